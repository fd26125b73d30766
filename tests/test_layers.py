"""Targets on Lisa's kernels: the tokens of the reference path, and the same bits with and without a drafter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulator
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama, qwen3, qwen3_5
from tiny import ScriptedDrafter, livelier, outcome, session

from lisa.drafters import PLAIN
from lisa.metal import NONE, Kernels
from lisa.target import Hybrid, Llama, Qwen3, Target
from lisa.train import Settings, networks
from lisa.types import Commit, Request, Sampling

pytestmark = pytest.mark.skipif(bool(emulator.unavailable()), reason=emulator.unavailable() or "emulator")

VOCAB = 96
DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {**DENSE, "model_type": "qwen3"},
    "hybrid": {
        **DENSE,
        "model_type": "qwen3_5",
        "num_hidden_layers": 3,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 3,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, llama.ModelArgs),
    "qwen3": (Qwen3, qwen3.ModelArgs),
    "hybrid": (Hybrid, qwen3_5.ModelArgs),
}


@functools.cache
def emulated() -> Kernels:
    return Kernels(functools.partial(emulator.metal_kernel, mode="fast"))


def target(kind: str, kernels: Kernels, dtype: mx.Dtype = mx.float16, bits: int = 4) -> Target:
    """A random target with packed matrices."""
    mx.random.seed(3)
    model, args = CLASSES[kind]
    made = model(args.from_dict(CONFIGS[kind]))
    made.update(livelier(made.parameters()))
    made.set_dtype(dtype)
    nn.quantize(made, group_size=32, bits=bits)
    mx.eval(made.parameters())
    return Target(made, CONFIGS[kind], name=kind, kernels=kernels)


class Watch:
    """Counts the launches of each kernel."""

    def __init__(self) -> None:
        self.launches: dict[str, int] = {}

    @property
    def kernels(self) -> Kernels:
        return Kernels(self._make)

    def _make(self, **made: Any) -> Any:
        kernel = emulator.metal_kernel(**made, mode="fast")

        def launch(**call: Any) -> list[mx.array]:
            self.launches[made["name"]] = self.launches.get(made["name"], 0) + 1
            return kernel(**call)

        return launch


def halting(plain: list[int], start: int) -> Any:
    """A drafter that is right for a while, then wrong, over and over."""

    def script(position: int, width: int) -> Iterator[int]:
        for i in range(width):
            at = position - start + 1 + i
            right = plain[at] if at < len(plain) else 0
            yield right if (position + i) % 7 else (right + 1) % VOCAB

    return lambda: ScriptedDrafter(lambda position, width: list(script(position, width)))


PROMPT = tuple(range(3, 26))  # more than one chunk, the first of which is too long for the kernels


def run(t: Target, drafter: Any, width: int, sampling: Sampling) -> tuple[list[int], list[Any]]:
    s = session(t, drafter, width, chunk=20)
    ids, _, logprobs, _, _ = outcome(s.run(Request(PROMPT, sampling, max_tokens=24, logprobs=3)))
    more, _, later, _, _ = outcome(s.run(Request((*PROMPT, *ids, 7, 8, 9), sampling, max_tokens=4, logprobs=3)))
    return [*ids, *more], [*logprobs, *later]


@pytest.mark.parametrize(
    ("kind", "dtype", "widths"),
    [
        ("hybrid", mx.float16, range(1, 16)),
        ("hybrid", mx.bfloat16, (3, 8, 15)),
        ("qwen3", mx.bfloat16, (2, 7, 15)),
        ("llama", mx.float16, (5, 12)),
    ],
)
def test_drafting_leaves_every_bit_of_a_packed_target_as_it_was(kind: str, dtype: mx.Dtype, widths: Any) -> None:
    t = target(kind, emulated(), dtype)
    sampling = Sampling(temperature=1.0, seed=5)
    plain, logits = run(t, lambda: ScriptedDrafter(lambda position, width: []), 0, sampling)
    for width in widths:
        assert run(t, halting(plain[:24], len(PROMPT)), width, sampling) == (plain, logits), f"width {width}"


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_kernels_compute_what_mlx_does(kind: str) -> None:
    """In float32, in pieces of many sizes, with rows taken back in between."""
    watch = Watch()
    own, stock = target(kind, watch.kernels, mx.float32), target(kind, NONE, mx.float32)
    tokens = mx.array([(7 * i) % VOCAB for i in range(70)], mx.int32)
    a, b = own.new_state(), stock.new_state()
    at = 0
    for rows, kept in ((1, 1), (5, 2), (16, 16), (20, 20), (3, 0), (9, 4), (17, 17), (2, 1), (1, 1)):
        outs = []
        for t, state in ((own, a), (stock, b)):
            final = rows > 16
            if not final:
                state.open(rows)
            logits, taps = t.forward(tokens[at : at + rows], state, (0, 1), rows)
            assert taps is not None
            mx.eval(logits, taps, state.arrays())
            if not final:
                state.commit(kept)
            outs.append((logits, taps))
        at += kept
        for x, y in zip(*outs, strict=True):
            assert float(mx.abs(x - y).max()) <= 2e-4 * float(mx.abs(y).max())
    expected = {"rows_qmm", "rows_attention", "rows_attention_merge"}
    expected |= {"gdn_conv", "gdn_verify"} if kind == "hybrid" else set()
    assert set(watch.launches) == expected


def test_the_best_token_is_that_of_the_logits_in_every_dtype() -> None:
    for kind in ("llama", "qwen3"):
        t = target(kind, emulated(), mx.bfloat16)
        for seed in range(30):
            hidden = mx.random.normal((16, 64), key=mx.random.key(seed)).astype(mx.bfloat16)
            logits = t.head(hidden)
            assert logits.dtype == mx.float32
            assert mx.array_equal(t.best(hidden), mx.argmax(logits, axis=-1)), f"{kind}, seed {seed}"


def test_a_state_of_pending_rows_is_saved_taken_back_and_restored() -> None:
    t = target("hybrid", emulated())
    tokens = mx.array([(5 * i) % VOCAB for i in range(20)], mx.int32)

    def logits(state: Any, piece: mx.array) -> mx.array:
        out, _ = t.forward(piece, state, rows=1)
        return out

    fresh = t.new_state()
    for i in range(10):
        wanted = logits(fresh, tokens[i : i + 1])
    state = t.new_state()
    state.open(9)
    logits(state, tokens[:9])
    state.commit(4)
    snapshot = state.snapshot()
    state.open(3)
    logits(state, tokens[9:12])
    state.commit(0)
    other = t.new_state()
    other.restore(snapshot)
    for s in (state, other):
        got = logits(s, tokens[4:10])
        assert mx.array_equal(got, wanted)
    assert state.rewind(0) == 0 and mx.array_equal(logits(state, tokens[:10]), wanted)


def test_without_kernels_layers_are_mlx_lms_own() -> None:
    config = CONFIGS["qwen3"]
    mx.random.seed(3)
    stock = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.random.seed(3)
    own = Qwen3(qwen3.ModelArgs.from_dict(config))
    own.update(stock.parameters())
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(own(tokens), stock(tokens))
    assert {name for name, _ in _parameters(own)} == {name for name, _ in _parameters(stock)}


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    flat: Any = tree_flatten(model.parameters())
    return list(flat)


def dspine(t: Target, scoring: str) -> Any:
    """A random DSpine drafter whose slots hear one another."""
    settings = Settings("hybrid", "dspine", Path("unused"), rank=64, layers=1, block=6, taps=(0, 1))
    model = networks.new(settings, t, VOCAB - 1, None).model
    for write in model.network.injection.writes:
        write.weight = 0.2 * mx.random.normal(write.weight.shape, key=mx.random.key(1))
    model.scoring = scoring
    return model


def test_a_hybrid_with_dspine_runs_on_all_kernels_and_gives_the_tokens_of_the_reference_path() -> None:
    watch = Watch()
    own, stock = target("hybrid", watch.kernels, mx.float32), target("hybrid", NONE, mx.float32)
    request = Request(PROMPT, max_tokens=40)
    results = {}
    for t in (own, stock):
        for drafts in (False, True):
            new = dspine(t, "pairs").new if drafts else PLAIN["none"]
            ids, _, _, _, stats = outcome(session(t, new, 5, chunk=20).run(request))
            results[t is own, drafts] = ids
            assert not drafts or stats.drafted > 20
    assert results[True, True] == results[True, False] == results[False, True] == results[False, False]
    every = ("rows_qmm", "rows_attention", "gdn_conv", "gdn_verify", "head_topk", "inject", "lattice")
    assert all(any(launched.startswith(name) for launched in watch.launches) for name in every)


def test_a_random_dspine_drafts_the_same_on_kernels_and_off() -> None:
    own, stock = (target("hybrid", kernels, mx.float32) for kernels in (emulated(), NONE))
    taps = mx.random.normal((9, 2 * 64), key=mx.random.key(4))
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        drafts = []
        for t in (own, stock):
            drafter = dspine(t, "path").new()
            drafter.observe(Commit(tuple(range(9)), taps, 11, 0))
            for width in (1, 3, 5):
                p = drafter.propose(11, width, sampling, 9)
                drafts.append((t is own, width, p.tokens.tolist(), p.confidence))
        for mine, theirs in zip(drafts[:3], drafts[3:], strict=True):
            assert mine[1:3] == theirs[1:3]
            assert mx.allclose(mine[3], theirs[3], atol=1e-4)


def test_a_kernel_kept_from_single_rows_leaves_them_to_mlx() -> None:
    watch = Watch()
    kernels = replace(watch.kernels, alone=frozenset({"rows_attention"}))
    t = target("qwen3", kernels)
    state = t.new_state()
    mx.eval(t.forward(mx.array([1]), state)[0])
    assert set(watch.launches) == {"rows_attention", "rows_attention_merge"}
    mx.eval(t.forward(mx.array([2, 3]), state, rows=2)[0])
    assert "rows_qmm" in watch.launches
