"""The shipped lisa-tiny answers held-out prompts of every kind, thinks when asked to, calls tools and writes JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lisa
from bench.tiny import checks, language
from bench.tiny.evaluate import MODES, ask, held_out, judge
from lisa import catalog
from lisa.types import Sampling

FOLDER = Path(__file__).parent.parent / "models" / "lisa-tiny"
GREEDY = Sampling(temperature=0.0)

pytestmark = pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="models/lisa-tiny is not here")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with lisa.load("lisa-tiny", drafter="none", strict=True, offline=True) as loaded:
        yield loaded


def test_the_folder_is_whole_small_and_described() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16_000_000
    entry = catalog.find("lisa-tiny")
    assert entry is not None
    assert abs(entry.weights[0].bytes - (FOLDER / "model.safetensors").stat().st_size) < 100_000
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert config["model_type"] == "qwen3_5" and set(entry.stop) == set(config["eos_token_id"])
    text = config["text_config"]
    full = sum(kind == "full_attention" for kind in text["layer_types"])
    assert entry.memory.kv_bytes == full * 2 * text["num_key_value_heads"] * text["head_dim"] * 2
    head = text["linear_value_head_dim"] * text["linear_key_head_dim"]
    recurrent = len(text["layer_types"]) - full
    assert entry.memory.state_bytes == recurrent * text["linear_num_value_heads"] * head * 4
    assert entry.context == text["max_position_embeddings"]


def test_a_folder_and_the_catalogue_name_are_the_same_model(model: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of Norland?"}]
    with lisa.load(str(FOLDER), drafter="none", offline=True) as other:
        assert other.chat(question, thinking=False).read().ids == model.chat(question, thinking=False).read().ids


@pytest.mark.parametrize("kind", language.KINDS)
def test_held_out_prompts_are_answered(model: Any, kind: str) -> None:
    right = []
    for i, sample in enumerate(held_out(kind, 6)):
        effort = MODES[i % len(MODES)]
        answer = ask(model, sample, effort)
        verdict = judge(sample, effort, answer)
        assert verdict["thinks as asked"] and verdict["ends"]
        right.append(verdict["right"])
    assert sum(right) >= ENOUGH


ENOUGH = 5
"""Of six."""


def test_medium_effort_thinks_longer_than_low(model: Any) -> None:
    sample = held_out("arithmetic", 1)[0]
    none, low, medium = (len(ask(model, sample, effort).reasoning) for effort in MODES)
    assert none == 0 < low < medium


def test_a_tool_is_called_and_its_result_read(model: Any) -> None:
    sample = next(s for s in held_out("tool_calls", 20) if len(s.key["calls"]) == 1)
    options: dict[str, Any] = {"sampling": GREEDY, "tools": sample.tools, "thinking": False}
    found, rest = checks.parsed_calls(model.chat(list(sample.messages), **options).read().text)
    assert len(found) == 1 and rest == ""
    name, arguments = found[0]
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    messages = [
        *sample.messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "green"},
    ]
    assert "green" in model.chat(messages, **options).read().text


def test_sampling_gives_different_texts_and_a_seed_the_same(model: Any) -> None:
    question = [{"role": "user", "content": "List four animals."}]
    texts = [
        model.chat(question, thinking=False, sampling=Sampling(temperature=1.0, seed=seed)).read().text
        for seed in (1, 2, 3, 1)
    ]
    assert texts[0] == texts[3] and len(set(texts)) > 1
