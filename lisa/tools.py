"""Tool calls out of text while it is generated.

Two ways of writing a call are read, whichever the model uses: Qwen's XML and the Hermes form, JSON between the same
tags. Damaged markup loses nothing: a value ends at the next tag, and what cannot be a call is given back as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import regex

from lisa.text import settled

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Style = Literal["xml", "json"]

_JSON_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
_UNIONS = ("anyOf", "oneOf")
_MOST_HOPS = 8
_LONGEST_NAME = 200
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Tool:
    """A function a model may call; `parameters` is a JSON schema of an object. `strict`: arguments must fit it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        about = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": dict(self.parameters)}}

    @cached_property
    def properties(self) -> Mapping[str, Any]:
        """The parameters' schemas, references in their own place and in that of a union's members resolved."""
        properties = self.parameters.get("properties")
        return {
            name: _resolved(schema, self.parameters)
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
        }


@dataclass(frozen=True)
class Text:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True)
class Begin:
    """Call number `index` (from 0) begins."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next characters of a call's arguments; joined they are one JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True)
class End:
    index: int


Piece = Text | Begin | Arguments | End


class CallParser:
    """Pieces of text in, Pieces out; what comes out does not depend on where the text was cut."""

    def __init__(self, tools: Sequence[Tool]):
        self._tools = {tool.name: tool for tool in tools}
        self._openers = (OPEN, *(f"<function={name}>" for name in self._tools))
        self._held = ""
        self._lead = ""  # white space in front of what may be a call
        self._over = False  # no more text will come
        self._out: list[Piece] = []
        self._count = 0
        self._members = 0
        self._seen: set[str] = set()
        self._tool = Tool("")
        self._step: Callable[[], bool] = self._read_text
        self._string = False
        self._value = ""
        self._end: Any = None

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._run()

    def finish(self) -> list[Piece]:
        """What was held back, once no text will come; a call cut off in the middle is closed."""
        self._over = True
        return self._run()

    def _run(self) -> list[Piece]:
        while self._step():
            pass
        out, self._out = self._out, []
        return _joined(out)

    # Text

    def _read_text(self) -> bool:
        found = [at for opener in self._openers if (at := self._held.find(opener)) >= 0]
        if found:
            before, self._held = self._held[: min(found)], self._held[min(found) :]
            self._text(before.rstrip())
            self._lead = before[len(before.rstrip()) :]
            self._step = self._read_opening
            return True
        end = len(self._held) if self._over else settled(self._held, self._openers)
        if not self._over:
            end = len(self._held[:end].rstrip())  # white space in front of a call belongs to nothing
        self._text(self._held[:end])
        self._held = self._held[end:]
        return False

    def _text(self, text: str) -> None:
        if text and not (self._count and text.isspace()):
            self._out.append(Text(text))

    def _read_opening(self) -> bool:
        """Behind <tool_call>: which form is it, and what is called?"""
        tag = OPEN if self._held.startswith(OPEN) else ""
        rest = self._held[len(tag) :].lstrip()
        header = regex.match(r"<function=([^>\n]*)[>\n]", rest)
        if header and header[1].strip():
            self._begin(header[1].strip())
            self._held = rest[header.end() :]
            self._step = self._read_body
            return True
        if rest.startswith("{"):
            self._held = rest
            self._step = self._read_object
            return True
        unsure = "<function=".startswith(rest) or (
            rest.startswith("<function=") and not header and len(rest) < _LONGEST_NAME
        )
        if unsure and not self._over:
            return False
        return self._give_back(tag or self._held[:1])

    def _give_back(self, markup: str) -> bool:
        """Not a call after all."""
        at = self._held.index(markup) + len(markup)
        self._out.append(Text(self._lead + self._held[:at]))
        self._held = self._held[at:]
        self._step = self._read_text
        return True

    def _begin(self, name: str) -> None:
        self._tool = self._tools.get(name, Tool(name))
        self._members, self._seen = 0, set()
        self._out += [Begin(self._count, name), Arguments(self._count, "{")]

    def _close_call(self) -> bool:
        self._out += [Arguments(self._count, "}"), End(self._count)]
        self._count += 1
        self._step = self._read_behind
        return True

    def _read_behind(self) -> bool:
        """The closing tag, which may be missing; a bracket too many is passed over."""
        rest = self._held.lstrip(" \t\r\n}]")
        if rest.startswith(CLOSE):
            self._held = rest[len(CLOSE) :]
        elif CLOSE.startswith(rest) and not self._over:
            return False
        elif CLOSE.startswith(rest):
            self._held = ""
        self._step = self._read_text
        return True

    def _member(self, key: str) -> None:
        """Begin a member of the arguments."""
        self._out.append(Arguments(self._count, (", " if self._members else "") + json.dumps(key) + ": "))
        self._members += 1
        self._seen.add(key)

    def _write(self, fragment: str) -> None:
        if fragment:
            self._out.append(Arguments(self._count, fragment))

    # Qwen's XML

    def _read_body(self) -> bool:
        """Between parameters."""
        rest = self._held.lstrip()
        if header := regex.match(r"<parameter(?:=([^>\n]*))?[>\n]", rest):
            self._start_value((header[1] or "").strip())
            self._held = rest[header.end() :]
            if header[0].endswith("\n"):  # the bracket is missing
                self._held = "\n" + self._held
            return True
        for tag in ("</function>", CLOSE, OPEN, "<function="):
            if rest.startswith(tag):
                self._held = rest[len(tag) :] if tag == "</function>" else rest
                return self._close_call()
        if self._over:
            self._held = ""
            return self._close_call()
        tags = ("<parameter=", "<parameter>", "</function>", CLOSE, OPEN, "<function=", "</parameter>")
        if any(tag.startswith(rest) or (rest.startswith(tag) and tag == "<parameter=") for tag in tags):
            return False
        self._held = rest[1:]  # a stray character
        return True

    def _start_value(self, key: str) -> None:
        self._member(key)
        self._types = types_of(self._tool.properties.get(key))
        self._string = self._types == {"string"}
        self._value = ""
        self._end = None
        self._step = self._read_first

    def _pattern(self) -> Any:
        """What ends a value. A closing tag counts when something that can follow it does: values may hold such tags."""
        last = r"|\s*(?:<[\w/]*=?)?\Z" if self._over else ""
        others = "|".join(regex.escape(key) for key in self._tool.properties if key not in self._seen)
        return regex.compile(
            rf"(?P<close>\n?</parameter>)(?:\s*(?:<parameter[=>]|</?function[=>]|</?tool_call>){last})"
            rf"|\n?</function>(?:\s*(?:</?tool_call>|<function=){last})"
            rf"|\n?</tool_call>(?:\s*<tool_call>{last})" + (rf"|\n?<parameter=(?:{others})>" if others else "")
        )

    def _read_first(self) -> bool:
        """The line break behind a parameter's tag is no part of the value."""
        if not self._held and not self._over:
            return False
        self._held = self._held.removeprefix("\n")
        if self._string:
            self._write('"')
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        if self._end is None or self._over:
            self._end = self._pattern()
        match = self._end.search(self._held, partial=not self._over)
        end = match.start() if match else len(self._held)
        self._take(self._held[:end])
        if match is None or match.partial:
            self._held = self._held[end:]
            if not self._over:
                return False
        else:
            # Only what closes this value is used up.
            self._held = self._held[match.end("close") if match["close"] is not None else end :]
        self._finish_value()
        self._step = self._read_body
        return True

    def _take(self, piece: str) -> None:
        if self._string:
            self._write(_escaped(piece))
        else:
            self._value += piece

    def _finish_value(self) -> None:
        self._write('"' if self._string else _typed(self._value, self._types))

    # Hermes' JSON

    def _read_object(self) -> bool:
        """{"name": ..., "arguments": {: streamed when the name comes first, else read as a whole."""
        head = regex.compile(
            r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', regex.DOTALL
        ).match(self._held, partial=not self._over)
        if head is not None and not head.partial:
            self._begin(str(_loads(f'"{head[1]}"', head[1])))
            self._held = self._held[head.end() :]
            self._step = self._read_member
            return True
        if head is not None and not self._over:
            return False
        end = _value_end(self._held)
        if end is None and not self._over:
            return False
        call = _loads(self._held[:end], None)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            self._out.append(Text(self._lead + OPEN))
            self._step = self._read_text
            return True
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = _loads(arguments, None)
        self._begin(call["name"])
        for key, value in arguments.items() if isinstance(arguments, dict) else ():
            self._member(key)
            self._write(json.dumps(value, ensure_ascii=False))
        self._held = self._held[end:] if end is not None else ""
        return self._close_call()

    def _read_member(self) -> bool:
        rest = self._held.lstrip(" \t\r\n,")
        if rest.startswith("}"):
            self._held = rest[1:]
            return self._close_call()
        key = regex.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)', regex.DOTALL).match(rest, partial=not self._over)
        if key is not None and not key.partial:
            self._member(str(_loads(f'"{key[1]}"', key[1])))
            self._held = rest[key.end() :]
            self._step = self._read_string if self._held.startswith('"') else self._read_json
            if self._step == self._read_string:
                self._held = self._held[1:]
                self._write('"')
            return True
        if (not rest or key is not None) and not self._over:
            return False
        return self._lost()

    def _lost(self) -> bool:
        """Nothing that continues the object: close it here and go on behind the closing tag, if there is one."""
        _, tag, after = self._held.partition(CLOSE)
        if not tag and not self._over:
            return False
        self._held = tag + after
        return self._close_call()

    def _read_string(self) -> bool:
        run = regex.match(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})+', self._held)
        if run:
            self._write(run[0])
            self._held = self._held[run.end() :]
        if not self._held:
            return self._over and self._end_string()
        first = self._held[0]
        if first == '"':
            self._held = self._held[1:]
            return self._end_string()
        if first == "\\" and not self._over and regex.fullmatch(r"\\(u[0-9a-fA-F]{0,3})?", self._held):
            return False
        # A line break or a backslash that JSON does not allow here: models write them, and mean them.
        self._write(_escaped(first))
        self._held = self._held[1:]
        return True

    def _end_string(self) -> bool:
        self._write('"')
        self._step = self._read_member
        return True

    def _read_json(self) -> bool:
        end = _value_end(self._held)
        if end is None and not self._over:
            return False
        raw = self._held[:end].strip()
        self._write(raw if _loads(raw, _BROKEN) is not _BROKEN else json.dumps(raw, ensure_ascii=False))
        self._held = "" if end is None else self._held[end:]
        self._step = self._read_member
        return True


