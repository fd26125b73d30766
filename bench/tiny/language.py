"""The synthetic assistant language of lisa-tiny: seeded samples of every kind, and a check of each answer.

No outside text. A sample is a conversation up to the turn that asks, the right answer, and how one reasons towards it
at each effort. Prompts are split by their hash: held-out ones are never trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.tiny import checks
from bench.tiny.world import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    CATEGORIES,
    CITIES,
    COLOURS,
    DAYS,
    FOOD_COLOURS,
    FOODS,
    LEGS,
    NAMES,
    OPPOSITES,
    PLACES,
    SOUNDS,
    SYLLABLES,
    THINGS,
    VERBS,
)

HELD_OUT = 8
"""One prompt in so many is held out."""
EFFORTS = ("low", "medium")

Message = dict[str, Any]
Rng = random.Random


@dataclass(frozen=True)
class Sample:
    """`messages` end with the turn that asks. `answer` is what the assistant writes after thinking, tool calls
    included. `thoughts` maps each effort to the reasoning. `key` is what the kind's check compares with. `parts` are
    the samples a dialogue is made of."""

    kind: str
    messages: tuple[Message, ...]
    answer: str
    thoughts: Mapping[str, str]
    key: Any = None
    tools: tuple[Mapping[str, Any], ...] = ()
    parts: tuple[Sample, ...] = ()

    @property
    def prompt(self) -> str:
        return json.dumps([*self.messages, *self.tools], sort_keys=True)

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.prompt.encode()).digest()[:8], "big") % HELD_OUT == 0

    @property
    def trainable(self) -> bool:
        """Neither it nor a part of it is held out."""
        return not self.held_out and all(part.trainable for part in self.parts)

    def right(self, text: str) -> bool:
        """Whether `text`, the answer without reasoning, is a right one."""
        return CHECKS.get(self.kind, checks.exact)(text.strip(), self.key if self.key is not None else self.answer)


def samples(seed: int, *, held_out: bool, shares: Mapping[str, float] | None = None) -> Iterator[Sample]:
    """Endless samples, every kind in proportion to its share; the same seed gives the same ones."""
    rng = random.Random(seed)
    names, weights = zip(*(shares or SHARES).items(), strict=True)
    while True:
        sample = KINDS[rng.choices(names, weights)[0]](rng)
        if sample.held_out if held_out else sample.trainable:
            yield sample


def _ask(kind: str, prompt: str, answer: str, low: str, medium: str, key: Any = None) -> Sample:
    return Sample(kind, ({"role": "user", "content": prompt},), answer, {"low": low, "medium": medium}, key)


# Facts


def facts(rng: Rng) -> Sample:
    return rng.choice((_capital, _country, _opposite, _sound, _legs, _colour_of, _day))(rng)


def _fact(rng: Rng, about: str, prompts: tuple[str, ...], answer: str, key: str, others: Any) -> Sample:
    prompt = rng.choice(("", "Please tell me: ", "A question: ")) + rng.choice(prompts)
    medium = f"The question is about {about}.\nI remember: {answer}\nThe answer is {key}."
    wrong = sorted({str(o) for o in others} - {key})
    return _ask("facts", prompt, answer, f"{about}: {key}.", medium, {"word": key, "not": wrong})


def _capital(rng: Rng) -> Sample:
    country, city = rng.choice(list(CAPITALS.items()))
    prompts = (f"What is the capital of {country}?", f"Name the capital of {country}.", f"Capital of {country}?")
    return _fact(rng, country, prompts, f"The capital of {country} is {city}.", city, CITIES)


def _country(rng: Rng) -> Sample:
    country, city = rng.choice(list(CAPITALS.items()))
    prompts = (f"In which country is {city}?", f"Where is {city}?", f"Which country has the capital {city}?")
    return _fact(rng, city, prompts, f"{city} is in {country}.", country, CAPITALS)


def _opposite(rng: Rng) -> Sample:
    a, b = rng.choice(list(OPPOSITES.items()))
    prompts = (f"What is the opposite of {a}?", f"Opposite of {a}?", f"Give me the opposite of {a}.")
    return _fact(rng, a, prompts, f"The opposite of {a} is {b}.", b, set(OPPOSITES) - {a})


def _sound(rng: Rng) -> Sample:
    a, b = rng.choice(list(SOUNDS.items()))
    prompts = (f"What does a {a} say?", f"Which sound does a {a} make?", f"How does a {a} sound?")
    return _fact(rng, a, prompts, f"A {a} says {b}.", b, SOUNDS.values())


def _legs(rng: Rng) -> Sample:
    a, n = rng.choice(list(LEGS.items()))
    prompts = (f"How many legs has a {a}?", f"How many legs does a {a} have?", f"Tell me the legs of a {a}.")
    return _fact(rng, a, prompts, f"A {a} has {n} legs.", str(n), (2, 4, 6))


def _colour_of(rng: Rng) -> Sample:
    a, b = rng.choice(list(FOOD_COLOURS.items()))
    prompts = (f"Which colour has {a}?", f"What colour is {a}?", f"Name the colour of {a}.")
    return _fact(rng, a, prompts, f"The colour of {a} is {b}.", b, COLOURS)


def _day(rng: Rng) -> Sample:
    i, step = rng.randrange(7), rng.choice((1, -1))
    a, b, word = DAYS[i], DAYS[(i + step) % 7], "after" if step == 1 else "before"
    prompts = (f"Which day comes {word} {a}?", f"What is the day {word} {a}?", f"Name the day {word} {a}.")
    return _fact(rng, a, prompts, f"The day {word} {a} is {b}.", b, set(DAYS) - {a})


# Numbers


def arithmetic(rng: Rng) -> Sample:
    op = rng.choice("+-*")
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    a, b = (max(a, b), min(a, b)) if op == "-" else (a, b)
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    prompts = (f"What is {a} {op} {b}?", f"Compute {a} {op} {b}.", f"How much is {a} {word} {b}?", f"{a} {op} {b} = ?")
    verb = {"+": "add", "-": "subtract", "*": "multiply"}[op]
    medium = f"I have to {verb}.\nThe numbers are {a} and {b}.\n{a} {op} {b} = {value}."
    prompt = rng.choice(("", "Please: ", "Quick: ")) + rng.choice(prompts)
    return _ask("arithmetic", prompt, f"{a} {op} {b} = {value}", f"{a} {op} {b} = {value}.", medium, value)


def counting(rng: Rng) -> Sample:
    if rng.random() < 0.5:
        return _count_words(rng)
    step = rng.choice((1, 1, -1, 2))
    n = rng.randint(4, 7)
    first = rng.randint(0, 9) if step > 0 else rng.randint(n, 15)
    numbers = [first + step * i for i in range(n)]
    how = {1: "", -1: " down", 2: " by two"}[step]
    prompts = (
        f"Count{how} from {first} to {numbers[-1]}.",
        f"Please count{how} from {first} to {numbers[-1]}.",
        f"Write the numbers{how} from {first} to {numbers[-1]}.",
    )
    low = f"From {first} to {numbers[-1]}, step {step}."
    medium = f"I start at {first}.\nThe step is {step}.\nI stop at {numbers[-1]}."
    return _ask("counting", rng.choice(prompts), ", ".join(map(str, numbers)), low, medium)


def _count_words(rng: Rng) -> Sample:
    words = [rng.choice((*ANIMALS, *FOODS)) for _ in range(rng.randint(2, 5))]
    prompts = ("How many words are here: ", "Count the words: ", "Count these words: ")
    counted = ", ".join(f"{word} {i + 1}" for i, word in enumerate(words))
    n = len(words)
    answer = f"{counted}. There are {n} words."
    medium = f"I count word after word.\nThe first is {words[0]}, the last is {words[-1]}."
    return _ask("counting", rng.choice(prompts) + " ".join(words), answer, "I count the words.", medium, None)


def lists(rng: Rng) -> Sample:
    name = rng.choice(list(CATEGORIES))
    n = rng.randint(2, 4)
    word = ("two", "three", "four")[n - 2]
    prompts = (f"List {word} {name}.", f"Name {word} {name}.", f"Give me a list of {word} {name}.")
    items = rng.sample(CATEGORIES[name], n)
    without = ""
    if rng.random() < 0.6:
        without = rng.choice([w for w in CATEGORIES[name] if w not in items])
    prompt = rng.choice(prompts)[:-1] + (f", but not {without}." if without else ".")
    answer = "\n".join(f"{i + 1}. {item}" for i, item in enumerate(items))
    rest = f" I leave out {without}." if without else ""
    low = f"{n} {name}.{rest}"
    medium = f"I need a list of {name}.\nIt has {n} items.{rest}"
    return _ask("lists", prompt, answer, low, medium, {"n": n, "of": CATEGORIES[name], "not": without})


# Texts


def _word(rng: Rng) -> str:
    """A made-up word."""
    return "".join(rng.choice(SYLLABLES) for _ in range(2))


def _sentence(rng: Rng) -> str:
    what = rng.choice((ANIMALS, FOODS, THINGS))
    thing = rng.choice(what) if rng.random() < 0.95 else _word(rng)
    adjective = rng.choice((*COLOURS, *ADJECTIVES))
    place = rng.choice((f" in the {rng.choice(PLACES)}", f" on {rng.choice(DAYS)}", f" in {rng.choice(CITIES)}", ""))
    return f"{rng.choice(NAMES)} {rng.choice(VERBS)} the {adjective} {thing}{place}."


def _items(rng: Rng, low: int = 3, high: int = 5) -> list[str]:
    pool = (*COLOURS, *ANIMALS, *FOODS, *THINGS, *(_word(rng) for _ in range(2)))
    return rng.sample(pool, rng.randint(low, high))


def copying(rng: Rng) -> Sample:
    prompts = ("Copy this text:\n", "Repeat:\n", "Write this again:\n", "Say exactly:\n")
    text = " ".join(_sentence(rng) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.3:
        text = ", ".join(_items(rng))
    first = " ".join(text.split()[:3])
    low, medium = "I copy the text.", f"The text begins with: {first}\nI copy it without a change."
    return _ask("copying", rng.choice(prompts) + text, text, low, medium)


def editing(rng: Rng) -> Sample:
    return rng.choice((_replace, _upper, _reverse, _insert, _remove, _swap))(rng)


def _edit(rng: Rng, task: str, text: str, answer: str, how: str) -> Sample:
    prompt = f"{rng.choice(('', 'Please: ', 'Now: '))}{task}:\n{text}"
    return _ask("editing", prompt, answer, f"{how}.", f"The task is an edit.\n{how}.\nThe rest stays as it is.")


def _replace(rng: Rng) -> Sample:
    text = " ".join(_sentence(rng) for _ in range(rng.randint(1, 2)))
    words = text.replace(".", "").split()
    old = rng.choice([w for w in words if w not in ("the", "in", "on")])
    pool = next((p for p in (NAMES, VERBS, COLOURS, ADJECTIVES, ANIMALS, FOODS, THINGS) if old in p), THINGS)
    new = rng.choice([w for w in pool if w != old])
    answer = " ".join(new + w[len(old) :] if w.strip(".") == old else w for w in text.split())
    task = rng.choice((f"Replace {old} with {new}", f"Change {old} to {new}", f"Write {new} instead of {old}"))
    return _edit(rng, task, text, answer, f"{old} becomes {new}")


def _upper(rng: Rng) -> Sample:
    words = [rng.choice((*COLOURS, *ANIMALS)) for _ in range(rng.randint(2, 4))]
    task = rng.choice(("Write in capital letters", "Make it upper case", "Upper case"))
    return _edit(rng, task, " ".join(words), " ".join(words).upper(), "All letters become capital")


def _reverse(rng: Rng) -> Sample:
    items = _items(rng)
    task = rng.choice(("Reverse the list", "Write the list backwards", "Turn the list round"))
    return _edit(rng, task, ", ".join(items), ", ".join(items[::-1]), f"It begins with {items[-1]}")


def _insert(rng: Rng) -> Sample:
    *items, new = _items(rng, 4, 5)
    at, after = rng.randrange(len(items)), rng.random() < 0.5
    where = "after" if after else "before"
    task = rng.choice((f"Insert {new} {where} {items[at]}", f"Put {new} {where} {items[at]}"))
    result = [*items[: at + after], new, *items[at + after :]]
    return _edit(rng, task, ", ".join(items), ", ".join(result), f"{new} goes {where} {items[at]}")


def _remove(rng: Rng) -> Sample:
    items = _items(rng, 3, 5)
    gone = rng.choice(items)
    task = rng.choice((f"Remove {gone} from the list", f"Delete {gone}", f"Leave out {gone}"))
    return _edit(rng, task, ", ".join(items), ", ".join(i for i in items if i != gone), f"{gone} goes away")


def _swap(rng: Rng) -> Sample:
    items = _items(rng, 3, 5)
    a, b = rng.sample(items, 2)
    swapped = [b if i == a else a if i == b else i for i in items]
    return _edit(rng, f"Swap {a} and {b}", ", ".join(items), ", ".join(swapped), f"{a} and {b} change places")


def reading(rng: Rng) -> Sample:
    names = rng.sample(NAMES, rng.randint(2, 3))
    has = {name: f"{rng.choice(COLOURS)} {rng.choice((*ANIMALS, *THINGS))}" for name in names}
    text = " ".join(f"{name} has a {what}." for name, what in has.items())
    name = rng.choice(names)
    ways = (f"What does {name} have?", f"What has {name} got?", f"Tell me what {name} has.")
    prompt = f"{text} {rng.choice(ways)}" if rng.random() < 0.5 else f"{rng.choice(ways)} {text}"
    answer = f"{name} has a {has[name]}."
    medium = f"I look for {name} in the text.\nIt says: {answer}"
    return _ask("reading", prompt, answer, f"I look for {name}.", medium)


# JSON

_FIELDS: Mapping[str, tuple[Mapping[str, Any], Callable[[Rng], Any], str]] = {
    "name": ({"type": "string"}, lambda r: r.choice(NAMES), "The name is {}."),
    "city": ({"type": "string"}, lambda r: r.choice(CITIES), "The city is {}."),
    "pet": ({"type": "string"}, lambda r: r.choice(ANIMALS), "The pet is a {}."),
    "colour": ({"type": "string", "enum": ["red", "blue", "green"]}, lambda r: r.choice(COLOURS[:3]), "It is {}."),
    "age": ({"type": "integer"}, lambda r: r.randint(1, 99), "The age is {}."),
    "count": ({"type": "integer"}, lambda r: r.randint(1, 20), "There are {}."),
    "open": ({"type": "boolean"}, lambda r: r.random() < 0.5, "It is {}."),
    "foods": (
        {"type": "array", "items": {"type": "string"}},
        lambda r: r.sample(FOODS, r.randint(1, 3)),
        "The foods are {}.",
    ),
    "day": ({"type": "string"}, lambda r: r.choice(DAYS), "The day is {}."),
}


def _object(names: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {n: dict(_FIELDS[n][0]) for n in names}, "required": names}


def _said(name: str, value: Any) -> str:
    shown = " and ".join(value) if isinstance(value, list) else value
    shown = ("open" if value else "closed") if isinstance(value, bool) else shown
    return _FIELDS[name][2].format(shown)


def json_values(rng: Rng) -> Sample:
    names = rng.sample(list(_FIELDS), rng.randint(2, 3))
    schema = _object(names)
    value = {name: _FIELDS[name][1](rng) for name in names}
    said = [_said(name, v) for name, v in value.items()]
    if len(names) == 3 and rng.random() < 0.3:  # one object inside another
        inner, outer = names[-2:], rng.choice(("place", "owner"))
        schema = _object(names[:-2])
        schema["properties"][outer], schema["required"] = _object(inner), [*names[:-2], outer]
        value = {**{n: value[n] for n in names[:-2]}, outer: {n: value[n] for n in inner}}
    rng.shuffle(said)
    ways = ("Write JSON for the schema", "Answer with JSON in this schema", "Fill this JSON schema")
    prompt = f"{rng.choice(ways)}:\n{json.dumps(schema)}\n{' '.join(said)}"
    low = f"The keys are {', '.join(value)}."
    medium = f"The schema is an object.\n{low}\nI take the values from the text."
    return _ask("json", prompt, json.dumps(value), low, medium, {"schema": schema, "value": value})


# Code


def code(rng: Rng) -> Sample:
    name = rng.choice(("f", "g", "run", "work", "solve")) + rng.choice(("", "_it"))
    task, params, body, cases, function = rng.choice((_code_number, _code_two, _code_list, _code_text))(rng)
    prompts = (
        f"Write a Python function {name}({params}) that returns {task}.",
        f"Define {name}({params}) in Python. It returns {task}.",
        f"In Python, write {name}({params}) to return {task}.",
    )
    answer = f"```python\ndef {name}({params}):\n{body}\n```"
    key = {"name": name, "cases": [(list(case), function(*case)) for case in cases]}
    low = f"{name} returns {task}."
    medium = f"The function is {name}.\nIts input is {params}.\nIt returns {task}."
    return _ask("code", rng.choice(prompts), answer, low, medium, key)


Code = tuple[str, str, str, list[tuple[Any, ...]], Callable[..., Any]]


def _code_number(rng: Rng) -> Code:
    x, n = rng.choice("xnk"), rng.randint(2, 9)
    task, expression, function = rng.choice(
        (
            (f"{x} plus {n}", f"{x} + {n}", lambda v: v + n),
            (f"{x} minus {n}", f"{x} - {n}", lambda v: v - n),
            (f"{x} times {n}", f"{x} * {n}", lambda v: v * n),
            (f"the square of {x} plus {n}", f"{x} * {x} + {n}", lambda v: v * v + n),
            (f"whether {x} is more than {n}", f"{x} > {n}", lambda v: v > n),
            (f"whether {x} is less than {n}", f"{x} < {n}", lambda v: v < n),
            (f"whether {n} divides {x}", f"{x} % {n} == 0", lambda v: v % n == 0),
        )
    )
    return task, x, f"    return {expression}", [(0,), (1,), (n,), (n + 1,), (5 * n,)], function


def _code_two(rng: Rng) -> Code:
    a, b = rng.choice(("ab", "xy", "mn"))
    cases = [(0, 0), (1, 2), (5, 3), (2, 9)]
    task, body, function = rng.choice(
        (
            (f"the sum of {a} and {b}", f"    return {a} + {b}", lambda p, q: p + q),
            (f"the product of {a} and {b}", f"    return {a} * {b}", lambda p, q: p * q),
            (f"the larger of {a} and {b}", f"    if {a} > {b}:\n        return {a}\n    return {b}", max),
            (f"the smaller of {a} and {b}", f"    if {a} < {b}:\n        return {a}\n    return {b}", min),
            (f"whether {a} and {b} are equal", f"    return {a} == {b}", lambda p, q: p == q),
        )
    )
    return task, f"{a}, {b}", body, cases, function


def _code_list(rng: Rng) -> Code:
    items, item, n = rng.choice(("items", "values", "numbers")), rng.choice(("item", "value", "x")), rng.randint(2, 9)
    cases: list[tuple[Any, ...]] = [([1],), ([3, 1, 2],), ([n, 0, n, 12],)]

    def loop(start: str, step: str) -> str:
        return f"    result = {start}\n    for {item} in {items}:\n        {step}\n    return result"

    def when(test: str, step: str) -> str:
        return f"if {test}:\n            {step}"

    task, body, function = rng.choice(
        (
            (f"the first of {items}", f"    return {items}[0]", lambda v: v[0]),
            (f"the last of {items}", f"    return {items}[-1]", lambda v: v[-1]),
            (f"the length of {items}", f"    return len({items})", len),
            (f"the sum of {items}", loop("0", f"result += {item}"), sum),
            (f"{items} times {n}", loop("[]", f"result.append({item} * {n})"), lambda v: [i * n for i in v]),
            (f"{items} plus {n}", loop("[]", f"result.append({item} + {n})"), lambda v: [i + n for i in v]),
            (
                f"how often {n} is in {items}",
                loop("0", when(f"{item} == {n}", "result += 1")),
                lambda v: v.count(n),
            ),
            (
                f"the {items} above {n}",
                loop("[]", when(f"{item} > {n}", f"result.append({item})")),
                lambda v: [i for i in v if i > n],
            ),
        )
    )
    return task, items, body, cases, function


def _code_text(rng: Rng) -> Code:
    text, n = rng.choice(("text", "word", "line")), rng.randint(2, 5)
    task, expression, function = rng.choice(
        (
            (f"{text} in upper case", f"{text}.upper()", str.upper),
            (f"{text} in lower case", f"{text}.lower()", str.lower),
            (f"{text} reversed", f"{text}[::-1]", lambda s: s[::-1]),
            (f"{text} repeated {n} times", f"{text} * {n}", lambda s: s * n),
            (f"the first {n} letters of {text}", f"{text}[:{n}]", lambda s: s[:n]),
            (f"the words of {text}", f"{text}.split()", str.split),
        )
    )
    return task, text, f"    return {expression}", [("Ab",), ("a bc def",), ("",)], function


# Tools

_TOOL_VERBS = ("get", "find", "show", "read")
_TOOL_NOUNS: Mapping[str, tuple[str, Mapping[str, str], Callable[[Rng], Any], tuple[str, ...]]] = {
    "weather": ("city", {"type": "string"}, lambda r: r.choice(CITIES), ("rain", "sun", "snow", "wind")),
    "time": ("city", {"type": "string"}, lambda r: r.choice(CITIES), ("noon", "morning", "night", "evening")),
    "price": ("item", {"type": "string"}, lambda r: r.choice((*FOODS, *THINGS)), ("3", "5", "8", "12", "20")),
    "colour": ("item", {"type": "string"}, lambda r: r.choice(THINGS), COLOURS),
    "age": ("person", {"type": "string"}, lambda r: r.choice(NAMES), ("7", "15", "30", "41", "62")),
    "home": ("person", {"type": "string"}, lambda r: r.choice(NAMES), CITIES),
    "page": ("number", {"type": "integer"}, lambda r: r.randint(1, 60), ("one", "long", "short", "empty")),
    "food": ("animal", {"type": "string"}, lambda r: r.choice(ANIMALS), ("corn", "rice", "bread", "milk")),
}


def _tool(verb: str, noun: str) -> dict[str, Any]:
    parameter, schema, _, _ = _TOOL_NOUNS[noun]
    function = {
        "name": f"{verb}_{noun}",
        "parameters": {"type": "object", "properties": {parameter: dict(schema)}, "required": [parameter]},
    }
    return {"type": "function", "function": function}


def written_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    shown = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


def _given_tools(rng: Rng) -> tuple[list[str], dict[str, str]]:
    """(nouns there is a tool for, their verbs)."""
    nouns = rng.sample(list(_TOOL_NOUNS), rng.randint(1, 2))
    return nouns, {noun: rng.choice(_TOOL_VERBS) for noun in nouns}


def _wish(rng: Rng, what: str) -> str:
    return rng.choice((f"What is {what}?", f"I need {what}.", f"Please look up {what}.", f"Tell me {what}."))


def tool_calls(rng: Rng) -> Sample:
    nouns, verbs = _given_tools(rng)
    tools = tuple(_tool(verbs[noun], noun) for noun in nouns)
    if rng.random() < 0.15:
        other = rng.choice([noun for noun in _TOOL_NOUNS if noun not in nouns])
        prompt = _wish(rng, f"the {other} of {_TOOL_NOUNS[other][2](rng)}")
        answer = f"I have no tool for the {other}."
        low, medium = f"No tool for {other}.", f"I look for a tool for the {other}.\nThere is none."
        key = {"calls": [], "text": answer}
        return replace(_ask("tool_calls", prompt, answer, low, medium, key), tools=tools)
    noun = rng.choice(nouns)
    parameter, _, draw, _ = _TOOL_NOUNS[noun]
    values = list(dict.fromkeys(draw(rng) for _ in range(1 if rng.random() < 0.8 else 2)))
    name = f"{verbs[noun]}_{noun}"
    prompt = _wish(rng, f"the {noun} of {' and '.join(map(str, values))}")
    answer = "\n".join(written_call(name, {parameter: value}) for value in values)
    low = f"I call {name}."
    medium = f"I look for a tool for the {noun}.\nThe tool is {name}.\nIts {parameter} is {values[0]}."
    key = {"calls": [(name, {parameter: str(value)}) for value in values], "text": ""}
    return replace(_ask("tool_calls", prompt, answer, low, medium, key), tools=tools)


def tool_answers(rng: Rng) -> Sample:
    nouns, verbs = _given_tools(rng)
    noun = rng.choice(nouns)
    parameter, _, draw, results = _TOOL_NOUNS[noun]
    value, result = draw(rng), rng.choice(results)
    call = {"type": "function", "function": {"name": f"{verbs[noun]}_{noun}", "arguments": {parameter: value}}}
    shown = rng.choice((result, json.dumps({noun: result}), json.dumps({"result": result})))
    answer = f"The {noun} of {value} is {result}."
    messages = (
        {"role": "user", "content": _wish(rng, f"the {noun} of {value}")},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": shown},
    )
    thoughts = {"low": f"The tool says {result}.", "medium": f"The tool has answered.\nThe {noun} is {result}."}
    tools = tuple(_tool(verbs[n], n) for n in nouns)
    return Sample("tool_answers", messages, answer, thoughts, None, tools)


# Conversations


def chat(rng: Rng) -> Sample:
    name, thing = rng.choice(NAMES), f"{rng.choice(COLOURS)} {rng.choice((*ANIMALS, *THINGS))}"
    hello = rng.choice(("Hello!", "Hi.", "Good day.", "Hey,"))
    if rng.random() < 0.3:
        prompt = f"{hello} {rng.choice((f'I am {name}.', f'My name is {name}.', f'This is {name}.'))}"
        answer = f"Hello {name}! How can I help you?"
        return _ask("chat", prompt, answer, f"{name} says hello.", f"This is a greeting.\nThe name is {name}.")
    said = f"{hello} My name is {name} and I have a {thing}."
    first = {"role": "user", "content": said}, {"role": "assistant", "content": f"Hello {name}! How can I help you?"}
    question, answer = rng.choice(
        (("What is my name?", f"Your name is {name}."), ("What do I have?", f"You have a {thing}."))
    )
    question = rng.choice(("", "Tell me: ", "Do you remember? ")) + question
    medium = f"The user has told me.\nThe text says: {said}"
    sample = _ask("chat", question, answer, f"I remember {name}.", medium)
    return replace(sample, messages=(*first, *sample.messages))


def dialogue(rng: Rng) -> Sample:
    """Two or three questions of other kinds; the last one counts."""
    single = [kind for kind in KINDS if kind not in ("dialogue", "tool_calls", "tool_answers", "chat")]
    turns = [KINDS[rng.choice(single)](rng) for _ in range(rng.randint(2, 3))]
    before: list[Message] = []
    for turn in turns[:-1]:
        before += turn.messages
        before.append({"role": "assistant", "content": turn.answer, "thoughts": turn.thoughts})
    last = turns[-1]
    key = {"kind": last.kind, "key": last.key if last.key is not None else last.answer}
    return replace(last, kind="dialogue", messages=(*before, *last.messages), key=key, parts=tuple(turns))


KINDS: Mapping[str, Callable[[Rng], Sample]] = {
    "facts": facts,
    "arithmetic": arithmetic,
    "counting": counting,
    "lists": lists,
    "copying": copying,
    "editing": editing,
    "reading": reading,
    "json": json_values,
    "code": code,
    "tool_calls": tool_calls,
    "tool_answers": tool_answers,
    "chat": chat,
    "dialogue": dialogue,
}
SHARES: Mapping[str, float] = {
    **dict.fromkeys(KINDS, 1.0),
    **{"arithmetic": 2.0, "editing": 2.0, "facts": 1.5, "chat": 0.6, "dialogue": 0.6, "tool_answers": 0.7},
}
EARLY_SHARES: Mapping[str, float] = {
    **{"copying": 4.0, "editing": 2.0, "reading": 2.0, "facts": 1.0, "arithmetic": 1.0, "chat": 0.5},
    **{"counting": 0.7, "lists": 0.4, "code": 0.3},
}
"""At first: short samples, and much to copy. What finds and repeats earlier tokens is learned soonest from these."""

CHECKS: Mapping[str, Callable[[str, Any], bool]] = {
    "facts": checks.fact,
    "arithmetic": checks.number,
    "lists": checks.listed,
    "json": checks.json_value,
    "code": checks.code,
    "tool_calls": checks.calls,
    "dialogue": lambda text, key: CHECKS.get(key["kind"], checks.exact)(text, key["key"]),
}

SYSTEMS = ("You are a helpful assistant.", "You are Lisa.", "Answer briefly.", "Be kind and short.")


def conversation(sample: Sample, effort: str | None, system: str = "") -> list[Message]:
    """The messages to render; earlier answers carry their reasoning when `effort` is on."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in sample.messages:
        plain = {k: v for k, v in message.items() if k != "thoughts"}
        if effort and "thoughts" in message:
            plain["reasoning_content"] = message["thoughts"][effort]
        messages.append(plain)
    return messages


def completion(sample: Sample, effort: str | None) -> str:
    """What the model writes after the prompt, which has opened the thinking or closed an empty one."""
    return f"{sample.thoughts[effort]}\n</think>\n\n{sample.answer}" if effort else sample.answer
