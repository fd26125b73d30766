"""Messages and count_tokens: JSON <-> Lisa's nouns. Format: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lisa.server.openai import MAX_TOOLS, Count, choice_options, make_tool
from lisa.server.problem import Problem
from lisa.server.turn import Ask, Body, Head, Nature, Thought, Turn, effort_options, given, plain_text
from lisa.tools import Arguments, Begin, End, Piece, Text
from lisa.types import Message

SIGNATURE = "lisa"
"""Thinking blocks carry a signature, which is for a service that checks them; this one does not."""


class Block(Body):
    """A content block of any supported type: which fields belong to which is checked when it is read."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: None = None
    source: Any = None
    caller: Any = None


class InputMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: None = None


class ToolParam(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["full", "summarized"] | None = None


class Metadata(Body):
    user_id: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest):
    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def messages_ask(body: CountRequest, nature: Nature) -> Ask:
    """Raises Problem for what cannot be honoured."""
    messages = _messages(body)
    if messages[-1]["role"] == "assistant":
        raise Problem(400, "messages: the last one must be the user's; an answer begun for the model is not supported")
    tools = tuple(make_tool(t.name, t.description, t.input_schema, t.strict) for t in body.tools or ())
    choice = body.tool_choice
    options = choice_options(tools, _choice(choice), None if choice is None else not choice.disable_parallel_tool_use)
    config = body.output_config or OutputConfig()
    thinking = _thinking(body.thinking, nature)
    if thinking.get("thinking"):
        options |= effort_options(config.effort, nature, "output_config.effort")
    options |= thinking
    if config.format is not None:
        options["schema"] = config.format.schema_
    sampling: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        options |= given(max_tokens=body.max_tokens, stop=body.stop_sequences or None)
        sampling = given(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    return Ask(messages, sampling, options, tools)


def _choice(choice: ToolChoice | None) -> str | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise Problem(400, "tool_choice of type tool needs a name", "tool_choice.name")
        return choice.name
    return "required" if choice.type == "any" else choice.type


def _thinking(thinking: Thinking | None, nature: Nature) -> dict[str, Any]:
    """Thinking is off unless asked for, as in the API this is; a model that cannot be told so keeps its way."""
    if thinking is None or thinking.type == "disabled":
        if thinking is not None and thinking.budget_tokens is not None:
            raise Problem(400, "thinking.budget_tokens needs thinking to be enabled", "thinking.budget_tokens")
        return {"thinking": False} if nature.thinks and nature.reads("enable_thinking") else {}
    if not nature.thinks:
        raise Problem(400, "thinking: this model does not think; leave it out", "thinking")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise Problem(400, "thinking.budget_tokens is missing", "thinking.budget_tokens")
    return {"thinking": True} | given(thinking_budget=thinking.budget_tokens)


def _messages(body: CountRequest) -> list[Message]:
    out: list[Message] = []
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        out.append({"role": "system", "content": "\n\n".join(texts)})
    for i, message in enumerate(body.messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            out.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            out += _user(message.content, where)
        else:
            out.append(_assistant(message.content, where))
    return out


def _user(blocks: Sequence[Block], where: str) -> list[Message]:
    """Results of tools are messages of their own, and come first."""
    results: list[Message] = []
    texts: list[str] = []
    for j, block in enumerate(blocks):
        if block.type == "text":
            texts.append(_field(block.text, f"{where}[{j}].text"))
        elif block.type == "tool_result":
            content = plain_text(block.content, ("text",), f"{where}[{j}].content")
            text = f"Error: {content}" if block.is_error else content
            tool_use_id = _field(block.tool_use_id, f"{where}[{j}].tool_use_id")
            results.append({"role": "tool", "tool_call_id": tool_use_id, "content": text})
        else:
            raise _unsupported(block, f"{where}[{j}]")
    return [*results, {"role": "user", "content": "".join(texts)}] if texts or not results else results


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for j, block in enumerate(blocks):
        at = f"{where}[{j}]"
        if block.type == "text":
            message["content"] += _field(block.text, f"{at}.text")
        elif block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _field(
                block.thinking, f"{at}.thinking"
            )
        elif block.type == "tool_use":
            function = {"name": _field(block.name, f"{at}.name"), "arguments": json.dumps(block.input or {})}
            call = {"id": _field(block.id, f"{at}.id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise _unsupported(block, at)
    return message


def _field(value: str | None, name: str) -> str:
    if value is None:
        raise Problem(400, f"{name} is missing", name)
    return value


def _unsupported(block: Block, where: str) -> Problem:
    return Problem(400, f"{where}: a block of type {block.type!r} is not supported here", f"{where}.type")


class MessagesWriter:
    """A reply as Anthropic's events in order, or as one message. `stopped_by` tells the stop string that ended it."""

    def __init__(self, head: Head, turn: Turn, stopped_by: Any):
        self._head = head
        self._turn = turn
        self._stopped_by = stopped_by
        self._index = -1
        self._kind: str | None = None

    def opening(self) -> Iterator[dict[str, Any]]:
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0, "cache_read_input_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, None, usage)}

    def _message(
        self, content: Sequence[Any], reason: str | None, stop: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": list(content),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": dict(usage),
        }

    def feed(self, pieces: Sequence[Piece | Thought], rounds: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if isinstance(piece, Begin):
                call = self._turn.calls[piece.index]
                yield from self._open("tool_use", {"id": call.id, "name": piece.name, "input": {}})
            elif isinstance(piece, Arguments):
                yield self._delta({"type": "input_json_delta", "partial_json": piece.fragment})
            elif isinstance(piece, End):
                yield from self._close()
            elif isinstance(piece, Text):
                if self._kind != "text":
                    yield from self._open("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": piece.text})
            else:
                if self._kind != "thinking":
                    yield from self._open("thinking", {"thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": piece.text})

    def _open(self, kind: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._index += 1
        self._kind = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def closing(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage(), "timings": self._turn.timings}
        yield {"type": "message_stop"}

    def _reason(self) -> tuple[str, str | None]:
        if self._turn.reason == "tool_calls":
            return "tool_use", None
        if self._turn.reason == "length":
            return "max_tokens", None
        stop = self._stopped_by()
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _usage(self) -> dict[str, Any]:
        s = self._turn.stats
        return {
            "input_tokens": s.prompt_tokens - s.cached_tokens,
            "cache_read_input_tokens": s.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": s.completion_tokens,
        }

    def whole(self) -> dict[str, Any]:
        turn = self._turn
        content: list[dict[str, Any]] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": SIGNATURE})
        if turn.text:
            content.append({"type": "text", "text": turn.text})
        for call in turn.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            content.append(block)
        return self._message(content, *self._reason(), self._usage()) | {"timings": turn.timings}
