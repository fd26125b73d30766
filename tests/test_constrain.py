"""Constraints: the text fits the grammar, thinking ends where its budget does, and drafting changes neither."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from serving import XML_TEMPLATE, Speech
from tiny import ScriptedDrafter, ScriptedTarget, events, outcome, session
from tokenizers_tiny import make_tokenizer

from lisa.constrain import MAX_GRAMMAR, Constrained, Grammars
from lisa.drafters.none import Nothing
from lisa.errors import UsageError
from lisa.grammar import call_grammar, either, json_grammar, led
from lisa.tokenizer import Tokenizer, load_tokenizer
from lisa.tools import CallParser, Tool
from lisa.types import Request, Sampling

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOLS = [
    Tool("get", "", {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
                     "required": ["city"]}),
    Tool("unit", "", {"type": "object", "properties": {"u": {"enum": ["c", "f"]}}, "required": ["u"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def make(tokenizer: Tokenizer, grammars: Grammars, tail: str, grammar: str | None, budget: int | None) -> Constrained:
    return Constrained(tokenizer, tokenizer.vocab, tail, grammar and grammars.matcher(grammar), budget)


def say(
    tokenizer: Tokenizer,
    says: str,
    constraint: Callable[[], Constrained | None],
    tail: str = "",
    drafter: Callable[[], Any] = Nothing,
    width: int = 0,
    sampling: Sampling = Sampling(seed=3),  # noqa: B008
    limit: int = 120,
) -> tuple[list[int], str, str]:
    """(ids, raw text, reason) of a model that wants to say `says` behind `tail`."""
    speech = Speech(tokenizer, lambda prompt: says)
    target = ScriptedTarget(speech.logits, tokenizer.vocab)
    prompt = tuple(tokenizer.raw.encode(f"<|im_start|>assistant\n{tail}").ids)
    request = Request(prompt, sampling, limit, tokenizer.eos, constraint=constraint())
    ids, _, _, reason, _ = outcome(events(session(target, drafter, width), request))
    return ids, tokenizer.raw.decode(ids, skip_special_tokens=False), reason


def adversaries(tokenizer: Tokenizer, prompt: int, truth: list[int], rng: random.Random) -> list[Any]:
    def right(position: int, width: int) -> list[int]:
        return truth[position + 1 - prompt :][:width]

    def wrong(position: int, width: int) -> list[int]:
        return [rng.randrange(tokenizer.vocab) for _ in range(width)]

    def mixed(position: int, width: int) -> list[int]:
        cut = rng.randint(0, width)
        return [*right(position, cut), *wrong(position, width - cut)]

    def ended(position: int, width: int) -> list[int]:
        return [*right(position, 1), *tokenizer.eos, *wrong(position, 3)][:width]

    return [right, wrong, mixed, ended]


CASES: dict[str, tuple[str, str, Callable[[Grammars], str | None], int | None]] = {
    "prose where JSON is asked for": ("Sure! Here it is.", "", lambda g: json_grammar(SCHEMA), None),
    "JSON as asked": ('{"name": "Ada", "n": 36}', "", lambda g: json_grammar(SCHEMA), None),
    "JSON behind thinking": (
        'hm {"x"\n</think>\n\n{"name": "Ada", "n": 36}',
        "<think>\n",
        lambda g: led(json_grammar(SCHEMA), True),
        None,
    ),
    "prose behind thinking": ("hm\n</think>\n\nSure.", "<think>\n", lambda g: led(json_grammar(SCHEMA), True), None),
    "JSON behind thinking that is cut": (
        "hm " * 30,
        "<think>\n",
        lambda g: led(json_grammar(SCHEMA), True),
        7,
    ),
    "thinking opened by the model": (
        "<think>\nhm\n</think>\n\n{}",
        "",
        lambda g: led(json_grammar(None), True),
        None,
    ),
    "an end in the middle of thinking": ("hm<|im_end|>", "<think>\n", lambda g: led(json_grammar(None), True), 9),
    "budget alone": ("one two three four five six", "<think>\n", lambda g: None, 5),
    "a call that must be made": ("No.", "", lambda g: call_grammar(TOOLS, "xml", g.literal, several=True), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_changes_nothing_under_a_constraint(
    tokenizer: Tokenizer, grammars: Grammars, name: str, temperature: float
) -> None:
    says, tail, grammar, budget = CASES[name]
    sampling = Sampling(temperature=temperature, seed=11)

    def constraint() -> Constrained:
        return make(tokenizer, grammars, tail, grammar(grammars), budget)

    plain = say(tokenizer, says, constraint, tail, sampling=sampling, limit=70)
    prompt = len(tokenizer.raw.encode(f"<|im_start|>assistant\n{tail}").ids)
    rng = random.Random(5)
    for script in adversaries(tokenizer, prompt, [*plain[0], 0, 1, 2], rng):
        for width in (1, 7):
            drafter = lambda s=script: ScriptedDrafter(s)  # noqa: E731
            assert say(tokenizer, says, constraint, tail, drafter, width, sampling, 70) == plain, script.__name__


def fits(value: Any) -> bool:
    return set(value) == {"name", "n"} and isinstance(value["name"], str) and 0 <= value["n"] <= 999


@pytest.mark.parametrize("says", ["Sure! Here it is.", '{"name": "Ada", "n": 36}', '{"name": 3}', "<think>no</think>"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_E19_the_answer_fits_the_schema_whatever_the_model_wants(
    tokenizer: Tokenizer, grammars: Grammars, says: str, temperature: float
) -> None:
    for seed in range(4):
        _, text, reason = say(
            tokenizer,
            says,
            lambda: make(tokenizer, grammars, "</think>\n\n", json_grammar(SCHEMA), None),
            "<think>\n\n</think>\n\n",
            sampling=Sampling(temperature=temperature, seed=seed),
        )
        if reason == "stop":
            assert fits(json.loads(text))
    if says.startswith('{"name": "Ada"') and temperature == 0:
        assert text == says


def test_the_grammar_begins_behind_the_thinking(tokenizer: Tokenizer, grammars: Grammars) -> None:
    says = 'I think {"of": prose\n</think>\n\n{"name": "Ada", "n": 36}'
    grammar = led(json_grammar(SCHEMA), True)
    _, text, reason = say(tokenizer, says, lambda: make(tokenizer, grammars, "<think>\n", grammar, None), "<think>\n")
    assert (text, reason) == (says, "stop")
    says = "<think>hm\n</think>" + '{"name": "Ada", "n": 36}'
    assert say(tokenizer, says, lambda: make(tokenizer, grammars, "", grammar, None))[1] == says


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_a_thinking_budget_is_met_to_the_token(tokenizer: Tokenizer, grammars: Grammars, budget: int) -> None:
    says = "abcdefghijkl"
    ids, text, _ = say(
        tokenizer, says, lambda: make(tokenizer, grammars, "<think>\n", None, budget), "<think>\n", limit=30
    )
    close = tokenizer.raw.token_to_id("</think>")
    assert ids.index(close) == budget + 1, "the budget, a line break and the closing tag"
    assert text.startswith(says[:budget] + "\n</think>")


def test_a_budget_never_cuts_a_character(tokenizer: Tokenizer, grammars: Grammars) -> None:
    _, text, _ = say(
        tokenizer, "ab\U0001f680cd", lambda: make(tokenizer, grammars, "<think>\n", None, 3), "<think>\n", limit=30
    )
    assert text.startswith("ab\U0001f680\n</think>")


def test_a_budget_leaves_shorter_thinking_alone(tokenizer: Tokenizer, grammars: Grammars) -> None:
    says = "ab\n</think>\n\nanswer that is longer than the budget"
    made = make(tokenizer, grammars, "<think>\n", None, 8)
    assert made.free(8) and not made.free(9)
    assert say(tokenizer, says, lambda: made, "<think>\n")[1] == says
    assert made.free(10**6)


@pytest.mark.parametrize("form", ["xml", "json"])
@pytest.mark.parametrize("says", ["No, I would rather talk.", "<tool_call>\nsomething", '<tool_call>\n{"name": "unit"'])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_E9_a_required_call_is_made_and_fits(
    tokenizer: Tokenizer, grammars: Grammars, form: Any, says: str, temperature: float
) -> None:
    grammar = call_grammar(TOOLS, form, grammars.literal, several=False)
    for seed in range(3):
        _, text, reason = say(
            tokenizer,
            says,
            lambda: make(tokenizer, grammars, "</think>", grammar, None),
            sampling=Sampling(temperature=temperature, seed=seed),
            limit=200,
        )
        if reason != "stop":
            continue
        parser = CallParser(TOOLS)
        pieces = parser.push(text) + parser.finish()
        names = [p.name for p in pieces if type(p).__name__ == "Begin"]
        arguments = json.loads("".join(p.fragment for p in pieces if type(p).__name__ == "Arguments"))
        assert len(names) == 1 and not [p for p in pieces if type(p).__name__ == "Text"]
        if names == ["unit"]:
            assert arguments["u"] in ("c", "f")
        else:
            assert isinstance(arguments["city"], str) and isinstance(arguments.get("n", 0), int)


@pytest.mark.parametrize("form", ["xml", "json"])
def test_strict_tools_leave_text_and_calls_free_but_for_the_arguments(
    tokenizer: Tokenizer, grammars: Grammars, form: Any
) -> None:
    grammar = call_grammar(TOOLS, form, grammars.literal, several=True, free_text=True)
    written = {
        "xml": "<tool_call>\n<function=unit>\n<parameter=u>\nf\n</parameter>\n</function>\n</tool_call>",
        "json": '<tool_call>\n{"name": "unit", "arguments": {"u": "f"}}\n</tool_call>',
    }[form]
    for says in ("Hello.", f"I look.\n\n{written}", written, f"{written}\n{written}"):
        assert say(tokenizer, says, lambda: make(tokenizer, grammars, "</think>", grammar, None), limit=300)[1] == says
    wrong = written.replace("\nf\n", "\nx\n").replace('"f"', '"x"')
    text = say(tokenizer, wrong, lambda: make(tokenizer, grammars, "</think>", grammar, None))[1]
    assert text != wrong


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
DEFS = {
    "$defs": {
        "P": POINT,
        "Unit": {"type": "string", "enum": ["c", "f"]},
        "Name": {"type": "string"},
        "Path": {"type": "array", "items": {"$ref": "#/$defs/P"}},
        "Again": {"$ref": "#/$defs/P"},
    },
    "definitions": {"Old": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("schema", "fitting", "unfitting"),
    [
        ({"type": ["string", "null"]}, ["Oslo", 'Os"lo', "12", None], []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["Oslo", None], []),
        ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, ["12", None], []),
        ({"type": ["integer", "null"]}, [3, None], ["Oslo"]),
        ({"type": ["string", "null"], "enum": ["c", None]}, ["c", None], ["x", '"c"']),
        ({"enum": ["c", 3, True, None]}, ["c", 3, True, None], ["x", 4, False]),
        ({"enum": [1, 2]}, [1, 2], [3, "x"]),
        ({"type": "array", "items": {"$ref": "#/$defs/P"}}, [[], [{"x": 1}]], [[1], "x", {"x": 1}]),
        ({"$ref": "#/$defs/P"}, [{"x": 1}], ["Oslo", 3, [], {"y": 1}]),
        ({"$ref": "#/$defs/P", "description": "where"}, [{"x": 1}], ["Oslo"]),
        ({"$ref": "#/$defs/Again"}, [{"x": 1}], ["Oslo"]),
        ({"$ref": "#/$defs/Path"}, [[{"x": 1}]], ["Oslo", [1]]),
        ({"$ref": "#/$defs/Unit"}, ["c", "f"], ["x", '"c"']),
        ({"$ref": "#/$defs/Name"}, ["Oslo", "12", "null"], []),
        ({"$ref": "#/definitions/Old"}, [12], ["Oslo"]),
        ({"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, [{"x": 1}, None], ["Oslo", 3]),
    ],
)
@pytest.mark.parametrize("form", ["xml", "json"])
def test_E9_a_value_that_fits_can_be_written_and_is_read_back_and_no_other_can(
    tokenizer: Tokenizer, grammars: Grammars, form: Any, schema: Any, fitting: list[Any], unfitting: list[Any]
) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"v": schema}, "required": ["v"], **DEFS}, True)
    grammar = call_grammar([tool], form, grammars.literal, several=False)

    def written(value: Any) -> str:
        if form == "json":
            arguments = json.dumps({"v": value}, ensure_ascii=False)
            return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"

    def accepted(text: str) -> bool:
        matcher = grammars.matcher(grammar)
        return all(matcher.consume_token(token) for token in tokenizer.encode(text)) and bool(matcher.is_accepting())

    for value in fitting:
        assert accepted(written(value)), value
        parser = CallParser([tool])
        pieces = parser.push(written(value)) + parser.finish()
        arguments = "".join(p.fragment for p in pieces if type(p).__name__ == "Arguments")
        assert json.loads(arguments) == {"v": value}
    for value in unfitting:
        assert not accepted(written(value)), value


@pytest.mark.parametrize("form", ["xml", "json"])
def test_beside_tools_a_schema_leaves_a_call_or_an_answer(tokenizer: Tokenizer, grammars: Grammars, form: Any) -> None:
    grammar = either(call_grammar(TOOLS, form, grammars.literal, several=True), json_grammar(SCHEMA))
    call = {
        "xml": "<tool_call>\n<function=unit>\n<parameter=u>\nf\n</parameter>\n</function>\n</tool_call>",
        "json": '<tool_call>\n{"name": "unit", "arguments": {"u": "f"}}\n</tool_call>',
    }[form]
    for tail, lead in (("</think>", ""), ("<think>\n", "hm\n</think>\n\n")):
        for says in (call, f"{call}\n{call}", '{"name": "Ada", "n": 36}'):
            made = lambda t=tail: make(tokenizer, grammars, t, led(grammar, bool(lead)), None)  # noqa: B023, E731
            start = tail if lead else ""
            assert say(tokenizer, lead + says, made, start, limit=300)[1] == lead + says
    prose = say(tokenizer, "Well, no.", lambda: make(tokenizer, grammars, "</think>", grammar, None))[1]
    assert prose.startswith(("{", "<tool_call>"))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "zzz"}, "zzz"),
        ({"$ref": "http://example.org/x"}, "example.org"),
        ({"type": "string", "pattern": "(?=x)y"}, "schema"),
        ({"enum": ["x" * MAX_GRAMMAR]}, str(MAX_GRAMMAR)),
    ],
)
def test_E19_what_cannot_be_enforced_is_refused_by_name(grammars: Grammars, schema: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        grammars.matcher(json_grammar(schema))


def test_every_end_of_turn_ends_a_finished_answer(tokenizer: Tokenizer) -> None:
    from dataclasses import replace

    two = replace(tokenizer, eos=frozenset({*tokenizer.eos, tokenizer.raw.token_to_id("<|endoftext|>")}))
    made = Constrained(two, two.vocab, "", Grammars(two).matcher(json_grammar({"const": 1})), None)
    made.push(tokenizer.encode("1")[0])
    row = made.allowed([])[0]
    assert {i for i in range(two.vocab) if row[i]} >= two.eos


def test_the_template_of_lisa_tiny_writes_xml() -> None:
    from lisa.tools import style

    assert style(XML_TEMPLATE) == "xml"
