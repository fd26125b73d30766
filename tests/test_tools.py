"""Tool calls out of text: nothing lost, nothing leaked, the same wherever the text is cut, arguments always JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lisa.tools import Arguments, Begin, CallParser, End, Text, Tool, style

WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "where": {"type": "object"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
)
SEARCH = Tool("search", "", {"type": "object", "properties": {"q": {"type": "string"}}})
TOOLS = (WEATHER, SEARCH)


def read(pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls as (name, arguments)), with the order of events checked on the way."""
    parser = CallParser(tools)
    text, calls, opened = "", [], False
    for event in [e for piece in pieces for e in parser.push(piece)] + parser.finish():
        if isinstance(event, Text):
            assert not opened
            text += event.text
        elif isinstance(event, Begin):
            assert not opened and event.index == len(calls)
            calls.append((event.name, ""))
            opened = True
        elif isinstance(event, Arguments):
            assert opened and event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.fragment)
        else:
            assert isinstance(event, End) and opened
            opened = False
    assert not opened and parser.finish() == []
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    return text, calls


def every_cut(text: str, tools: Sequence[Tool] = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    whole = read([text], tools)
    assert read(list(text), tools) == whole, "letter by letter"
    for at in range(len(text)):
        assert read([text[:at], text[at:]], tools) == whole, at
    return whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def test_values_get_the_types_of_the_schema() -> None:
    call = xml("get_weather", city="12", days="3", metric="True", where='{"a": [1]}', note="null")
    assert every_cut(call) == (
        "",
        [("get_weather", {"city": "12", "days": 3, "metric": True, "where": {"a": [1]}, "note": None})],
    )


def test_a_value_of_another_type_stays_text() -> None:
    assert every_cut(xml("get_weather", days="soon", metric="3", note="12"))[1] == [
        ("get_weather", {"days": "soon", "metric": "3", "note": "12"})
    ]


@pytest.mark.parametrize("write", [lambda n, v: xml(n, **v), hermes], ids=["xml", "hermes"])
def test_several_calls_and_the_text_round_them(write: Any) -> None:
    calls = [("get_weather", {"city": "Oslo"}), ("search", {"q": "x"})]
    text = "I look.\n\n" + "\n".join(write(n, v) for n, v in calls) + "\n"
    assert every_cut(text) == ("I look.", calls)
    assert every_cut(f"{text}Done.") == ("I look.\nDone.", calls)


VALUES = [
    "</parameter>", "a</parameter>b", "x\n</parameter> y", "<parameter=zz>", "</function>", "\n\nx\n", " ", "", '"\\"',
    "<tool_call", "tab\t", "<function=f>", "e\u0301 \U0001f680", "a </function> b", "</parameter",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_values_are_exact_to_the_byte(value: str) -> None:
    assert every_cut(xml("get_weather", city=value))[1] == [("get_weather", {"city": value})]
    assert every_cut(hermes("get_weather", {"city": value}))[1] == [("get_weather", {"city": value})]


DAMAGED = {
    "no parameter close": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>",
        {"city": "Oslo"},
    ),
    "no parameter close, another follows": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        {"city": "Oslo", "days": 3},
    ),
    "no function close": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>",
        {"city": "Oslo"},
    ),
    "ends inside a value": ("<tool_call>\n<function=get_weather>\n<parameter=city>\nOs", {"city": "Os"}),
    "ends inside a tag": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</para",
        {"city": "Oslo\n</para"},
    ),
    "ends between parameters": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<para",
        {"city": "Oslo"},
    ),
    "missing bracket of a parameter": (
        "<tool_call>\n<function=get_weather>\n<parameter=city\nOslo\n</parameter>\n</function>\n</tool_call>",
        {"city": "Oslo"},
    ),
    "missing bracket of the function": (
        "<tool_call>\n<function=get_weather\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        {"city": "Oslo"},
    ),
    "nameless parameter": (
        "<tool_call>\n<function=get_weather>\n<parameter=>\nOslo\n</parameter>\n</function>\n</tool_call>",
        {"": "Oslo"},
    ),
    "no opening tag": (
        "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        {"city": "Oslo"},
    ),
    "json cut in a string": ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os', {"city": "Os"}),
    "json cut behind a backslash": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os\\',
        {"city": "Os\\"},
    ),
    "json cut behind a key": ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "days"', {"city": "x"}),
    "json with a line break in a string": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a\nb\\d"}}\n</tool_call>',
        {"city": "a\nb\\d"},
    ),
    "json with the arguments first": (
        '<tool_call>\n{"arguments": {"city": "x"}, "name": "get_weather"}\n</tool_call>',
        {"city": "x"},
    ),
    "json with arguments as text": (
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}\n</tool_call>',
        {"city": "x"},
    ),
    "json with a bracket too many": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}}\n</tool_call>',
        {"city": "x"},
    ),
    "json with a bracket too few": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}\n</tool_call>',
        {"city": "x"},
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_E6_damaged_markup_is_closed_at_the_next_tag(name: str) -> None:
    text, arguments = DAMAGED[name]
    assert every_cut(text) == ("", [("get_weather", arguments)])


def test_a_second_call_survives_damage_to_the_first() -> None:
    broken = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    assert every_cut(broken + xml("search", q="x"))[1] == [("get_weather", {"city": "Oslo"}), ("search", {"q": "x"})]
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", oops\n</tool_call>\n'
    assert every_cut(broken + hermes("search", {"q": "x"}))[1] == [
        ("get_weather", {"city": "x"}),
        ("search", {"q": "x"}),
    ]


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "<tool_call>\n</tool_call>", "<tool_call>hm", "<tool_call>\n<function=>",
     "<tool_call>\n<function=ge", '<tool_call>{"nam', "<tool_cal", "1 < 2 <t"],
)  # fmt: skip
def test_E6_hopeless_markup_is_returned_as_text(text: str) -> None:
    assert every_cut(f"So: {text}") == (f"So: {text}", [])


def test_text_without_calls_is_untouched() -> None:
    text = "  a\n\n b </tool_call> <parameter=x> \n\n"
    assert every_cut(text) == (text, [])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_calls_in_any_pieces_come_back_whole(data: st.DataObject) -> None:
    letters = st.text(st.sampled_from(list('ab<>/="\\{}[],:\n é\U0001f680')), max_size=12)
    calls = data.draw(st.lists(letters, min_size=1, max_size=3))
    write = data.draw(st.sampled_from([lambda v: xml("search", q=v), lambda v: hermes("search", {"q": v})]))
    text = "\n".join(map(write, calls))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert [(n, json.loads(a)) for n, a in read(pieces)[1]] == [("search", {"q": value}) for value in calls]


MARKUP = ["<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=q>", "</parameter>", "\n", "x"]
MARKUP += [
    '{"name": "search", ',
    '"arguments": {',
    '"q": ',
    '"v"',
    "}",
    "{",
    '"',
    "\\",
    "<function=",
    "<parameter",
    ">",
]


@given(st.lists(st.sampled_from(MARKUP), max_size=14).map("".join), st.integers(1, 7))
@settings(max_examples=600, deadline=None)
def test_E6_any_rubble_gives_valid_arguments_and_the_same_in_pieces(text: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(pieces) == read([text])


def test_the_style_is_read_off_the_template() -> None:
    assert style("{{ messages }}") is None
    assert style("{% for t in tools %}<function=f>") == "xml" and style("{% for t in tools %}<tool_call>") == "json"
