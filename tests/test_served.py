"""Real models behind the server: SmolLM2, and lisa-tiny, which thinks, calls tools and writes JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import running

import lisa
from bench.tiny.evaluate import held_out
from lisa.blas import STRICT_POSSIBLE
from lisa.server.desk import Settings

openai = pytest.importorskip("openai")

LISA_TINY = Path(__file__).parent.parent / "models" / "lisa-tiny" / "model.safetensors"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def client_of(name: str) -> Iterator[Any]:
    model = lisa.load(name, slots=4, offline=True, strict=STRICT_POSSIBLE)
    with running(model, Settings()) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Any]:
    yield from client_of("smollm2-135m")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    if not LISA_TINY.is_file():
        pytest.skip("models/lisa-tiny is not here")
    yield from client_of("lisa-tiny")


def ask(client: Any, model: str, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0, **options).choices[0]


def test_smollm2_knows_the_capital_of_france_streamed_or_not(smollm2: Any) -> None:
    question = "What is the capital of France?"
    assert ask(smollm2, "smollm2-135m", question, max_tokens=24).message.content == "The capital of France is Paris."
    stream = smollm2.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": question}], max_tokens=24, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "The capital of France is Paris."


def test_smollm2_writes_what_fits_the_schema(smollm2: Any) -> None:
    choice = ask(smollm2, "smollm2-135m", "Ada is 36. Write it as JSON.", max_tokens=60, response_format=FORMAT)
    assert choice.finish_reason == "stop" and set(json.loads(choice.message.content)) == {"name", "age"}


def test_smollm2_says_that_it_knows_no_tools(smollm2: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(smollm2, "smollm2-135m", "hello", tools=tools)


def test_E15_smollm2_says_together_what_it_says_alone(smollm2: Any) -> None:
    prompts = ["Name three rivers.", "Count to five.", "Say one two one two one two.", "What is rain?"]

    def say(i: int) -> str:
        return str(ask(smollm2, "smollm2-135m", prompts[i], max_tokens=4 + i).message.content)

    alone = [say(i) for i in range(4)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: say(i)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [together[i] for i in range(4)] == alone


def test_lisa_tiny_thinks_when_asked_to(tiny: Any) -> None:
    question = held_out("arithmetic", 1)[0].messages[-1]["content"]
    message = ask(tiny, "lisa-tiny", question, reasoning_effort="medium").message
    assert message.reasoning_content and message.content and "think>" not in message.content
    assert not hasattr(ask(tiny, "lisa-tiny", question, reasoning_effort="none").message, "reasoning_content")
    short = ask(tiny, "lisa-tiny", question, extra_body={"thinking_budget": 3}).message
    assert len(short.reasoning_content) < len(message.reasoning_content)


def test_lisa_tiny_calls_tools(tiny: Any) -> None:
    right = 0
    for sample in held_out("tool_calls", 6):
        got = tiny.chat.completions.create(
            model="lisa-tiny", messages=list(sample.messages), tools=list(sample.tools), temperature=0,
            reasoning_effort="none",
        ).choices[0].message  # fmt: skip
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in got.tool_calls or []]
        wanted = [(name, dict(arguments)) for name, arguments in sample.key["calls"]]
        right += [(n, {k: str(v) for k, v in a.items()}) for n, a in calls] == wanted
    assert right >= 5


def test_lisa_tiny_writes_what_fits_the_schema(tiny: Any) -> None:
    for sample in held_out("json", 4):
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": sample.key["schema"]}}
        for effort in ("none", "low"):
            got = tiny.chat.completions.create(
                model="lisa-tiny", messages=list(sample.messages), response_format=form, temperature=0,
                reasoning_effort=effort,
            ).choices[0]  # fmt: skip
            assert got.finish_reason == "stop" and isinstance(json.loads(got.message.content), dict | list)
