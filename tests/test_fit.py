"""What a model needs against what a machine gives: the sums, the refusal, and what is offered instead."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafters_tiny import write_drafter
from folders import write_model

import lisa
from lisa import catalog, fit, loader
from lisa.engine import Session
from lisa.errors import DoesNotFit
from lisa.memory import Machine
from lisa.types import Request

GB = 10**9
MAC = Machine(True, 64 * GB)
QWEN = {
    "dtype": "bfloat16",
    "quantization": {"bits": 4, "group_size": 64},
    "text_config": {
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}
"""The structure of Qwen3.8-27B."""


def entry(name: str) -> catalog.Entry:
    found = catalog.find(name)
    assert found
    return found


def test_a_config_and_the_catalogue_agree() -> None:
    need = fit.of_config(QWEN, 16 * GB, MAC)
    memory = entry("qwen3.8-27b").memory
    assert need.kv == memory.kv_bytes == 65536
    window = 48 * 3 * (2 * 16 * 128 + 48 * 128) * 2
    assert need.state == memory.state_bytes + window and need.weights == 16 * GB


def test_a_packed_cache_counts_its_scales() -> None:
    assert fit.of_config(QWEN, GB, MAC, kv_bits=8).kv == int(32768 * (1 + 4 / 64))
    assert fit.of_config(QWEN, GB, MAC, kv_bits=4).kv == int(32768 * (0.5 + 4 / 64))


def test_a_cpu_computes_in_float32() -> None:
    cpu = Machine(False, 64 * GB)
    dense = {**QWEN, "quantization": None}
    del dense["quantization"]
    assert fit.of_config(dense, GB, cpu).weights == 2 * GB and fit.of_config(dense, GB, MAC).weights == GB
    assert fit.of_config(dense | {"dtype": "float32"}, GB, cpu).weights == GB
    assert fit.of_config(QWEN, GB, cpu).kv == 2 * 65536
    small = entry("smollm2-135m")
    assert fit.of_entry(small, small.weights[0], cpu).weights == pytest.approx(538e6, rel=0.02)  # as converted


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_the_estimate_is_what_a_session_really_holds(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", kind)
    loaded = loader.load(str(folder), drafter="none")
    config = json.loads((folder / "config.json").read_text())
    need = fit.of_config(config | {"dtype": "float32"}, loader._size(folder), Machine(False, GB))
    assert need.weights == pytest.approx(loaded.engine.target.nbytes, rel=0.05)
    session: Session = loaded.engine.session()
    list(session.run(Request((1,) * 256, max_tokens=1)))
    held = sum(array.nbytes for array in session.state.arrays() if isinstance(array, mx.array))
    assert held == 256 * need.kv + need.state


def test_the_longest_context_is_the_one_that_still_fits() -> None:
    need = fit.Need(weights=10 * GB, kv=65536, state=150_000_000, drafter=GB, drafter_kv=1000)
    room = fit.Room(12 * GB, "the room")
    longest = need.longest(room)
    assert longest and need.fits(room, longest) and not need.fits(room, longest + 1)
    assert need.longest(fit.Room(11 * GB, "")) == 0 and replace(need, kv=0, drafter_kv=0).longest(room) is None


@pytest.mark.parametrize(
    ("memory", "expected"), [(16 << 30, (16 << 30) * 2 // 3), (64 << 30, 48 << 30), (36 << 30, 27 << 30)]
)
def test_the_working_set_of_a_mac(memory: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_wired_limit", lambda: 0)
    assert fit.room(Machine(True, memory)).bytes == expected
    assert fit.room(Machine(True, memory), 123).bytes == 123
    monkeypatch.setattr(fit, "_wired_limit", lambda: 5 << 30)
    assert fit.room(Machine(True, memory)).bytes == 5 << 30


def test_a_refusal_has_the_numbers_and_what_fits() -> None:
    qwen = entry("qwen3.8-27b")
    machine = Machine(True, 25 * GB)
    room = fit.Room(17 * GB, "Metal's recommended working set")
    need = fit.of_entry(qwen, qwen.weights[0], machine, qwen.drafters[0])
    with pytest.raises(DoesNotFit) as caught:
        fit.check("qwen3.8-27b", need, room, qwen, machine)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    for part in ("20.7 GB", "weights 16.1", "drafter 4.0", "recurrent state 0.2", "working set is 17.0 GB"):
        assert part in text
    offer = re.search(r"--drafter ngram with up to (\d+) tokens of context", text)
    assert offer and need.alone().fits(room, int(offer[1])) and not need.alone().fits(room, int(offer[1]) + 1)
    assert text.endswith("the model qwen3.6-27b") or "the model qwen3.5-9b" in text


def test_a_smaller_quantisation_is_offered() -> None:
    qwen = entry("qwen3.8-27b")
    machine = Machine(True, 32 * GB)
    need = fit.of_entry(qwen, qwen.weights[1], machine)
    with pytest.raises(DoesNotFit, match="--quantisation 4bit,"):
        fit.check("qwen3.8-27b", need, fit.Room(24 * GB, "the room"), qwen, machine)


def small_room(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(fit, "room", lambda machine, recommended=None: fit.Room(size, "the room"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", "llama")


def needs(folder: Path) -> fit.Need:
    config = json.loads((folder / "config.json").read_text())
    return fit.of_config(config, loader._size(folder), Machine(False, GB))


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    small_room(monkeypatch, 50_000)
    monkeypatch.setattr(loader.Target, "load", never)
    with pytest.raises(DoesNotFit, match=r"tiny needs 0\.0 GB \(weights 0\.0.*the room is 0\.0 GB; choose a smaller"):
        loader.load(str(folder), drafter="none")


def test_the_context_is_held_to_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = needs(folder)
    small_room(monkeypatch, need.at(2000))
    said: list[str] = []
    assert loader.load(str(folder), drafter="none", say=said.append).engine.target.context == 512  # the model's own
    assert said == ["there is room for 2000 tokens of context in the room, 0.0 GB"]
    monkeypatch.setattr(fit, "SMALLEST", 100)
    small_room(monkeypatch, need.at(300))
    assert loader.load(str(folder), drafter="none").engine.target.context == 300


def test_a_drafter_nobody_named_is_left_out_where_it_does_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loader.load(str(folder), drafter="none")
    write_drafter(folder / "drafters" / "dspine", "dspine", plain.tokenizer.vocab)
    assert loader.load(str(folder)).drafter == "dspine" and loader.load(str(folder), drafter="auto+ngram").need.drafter
    small_room(monkeypatch, needs(folder).at(fit.CONTEXT) + 1000)
    said: list[str] = []
    assert loader.load(str(folder), say=said.append).drafter == "ngram"
    assert said[0].startswith("the trained drafter is left out: with it ")
    assert loader.load(str(folder), drafter="auto+ngram").drafter == "ngram"
    assert loader.redraft(plain, "auto").drafter == "dspine", "in the room it was loaded in"
    assert loader.redraft(loader.load(str(folder), drafter="none"), "auto").drafter == "ngram"
    monkeypatch.setattr(fit, "SMALLEST", fit.CONTEXT)
    with pytest.raises(DoesNotFit, match="what fits: --drafter ngram"):
        loader.load(str(folder), drafter="dspine")
    with pytest.raises(DoesNotFit, match="what fits: --drafter ngram"):
        loader.redraft(loader.load(str(folder), drafter="none"), "dspine")


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize(
    "options", [{}, {"kv_bits": 4}, {"drafter": "dspine"}, {"drafter": "eagle", "drafter_bits": 8}]
)
def test_the_budget_grants_the_context_that_was_found_to_fit_and_not_a_token_more(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "tiny", kind)
    options = {"drafter": "none"} | options
    if options["drafter"] != "none":
        vocab = loader.load(str(folder)).tokenizer.vocab
        write_drafter(folder / "drafters" / "one", options["drafter"], vocab, num_hidden_layers=1)
    need = loader.load(str(folder), **options).need
    assert bool(need.drafter and need.drafter_kv) == (options["drafter"] != "none")
    small_room(monkeypatch, need.at(2000))
    with lisa.load(str(folder), **options) as model:

        def grants(tokens: int) -> bool:
            return model._budget.fits(model._budget.need(tokens), 0)

        assert grants(2000) and not grants(2001)
        model.redraft("none")
        longest = need.alone().longest(fit.Room(need.at(2000), ""))
        assert longest and grants(longest) and not grants(longest + 1)


def test_only_the_drafter_that_runs_is_counted(folder: Path) -> None:
    vocab = loader.load(str(folder), drafter="none").tokenizer.vocab
    write_drafter(folder / "drafters" / "one", "dspine", vocab, mask_token_id=None)
    passed_over = loader.load(str(folder))
    assert passed_over.drafter == "ngram" and passed_over.need == passed_over.need.alone()
    write_drafter(folder / "drafters" / "two", "eagle", vocab)
    assert loader.load(str(folder)).need == loader.load(str(folder), drafter="eagle").need


def test_a_packed_drafter_counts_its_scales() -> None:
    alone, config = fit.Need(GB), {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    assert fit.with_drafter(alone, config, GB, MAC) == fit.Need(GB, drafter=GB, drafter_kv=2 * 2 * 4 * 8 * 2)
    assert fit.with_drafter(alone, config, GB, MAC, bits=4).drafter == int(GB / 4 * (1 + 2 / 16))
    cpu = Machine(False, 64 * GB)
    assert fit.with_drafter(alone, config, GB, cpu).drafter == 2 * GB
    assert fit.with_drafter(alone, config, GB, cpu, bits=8).drafter == int(GB / 2 * (1 + 1 / 8))
