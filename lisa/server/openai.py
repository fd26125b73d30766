"""Chat completions: JSON <-> Lisa's nouns.

Format: https://platform.openai.com/docs/api-reference/chat. Beyond it: `min_p`, `top_k`,
`repetition_penalty`, `chat_template_kwargs`, `thinking_budget`, `reasoning_content` and `timings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lisa.server.problem import Problem
from lisa.server.turn import (
    Ask,
    Body,
    Call,
    Head,
    Nature,
    Thought,
    Turn,
    effort_options,
    given,
    leading_system,
    plain_text,
)
from lisa.tools import Arguments, Begin, Piece, Text, Tool
from lisa.types import Message, TokenLogprob

Spell = Callable[[int], bytes]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64)]
Stop = str | Annotated[list[str], Field(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
MAX_TOOLS = 256
NONE: Mapping[str, Any] = {}


class Part(Body):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    include_rounds: Annotated[bool | None, Field(description="Lisa: say of each round what was accepted")] = None


class Labels(Body):
    """Fields that ask for nothing: names for the caller's own books."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None


class Sampled(Labels):
    """Options of sampling that both routes have."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1, description="one answer a request")] | None = None

    def sampling(self) -> dict[str, Any]:
        """Fields of Sampling."""
        bias = {} if self.logit_bias is None else {"logit_bias": _bias(self.logit_bias)}
        return bias | given(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
        )

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise Problem(400, "stream_options needs stream: true", "stream_options")

    @property
    def usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Sampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None


def chat_ask(body: ChatRequest, nature: Nature) -> Ask:
    """Raises Problem for what cannot be honoured."""
    body.check_stream()
    limit = body.max_completion_tokens or body.max_tokens
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise Problem(400, "max_tokens and max_completion_tokens differ: give one", "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs needs logprobs: true", "top_logprobs")
    tools = tuple(_tool(tool.function) for tool in body.tools or ())
    options = given(
        max_tokens=limit,
        stop=body.stop,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        schema=_schema(body.response_format),
    )
    options |= choice_options(tools, _choice(body.tool_choice), body.parallel_tool_calls)
    effort = effort_options(body.reasoning_effort, nature, "reasoning_effort")
    template = _template(body.chat_template_kwargs, nature)
    if (effort | template).get("thinking") != (template | effort).get("thinking"):
        message = "reasoning_effort and chat_template_kwargs.enable_thinking differ: give one"
        raise Problem(400, message, "reasoning_effort")
    options |= effort | template | given(thinking_budget=body.thinking_budget)
    return Ask(chat_messages(body.messages), body.sampling(), options, tools)


def choice_options(tools: Sequence[Tool], choice: str | None, parallel: bool | None) -> dict[str, Any]:
    """Options of `Model.chat` for tools, whichever API asked."""
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = [
            tool.described | {"function": tool.described["function"] | {"strict": tool.strict}} for tool in tools
        ]
    if choice is not None and (tools or choice != "none"):
        options["tool_choice"] = choice
    if parallel is False:
        options["parallel"] = False
    return options


def _choice(choice: str | NamedChoice | None) -> str | None:
    return choice.function.name if isinstance(choice, NamedChoice) else choice


def _tool(function: Function) -> Tool:
    return make_tool(function.name, function.description, function.parameters, function.strict)


def make_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None) -> Tool:
    tool = Tool(name, description or "", strict=bool(strict))
    return tool if not parameters else Tool(name, description or "", parameters, bool(strict))


def _schema(form: ResponseFormat | None) -> Any:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return "object"
    if form.json_schema is None:
        raise Problem(400, "response_format of type json_schema needs json_schema", "response_format.json_schema")
    return form.json_schema.schema_


def _template(options: Mapping[str, Any] | None, nature: Nature) -> dict[str, Any]:
    extra = {name: value for name, value in (options or {}).items() if value is not None}
    for name in extra:
        if not nature.reads(name) and not (name == "enable_thinking" and extra[name] is False):
            where = f"chat_template_kwargs.{name}"
            raise Problem(400, f"{where}: the model's chat template does not look at it; leave it out", where)
    thinking = extra.pop("enable_thinking", None)
    if thinking is not None and not isinstance(thinking, bool):
        where = "chat_template_kwargs.enable_thinking"
        raise Problem(400, f"{where} is true or false", where)
    if thinking is False and not nature.thinks:
        thinking = None
    return given(thinking=thinking, template=extra or None)


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), value) for token, value in bias.items())
    except ValueError:
        raise Problem(400, "logit_bias: its keys are token ids", "logit_bias") from None


def chat_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """As chat templates expect them."""
    out: list[Message] = []
    for i, message in enumerate(messages):
        parts: Any = message.content
        if isinstance(parts, list):
            parts = [part.model_dump(exclude_none=True) for part in parts]
        plain: Message = {
            "role": "system" if message.role == "developer" else message.role,
            "content": plain_text(parts, ("text", "refusal"), f"messages[{i}].content"),
        }
        plain |= given(
            name=message.name, tool_call_id=message.tool_call_id, reasoning_content=message.reasoning_content
        )
        if message.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        out.append(plain)
    return leading_system(out)


def usage(turn: Turn) -> dict[str, Any]:
    s = turn.stats
    return {
        "prompt_tokens": s.prompt_tokens,
        "completion_tokens": s.completion_tokens,
        "total_tokens": s.prompt_tokens + s.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": s.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
    }


def _logprob(entry: TokenLogprob, spell: Spell) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        spelt = spell(token)
        return {"token": spelt.decode("utf-8", "replace"), "bytes": list(spelt), "logprob": logprob}

    return one(entry.token, entry.logprob) | {"top_logprobs": [one(t, p) for t, p in entry.top]}


class ChatWriter:
    """A reply as chat completion chunks, or as one object."""

    kind = "openai"

    def __init__(self, body: ChatRequest, head: Head, turn: Turn, spell: Spell):
        self._body = body
        self._head = head
        self._turn = turn
        self._spell = spell
        self._told = 0  # log probabilities sent

    def _chunk(
        self, delta: Mapping[str, Any], finish: str | None = None, extra: Mapping[str, Any] = NONE
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if self._body.logprobs:
            entries = self._turn.logprobs[self._told :]
            self._told = len(self._turn.logprobs)
            choice["logprobs"] = {"content": [_logprob(e, self._spell) for e in entries]} if entries else None
        empty = {"usage": None} if self._body.usage_chunk else {}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]} | empty | dict(extra)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({"role": "assistant", "content": ""})

    def feed(self, pieces: Sequence[Piece | Thought], rounds: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        extra: Mapping[str, Any] = {} if rounds is None else {"round": rounds}
        for delta in _deltas(pieces, self._turn.calls):
            yield self._chunk(delta, extra=extra)
            extra = {}
        if extra or (self._body.logprobs and self._told < len(self._turn.logprobs)):
            yield self._chunk({}, extra=extra)

    def closing(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({}, self._turn.reason, extra={"timings": self._turn.timings})
        if self._body.usage_chunk:
            yield self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage(self._turn)}

    def whole(self) -> dict[str, Any]:
        turn = self._turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or (None if turn.calls else "")}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": turn.reason, "logprobs": None}
        if self._body.logprobs:
            choice["logprobs"] = {"content": [_logprob(e, self._spell) for e in turn.logprobs]}
        tail = {"choices": [choice], "usage": usage(turn), "timings": turn.timings}
        return self._envelope("chat.completion") | tail


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _deltas(pieces: Sequence[Piece | Thought], calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        if isinstance(piece, Thought):
            yield {"reasoning_content": piece.text}
        elif isinstance(piece, Text):
            yield {"content": piece.text}
        elif isinstance(piece, Begin):
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": calls[piece.index].id, "type": "function", "function": function}
            yield {"tool_calls": [call]}
        elif isinstance(piece, Arguments):
            yield {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.fragment}}]}
