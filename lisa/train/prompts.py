"""Prompts to train on: a user's own, or written by the target as the user's turn of its own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lisa.errors import LisaError, NoTemplate, UsageError
from lisa.tokenizer import Tokenizer
from lisa.types import Message

HELD_OUT = 16
"""One prompt in so many is never trained on."""

_MARK = "PROMPTGOESHERE"


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer. `key` is a hash of it, the same in every run and on every machine."""

    messages: tuple[Message, ...]
    key: str
    held: bool


def prompt(messages: Sequence[Message]) -> Prompt:
    text = json.dumps(list(messages), sort_keys=True, ensure_ascii=False)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Prompt(tuple(messages), key, int(key[:8], 16) % HELD_OUT == 0)


def read(file: Path) -> list[Prompt]:
    """The prompts of a JSONL file, held-out ones first, each part in the order of their hashes.

    A line is {"messages": [...]} or {"prompt": "..."}. Of a small file the prompt of the smallest hash is held out.
    Answers at the end of a conversation are dropped: the target's own are what is learned. Raises UsageError.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {file} cannot be read: {error}") from error
    found = [prompt(_messages(line, f"--data {file}, line {n}")) for n, line in enumerate(lines, 1) if line.strip()]
    unique = {each.key: each for each in found}
    if len(unique) < 2:
        raise UsageError(f"--data {file} holds {len(unique)} prompts: at least 2 are needed, one of them held out")
    ordered = sorted(unique.values(), key=lambda each: (not each.held, each.key))
    return [replace(ordered[0], held=True), *ordered[1:]]


def _messages(line: str, where: str) -> list[Message]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return [{"role": "user", "content": value["prompt"]}]
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UsageError(f'{where} must be {{"messages": [...]}} or {{"prompt": "..."}}')
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UsageError(f"{where} has no message to answer")
    return messages


def opening(tokenizer: Tokenizer) -> list[int]:
    """What the template writes before the words of a user. Raises LisaError where it cannot be told."""
    try:
        rendered = tokenizer.render([{"role": "user", "content": _MARK}])
    except NoTemplate as error:
        raise LisaError(f"{error}; and give prompts with --data") from error
    before, mark, _ = tokenizer.raw.decode(rendered, skip_special_tokens=False).partition(_MARK)
    if not mark or not before:
        raise LisaError("the chat template changes what a user writes, so no prompt can be sampled: give --data")
    return tokenizer.encode(before)


def sampled(tokenizer: Tokenizer, turns: Sequence[tuple[Sequence[int], str]]) -> list[Prompt]:
    """The usable ones of sampled user turns (tokens, reason): ended by themselves, and neither empty nor repeated."""
    texts = [tokenizer.decode(tokens).strip() for tokens, reason in turns if reason == "stop"]
    kept = {text: None for text in texts if len(text) >= 4 and "\ufffd" not in text}
    return [prompt([{"role": "user", "content": text}]) for text in kept]
