"""Whether a kernel is right and worth its place on this machine: checked at first use, at the shapes of the target.

Each kernel is compared with its reference and raced against MLX's own ops: calls form a chain, each waiting for the
last, over different weights, for long enough that a chip which stalls in long runs shows it. A kernel that differs or
loses is not used. A verdict is kept for the chip, the macOS, the MLX, the kernel's text and the shapes it was found at.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import mlx.core as mx

from lisa import layers, remember, verdicts
from lisa.metal import (
    FLOATS,
    Kernels,
    Packed,
    Source,
    gdn_conv,
    gdn_verify,
    head_argmax,
    head_topk,
    inject,
    lattice,
    rows_attention,
    rows_qmm,
)
from lisa.metal.stock import stock
from lisa.target import Target
from lisa.verdicts import ALONE, TOGETHER, Verdict

Say = Callable[[str], None]
Clock = Callable[[], float]
Arguments = Mapping[str, Any]

MODULES: tuple[ModuleType, ...] = (
    *(rows_qmm, rows_attention, gdn_conv, gdn_verify, head_argmax, head_topk, inject, lattice),
)
TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}
"""Of the largest value, against the float32 reference: a GPU's own arithmetic is looser than the emulator's."""
SUSTAINED = 0.2
"""Seconds a race lasts at least."""


@dataclass(frozen=True)
class Trial:
    """A kernel at the shapes of a target. `copies` makes several arguments for so many rows, of different weights."""

    module: ModuleType
    shapes: str
    copies: Callable[[int], Sequence[Arguments]]

    @property
    def name(self) -> str:
        return self.module.__name__.rsplit(".", 1)[-1]

    def run(self, arguments: Arguments, kernels: Kernels) -> Any:
        return getattr(self.module, self.name)(**arguments, kernels=kernels)


def choose(target: Target, kernels: Kernels, *, exact: bool, say: Say | None = None) -> Kernels:
    """Those of `kernels` that are to run for `target`; what is not known yet is found out now.

    With `exact` a single row takes the same kernels as several, so that plain text has the bits of verified text;
    without, whichever is faster.
    """
    if kernels.make is None:
        return kernels
    known: dict[str, Verdict] = {}
    for trial in trials(target):
        known[trial.name] = _verdict(trial, kernels, say)
    used = frozenset(name for name, verdict in known.items() if verdict.used)
    alone = None if exact else frozenset(name for name in used if known[name].alone >= 1.0)
    return replace(kernels, names=used, alone=alone)


def _verdict(trial: Trial, kernels: Kernels, say: Say | None) -> Verdict:
    key = f"{verdicts.machine()}: {trial.name} {text_hash(trial.module)} {trial.shapes}"
    with suppress(TypeError, KeyError):
        stored: Any = remember.load(verdicts.file(), key)
        return Verdict(**stored)
    if say is not None:
        say(f"checking the kernel {trial.name} on this machine, once")
    verdict = examine(trial, kernels)
    with suppress(OSError):  # then it is found out again next time
        remember.save(verdicts.file(), key, asdict(verdict))
    return verdict


def examine(trial: Trial, kernels: Kernels, clock: Clock = time.perf_counter) -> Verdict:
    """Compare, then race. An exception of the kernel's compiler or launch is a verdict too."""
    try:
        for rows in (ALONE, TOGETHER):
            arguments = trial.copies(rows)[0]
            error = difference(trial.run(arguments, kernels), trial.module.reference(**arguments))
            if not error <= 1.0:
                return Verdict(False, why=f"at {rows} rows it differs by {error:.1f} times what is allowed")
        alone, ratio = (_race(trial, kernels, rows, clock) for rows in (ALONE, TOGETHER))
    except (RuntimeError, ValueError) as error:
        return Verdict(False, why=(str(error).strip().splitlines() or [type(error).__name__])[0][:200])
    return Verdict(True, ratio, alone)


def _race(trial: Trial, kernels: Kernels, rows: int, clock: Clock) -> float:
    copies = trial.copies(rows)
    mine = seconds(lambda **arguments: trial.run(arguments, kernels), copies, clock)
    return seconds(stock(trial.name), copies, clock) / mine


