"""mx.fast.metal_kernel on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from . import codegen, compiler
from .compiler import Mode
from .launch import ACCESS_LIMIT, MAX_LANES, How, Memory, Order, Program, Result, Three

Input = mx.array | bool | int | float

NUMPY: dict[mx.Dtype, type[np.generic]] = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.float32: np.float32,
}
"""bfloat16 travels as its bits."""


class Kernel:
    """What `metal_kernel` returns: called as MLX's, it runs on the CPU. `last` is the result of the last call."""

    last: Result

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        mode: Mode,
        seed: int,
        after: Callable[[Result], None] | None,
    ) -> None:
        self.name = name
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.source, self.header = source, header
        self.ensure_row_contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs
        self.mode: Mode = mode
        self.seed, self.after = seed, after

    def text(
        self, inputs: Sequence[Input], output_dtypes: Sequence[mx.Dtype], template: codegen.Template | None = None
    ) -> codegen.Text:
        """The function generated for a call. `text(...).metal` equals what `codegen.mlx_text` shows of MLX itself."""
        arrays = [_array(value) for value in inputs]
        if len(arrays) != len(self.input_names) or len(output_dtypes) != len(self.output_names):
            raise ValueError(f"{self.name} takes {len(self.input_names)} inputs and {len(self.output_names)} outputs")
        described = [(name, a.dtype, a.ndim, a.size) for name, a in zip(self.input_names, arrays, strict=True)]
        outputs = list(zip(self.output_names, output_dtypes, strict=True))
        return codegen.generate(self.name, self.header, self.source, described, outputs, template, self.atomic_outputs)

    def __call__(
        self,
        *,
        inputs: Sequence[Input],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Three,
        threadgroup: Three,
        template: codegen.Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        mode: Mode | None = None,
        order: Order = "random",
        seed: int | None = None,
        access_limit: int = ACCESS_LIMIT,
    ) -> list[mx.array]:
        """Runs the kernel; the last four arguments are the emulator's own.

        `mode` and `seed` override the kernel's; `order` is that of threadgroups and, between waits, of lanes.

        Raises:
            CompileError: clang refuses the source.
        """
        text = self.text(inputs, output_dtypes, template)
        if verbose:
            print(text.metal)
        mode = mode or self.mode
        texts = {self.name: text.source, f"{self.name} (header)": text.header}
        program = Program(self.name, compiler.kernel(text.cpp(), mode), texts)
        group: Three = (min(threadgroup[0], grid[0]), min(threadgroup[1], grid[1]), min(threadgroup[2], grid[2]))
        if not 0 < group[0] * group[1] * group[2] <= MAX_LANES:
            raise ValueError(f"{self.name}: a threadgroup of {group} threads, 1 to {MAX_LANES} are possible")
        outputs = {
            name: _output(name, shape, dtype, init_value)
            for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        }
        memory = self._memory(text, [_array(value) for value in inputs], outputs)
        how = How(grid, group, mode == "check", order, self.seed if seed is None else seed, access_limit)
        result = program.run(memory, how)
        if mode == "check":
            errors = compiler.space_errors(text.cpp(spaces=True))
            reports = [program.compile_report(*error) for error in errors]
            result = replace(result, reports=(*reports, *result.reports))
        self.last = result
        if self.after is not None:
            self.after(result)
        return [
            _returned(outputs[name], shape, dtype)
            for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        ]

    def _memory(self, text: codegen.Text, arrays: Sequence[mx.array], outputs: dict[str, Memory]) -> list[Memory]:
        seen = [_Input(array, self.ensure_row_contiguous) for array in arrays]
        values = dict(zip(self.input_names, seen, strict=True))
        return [
            outputs[slot.name] if slot.role == "output" else values[slot.name].memory(slot.name, slot.role)
            for slot in text.slots
        ]


class _Input:
    """An input as the kernel sees it: its bytes from the first element's on, and its strides."""

    def __init__(self, array: mx.array, row_contiguous: bool) -> None:
        viewed = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        values = np.array(viewed, copy=False)
        backwards = any(stride < 0 for stride in values.strides)
        copied = row_contiguous or backwards
        self.values = np.ascontiguousarray(values).reshape(values.shape) if copied else values

    def memory(self, name: str, role: codegen.Role) -> Memory:
        v = self.values
        if role == "input":
            last = sum((n - 1) * stride for n, stride in zip(v.shape, v.strides, strict=True))
            size = last + v.itemsize if v.size else 0
            return Memory(name, "input", np.frombuffer(ctypes.string_at(v.ctypes.data, size), np.uint8))
        extras: dict[codegen.Role, np.ndarray[Any, Any]] = {
            "shape": np.array(v.shape, np.int32),
            "strides": np.array([stride // v.itemsize for stride in v.strides], np.int64),
            "ndim": np.array(v.ndim, np.int32),
        }
        return Memory(f"{name}_{role}", "constant", np.frombuffer(extras[role].tobytes(), np.uint8))


def _array(value: Input) -> mx.array:
    """As MLX takes Python's numbers."""
    if isinstance(value, mx.array):
        return value
    return mx.array(value, mx.bool_ if isinstance(value, bool) else mx.int32 if isinstance(value, int) else mx.float32)


def _output(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Memory:
    """Poisoned (NaN in every float type) where MLX would leave what was there."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY[dtype]).itemsize
    if init_value is None:
        return Memory(name, "output", np.full(size, 0xFF, np.uint8), initialised=False)
    filled = mx.full(tuple(shape), init_value, dtype=dtype).view(mx.uint8)
    return Memory(name, "output", np.array(filled).reshape(-1))


def _returned(memory: Memory, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    values = mx.array(memory.data.view(NUMPY[dtype]).reshape(tuple(shape)))
    return values.view(mx.bfloat16) if dtype == mx.bfloat16 else values


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
    mode: Mode = "check",
    seed: int = 0,
    after: Callable[[Result], None] | None = None,
) -> Kernel:
    """mx.fast.metal_kernel's signature, and the emulator's own: `mode` "check" reports what is wrong, "fast" only
    computes; `seed` shuffles the lanes; `after` hears every result."""
    return Kernel(
        name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs, mode, seed, after
    )


class Reported(AssertionError):
    """A kernel that ran under `install` did something wrong."""


@contextmanager
def install(mode: Mode = "fast", seed: int = 0) -> Iterator[list[Result]]:
    """Inside, mx.fast.metal_kernel makes emulated kernels, mx.metal.is_available() is true; gives the results so far.

    mx.compile is off inside: an emulated kernel needs its inputs' values. A kernel made inside stays emulated.

    Raises:
        Reported: by a kernel's call, when the emulator has something to report.
    """
    results: list[Result] = []

    def collect(result: Result) -> None:
        results.append(result)
        if result.reports:
            raise Reported("\n".join(str(report) for report in result.reports))

    before = mx.fast.metal_kernel, mx.metal.is_available
    mx.fast.metal_kernel = partial(metal_kernel, mode=mode, seed=seed, after=collect)
    mx.metal.is_available = lambda: True
    mx.disable_compile()
    try:
        yield results
    finally:
        mx.enable_compile()
        mx.fast.metal_kernel, mx.metal.is_available = before
