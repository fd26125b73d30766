"""The official clients against a running server: what they parse is what was said, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import XML_TEMPLATE, running, scripted

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

THOUGHT = "Let me see, é \U0001f680.\n"
"""The line break in front of the closing tag is part of it."""
ANSWER = "It is sunny, é \U0001f469\u200d\U0001f680!"
CITY = 'Os"lo</parameter>\n\\x'


def call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def script(conversation: str) -> str:
    """What the model says is asked for by the last message."""
    user = conversation.rsplit("<|im_start|>user\n", 1)[-1]
    if "<tool_response>" in user:
        said = ANSWER
    elif "two calls" in user:
        said = "I look.\n\n" + call("get_weather", city=CITY, days="3") + "\n" + call("get_weather", city="Rome")
    elif "weather" in user:
        said = call("get_weather", city=CITY, days="3")
    elif "person" in user:
        said = '{"name": "Ada", "age": 36}'
    elif "count" in user:
        said = "one two three four five six seven"
    else:
        said = ANSWER
    return (f"{THOUGHT}</think>\n\n" if conversation.endswith("<think>\n") else "") + said


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
CLAUDE_TOOLS: Any = [{"name": "get_weather", "description": "of a city", "input_schema": PARAMETERS}]
OFF: Any = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "drafted"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    right = request.param
    model = scripted(
        tmp_path_factory.mktemp("model"), script, template=XML_TEMPLATE, right=right, wrong=right // 2, context=4096
    )
    with running(model) as address:
        yield address


@pytest.fixture(scope="module")
def gpt(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# openai: chat


def test_chat_whole_and_streamed_say_the_same(gpt: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("hello")}
    whole = gpt.chat.completions.create(**options)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT)
    assert whole.choices[0].finish_reason == "stop" and whole.timings["drafter_reason"]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    chunks = list(gpt.chat.completions.create(**options, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == ANSWER
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == THOUGHT
    assert chunks[-1].choices[0].finish_reason == "stop" and len({c.id for c in chunks}) == 1
    assert all("\ufffd" not in (d.content or "") for d in deltas), "E1"


@pytest.mark.parametrize("asked", [True, False, None])
def test_E2_usage_comes_once_at_the_end_and_only_when_asked_for(gpt: Any, asked: bool | None) -> None:
    options: Any = {} if asked is None else {"stream_options": {"include_usage": asked}}
    chunks = list(
        gpt.chat.completions.create(model="scripted", messages=user("hello"), stream=True, extra_body=OFF, **options)
    )
    with_usage = [c for c in chunks if c.usage is not None]
    if asked:
        assert with_usage == [chunks[-1]] and chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens > 0
    else:
        assert not with_usage and all(c.choices for c in chunks)


@pytest.mark.parametrize("stop", ["three", ["zzz", "three"], ["thr", "three f"], None, []])
def test_E3_stop_strings_end_the_text_and_never_leak(gpt: Any, stop: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("count"), "stop": stop, "extra_body": OFF}
    expected = "one two three four five six seven" if not stop else "one two "
    whole = gpt.chat.completions.create(**options)
    pieces = [c.choices[0].delta.content or "" for c in gpt.chat.completions.create(**options, stream=True)]
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop"
    assert "".join(pieces) == expected


def test_E3_a_near_miss_is_delivered(gpt: Any) -> None:
    whole = gpt.chat.completions.create(model="scripted", messages=user("count"), stop="three!", extra_body=OFF)
    assert whole.choices[0].message.content.endswith("seven")


def test_tools_come_whole_and_in_pieces(gpt: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("two calls"), "tools": TOOLS, "extra_body": OFF}
    choice = gpt.chat.completions.create(**options).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": CITY, "days": 3}, {"city": "Rome"}]
    names: dict[int, list[str]] = {}
    ids: dict[int, set[str]] = {}
    arguments: dict[int, str] = {}
    chunks = list(gpt.chat.completions.create(**options, stream=True))
    for chunk in chunks:
        for c in chunk.choices[0].delta.tool_calls or []:
            if c.function.name:
                names.setdefault(c.index, []).append(c.function.name)
            if c.id:
                ids.setdefault(c.index, set()).add(c.id)
            arguments[c.index] = arguments.get(c.index, "") + (c.function.arguments or "")
    assert names == {0: ["get_weather"], 1: ["get_weather"]}, "E8: the name once, an index each"
    assert all(len(i) == 1 for i in ids.values()) and len(set.union(*ids.values())) == 2, "E8: ids stable and distinct"
    assert [json.loads(arguments[i]) for i in (0, 1)] == [{"city": CITY, "days": 3}, {"city": "Rome"}]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_tool_loop_ends_in_an_answer(gpt: Any) -> None:
    messages = user("the weather?")
    message = gpt.chat.completions.create(
        model="scripted", messages=messages, tools=TOOLS, extra_body=OFF
    ).choices[0].message  # fmt: skip
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "sun"}]},
    ]
    last = gpt.chat.completions.create(model="scripted", messages=messages, tools=TOOLS).choices[0].message
    assert last.content == ANSWER and not last.tool_calls


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_E9_a_call_can_be_required(gpt: Any, choice: Any) -> None:
    got = gpt.chat.completions.create(
        model="scripted", messages=user("hello"), tools=TOOLS, tool_choice=choice, max_tokens=300, extra_body=OFF
    ).choices[0]
    assert [c.function.name for c in got.message.tool_calls] == ["get_weather"]
    assert isinstance(json.loads(got.message.tool_calls[0].function.arguments)["city"], str)


def test_E9_none_shows_no_tools_and_returns_no_calls(gpt: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("the weather?"), "extra_body": OFF}
    plain = gpt.chat.completions.create(**options)
    none = gpt.chat.completions.create(**options, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.tool_calls is None and none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert gpt.chat.completions.create(**options, tool_choice="none").choices[0].message.content


def test_one_call_only_without_parallel_calls(gpt: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("two calls"), "tools": TOOLS, "parallel_tool_calls": False}
    choice = gpt.chat.completions.create(**options, extra_body=OFF).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    chunks = list(gpt.chat.completions.create(**options, extra_body=OFF, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("text", ["a person", "hello"])
def test_E19_a_parsed_answer_is_of_the_class_asked_for(gpt: Any, text: str) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    for extra in (OFF, {}):
        got = gpt.chat.completions.parse(
            model="scripted", messages=user(text), response_format=Person, max_tokens=400, extra_body=extra
        ).choices[0]
        assert isinstance(got.message.parsed, Person)
        if text == "a person":
            assert got.message.parsed == Person(name="Ada", age=36)


def test_A11_logprobs_are_one_a_token_streamed_or_not(gpt: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("count"), "logprobs": True, "top_logprobs": 3}
    whole = gpt.chat.completions.create(**options, extra_body=OFF)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens and all(len(e.top_logprobs) == 3 for e in entries)
    assert all(e.logprob < 0 and e.top_logprobs[0].token == e.token for e in entries)
    assert b"".join(bytes(e.bytes) for e in entries).decode() == whole.choices[0].message.content
    streamed = [
        entry
        for chunk in gpt.chat.completions.create(**options, extra_body=OFF, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [(e.token, round(e.logprob, 4)) for e in streamed] == [(e.token, round(e.logprob, 4)) for e in entries]


def test_E5_thinking_that_is_cut_is_all_reasoning(gpt: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("hello"), "max_tokens": 5}
    choice = gpt.chat.completions.create(**options).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content and THOUGHT.startswith(choice.message.reasoning_content)
    deltas = [c.choices[0].delta for c in gpt.chat.completions.create(**options, stream=True)]
    assert not "".join(d.content or "" for d in deltas)
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == choice.message.reasoning_content
    off = gpt.chat.completions.create(**options, extra_body=OFF).choices[0].message
    assert off.content and not hasattr(off, "reasoning_content")


def test_a_thinking_budget_ends_the_thinking(gpt: Any) -> None:
    message = gpt.chat.completions.create(
        model="scripted", messages=user("hello"), max_tokens=60, extra_body={"thinking_budget": 4}
    ).choices[0].message  # fmt: skip
    assert message.reasoning_content.strip() == THOUGHT[:4].strip()


def test_completions(gpt: Any) -> None:
    whole = gpt.completions.create(model="scripted", prompt="count>", max_tokens=40)
    assert whole.choices[0].text == "one two three four five six seven"
    streamed = gpt.completions.create(model="scripted", prompt="count>", max_tokens=40, stream=True, logprobs=1)
    assert "".join(c.choices[0].text for c in streamed) == whole.choices[0].text


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"n": 2}, "BadRequestError"),
        ({"model": "other"}, "NotFoundError"),
        ({"extra_body": {"zz": 1}}, "BadRequestError"),
        ({"messages": user("x" * 9000)}, "BadRequestError"),
    ],
)
def test_errors_arrive_as_the_clients_own_classes(gpt: Any, options: Any, kind: str) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        gpt.chat.completions.create(**{"model": "scripted", "messages": user("hello")} | options)
    assert caught.value.body["message"] and caught.value.body["type"]


# openai: responses


def test_responses_whole_and_streamed_say_the_same(gpt: Any) -> None:
    options: Any = {"model": "scripted", "input": "hello", "instructions": "be kind", "store": False}
    whole = gpt.responses.create(**options)
    assert whole.output_text == ANSWER and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == THOUGHT
    events = list(gpt.responses.create(**options, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER
    order = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    message = [
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert order[-7:-1] == message


def test_responses_call_functions_and_read_their_results(gpt: Any) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
    options: Any = {"model": "scripted", "tools": tools, "store": False}
    include: Any = ["reasoning.encrypted_content"]
    first = gpt.responses.create(input=user("the weather?"), include=include, **options)
    made = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(c.arguments) for c in made] == [{"city": CITY, "days": 3}]
    history = [*user("the weather?"), *(item.model_dump(exclude_none=True) for item in first.output)]
    history.append({"type": "function_call_output", "call_id": made[0].call_id, "output": "sun"})
    assert gpt.responses.create(input=history, **options).output_text == ANSWER
    with gpt.responses.stream(input=user("two calls"), **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(c.arguments)["city"] for c in calls] == [CITY, "Rome"]
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert done == [c.arguments for c in calls]


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ("required", ["function_call"]),
        ({"type": "function", "name": "get_weather"}, ["function_call"]),
        ("none", ["message"]),
    ],
)
def test_E9_responses_do_as_tool_choice_says(gpt: Any, choice: Any, kinds: list[str]) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": None}]
    got = gpt.responses.create(
        model="scripted", input="hello", tools=tools, tool_choice=choice, reasoning={"effort": "none"}
    )
    assert [item.type for item in got.output] == kinds


def test_responses_are_cut_and_refused_as_said(gpt: Any) -> None:
    cut = gpt.responses.create(model="scripted", input="count", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    for options in ({"previous_response_id": "x"}, {"store": True}, {"truncation": "auto"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(options))):
            gpt.responses.create(model="scripted", input="hello", **options)


def test_responses_parse_into_a_class(gpt: Any) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    got = gpt.responses.parse(model="scripted", input="a person", text_format=Person)
    assert got.output_parsed == Person(name="Ada", age=36)


# anthropic


def test_messages_whole_and_streamed_say_the_same(claude: Any) -> None:
    options: Any = {"model": "scripted", "max_tokens": 200, "messages": user("hello"), "system": "be kind"}
    whole = claude.messages.create(**options)
    assert [b.type for b in whole.content] == ["text"] and whole.content[0].text == ANSWER
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.content[0].text == ANSWER and final.usage.output_tokens == whole.usage.output_tokens


def test_messages_events_come_in_order_with_rising_index(claude: Any) -> None:
    events = list(
        claude.messages.create(
            model="scripted",
            max_tokens=2000,
            messages=user("two calls"),
            tools=CLAUDE_TOOLS,
            thinking={"type": "enabled", "budget_tokens": 1024},
            stream=True,
        )
    )
    kinds = [e.type for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_block, blocks = None, []
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_block is None and event.index == len(blocks)
            open_block = event.index
            blocks.append(event.content_block.type)
        elif event.type == "content_block_stop":
            assert event.index == open_block
            open_block = None
        else:
            assert event.type == "content_block_delta" and event.index == open_block
    assert open_block is None and blocks == ["thinking", "text", "tool_use", "tool_use"]
    assert events[-2].delta.stop_reason == "tool_use"


def test_messages_think_only_when_asked_to(claude: Any) -> None:
    options: Any = {"model": "scripted", "max_tokens": 2000, "messages": user("hello")}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(**options, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert [b.type for b in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == THOUGHT and final.content[1].text == ANSWER
    assert [b.type for b in claude.messages.create(**options).content] == ["text"]


def test_messages_call_tools_and_read_their_results(claude: Any) -> None:
    options: Any = {"model": "scripted", "max_tokens": 300, "tools": CLAUDE_TOOLS}
    first = claude.messages.create(messages=user("the weather?"), **options)
    block = first.content[-1]
    assert (first.stop_reason, block.name, block.input) == ("tool_use", "get_weather", {"city": CITY, "days": 3})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sun"}]}
    history = [
        *user("the weather?"),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(messages=history, **options).content[0].text == ANSWER


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_E9_messages_require_a_call_too(claude: Any, choice: Any) -> None:
    got = claude.messages.create(
        model="scripted", max_tokens=300, messages=user("hello"), tools=CLAUDE_TOOLS, tool_choice=choice
    )
    assert [b.type for b in got.content] == ["tool_use"]
    none: Any = {"type": "none"}
    got = claude.messages.create(
        model="scripted", max_tokens=300, messages=user("hello"), tools=CLAUDE_TOOLS, tool_choice=none
    )
    assert [b.type for b in got.content] == ["text"]


def test_messages_say_which_stop_sequence_ended_them(claude: Any) -> None:
    got = claude.messages.create(
        model="scripted", max_tokens=99, messages=user("count"), stop_sequences=["zz", "three"]
    )
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == ("stop_sequence", "three", "one two ")
    got = claude.messages.create(model="scripted", max_tokens=2, messages=user("count"))
    assert got.stop_reason == "max_tokens"


def test_count_tokens_counts_what_a_message_reads(claude: Any) -> None:
    options: Any = {"model": "scripted", "messages": user("hello"), "system": "be kind", "tools": CLAUDE_TOOLS}
    counted = claude.messages.count_tokens(**options).input_tokens
    usage = claude.messages.create(**options, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_messages_errors_have_anthropics_form(claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="scripted", max_tokens=0, messages=user("hello"))
    assert caught.value.body["error"]["type"] == "invalid_request_error" and "max_tokens" in str(caught.value)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=user("hello"))
    image = [{"type": "image", "source": {"type": "url", "url": "http://example.org/x.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model="scripted", max_tokens=1, messages=[{"role": "user", "content": image}])


def test_models_are_listed(gpt: Any) -> None:
    listed = list(gpt.models.list())
    assert [m.id for m in listed] == ["scripted"] and listed[0].context_length == 4096
    assert gpt.models.retrieve("scripted").drafter == "scripted"
    with pytest.raises(openai.NotFoundError):
        gpt.models.retrieve("other")