_BROKEN = object()


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring fragments as one."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Arguments) and isinstance(last, Arguments) and last.index == piece.index:
            out[-1] = Arguments(piece.index, last.fragment + piece.fragment)
        elif isinstance(piece, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + piece.text)
        else:
            out.append(piece)
    return out


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _loads(text: str, default: Any) -> Any:
    """Strict JSON, or `default`."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return default


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    schema = _followed(schema, root)
    if not isinstance(schema, Mapping):
        return schema
    unions = {name: schema[name] for name in _UNIONS if isinstance(schema.get(name), list)}
    return {**schema, **{name: [_followed(member, root) for member in members] for name, members in unions.items()}}


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a reference to a definition of the root's leads to, with what stands beside it; or else `schema`."""
    for _ in range(_MOST_HOPS):  # references may go in a circle
        where = schema.get("$ref") if isinstance(schema, Mapping) else None
        found = regex.fullmatch(r"#/(\$defs|definitions)/([^/]+)", where) if isinstance(where, str) else None
        shared = root.get(found[1]) if found else None
        target = shared.get(found[2]) if found and isinstance(shared, Mapping) else None
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def types_of(schema: Any) -> set[str]:
    """The JSON types a schema admits; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    if isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(v, str) for v in schema["enum"]) else set()
    members = [m for name in _UNIONS if isinstance(schema.get(name), list) for m in schema[name]]
    found = [types_of(member) for member in members]
    return set().union(*found) if all(found) else set()


def _typed(raw: str, types: set[str]) -> str:
    """A parameter's text as JSON of one of `types` where it is one, else as a string of exactly that text."""
    text = _WORDS.get(raw.strip(), raw.strip())
    value = _loads(text, _BROKEN)
    if value is not _BROKEN and _is_one_of(value, types):
        return text
    return json.dumps(raw, ensure_ascii=False)


def _is_one_of(value: Any, types: set[str]) -> bool:
    if not types:
        return not isinstance(value, str)
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, str):
        return False  # text stays as it was written
    return any(isinstance(value, _JSON_TYPES[kind]) for kind in types if kind in _JSON_TYPES)


def _value_end(text: str) -> int | None:
    """Where the JSON value that `text` begins with ends; None when that is not certain yet."""
    if text[:1] in "{[":
        depth = 0
        for token in regex.finditer(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[{}\[\]]', text, regex.DOTALL):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
            if depth == 0:
                return int(token.end())
        return None
    end = regex.search(r"[,}\]\s<]", text)
    return int(end.start()) if end else None


def style(template: str) -> Style | None:
    """How a chat template writes calls; None when it shows a model no tools."""
    if "tools" not in template:
        return None
    return "xml" if "<function=" in template else "json"
