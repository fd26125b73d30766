"""A file of prompts: what `lisa bench` asks and `lisa train --data` trains on, one JSON object a line.

{"prompt": "..."} or {"messages": [...]}; beside it, where wanted, "kind", "tools", "thinking" (true or false) and
"effort" (low, medium). Answers at the end of a conversation are dropped: it is the target that answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lisa.errors import UsageError
from lisa.tokenizer import Tokenizer
from lisa.types import Message

_KINDS: Mapping[str, type] = {"kind": str, "tools": list, "thinking": bool, "effort": str}


class Readable(Protocol):
    """A path, or a file inside the package."""

    def read_bytes(self) -> bytes: ...


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer, and how the chat template is to be filled."""

    messages: tuple[Message, ...]
    kind: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool | None = None
    effort: str | None = None

    def render(self, tokenizer: Tokenizer, thinking: bool | None = None) -> list[int]:
        """Token ids; `thinking` where the prompt says nothing of it."""
        wanted = thinking if self.thinking is None else self.thinking
        return tokenizer.render(self.messages, tools=self.tools or None, thinking=wanted, effort=self.effort)


def read(file: Readable) -> list[Prompt]:
    """Raises UsageError, naming the line."""
    try:
        lines = file.read_bytes().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return [_prompt(line, f"{file}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _prompt(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise UsageError(f'{where} must be {{"messages": [...]}} or {{"prompt": "..."}}')
    messages = value.pop("messages", None) or [{"role": "user", "content": value.pop("prompt", None)}]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and _text(m) for m in messages):
        raise UsageError(f'{where} must be {{"messages": [...]}} or {{"prompt": "..."}}')
    for name, given in value.items():
        if name not in _KINDS or not isinstance(given, _KINDS[name]):
            raise UsageError(f"{where}: {name!r} is unknown, or not of its kind; known are {', '.join(_KINDS)}")
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UsageError(f"{where} has no message to answer")
    return Prompt(tuple(messages), **{**value, "tools": tuple(value.get("tools", ()))})


def _text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content", ""), str)
