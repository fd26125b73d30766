"""The closed world of lisa-tiny's language: words, names and facts. Countries and cities are made up."""

from __future__ import annotations

COLOURS = ("red", "blue", "green", "yellow", "black", "white")
ANIMALS = ("cat", "dog", "cow", "pig", "hen", "fox", "bee", "owl")
FOODS = ("bread", "rice", "soup", "milk", "egg", "apple", "plum", "corn")
THINGS = ("box", "cup", "book", "pen", "hat", "bag", "key", "ball")
NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe")
VERBS = ("sees", "has", "wants", "likes", "finds")
PLACES = ("house", "park", "shop", "school", "garden")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

CATEGORIES = {"colours": COLOURS, "animals": ANIMALS, "foods": FOODS, "things": THINGS, "names": NAMES, "days": DAYS}

CAPITALS = {
    "Norland": "Velda",
    "Sorin": "Maro",
    "Tavia": "Kestel",
    "Brona": "Luma",
    "Elvar": "Dorn",
    "Quill": "Pesk",
    "Ostia": "Rufa",
    "Zamora": "Tilt",
}
CITIES = tuple(CAPITALS.values())

OPPOSITES = {
    a: b
    for pair in (
        ("hot", "cold"),
        ("big", "small"),
        ("up", "down"),
        ("old", "new"),
        ("fast", "slow"),
        ("open", "closed"),
        ("wet", "dry"),
        ("light", "dark"),
        ("full", "empty"),
        ("long", "short"),
        ("good", "bad"),
        ("early", "late"),
        ("rich", "poor"),
        ("loud", "quiet"),
        ("hard", "soft"),
        ("high", "low"),
    )
    for a, b in (pair, pair[::-1])
}
ADJECTIVES = tuple(OPPOSITES)

SOUNDS = {
    "cat": "meow",
    "dog": "woof",
    "cow": "moo",
    "pig": "oink",
    "hen": "cluck",
    "bee": "buzz",
    "owl": "hoot",
}
LEGS = {a: 2 if a in ("hen", "owl") else 6 if a == "bee" else 4 for a in ANIMALS}
FOOD_COLOURS = {
    "milk": "white",
    "rice": "white",
    "corn": "yellow",
    "apple": "red",
    "plum": "blue",
    "soup": "green",
}
SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "ra", "si", "ta", "vu", "ze", "po")
