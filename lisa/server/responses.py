"""Responses, stateless: JSON <-> Lisa's nouns. Format: https://platform.openai.com/docs/api-reference/responses

A reply's reasoning can be asked for in a form that clients hand back unread (`include: reasoning.encrypted_content`);
since nothing is kept here it is the text itself, in base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lisa.server.openai import MAX_TOOLS, Count, Effort, Labels, choice_options, make_tool
from lisa.server.problem import Problem, problem
from lisa.server.stream import EventWire
from lisa.server.turn import (
    Ask,
    Body,
    Head,
    Nature,
    Thought,
    Turn,
    effort_options,
    given,
    leading_system,
    new_id,
    plain_text,
)
from lisa.tools import Arguments, Begin, End, Piece, Text
from lisa.types import Message

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_ENCRYPTED = "reasoning.encrypted_content"


class Item(Body):
    """An input item of any supported type: which fields belong to which is checked when it is read."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[dict[str, Any]] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesStream(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Labels):
    model: str
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream: bool | None = None
    stream_options: ResponsesStream | None = None
    store: Annotated[Literal[False] | None, Field(description="nothing is stored")] = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: Annotated[None, Field(description="stateless: send the whole input")] = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


def responses_ask(body: ResponsesRequest, nature: Nature) -> Ask:
    """Raises Problem for what cannot be honoured."""
    tools = tuple(make_tool(t.name, t.description, t.parameters, t.strict) for t in body.tools or ())
    choice = body.tool_choice.name if isinstance(body.tool_choice, NamedChoice) else body.tool_choice
    options = given(max_tokens=body.max_output_tokens, schema=_schema(body.text))
    options |= choice_options(tools, choice, body.parallel_tool_calls)
    options |= effort_options(body.reasoning.effort if body.reasoning else None, nature, "reasoning.effort")
    return Ask(_messages(body), given(temperature=body.temperature, top_p=body.top_p), options, tools)


def _schema(text: TextOptions | None) -> Any:
    form = text.format if text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return "object"
    if form.schema_ is None:
        raise Problem(400, "text.format of type json_schema needs a schema", "text.format.schema")
    return form.schema_


def _messages(body: ResponsesRequest) -> list[Message]:
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    reasoning = ""
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if item.type == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        message = _message(item, where)
        last = messages[-1] if messages else None
        if message["role"] != "assistant":
            messages.append(message)
            continue
        if reasoning:
            message["reasoning_content"] = reasoning
            reasoning = ""
        if last is not None and last["role"] == "assistant" and "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            last |= {"reasoning_content": message["reasoning_content"]} if "reasoning_content" in message else {}
        else:
            messages.append(message)
    return leading_system(messages)


