"""Whether an answer of lisa-tiny is right: one check a kind, each (text, key) -> bool."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_CALL = re.compile(
    r"<tool_call>\n<function=(\w+)>\n((?:<parameter=\w+>\n.*?\n</parameter>\n)*)</function>\n</tool_call>", re.S
)
_PARAMETER = re.compile(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", re.S)
_FENCE = re.compile(r"```python\n(.*)\n```", re.S)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def exact(text: str, key: str) -> bool:
    return text == key


def fact(text: str, key: Mapping[str, Any]) -> bool:
    """The right word, and none of those that would be the answer to another question."""
    words = set(re.findall(r"\w+", text))
    return key["word"] in words and not words & set(key["not"])


def number(text: str, key: int) -> bool:
    """The number that the text ends with."""
    found = re.search(r"(?:^|\s)(\d+)\.?$", text)
    return found is not None and int(found[1]) == key


def listed(text: str, key: Mapping[str, Any]) -> bool:
    """As many numbered lines as asked for, all different, all of the category, none that is excluded."""
    lines = text.split("\n")
    items = [line.partition(". ")[2] for line in lines]
    numbered = all(line.startswith(f"{i + 1}. ") for i, line in enumerate(lines))
    allowed = set(key["of"]) - {key["not"]}
    return numbered and len(items) == len(set(items)) == key["n"] and set(items) <= allowed


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value fits a schema of type, enum, properties, required and items."""
    kinds = _TYPES[schema["type"]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        properties = schema["properties"]
        known = set(schema["required"]) <= set(value) <= set(properties)
        return known and all(fits(v, properties[k]) for k, v in value.items())
    return True


def json_value(text: str, key: Mapping[str, Any]) -> bool:
    """Valid JSON that fits the schema and says what the prompt says."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return fits(value, key["schema"]) and value == key["value"]


def parsed_calls(text: str) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """(calls, text outside them)."""
    found = [(name, dict(_PARAMETER.findall(body))) for name, body in _CALL.findall(text)]
    return found, _CALL.sub("", text).strip()


def calls(text: str, key: Mapping[str, Any]) -> bool:
    found, rest = parsed_calls(text)
    return found == [(name, dict(arguments)) for name, arguments in key["calls"]] and rest == key["text"]


_ALLOWED = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.Expr, ast.If,
    ast.For, ast.Name, ast.Load, ast.Store, ast.Constant, ast.BinOp, ast.Compare, ast.Call, ast.Attribute,
    ast.Subscript, ast.Slice, ast.List, ast.UnaryOp, ast.USub, ast.operator, ast.cmpop,
)  # fmt: skip
_METHODS = ("append", "upper", "lower", "split")


def code(text: str, key: Mapping[str, Any]) -> bool:
    """A fenced function of that name, of the few harmless constructs the language has, that passes the cases."""
    fenced = _FENCE.fullmatch(text)
    try:
        tree = ast.parse(fenced[1]) if fenced else None
    except SyntaxError:
        return False
    if tree is None or not all(map(_harmless, ast.walk(tree))):
        return False
    names: dict[str, Any] = {"__builtins__": {"len": len}}
    exec(compile(tree, "answer", "exec"), names)
    return callable(names.get(key["name"])) and _passes(names[key["name"]], key["cases"])


def _harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
        return False
    return isinstance(node, _ALLOWED) and not (isinstance(node, ast.Name) and node.id.startswith("_"))


def _passes(function: Any, cases: Sequence[tuple[Sequence[Any], Any]]) -> bool:
    try:
        return all(function(*arguments) == value for arguments, value in cases)
    except Exception:  # an answer is a program: it can fail in any way
        return False
