"""What a request asks for and what came of it, in Lisa's nouns. Every API is a translation to and from these."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lisa.server.problem import Problem
from lisa.tools import Arguments, Begin, CallParser, End, Piece, Text, Tool
from lisa.types import Done, Event, Message, Stats, TokenLogprob, Tokens


class Body(BaseModel):
    """A JSON object of which every field is known: an unknown one, or one of a wrong type, is refused by its name."""

    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Ask:
    """A chat request. `options` are arguments of `Model.chat`; `sampling` wins over the model's own."""

    messages: Sequence[Message]
    sampling: Mapping[str, Any]
    options: Mapping[str, Any]
    tools: tuple[Tool, ...] = ()

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools whose calls are read out of the answer."""
        return () if self.options.get("tool_choice") == "none" else self.tools


@dataclass(frozen=True)
class Head:
    """What a reply's envelope says of it. `prompt_tokens` is known before anything has been read."""

    id: str
    model: str
    created: int
    prompt_tokens: int


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


class Turn:
    """One reply as it grows: events in, pieces out, and the whole of it at the end.

    `marks` are the token ids of the thinking tags where the model has them, and `thinking` says that the prompt opened
    the first. `several` False ends the turn with its first call. `new_id` makes the ids of calls.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        several: bool = True,
        marks: tuple[int | None, int | None] = (None, None),
        thinking: bool = False,
        new_id: Callable[[str], str] = new_id,
    ):
        self._parser = CallParser(tools) if tools else None
        self._several = several
        self._open, self._close = marks
        self._thinking = thinking
        self._new_id = new_id
        self._begun = False
        self.complete = False
        self.text = ""
        self.reasoning = ""
        self.reasoning_tokens = 0
        self.calls: list[Call] = []
        self.logprobs: list[TokenLogprob] = []
        self.ids: list[int] = []
        self.stats = Stats()
        self.reason: Literal["stop", "length", "cancelled", "tool_calls"] = "stop"

    def feed(self, event: Event) -> list[Piece | Thought]:
        """What an event adds. After `complete` no further event counts."""
        if self.complete:
            self._note(event)
            return []
        if isinstance(event, Done):
            self._note(event)
            return self._finish(event)
        if not isinstance(event, Tokens):
            return []
        self._count(event.ids)
        self.ids += event.ids
        self.logprobs += event.logprobs
        pieces: list[Piece | Thought] = [Thought(event.reasoning)] if event.reasoning else []
        self.reasoning += event.reasoning
        return pieces + self._take(self._parser.push(event.text) if self._parser else _text(event.text))

    def _count(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not self._begun and token == self._open:
                self._thinking = True
            self._begun = True
            self.reasoning_tokens += self._thinking
            if token == self._close:
                self._thinking = False

    def _take(self, pieces: Sequence[Piece]) -> list[Piece | Thought]:
        taken: list[Piece | Thought] = []
        for piece in pieces:
            if isinstance(piece, Text):
                self.text += piece.text
            elif isinstance(piece, Begin):
                self.calls.append(Call(self._new_id("call_"), piece.name, ""))
            elif isinstance(piece, Arguments):
                call = self.calls[piece.index]
                self.calls[piece.index] = replace(call, arguments=call.arguments + piece.fragment)
            taken.append(piece)
            if isinstance(piece, End) and not self._several:
                self.complete = True
                self.reason = "tool_calls"
                break
        return taken

    def _finish(self, done: Done) -> list[Piece | Thought]:
        pieces = self._take(self._parser.finish()) if self._parser else []
        self.complete = True
        self.reason = "tool_calls" if self.calls and done.reason == "stop" else done.reason
        return pieces

    def _note(self, event: Event) -> None:
        if isinstance(event, Done):
            self.stats = event.stats

    @property
    def timings(self) -> dict[str, Any]:
        """What the reply cost, in numbers a person asks about. Times in seconds, rates per second."""
        s = self.stats
        return {
            "prompt_tokens": s.prompt_tokens,
            "cached_tokens": s.cached_tokens,
            "completion_tokens": s.completion_tokens,
            "time_to_first_token": round(s.ttft, 6),
            "tokens_per_second": None if s.tokens_per_second is None else round(s.tokens_per_second, 3),
            "rounds": s.rounds,
            "drafted": s.drafted,
            "accepted": s.accepted,
            "mean_accepted_length": None if s.accepted_length is None else round(s.accepted_length, 3),
            "drafter": s.drafter,
            "drafter_reason": s.why,
            "notes": list(s.notes),
            "seed": s.seed,
        }


def _text(text: str) -> list[Piece]:
    return [Text(text)] if text else []


@dataclass(frozen=True)
class Nature:
    """What a model can do, as far as requests depend on it."""

    thinks: bool
    reads: Callable[[str], bool]


_BUDGETS = {"minimal": 256, "low": 1024, "medium": 8192, "high": None, "xhigh": None, "max": None}


def effort_options(effort: str | None, nature: Nature, field_name: str) -> dict[str, Any]:
    """A reasoning effort as options of `Model.chat`.

    A template that reads efforts is given it; of another thinking model it bounds the thinking. Raises Problem.
    """
    if effort is None:
        return {}
    if effort == "none":
        return {"thinking": False} if nature.thinks else {}
    if not nature.thinks:
        raise Problem(400, f"{field_name}: this model does not think; leave it out or set it to none", field_name)
    if nature.reads("reasoning_effort"):
        return {"thinking": True, "effort": "xhigh" if effort == "max" else "low" if effort == "minimal" else effort}
    budget = _BUDGETS[effort]
    return {"thinking": True} if budget is None else {"thinking": True, "thinking_budget": budget}


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """Several system messages at the front as one: templates take no more."""
    front = 0
    while front < len(messages) and messages[front]["role"] == "system":
        front += 1
    if front < 2:
        return list(messages)
    text = "\n\n".join(str(message["content"]) for message in messages[:front])
    return [{"role": "system", "content": text}, *messages[front:]]


def plain_text(content: Any, kinds: Sequence[str], where: str) -> str:
    """Content that is a string, null, or a list of text parts, as one string. Raises Problem naming another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text", part.get("refusal")), str):
            raise Problem(
                400, f"{where}[{i}]: content of type {kind!r} is not supported; send text", f"{where}[{i}].type"
            )
        texts.append(part.get("text", part.get("refusal")))
    return "".join(texts)


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
