"""Kernels for Apple GPUs, one a file: what it computes, its source, its reference, when it fits, and its cases.

A public function takes `kernels`, which says what may run; where its kernel may not or does not fit, it computes the
reference. Nothing is registered and nothing is global: whoever loads a model makes one `Kernels` and passes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import mlx.core as mx

MOST_ROWS = 16


class Launch(Protocol):
    """A compiled kernel, as mx.fast.metal_kernel returns it."""

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = ...,
    ) -> list[mx.array]: ...


Factory = Callable[..., Launch]
"""mx.fast.metal_kernel, or anything with its signature."""


@dataclass(frozen=True)
class Source:
    """One function in Metal Shading Language: its name, its buffers in order, the body, and what the body calls."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str = ""


@dataclass(frozen=True)
class Kernels:
    """Which kernels may run, and what compiles them. `make` None: none; `names` None: all.

    `alone` are those that run for a single row too, None all: with all, a plain step has the bits of a verifying one.
    """

    make: Factory | None = None
    names: frozenset[str] | None = None
    alone: frozenset[str] | None = None
    _compiled: dict[Source, Launch] = field(default_factory=dict, compare=False, repr=False)

    def may_run(self, name: str, rows: int = 2) -> bool:
        if self.make is None or rows > MOST_ROWS or (self.names is not None and name not in self.names):
            return False
        return rows > 1 or self.alone is None or name in self.alone

    def __call__(self, source: Source) -> Launch:
        if source not in self._compiled:
            assert self.make is not None
            self._compiled[source] = self.make(
                name=source.name,
                input_names=list(source.inputs),
                output_names=list(source.outputs),
                source=source.body,
                header=source.header,
            )
        return self._compiled[source]


NONE = Kernels()
"""No kernel: every public function computes its reference."""


def of_this_machine() -> Kernels:
    """All kernels where MLX has a Metal device, else none."""
    return Kernels(cast(Factory, mx.fast.metal_kernel)) if mx.metal.is_available() else NONE


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantised weight [N, K]: w uint32 [N, K * bits / 32], scales and biases [N, K / group_size], as mx.quantize
    makes them. Modes other than affine have no biases, and no kernel."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @classmethod
    def quantized(cls, weight: mx.array, group_size: int, bits: int) -> Packed:
        return cls(*mx.quantize(weight, group_size=group_size, bits=bits), group_size, bits)

    def dequantized(self) -> mx.array:
        """float32 [N, K], computed in float32."""
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(self.w, scales, biases, group_size=self.group_size, bits=self.bits, mode=self.mode)
        return weight.astype(mx.float32)

    def __getitem__(self, rows: slice) -> Packed:
        biases = None if self.biases is None else self.biases[rows]
        return replace(self, w=self.w[rows], scales=self.scales[rows], biases=biases)


@dataclass(frozen=True)
class Fit:
    """Whether a kernel can take these arguments; false when there is a reason why not."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def first_reason(*checks: tuple[bool, str]) -> Fit:
    """The reason of the first check that does not hold."""
    return Fit(next((reason for holds, reason in checks if not holds), ""))


@dataclass(frozen=True)
class Case:
    """Arguments of a kernel's public function, for its tests and its bench; small unless `long`.

    `rows` are the rows read at once, `bits` those of a packed weight (0: none is packed).
    """

    name: str
    rows: int
    arguments: Callable[[], Mapping[str, Any]]
    bits: int = 0
    long: bool = False


FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]