def difference(got: Any, wanted: Any) -> float:
    """The largest difference over the largest value, as a part of what is allowed; ids and columns are not compared,
    for near ties fall either way, but the values they were chosen by are."""
    worst = 0.0
    for a, b in zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (got, wanted)), strict=True):
        if a.dtype not in FLOATS:
            continue
        if a.shape != b.shape:
            return math.inf
        x, y = a.astype(mx.float32), b.astype(mx.float32)
        relative: Any = (mx.abs(x - y).max() / mx.maximum(mx.abs(y).max(), 1e-30)).item()
        error = relative / TOLERANCE[a.dtype]
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def seconds(function: Callable[..., Any], copies: Sequence[Arguments], clock: Clock) -> float:
    """Of one call: the median over the later half of the rounds, each over all copies in a chain."""
    times: list[float] = []
    while sum(times) < SUSTAINED or len(times) < 8:
        began, last = clock(), mx.array(0)
        for arguments in copies:
            first = next(iter(arguments))
            waiting = mx.depends([arguments[first]], [last])[0]
            out = function(**{**arguments, first: waiting})
            last = out[0] if isinstance(out, (tuple, list)) else out
        mx.eval(last)
        times.append(max(clock() - began, 1e-9))
    return statistics.median(times[len(times) // 2 :]) / len(copies)


# ---- the shapes of a target


def trials(target: Target) -> Iterator[Trial]:
    """Every kernel that something in `target`, or a DSpine drafter for it, can use."""
    dtype = target.embed(mx.array([0])).dtype
    if dtype not in FLOATS:
        return
    if matrices := _largest(target.model):
        yield Trial(rows_qmm, f"{_size(matrices[0])}, {dtype}", lambda rows: [_qmm(rows, m, dtype) for m in matrices])
    for attention in layers.found(target.model, layers.Attention)[:1]:
        yield _attention(layers.heads_of(attention), dtype)
    for gdn in layers.found(target.model, layers.GatedDeltaNet)[:1]:
        yield from _recurrent((gdn.num_v_heads, gdn.num_k_heads, gdn.head_k_dim, gdn.head_v_dim), dtype)
    if target.packed_head is not None:
        yield from _heads(target.packed_head[:32768], dtype)
    yield from _spine(target.hidden, dtype)


def _attention(heads: tuple[int, int, int], dtype: mx.Dtype) -> Trial:
    def copies(rows: int) -> Sequence[Arguments]:
        return _different(rows_attention.example(rows, 2048, *heads, dtype))

    return Trial(rows_attention, f"{heads}, {dtype}", copies)


def _recurrent(sizes: tuple[int, int, int, int], dtype: mx.Dtype) -> Iterator[Trial]:
    values, keys, dk, dv = sizes

    def conv(rows: int) -> Sequence[Arguments]:
        return _different(gdn_conv.example(rows, rows, [rows], keys, values, dk, dv, dtype))

    def verify(rows: int) -> Sequence[Arguments]:
        return _different(gdn_verify.example(rows, rows, [rows], values, keys, dk, dv, dtype))

    yield Trial(gdn_conv, f"{sizes}, {dtype}", conv)
    yield Trial(gdn_verify, f"{sizes}, {dtype}", verify)


def _heads(head: Packed, dtype: mx.Dtype) -> Iterator[Trial]:
    def arguments(rows: int) -> dict[str, Any]:
        return {"x": _qmm(rows, head, dtype)["x"], "head": head, "vocab": head.w.shape[0]}

    yield Trial(head_argmax, f"{_size(head)}, {dtype}", lambda rows: [arguments(rows)])
    yield Trial(head_topk, f"{_size(head)}, {dtype}", lambda rows: [{**arguments(rows), "k": 16}])


def _spine(hidden: int, dtype: mx.Dtype) -> Iterator[Trial]:
    rank = int(2 ** round(math.log2(max(hidden / 5, 64))))

    def injected(rows: int) -> Sequence[Arguments]:
        return _different(inject.example(max(rows, 2), hidden, rank, rank // 2, dtype))

    def walked(rows: int) -> Sequence[Arguments]:
        return _different(lattice.example(max(rows, 2) - 1, 16, hidden, 0.0))

    yield Trial(inject, f"{hidden}, rank {rank}, {dtype}", injected)
    yield Trial(lattice, f"{hidden}", walked)


def _size(weight: Packed) -> str:
    k = weight.scales.shape[1] * weight.group_size
    return f"{weight.w.shape[0]} x {k} at {weight.bits} bits, groups of {weight.group_size}"


def _largest(model: Any, most: int = 8) -> list[Packed]:
    """Projections of the largest size a kernel can take, from several layers."""
    packed = [layers.packed(module) for module in layers.found(model, layers.PackedLinear)]
    if not packed:
        return []
    largest = max((p.w.shape for p in packed), key=math.prod)
    return [p for p in packed if p.w.shape == largest][:most]


def _qmm(rows: int, weight: Packed, dtype: mx.Dtype) -> Arguments:
    k = weight.scales.shape[1] * weight.group_size
    return {"x": mx.random.normal((rows, k), key=mx.random.key(rows)).astype(dtype), "weight": weight}


def _different(arguments: Arguments, copies: int = 4) -> list[Arguments]:
    """The same arguments in arrays of their own, so that no call finds its data in a cache."""
    made = [each_array(arguments, lambda a: a + mx.zeros((), a.dtype)) for _ in range(copies)]
    mx.eval([arrays(each) for each in made])
    return made


def each_array(value: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """A value with every array in it changed."""
    if isinstance(value, mx.array):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(each_array(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: each_array(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: each_array(getattr(value, f.name), change) for f in fields(value)})
    return value


def arrays(value: Any) -> list[mx.array]:
    found: list[mx.array] = []

    def keep(array: mx.array) -> mx.array:
        found.append(array)
        return array

    each_array(value, keep)
    return found


# ---- what is kept


def text_hash(module: ModuleType) -> str:
    """Of everything a kernel compiles: another text is another kernel."""
    sources = sorted((s.name, s.header, s.body) for s in vars(module).values() if isinstance(s, Source))
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:12]
