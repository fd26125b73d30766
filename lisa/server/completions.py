"""Completions: JSON <-> Lisa's nouns. Format: https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from lisa.server.openai import NONE, Sampled, Spell
from lisa.server.problem import Problem
from lisa.server.turn import Head, Thought, Turn, given
from lisa.tools import Piece, Text
from lisa.types import TokenLogprob


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None


def completion_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One prompt for each choice. Raises Problem."""
    body.check_stream()
    if body.echo and body.logprobs is not None:
        raise Problem(400, "echo with logprobs is not supported: the prompt's are not computed", "logprobs")
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt or not all(prompt):
        raise Problem(400, "prompt must not be empty", "prompt")
    if len(prompt) > 64:
        raise Problem(400, f"prompt: at most 64 at once, not {len(prompt)}", "prompt")
    return list(prompt)


def completion_options(body: CompletionRequest) -> dict[str, Any]:
    return given(max_tokens=body.max_tokens or 16, stop=body.stop, logprobs=body.logprobs)


class CompletionWriter:
    """One choice of a completion. `echoed` is the prompt's text where it is to be repeated."""

    kind = "openai"

    def __init__(self, body: CompletionRequest, head: Head, turn: Turn, spell: Spell, index: int, echoed: str):
        self._body = body
        self._head = head
        self._turn = turn
        self._spell = spell
        self._index = index
        self._echoed = echoed
        self._told = 0
        self._offset = 0

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, "text": text, "finish_reason": finish, "logprobs": None}
        if self._body.logprobs is not None:
            entries = self._turn.logprobs[self._told :]
            self._told = len(self._turn.logprobs)
            choice["logprobs"] = self._logprobs(entries)
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._spell(e.token).decode("utf-8", "replace") for e in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [{self._spell(t).decode("utf-8", "replace"): p for t, p in e.top} for e in entries],
            "text_offset": offsets,
        }

    def _chunk(self, text: str, finish: str | None = None, extra: Mapping[str, Any] = NONE) -> dict[str, Any]:
        empty = {"usage": None} if self._body.usage_chunk else {}
        return self.envelope() | {"choices": [self._choice(text, finish)]} | empty | dict(extra)

    def envelope(self) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self._chunk(self._echoed)

    def feed(self, pieces: Sequence[Piece | Thought], rounds: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        extra: Mapping[str, Any] = {} if rounds is None else {"round": rounds}
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        if text or extra or self._told < len(self._turn.logprobs):
            yield self._chunk(text, extra=extra)

    def closing(self) -> Iterator[dict[str, Any]]:
        yield self._chunk("", self._turn.reason, extra={"timings": self._turn.timings})

    def choice(self) -> dict[str, Any]:
        return self._choice(self._echoed + self._turn.text, self._turn.reason)


def completions_usage(turns: Sequence[Turn]) -> dict[str, Any]:
    """Of all choices together."""
    prompt, completion = (sum(getattr(t.stats, f"{name}_tokens") for t in turns) for name in ("prompt", "completion"))
    cached = sum(t.stats.cached_tokens for t in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
