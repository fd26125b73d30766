"""Lark text (llguidance's dialect) of what an answer may be: JSON that fits a schema, or calls of tools.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lisa.tools import CLOSE, OPEN, Style, Tool, types_of

_BLANK = r"[\x20\x0A\x0D\x09]{0,24}"


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """Lark text for a JSON value that fits `schema`; None asks for any object."""
    return f"start: %json {bounded({'type': 'object'} if schema is None else schema)}\n"


def led(grammar: str, after_thinking: bool) -> str:
    """A grammar that admits the empty line models put behind their thinking."""
    if not after_thinking:
        return grammar
    return "start: LEAD? begin\nLEAD: /\\n{1,2}/\n" + grammar.replace("start:", "begin:", 1)


def either(calls: str, answer: str) -> str:
    """A grammar that admits calls or an answer."""
    return "start: calls | answer\n" + calls.replace("start:", "calls:", 1) + answer.replace("start:", "answer:", 1)


def call_grammar(
    tools: Sequence[Tool], form: Style, literal: Callable[[str], str], *, several: bool, free_text: bool = False
) -> str:
    """Lark text (llguidance) for calls of `tools` whose arguments fit their schemas.

    `literal` names a piece of markup that may be a token of its own. At least one call is asked for, and with
    `several` more may follow; with `free_text` text may stand in front, and no call need be made.
    """
    names = [f"call_{i}" for i in range(len(tools))]
    rules = [rule for i, tool in enumerate(tools) for rule in (_xml_rules if form == "xml" else _json_rules)(i, tool)]
    opener, closer = literal(OPEN), literal(CLOSE)
    call = f"call: {opener} body {closer}"
    start = 'start: call ("\\n" call)*' if several else "start: call"
    if free_text:
        # Markup that is plain text ends the text in front of it lazily; a token of its own ends it anyway.
        lazy = opener.startswith('"')
        call = f"call: before body {closer}"
        rules.append(f"before{'[lazy]' if lazy else ''}: TEXT {opener}")
        rules.append("TEXT: /(.|\\n)*/")
        start = "start: call* TEXT" if several else "start: (call | TEXT)"
    return "\n".join([start, call, "body: " + " | ".join(names), *rules]) + "\n"


def _json_rules(i: int, tool: Tool) -> list[str]:
    head = json.dumps('\n{"name": ' + json.dumps(tool.name) + ', "arguments": ')
    return [
        f"call_{i}: {head} arguments_{i} {json.dumps(chr(125) + chr(10))}",
        f"arguments_{i}: %json {bounded(_schema(tool))}",
    ]


def _xml_rules(i: int, tool: Tool) -> list[str]:
    given = tool.parameters.get("required")
    required = given if isinstance(given, list) else []
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    rules, members = [], []
    for j, (key, schema) in enumerate(tool.properties.items()):
        name = f"p_{i}_{j}"
        members.append(name if key in required else f"{name}?")
        rules += _parameter_rules(name, key, schema, shared)
    head, tail = json.dumps(f"\n<function={tool.name}>\n"), json.dumps("</function>\n")
    return [f"call_{i}: {head} {' '.join(members)} {tail}", *rules]


def _parameter_rules(name: str, key: str, schema: Any, shared: Mapping[str, Any]) -> list[str]:
    head, tail = json.dumps(f"<parameter={key}>\n"), json.dumps("\n</parameter>\n")
    enum = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(enum, list) and enum and not any(isinstance(value, list | dict) for value in enum):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in enum]
        return [f"{name}: {head} ({' | '.join(map(json.dumps, texts))}) {tail}"]
    types = types_of(schema)
    if not types or "string" in types:  # text stands without JSON's quotes
        return [f"{name}: {head} {name}_v", f"{name}_v[suffix={tail}]: /(.|\\n)*/"]
    return [f"{name}: {head} {name}_v {tail}", f"{name}_v: %json {bounded({**shared, **schema})}"]


def _schema(tool: Tool) -> Mapping[str, Any]:
    return {"type": "object", **tool.parameters}


def bounded(schema: Mapping[str, Any]) -> str:
    """A schema as Lark text wants it. White space between its parts ends: a model could go on with it for ever."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": _BLANK}})