def _message(item: Item, where: str) -> Message:
    if item.type == "function_call":
        call_id, name = _needed(item.call_id, where, "call_id"), _needed(item.name, where, "name")
        function = {"name": name, "arguments": _needed(item.arguments, where, "arguments")}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
    if item.type == "function_call_output":
        output = plain_text(_needed(item.output, where, "output"), _TEXTS, f"{where}.output")
        return {"role": "tool", "tool_call_id": _needed(item.call_id, where, "call_id"), "content": output}
    role = _needed(item.role, where, "role")
    content = plain_text(item.content, _TEXTS, f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _needed(value: Any, where: str, name: str) -> Any:
    if value is None:
        raise Problem(400, f"{where}.{name} is missing", f"{where}.{name}")
    return value


def _reasoning(item: Item, where: str) -> str:
    if item.content:
        return plain_text(item.content, _TEXTS, f"{where}.content")
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        name = f"{where}.encrypted_content"
        raise Problem(400, f"{name} is not of this server", name) from None


class _Open:
    """The output item that is being written."""

    def __init__(self, kind: str, index: int, item: dict[str, Any]):
        self.kind = kind
        self.index = index
        self.item = item
        self.text = ""


class ResponsesWriter:
    """A reply as typed events in order, or as one response object."""

    def __init__(self, body: ResponsesRequest, head: Head, turn: Turn):
        self._body = body
        self._head = head
        self._turn = turn
        self._sequence = -1
        self._output: list[dict[str, Any]] = []
        self._now: _Open | None = None
        self._encrypted = _ENCRYPTED in (body.include or ())

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **fields}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self.event("response.created", response=self.response("in_progress"))
        yield self.event("response.in_progress", response=self.response("in_progress"))

    def feed(self, pieces: Sequence[Piece | Thought], rounds: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if isinstance(piece, Begin):
                yield from self._close()
                yield from self._call(piece)
            elif isinstance(piece, Arguments):
                yield from self._delta("response.function_call_arguments.delta", piece.fragment)
            elif isinstance(piece, End):
                yield from self._close()
            elif isinstance(piece, Text):
                yield from self._text("message", piece.text)
            else:
                yield from self._text("reasoning", piece.text)

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._now is None or self._now.kind != kind:
            yield from self._close()
            yield from self._begin(kind)
        name = "output_text" if kind == "message" else "reasoning_text"
        yield from self._delta(f"response.{name}.delta", text)

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        if kind == "message":
            item = {
                "id": new_id("msg_"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        else:
            item = {"id": new_id("rs_"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        yield self._add(kind, item)
        assert self._now is not None
        yield self.event("response.content_part.added", **self._place(), part=_part(kind, ""))

    def _call(self, piece: Begin) -> Iterator[dict[str, Any]]:
        call_id = self._turn.calls[piece.index].id
        item = {"id": new_id("fc_"), "type": "function_call", "status": "in_progress", "call_id": call_id}
        yield self._add("function_call", item | {"name": piece.name, "arguments": ""})

    def _add(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        self._now = _Open(kind, len(self._output), item)
        self._output.append(item)
        return self.event("response.output_item.added", output_index=self._now.index, item=dict(item))

    def _place(self) -> dict[str, Any]:
        assert self._now is not None
        place = {"item_id": self._now.item["id"], "output_index": self._now.index}
        return place if self._now.kind == "function_call" else place | {"content_index": 0}

    def _delta(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        assert self._now is not None
        self._now.text += text
        extra: dict[str, Any] = {"logprobs": []} if self._now.kind == "message" else {}
        yield self.event(kind, **self._place(), delta=text, **extra)

    def _close(self) -> Iterator[dict[str, Any]]:
        now = self._now
        if now is None:
            return
        place = self._place()
        if now.kind == "function_call":
            now.item["arguments"] = now.text
            name = now.item["name"]
            yield self.event("response.function_call_arguments.done", **place, name=name, arguments=now.text)
        else:
            part = _part(now.kind, now.text)
            now.item["content"] = [part]
            extra: dict[str, Any] = {"logprobs": []} if now.kind == "message" else {}
            yield self.event(f"response.{part['type']}.done", **place, text=now.text, **extra)
            yield self.event("response.content_part.done", **place, part=part)
            if now.kind == "reasoning" and self._encrypted:
                now.item["encrypted_content"] = base64.b64encode(now.text.encode()).decode()
        now.item["status"] = "incomplete" if self._turn.complete and self._turn.reason == "length" else "completed"
        yield self.event("response.output_item.done", output_index=now.index, item=dict(now.item))
        self._now = None

    def closing(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        status = "incomplete" if self._turn.reason == "length" else "completed"
        yield self.event(f"response.{status}", response=self.response(status))

    def whole(self) -> dict[str, Any]:
        """After the turn has been fed: pieces become items as they do in a stream."""
        for pieces in _pieces_of(self._turn):
            list(self.feed([pieces], None))
        list(self._close())
        return self.response("incomplete" if self._turn.reason == "length" else "completed")

    def response(self, status: str, error: Problem | None = None) -> dict[str, Any]:
        b, turn = self._body, self._turn
        finished = status in ("completed", "incomplete")
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None if error is None else {"code": error.code or "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": b.instructions,
            "max_output_tokens": b.max_output_tokens,
            "model": self._head.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": b.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": b.reasoning.effort if b.reasoning else None, "summary": None},
            "store": False,
            "temperature": b.temperature,
            "text": {"format": {"type": "text"}} if b.text is None else b.text.model_dump(by_alias=True),
            "tool_choice": b.tool_choice.model_dump() if isinstance(b.tool_choice, Body) else b.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in b.tools or ()],
            "top_p": b.top_p,
            "truncation": "disabled",
            "metadata": b.metadata or {},
            "usage": _usage(turn) if finished else None,
            "timings": turn.timings if finished else None,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _pieces_of(turn: Turn) -> Iterator[Piece | Thought]:
    """A finished turn as the pieces it came from."""
    if turn.reasoning:
        yield Thought(turn.reasoning)
    if turn.text:
        yield Text(turn.text)
    for i, call in enumerate(turn.calls):
        yield from (Begin(i, call.name), Arguments(i, call.arguments), End(i))


def _usage(turn: Turn) -> dict[str, Any]:
    s = turn.stats
    return {
        "input_tokens": s.prompt_tokens,
        "input_tokens_details": {"cached_tokens": s.cached_tokens},
        "output_tokens": s.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": s.prompt_tokens + s.completion_tokens,
    }


class ResponsesWire(EventWire):
    """Events of their own type. Some clients do not count comments as life, so keep-alives are events too."""

    def __init__(self, writer: ResponsesWriter):
        self._writer = writer

    def keepalive(self) -> bytes:
        return self.frame(self._writer.event("keepalive"))

    def failed(self, why: Problem) -> Iterator[bytes]:
        why = problem(why)
        code = why.code or why.kind
        yield self.frame(self._writer.event("error", code=code, message=why.message, param=why.param))
        yield self.frame(self._writer.event("response.failed", response=self._writer.response("failed", why)))
