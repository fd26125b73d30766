"""Prompts to train on: a user's own, or written by the target as the user's turn of its own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lisa import prompts
from lisa.errors import LisaError, NoTemplate, UsageError
from lisa.prompts import Prompt
from lisa.tokenizer import Tokenizer

HELD_OUT = 16
"""One prompt in so many is never trained on."""

_MARK = "PROMPTGOESHERE"


@dataclass(frozen=True)
class Question:
    """A prompt with the `key` it is known by, a hash of it, the same in every run and on every machine."""

    prompt: Prompt
    key: str
    held: bool


def question(prompt: Prompt) -> Question:
    given = {k: v for k, v in asdict(prompt).items() if k not in ("messages", "kind") and v not in (None, ())}
    hashed: Any = [list(prompt.messages), given] if given else list(prompt.messages)
    text = json.dumps(hashed, sort_keys=True, ensure_ascii=False)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Question(prompt, key, int(key[:8], 16) % HELD_OUT == 0)


def read(file: Path) -> list[Question]:
    """The prompts of a file (lisa/prompts.py), held-out ones first, each part in the order of their hashes.

    Of a small file the prompt of the smallest hash is held out. Raises UsageError.
    """
    unique = {each.key: each for each in map(question, prompts.read(file))}
    if len(unique) < 2:
        raise UsageError(f"{file} holds {len(unique)} prompts: at least 2 are needed, one of them held out")
    ordered = sorted(unique.values(), key=lambda each: (not each.held, each.key))
    return [replace(ordered[0], held=True), *ordered[1:]]


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


def sampled(tokenizer: Tokenizer, turns: Sequence[tuple[Sequence[int], str]]) -> list[Question]:
    """The usable ones of sampled user turns (tokens, reason): ended by themselves, and neither empty nor repeated."""
    texts = [tokenizer.decode(tokens).strip() for tokens, reason in turns if reason == "stop"]
    kept = {text: None for text in texts if len(text) >= 4 and "\ufffd" not in text}
    return [question(Prompt(({"role": "user", "content": text},))) for text in kept]
