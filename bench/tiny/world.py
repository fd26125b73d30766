"""The closed world of lisa-tiny's language: words, names and facts. Countries and cities are made up."""

from __future__ import annotations

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink")
ANIMALS = ("cat", "dog", "cow", "pig", "hen", "fox", "bee", "ant", "owl", "bat", "frog", "horse", "sheep", "duck")
FOODS = ("bread", "rice", "soup", "cake", "milk", "tea", "egg", "apple", "pear", "plum", "bean", "corn")
THINGS = ("box", "cup", "book", "pen", "hat", "bag", "key", "ball", "lamp", "coat", "map", "clock")
NAMES = ("Tom", "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe", "Max", "Ida", "Kim", "Noa", "Ali", "Lea")
VERBS = ("sees", "has", "wants", "likes", "finds", "takes", "keeps", "sells")
PLACES = ("house", "park", "shop", "school", "garden", "station", "market", "library")
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
    "Fenn": "Garda",
    "Ilmen": "Sova",
    "Parth": "Nema",
    "Wold": "Hask",
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
    "frog": "croak",
    "horse": "neigh",
    "sheep": "baa",
    "duck": "quack",
}
LEGS = {a: 2 if a in ("hen", "owl", "duck", "bat") else 6 if a in ("bee", "ant") else 4 for a in ANIMALS}
FOOD_COLOURS = {
    "milk": "white",
    "rice": "white",
    "corn": "yellow",
    "bread": "brown",
    "apple": "red",
    "pear": "green",
    "plum": "blue",
    "bean": "green",
    "tea": "brown",
    "cake": "pink",
}
SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "ra", "si", "ta", "vu", "ze", "po")
