"""The Metal emulator computes what kernels say, and finds every kind of mistake it claims to find, where it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import emulator
import mlx.core as mx
import numpy as np
import pytest
from emulator import Detail, Kind, Result, compiler

pytestmark = pytest.mark.skipif(bool(emulator.unavailable()), reason=emulator.unavailable() or "it can run")

LANES = 64
X = mx.arange(LANES, dtype=mx.float32)
INDEX = "uint i = thread_position_in_grid.x;\n"


def run(
    source: str,
    inputs: Sequence[Any] = (),
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]] = (((LANES,), mx.float32),),
    lanes: int = LANES,
    threadgroup: int | tuple[int, int, int] = LANES,
    header: str = "",
    made: dict[str, Any] | None = None,
    **call: Any,
) -> tuple[list[mx.array], Result]:
    """Inputs are x0, x1 ..., outputs y0, y1 ...; `x` and `y` name the first of each."""
    kernel = emulator.metal_kernel(
        "case",
        ["x" if n == 0 else f"x{n}" for n in range(len(inputs))],
        ["y" if n == 0 else f"y{n}" for n in range(len(outputs))],
        source,
        header,
        **(made or {}),
    )
    group = (threadgroup, 1, 1) if isinstance(threadgroup, int) else threadgroup
    call = {"grid": (lanes, 1, 1), "threadgroup": group, **call}
    shapes, dtypes = [shape for shape, _ in outputs], [dtype for _, dtype in outputs]
    arrays = kernel(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, **call)
    return arrays, kernel.last


def clean(*arguments: Any, **named: Any) -> list[mx.array]:
    """The outputs of a kernel that has nothing reported."""
    arrays, result = run(*arguments, **named)
    assert [str(report) for report in result.reports] == [] and result.finished
    return arrays


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


# ------------------------------------------------------------------------------------------------ what kernels compute


@pytest.mark.parametrize("mode", ["check", "fast"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_function_of_every_float_type(dtype: mx.Dtype, mode: str) -> None:
    x = mx.random.normal((3, 50), key=mx.random.key(0)).astype(dtype)
    source = INDEX + "T v = x[i];\ny[i] = metal::exp(v) * T(0.5);"
    (y,) = clean(source, [x], [(x.shape, dtype)], 150, 64, template=[("T", dtype)], mode=mode)
    assert y.dtype == dtype and y.shape == x.shape
    want = floats((mx.exp(x.astype(mx.float32)).astype(dtype) * mx.array(0.5, dtype)).astype(dtype))
    np.testing.assert_allclose(floats(y), want, rtol=1e-6 if dtype == mx.float32 else 0)


def test_each_operation_of_half_and_bfloat_rounds() -> None:
    source = "half h = 2048;\nbfloat b = 256;\ny[0] = float(h + half(1) - h);\ny[1] = float(b + bfloat(1) - b);"
    (y,) = clean(source, outputs=[((2,), mx.float32)], lanes=1, threadgroup=1)
    assert y.tolist() == [0, 0]


ATTRIBUTES = {
    "thread_position_in_grid": lambda g, t, grid, tg: [g * s + p for g, s, p in zip(g, tg, t, strict=True)],
    "thread_position_in_threadgroup": lambda g, t, grid, tg: t,
    "threadgroup_position_in_grid": lambda g, t, grid, tg: g,
    "threads_per_grid": lambda g, t, grid, tg: grid,
    "threadgroups_per_grid": lambda g, t, grid, tg: [-(-a // b) for a, b in zip(grid, tg, strict=True)],
    "dispatch_threads_per_threadgroup": lambda g, t, grid, tg: tg,
    "threads_per_threadgroup": lambda g, t, grid, tg: [min(s, n - p * s) for p, s, n in zip(g, tg, grid, strict=True)],
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_a_grid_that_no_threadgroup_divides(name: str) -> None:
    grid, group = (5, 3, 2), (4, 2, 2)
    source = f"uint3 p = thread_position_in_grid;\nuint n = (p.z * 3 + p.y) * 5 + p.x;\nuint3 v = {name};\n"
    source += "y[n * 3] = v.x; y[n * 3 + 1] = v.y; y[n * 3 + 2] = v.z;"
    (y,) = clean(source, outputs=[((30, 3), mx.uint32)], grid=grid, threadgroup=group)
    want = []
    for z, row, x in np.ndindex(2, 3, 5):
        position = (x, row, z)
        groups = [p // s for p, s in zip(position, group, strict=True)]
        inside = [p % s for p, s in zip(position, group, strict=True)]
        want.append(ATTRIBUTES[name](groups, inside, grid, group))
    assert y.tolist() == [list(v) for v in want]


def test_indices_within_a_threadgroup() -> None:
    names = ["thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup"]
    names += ["simdgroups_per_threadgroup", "threads_per_simdgroup"]
    source = INDEX + "".join(f"y[i * 5 + {n}] = {name};\n" for n, name in enumerate(names))
    (y,) = clean(source, outputs=[((80, 5), mx.uint32)], lanes=80, threadgroup=80)
    assert y.tolist() == [[n, n % 32, n // 32, 3, 32] for n in range(80)]


def test_vectors() -> None:
    source = """
    float4 v = float4(1, 2, 3, 4);
    half4 h = half4(v);
    float2 low = float2(h.xy);
    vec<float, 4> w = vec<float, 4>(low, float2(7));
    y[0] = dot(v, w);
    y[1] = max(v, float4(2.5)).x + min(v, float4(2.5)).w + clamp(v, 2.0, 3.0).x;
    y[2] = any(v > float4(3)) + 2 * all(v > float4(0)) + 4 * any(v > float4(4));
    y[3] = select(v, w, v > float4(2)).z;
    y[4] = as_type<float>(as_type<uint>(1.5f));
    y[5] = as_type<half2>(0x3c004000u).x;
    packed_float3 p = packed_float3(float3(1, 2, 3));
    y[6] = sizeof(p) + p[2] + sizeof(float3);
    uint4 q = *(const device uint4*)(x + 4);
    using F2 = vec<float, 2>;
    y[7] = q.w + F2(x[1], x[2]).y;
    """
    x = mx.arange(8, dtype=mx.uint32)
    (y,) = clean(source, [x], [((8,), mx.float32)], 1, 1)
    assert y.tolist() == [1 + 4 + 21 + 28, 2.5 + 2.5 + 2, 3, 7, 1.5, 2, 12 + 3 + 16, 9]


def test_numbers() -> None:
    source = """
    y[0] = fma(2.0f, 3.0f, 4.0f);
    y[1] = metal::precise::rsqrt(0.25f) + fast::exp2(3.0f);
    y[2] = max(NAN, 1.0f) + min(2.0f, NAN);
    y[3] = popcount(0xf0f0u) + clz(1u) + ctz(8u);
    y[4] = extract_bits(0xabcdu, 4u, 8u);
    y[5] = mulhi(0x80000000u, 6u);
    y[6] = abs(-3) + abs(-1.5f);
    y[7] = isnan(NAN) + isinf(INFINITY) + isfinite(1.0f);
    y[8] = 1.0 / 3.0 == 1.0f / 3.0f;
    y[9] = 1.5h * 2h;
    y[10] = numeric_limits<half>::max();
    y[11] = is_same_v<decltype(1.0h), half> + is_floating_point_v<bfloat>;
    """
    (y,) = clean(source, outputs=[((12,), mx.float32)], lanes=1, threadgroup=1)
    assert y.tolist() == [10, 10, 3, 8 + 31 + 3, 0xBC, 3, 4.5, 3, 1, 3, 65504, 2]


SIMD: dict[str, Callable[[np.ndarray, int], float]] = {
    "simd_sum(v)": lambda v, n: v.sum(),
    "simd_max(v)": lambda v, n: v.max(),
    "simd_min(v)": lambda v, n: v.min(),
    "simd_product(v > 40.0f ? 2.0f : 1.0f)": lambda v, n: 2.0 ** (v > 40).sum(),
    "float(simd_and(uint(v) | 1u))": lambda v, n: np.bitwise_and.reduce(v.astype(int) | 1),
    "float(simd_or(uint(v)))": lambda v, n: np.bitwise_or.reduce(v.astype(int)),
    "float(simd_xor(uint(v)))": lambda v, n: np.bitwise_xor.reduce(v.astype(int)),
    "simd_shuffle(v, 31 - lane)": lambda v, n: v[31 - n],
    "simd_broadcast(v, 3)": lambda v, n: v[3],
    "simd_broadcast_first(v)": lambda v, n: v[0],
    "simd_shuffle_xor(v, 5)": lambda v, n: v[n ^ 5],
    "simd_shuffle_down(v, 3)": lambda v, n: v[n + 3] if n < 29 else v[n],
    "simd_shuffle_up(v, 3)": lambda v, n: v[n - 3] if n > 2 else v[n],
    "simd_shuffle_rotate_down(v, 3)": lambda v, n: v[(n + 3) % 32],
    "simd_shuffle_rotate_up(v, 3)": lambda v, n: v[(n - 3) % 32],
    "simd_shuffle_and_fill_down(v, -v, 3)": lambda v, n: v[n + 3] if n < 29 else -v[(n + 3) % 32],
    "simd_shuffle_and_fill_up(v, -v, 3)": lambda v, n: v[n - 3] if n > 2 else -v[(n - 3) % 32],
    "simd_prefix_inclusive_sum(v)": lambda v, n: v[: n + 1].sum(),
    "simd_prefix_exclusive_sum(v)": lambda v, n: v[:n].sum(),
    "float(simd_any(v == 7.0f))": lambda v, n: (v == 7).any(),
    "float(simd_all(v < 32.0f))": lambda v, n: (v < 32).all(),
    "float(ulong(simd_ballot((uint(v) & 1u) == 1u)))": lambda v, n: float(np.float32(0xAAAAAAAA)),
    "float(simd_is_first())": lambda v, n: n == 0,
    "quad_sum(v)": lambda v, n: v[n & ~3 : (n & ~3) + 4].sum(),
    "quad_max(v)": lambda v, n: v[n | 3],
    "quad_broadcast(v, 2)": lambda v, n: v[(n & ~3) + 2],
    "quad_shuffle_xor(v, 1)": lambda v, n: v[n ^ 1],
}


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_operations_among_the_lanes_of_a_simdgroup(mode: str) -> None:
    source = INDEX + "ushort lane = thread_index_in_simdgroup;\nfloat v = x[i];\n"
    source += "".join(f"y[i * {len(SIMD)} + {n}] = {expression};\n" for n, expression in enumerate(SIMD))
    (y,) = clean(source, [X], [((LANES, len(SIMD)), mx.float32)], mode=mode)
    for column, (expression, want) in enumerate(SIMD.items()):
        expected = [float(want(np.arange(32.0) + start, n)) for start in (0, 32) for n in range(32)]
        assert y[:, column].tolist() == expected, expression


def test_a_simdgroup_that_the_threadgroup_does_not_fill() -> None:
    (y,) = clean(INDEX + "y[i] = simd_sum(1.0f) + simd_max(float(i));", outputs=[((40,), mx.float32)], lanes=40)
    assert y.tolist() == [32 + 31] * 32 + [8 + 39] * 8


PRODUCT = """
simdgroup_matrix<T, 8, 8> a, b;
simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
for (int k = 0; k < 16; k += 8) {
  simdgroup_load(a, x + k, 16);
  simdgroup_load(b, x1 + k, 16, 0, true);
  simdgroup_multiply_accumulate(c, a, b, c);
}
simdgroup_store(c, y, 8);
"""


@pytest.mark.parametrize("mode", ["check", "fast"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_products_of_matrices(dtype: mx.Dtype, mode: str) -> None:
    a, b = (mx.random.randint(-4, 5, (8, 16), key=mx.random.key(n)).astype(dtype) for n in (1, 2))
    kwargs: dict[str, Any] = {"template": [("T", dtype)], "mode": mode}
    (y,) = clean(PRODUCT, [a, b], [((8, 8), mx.float32)], 32, 32, **kwargs)
    np.testing.assert_array_equal(floats(y), floats(a) @ floats(b).T + 1)


def test_where_a_lane_keeps_its_elements_of_a_matrix() -> None:
    source = """
    simdgroup_float8x8 m, one(1.0f), product;
    m.thread_elements()[0] = 2 * thread_index_in_simdgroup;
    m.thread_elements()[1] = 2 * thread_index_in_simdgroup + 1;
    simdgroup_multiply(product, m, one);
    simdgroup_store(product, y, 16, ulong2(8, 8));
    """
    (y,) = clean(source, outputs=[((16, 16), mx.float32)], lanes=32, threadgroup=32, init_value=-1)
    assert y[8, 8:].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert y[9:, 8].tolist() == [4, 8, 12, 32, 36, 40, 44]
    assert (np.array(y)[:8] == -1).all() and (np.array(y)[8:, :8] == -1).all()


NORM = """
threadgroup float partial[GROUPS];
uint row = threadgroup_position_in_grid.x, lane = thread_position_in_threadgroup.x;
float sum = 0;
for (uint i = lane; i < N; i += 32 * GROUPS) { float v = x[row * N + i]; sum = fma(v, v, sum); }
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
float total = 0;
for (uint s = 0; s < GROUPS; ++s) total += partial[s];
float scale = rsqrt(total / N + eps);
for (uint i = lane; i < N; i += 32 * GROUPS) y[row * N + i] = T(float(x[row * N + i]) * scale) * w[i];
"""


def norm(dtype: mx.Dtype, **call: Any) -> tuple[mx.array, mx.array, Result]:
    """RMS norm of ragged rows: what the kernel gives, what it should, and the result."""
    x = mx.random.normal((5, 300), key=mx.random.key(3)).astype(dtype)
    w = mx.random.normal((300,), key=mx.random.key(4)).astype(dtype)
    kernel = emulator.metal_kernel("norm", ["x", "w", "eps"], ["y"], NORM)
    (y,) = kernel(
        inputs=[x, w, 1e-6],
        template=[("T", dtype), ("N", 300), ("GROUPS", 4)],
        grid=(128 * 5, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[dtype],
        **call,
    )
    return y, mx.fast.rms_norm(x, w, 1e-6), kernel.last


@pytest.mark.parametrize(("dtype", "error"), [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 1e-2)])
def test_a_norm_over_threadgroup_memory(dtype: mx.Dtype, error: float) -> None:
    y, want, result = norm(dtype)
    assert result.reports == ()
    assert np.abs(floats(y) - floats(want)).max() <= error * np.abs(floats(want)).max()


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_a_sound_kernel_gives_the_same_bits_in_every_order(mode: str) -> None:
    orders = [{"seed": 1}, {"seed": 2}, {"seed": 3}, {"order": "ascending"}, {"order": "descending"}]
    first, *rest = (np.array(norm(mx.float32, mode=mode, **order)[0]) for order in orders)
    assert all((first == other).all() for other in rest)


def test_an_unsound_kernel_shows_the_order_of_its_lanes() -> None:
    source = INDEX + "atomic_store_explicit(&y[0], int(i), memory_order_relaxed);"
    last = []
    for order in ({"order": "ascending"}, {"order": "descending"}, {"seed": 1}, {"seed": 2}):
        made = {"atomic_outputs": True}
        last.append(clean(source, outputs=[((1,), mx.int32)], made=made, mode="fast", **order)[0].item())
    assert last[:2] == [63, 0] and last[2] != last[3]


def test_atomics_of_device_and_threadgroup_memory() -> None:
    source = (
        INDEX
        + """
    threadgroup atomic<uint> count;
    if (i == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int total = atomic_load_explicit(&count, memory_order_relaxed);
    if (i == 0) atomic_store_explicit(&y[0], total, memory_order_relaxed);
    atomic_fetch_add_explicit(&y[1 + i % 3], 1, memory_order_relaxed);
    atomic_fetch_max_explicit(&y[4], int(i), memory_order_relaxed);
    int expected = 0;
    if (i == 5) atomic_compare_exchange_weak_explicit(&y[5], &expected, 9, memory_order_relaxed, memory_order_relaxed);
    """
    )
    (y,) = clean(source, outputs=[((6,), mx.int32)], made={"atomic_outputs": True}, init_value=0)
    assert y.tolist() == [64, 22, 21, 21, 63, 9]


def test_an_input_that_is_not_contiguous_comes_with_its_strides() -> None:
    x = mx.arange(24, dtype=mx.bfloat16).reshape(4, 6).T[::2]
    source = INDEX + "uint r = i / 4, c = i % 4;\ny[i] = x[r * x_strides[0] + c * x_strides[1]];\n"
    source += "if (i == 0) { y1[0] = x_ndim; y1[1] = x_shape[0]; y1[2] = x_shape[1]; y1[3] = int(x_strides[1]); }"
    outputs = [((12,), mx.float32), ((4,), mx.int32)]
    y, about = clean(source, [x], outputs, 12, 12, made={"ensure_row_contiguous": False})
    assert y.tolist() == floats(x).reshape(-1).tolist()
    assert about.tolist() == [2, 3, 4, 6]
    y, about = clean(source, [x], outputs, 12, 12)
    assert y.tolist() == floats(x).reshape(-1).tolist() and about.tolist() == [2, 3, 4, 1]


def test_inputs_that_are_python_numbers() -> None:
    (y,) = clean("y[0] = x + x1 + (x2 ? 10 : 0);", [1.5, 2, True], [((1,), mx.float32)], 1, 1)
    assert y.tolist() == [13.5]


def test_outputs_start_from_the_initial_value() -> None:
    assert clean(INDEX + "if (i < 2) y[i] += 1;", init_value=5)[0][:4].tolist() == [6, 6, 5, 5]


def test_tables_functions_and_variables_of_the_header() -> None:
    header = "constant float table[4] = {1, 2, 3, 4};\nconstant constexpr float two = 2.0;\n"
    header += "template <typename P>\ninline float at(P p, uint i) { return p[i % 4] * two; }\n"
    (y,) = clean(INDEX + "y[i] = at(table, i) + at(x, i);", [X], header=header)
    assert y.tolist() == [2 * (1 + i % 4) + 2 * (i % 4) for i in range(LANES)]


def test_threadgroup_variables_of_every_form() -> None:
    source = (
        INDEX
        + """
    threadgroup float a[(64 >> 1)], b[2]
      [32];
    threadgroup uint one;
    threadgroup vec<half, 4> wide[N > 4 ? 2 : 1];
    if (i < 32) { a[i] = i; b[i / 16][i % 16] = 1; b[i / 16][i % 16 + 16] = 2; }
    if (i == 0) { one = 3; wide[1] = half4(4); }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = a[i % 32] + b[i / 32][i % 32] + one + wide[1].w;
    """
    )
    (y,) = clean(source, template=[("N", 5)])
    assert y.tolist() == [i % 32 + (1 if i % 32 < 16 else 2) + 7 for i in range(LANES)]


# ----------------------------------------------------------------------------------------------------- what is counted


def test_traffic_is_counted_by_buffer_lane_and_simdgroup() -> None:
    source = INDEX + "float4 v = ((const device float4*)x)[i];\ny[i] = v.x * x1[0] + x1[1] + x1[i / 8];"
    x = mx.arange(4 * LANES, dtype=mx.float32)
    _, result = run(source, [x, X])
    assert result.reports == ()
    weights, shared, out = (result.traffic[name] for name in ("x", "x1", "y"))
    assert (weights.size, weights.read, weights.distinct_read, weights.refetch) == (1024, 1024, 1024, 1.0)
    assert weights.simdgroup_refetch == 1.0
    assert shared.read == 64 * 4 * 3 and shared.distinct_read == 8 * 4
    assert shared.simdgroup_read == (4 + 6) * 4  # 0 1 2 3, then 0 1 4 5 6 7
    assert (out.written, out.distinct_written, out.read) == (256, 256, 0)
    _, result = run(source, [x, X], threadgroup=32)
    assert result.traffic["x1"].simdgroup_read == (4 + 6) * 4


def test_loads_of_every_width_are_counted() -> None:
    source = (
        INDEX
        + """
    pack all = ((const device pack*)x)[i];
    y[i] = all.v[int(x1[0])] + float(((const device half*)x)[i]) + float(((const device uchar*)x)[i])
         + ((const device float3*)x1)[i % 4].y + packed_float3(((const device packed_float3*)x1)[i % 4])[2];
    """
    )
    x = mx.zeros((8 * LANES,))
    _, result = run(source, [x, mx.zeros((32,))], header="struct pack { float v[8]; };")
    assert result.reports == ()
    assert result.traffic["x"].distinct_read == 8 * LANES * 4
    assert result.traffic["x1"].distinct_read in range(48, 65)  # of 16 bytes a float3 may be read in 12


def test_barriers_operations_and_threadgroup_bytes_are_counted() -> None:
    _, _, result = norm(mx.float32)
    assert (result.lanes, result.threadgroups, result.barriers) == (640, 5, 5)
    assert (result.simd_ops, result.matrix_ops, result.simdgroup_barriers) == (5 * 4, 0, 0)
    assert (result.threadgroup_memory, result.threadgroup_written) == (16, 5 * 4 * 4)
    assert result.threadgroup_read == 5 * 128 * 4 * 4
    a = mx.zeros((8, 16))
    _, result = run(PRODUCT, [a, a], [((8, 8), mx.float32)], 32, 32, template=[("T", mx.float32)])
    assert (result.simd_ops, result.matrix_ops) == (2 * 3 + 1, 2)


# ------------------------------------------------------------------------------------------------------ what is caught


@dataclass(frozen=True)
class Broken:
    """A kernel with one mistake, at the line marked `here`; `there` marks the second line a report names. It runs in
    lane order. `repair` makes it sound."""

    name: str
    kind: Kind
    source: str
    repair: tuple[str, str]
    detail: Detail = Detail.NONE
    lane: int | None = None
    other: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    finished: bool = True
    header: str = ""


READ, WRITE = Detail.READ, Detail.WRITE
TILE = INDEX + "threadgroup float tile[64];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BROKEN = [
    Broken(
        *("read past an input", Kind.OUT_OF_BOUNDS, INDEX + "float v = x[i + 1]; // here\ny[i] = v;", ("i + 1", "i")),
        *(READ, 63),
        report={"buffer": "x", "offset": 256, "size": 4},
        finished=False,
    ),
    Broken(
        *("read before an input", Kind.OUT_OF_BOUNDS, INDEX + "y[i] = x[int(i) - 1]; // here", ("int(i) - 1", "i")),
        *(READ, 0),
        report={"buffer": "x", "offset": -4},
        finished=False,
    ),
    Broken(
        *("write past an output", Kind.OUT_OF_BOUNDS, INDEX + "y[i + 1] = 1; // here", ("i + 1", "i")),
        *(WRITE, 63),
        report={"buffer": "y", "offset": 256},
        finished=False,
    ),
    Broken(
        *("wide read over the end", Kind.OUT_OF_BOUNDS),
        INDEX + "auto v = ((const device packed_float3*)(x))[i]; // here\ny[i] = v[0] + v[2];",
        ("packed_float3*)(x))[i]", "packed_float3*)(x))[i % 21]"),
        *(READ, 21),
        report={"buffer": "x"},
        finished=False,
    ),
    Broken(
        *("write past threadgroup memory", Kind.OUT_OF_BOUNDS),
        TILE + f"threadgroup float* p = tile;\np[i + 1] = 1; // here\n{BARRIER}\ny[i] = tile[i];",
        ("i + 1", "i"),
        *(WRITE, 63),
        report={"buffer": "tile", "offset": 256},
        finished=False,
    ),
    Broken(
        *("index past an array", Kind.OUT_OF_BOUNDS),
        INDEX + "float own[4];\nfor (int j = 0; j < 4; ++j) own[j] = x[j];\ny[i] = own[i % 5]; // here",
        ("i % 5", "i % 4"),
        *(Detail.ARRAY_INDEX, 4),
        finished=False,
    ),
    Broken(
        *("read of what another lane wrote", Kind.RACE),
        TILE + "tile[i] = i; // there\n//\ny[i] = tile[i ? i - 1 : 0]; // here",
        ("//\n", BARRIER + "\n"),
        *(READ, 1, 0),
        report={"buffer": "tile", "offset": 0, "other_wrote": True, "weak": False},
    ),
    Broken(
        *("write of what another lane read", Kind.RACE),
        TILE + f"if (i == 0) tile[0] = 1;\n{BARRIER}\ny[i] = tile[0]; // there\n//\nif (i == 63) tile[0] = 2; // here",
        ("//\n", BARRIER + "\n"),
        *(WRITE, 63),
        report={"buffer": "tile", "other_wrote": False},
    ),
    Broken(
        *("a write by the last of a simdgroup that read", Kind.RACE),
        TILE + f"if (i == 0) tile[0] = 1;\n{BARRIER}\ny[i] = tile[0]; // there\n//\nif (i == 31) tile[0] = 2; // here",
        ("//\n", BARRIER + "\n"),
        *(WRITE, 31, 30),
        call={"lanes": 32, "outputs": [((32,), mx.float32)]},
    ),
    Broken(
        *("barrier of the other memory", Kind.RACE),
        TILE + "tile[i] = i; // there\nthreadgroup_barrier(mem_flags::mem_device);\ny[i] = tile[63 - i]; // here",
        ("mem_device", "mem_threadgroup"),
        *(READ, 0, 63),
    ),
    Broken(
        *("two lanes write one element", Kind.RACE),
        INDEX + "y[i / 2] = i; // here there\nif (i >= 32) y[i] = 0;",
        ("y[i / 2] = i;", "if (i % 2 == 0) y[i / 2] = i;"),
        *(WRITE, 1, 0),
        report={"buffer": "y"},
    ),
    Broken(
        *("two threadgroups write one element", Kind.RACE),
        INDEX + "y[i % 32] = 1; // here there\ny[i % 32 + 32] = 1;",
        ("y[i % 32] = 1; // here there\ny[i % 32 + 32] = 1;", "y[i] = 1;"),
        *(WRITE, 0, 0),
        report={"threadgroup": (1, 0, 0), "other_threadgroup": (0, 0, 0)},
        call={"threadgroup": 32},
    ),
    Broken(
        *("a write after another threadgroup read", Kind.RACE),
        INDEX + "y1[i] = y[0]; // there\nthreadgroup_barrier(mem_flags::mem_device);\nif (i == 63) y[0] = 2; // here",
        ("y[0] = 2", "y[1] = 2"),
        *(WRITE, 31),
        report={"threadgroup": (1, 0, 0), "other_threadgroup": (0, 0, 0)},
        call={"threadgroup": 32, "init_value": 1, "outputs": [((LANES,), mx.float32)] * 2},
    ),
    Broken(
        *("a simdgroup operation in place of a barrier", Kind.RACE),
        TILE + "tile[i] = i; // there\nsimd_sum(1.0f);\ny[i] = tile[i ^ 1]; // here",
        ("simd_sum(1.0f);", "simdgroup_barrier(mem_flags::mem_threadgroup);"),
        *(READ, 0, 1),
        report={"weak": True},
    ),
    Broken(
        *("a simdgroup barrier for two simdgroups", Kind.RACE),
        TILE + "tile[i] = i; // there\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = tile[i ^ 32]; // here",
        ("simdgroup_barrier", "threadgroup_barrier"),
        *(READ, 0, 32),
        report={"weak": False},
    ),
    Broken(
        *("a simdgroup barrier when another simdgroup has read", Kind.RACE),
        TILE + f"if (i == 0) tile[0] = 1;\n{BARRIER}\nfloat v = tile[0]; // there\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (i == 40) tile[0] = 2; // here\ny[i] = v;",
        ("simdgroup_barrier", "threadgroup_barrier"),
        *(WRITE, 40, 31),
        report={"other_wrote": False, "weak": False},
    ),
    Broken(
        *("a simdgroup barrier of the other memory", Kind.RACE),
        TILE + "tile[i] = i; // there\nsimdgroup_barrier(mem_flags::mem_device);\ny[i] = tile[i ^ 1]; // here",
        ("mem_device", "mem_threadgroup"),
        *(READ, 0, 1),
        report={"weak": True},
    ),
    Broken(
        *("device memory behind a barrier of threadgroup memory", Kind.RACE),
        INDEX + f"y[i] = i; // there\n{BARRIER}\ny1[i] = y[63 - i]; // here",
        ("mem_threadgroup", "mem_device"),
        *(READ, 0, 63),
        report={"buffer": "y"},
        call={"outputs": [((LANES,), mx.float32)] * 2},
    ),
    Broken(
        *("an atomic and a plain access", Kind.RACE),
        INDEX
        + "threadgroup atomic<uint> n;\nif (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);\n"
        + f"{BARRIER}\natomic_fetch_add_explicit(&n, 1u, memory_order_relaxed); // here\n//\n"
        + "y[i] = *(const threadgroup uint*)&n; // there",
        ("//\n", BARRIER + "\n"),
        *(WRITE, 1, 0),
        report={"buffer": "n"},
    ),
    Broken(
        *("a matrix loaded as it was stored", Kind.RACE),
        TILE
        + "simdgroup_float8x8 m(2.0f), t;\nsimdgroup_store(m, tile, 8); // there\n//\n"
        + "simdgroup_load(t, tile, 8, 0, true); // here\nsimdgroup_store(t, y, 8);",
        ("//\n", "simdgroup_barrier(mem_flags::mem_threadgroup);\n"),
        READ,
        report={"weak": True},
        call={"lanes": 32},
    ),
    Broken(
        *("threadgroup memory nobody wrote", Kind.UNINITIALISED),
        TILE + f"if (i != 5) tile[i] = i;\n{BARRIER}\ny[i] = tile[63 - i]; // here",
        ("if (i != 5) ", ""),
        *(READ, 58),
        report={"buffer": "tile", "offset": 20},
    ),
    Broken(
        *("threadgroup memory of the threadgroup before", Kind.UNINITIALISED),
        TILE + f"if (i < 32) tile[i % 32] = i;\n{BARRIER}\ny[i] = tile[i % 32]; // here",
        ("if (i < 32) ", ""),
        *(READ, 0),
        report={"buffer": "tile", "threadgroup": (1, 0, 0)},
        call={"threadgroup": 32},
    ),
    Broken(
        *(
            "an output before it is written",
            Kind.UNINITIALISED,
            INDEX + "y[i] += 1; // here",
            ("y[i] += 1", "y[i] = 1"),
        ),
        *(READ, 0),
        report={"buffer": "y", "offset": 0},
    ),
    Broken(
        *("an atomic addition to nothing", Kind.UNINITIALISED),
        INDEX + "atomic_fetch_add_explicit(&y[i], 1.0f, memory_order_relaxed); // here",
        ("atomic_fetch_add_explicit", "atomic_store_explicit"),
        *(READ, 0),
        call={"made": {"atomic_outputs": True}},
    ),
    Broken(
        *("a variable without a value", Kind.UNINITIALISED, INDEX + "float v;\nif (i > 7)\nv = 1; // here\ny[i] = v;"),
        ("float v;", "float v = 0;"),
        report={"line": 3},
    ),
    Broken(
        *("an element left out", Kind.NEVER_WRITTEN, INDEX + "if (i != 5) y[i] = 1;", ("if (i != 5) ", "")),
        report={"buffer": "y", "offset": 20, "size": 4, "line": 0, "lane": None},
    ),
    Broken(
        *("a sum in one branch", Kind.DIVERGENT_SIMD),
        INDEX + f"float v = i;\nif (i % 4 != 1) v = simd_sum(v); // here\n{BARRIER} // there\ny[i] = v;",
        ("if (i % 4 != 1) ", ""),
        *(Detail.SIMD_ELSEWHERE, 0, 29),
    ),
    Broken(
        *("two sums for one", Kind.DIVERGENT_SIMD),
        INDEX
        + "float v = i;\nif (i % 4 == 1)\n  v = simd_sum(v); // there\nelse\n  v = simd_sum(v); // here\ny[i] = v;",
        ("if (i % 4 == 1)\n  v = simd_sum(v); // there\nelse", ""),
        *(Detail.SIMD_ELSEWHERE, 0, 29),
    ),
    Broken(
        *("a sum after some returned", Kind.DIVERGENT_SIMD),
        INDEX + "y[i] = 0;\nif (i % 32 == 3) return;\ny[i] = simd_sum(1.0f); // here",
        ("if (i % 32 == 3) return;", ""),
        *(Detail.SIMD_RETURNED, 0),
    ),
    Broken(
        *(
            "a value of a lane that is not there",
            Kind.DIVERGENT_SIMD,
            INDEX + "y[i] = simd_broadcast(1.0f, 9); // here",
        ),
        ("1.0f, 9", "1.0f, 7"),
        *(Detail.SIMD_INACTIVE, 32, 41),
        call={"lanes": 40, "outputs": [((40,), mx.float32)]},
    ),
    Broken(
        *("a value of lane 32", Kind.DIVERGENT_SIMD, INDEX + "y[i] = simd_shuffle(1.0f, i % 32 + 1); // here"),
        ("i % 32 + 1", "i % 32"),
        *(Detail.SIMD_INACTIVE, 31),
    ),
    Broken(
        *("a matrix in half a simdgroup", Kind.DIVERGENT_SIMD),
        "simdgroup_float8x8 m(1.0f);\nsimdgroup_store(m, y, 8); // here",
        ("", ""),
        *(Detail.SIMD_MATRIX, 0),
        call={"lanes": 16, "init_value": 0},
    ),
    Broken(
        *("a barrier after some returned", Kind.DIVERGENT_BARRIER),
        INDEX + f"y[i] = 1;\nif (i > 40) return;\n{BARRIER} // here",
        ("if (i > 40) return;", ""),
        *(Detail.BARRIER_RETURNED, 0),
    ),
    Broken(
        *("two barriers for one", Kind.DIVERGENT_BARRIER),
        INDEX + f"y[i] = 1;\nif (i < 40)\n{BARRIER} // here\nelse\n{BARRIER} // there",
        ("if (i < 40)", "if (true)"),
        *(Detail.BARRIER_ELSEWHERE, 0, 40),
    ),
    Broken(
        *("too much threadgroup memory", Kind.THREADGROUP_LIMIT),
        TILE + "threadgroup float more[8192]; // here\nmore[i] = 1;\ny[i] = more[i];",
        ("8192", "8128"),
        report={"buffer": "more", "size": 32768 + 256},
        lane=0,
    ),
    Broken(
        *("a shift by the width", Kind.UNDEFINED, INDEX + "y[i] = 1u << uint(x[i]); // here", ("x[i]", "x[i % 32]")),
        *(Detail.SHIFT, 32),
    ),
    Broken(
        *("a signed overflow", Kind.UNDEFINED, INDEX + "y[i] = int(x[i]) * 100000000; // here", ("x[i]", "x[i % 21]")),
        *(Detail.OVERFLOW, 22),
    ),
    Broken(
        *("a division by zero", Kind.UNDEFINED, INDEX + "y[i] = 7 / int(x[i]); // here", ("x[i]", "x[i] + 1")),
        *(Detail.DIVISION, 0),
        finished=False,
    ),
    Broken(
        *("a remainder by zero", Kind.UNDEFINED, INDEX + "y[i] = 7u % uint(x[i]); // here", ("x[i]", "x[i] + 1")),
        *(Detail.DIVISION, 0),
        finished=False,
    ),
    Broken(
        *("a misaligned vector", Kind.UNDEFINED),
        INDEX + "float4 v = *(const device float4*)(x + i % 8); // here\ny[i] = v.x + v.y + v.z + v.w;",
        ("i % 8", "i % 8 * 4"),
        *(Detail.MISALIGNED, 1),
        finished=False,
    ),
    Broken(
        *("a misaligned pair", Kind.UNDEFINED),
        INDEX + "float2 v = *(const device float2*)(x + i % 8); // here\ny[i] = v.x + v.y;",
        ("i % 8", "i % 8 * 2"),
        *(Detail.MISALIGNED, 1),
        finished=False,
    ),
    Broken(
        *("a float no integer holds", Kind.UNDEFINED, INDEX + "y[i] = int(x[i] * 1e9f); // here", ("1e9f", "1e7f")),
        *(Detail.CAST, 3),
    ),
    Broken(
        *("a write to an input", Kind.WRITE_TO_INPUT),
        INDEX + "((device float*)x)[i] = 1; // here\ny[i] = 1;",
        ("((device float*)x)[i] = 1;", ""),
        *(WRITE, 0),
        report={"buffer": "x"},
    ),
    Broken(
        *("a loop without an end", Kind.ENDLESS),
        INDEX + "for (uint j = 0; j < 10; j += step(x, i))\n  y[i] = x[j]; // here",
        ("step(x, i)", "1"),
        lane=0,
        call={"access_limit": 10000},
        finished=False,
        header="inline uint step(const device float* p, uint i) { return p[i] < 0 ? 1 : 0; }",
    ),
    Broken(
        *("recursion without an end", Kind.CRASH, INDEX + "y[i] = deep(x, int(i)); // there", ("deep", "flat")),
        lane=0,
        report={"file": "case (header)", "line": 2},
        finished=False,
        header="float flat(const device float* p, int i) { return p[i]; }\n"
        "float deep(const device float* p, int i) { volatile float v[64]; v[i] = p[i]; return deep(p, i) + v[i]; }",
    ),
    Broken(
        *("a pointer without its space", Kind.ADDRESS_SPACE, INDEX + "const float* p = x; // here\ny[i] = p[i];"),
        ("const float*", "const device float*"),
    ),
    Broken(
        *("a pointer of another space", Kind.ADDRESS_SPACE),
        TILE + "tile[i] = i;\ndevice float* p = tile; // here\ny[i] = p[i];",
        ("device float* p", "threadgroup float* p"),
    ),
    Broken(
        *("a cast to another space", Kind.ADDRESS_SPACE),
        INDEX + "auto p = (const threadgroup float*)x; // here\ny[i] = p[i];",
        ("threadgroup", "device"),
    ),
    Broken(
        *("an argument of another space", Kind.ADDRESS_SPACE, INDEX + "y[i] = first(x) + i; // here"),
        ("first(x)", "x[0]"),
        header="inline float first(const threadgroup float* p) { return p[0]; }",
    ),
    Broken(
        *("a small input is constant, not device", Kind.ADDRESS_SPACE),
        INDEX + "const device float* p = x1; // here\ny[i] = p[0];",
        ("const device", "const constant"),
        call={"inputs": [X, mx.ones((7,))]},
    ),
]


def line_with(mark: str, source: str) -> int:
    marked = (line.partition("//")[2].split() for line in source.splitlines())
    return next((n for n, words in enumerate(marked, 1) if mark in words), 0)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name.replace(" ", "-"))
def test_a_mistake_is_named_with_its_line_and_lane(case: Broken) -> None:
    call = {"inputs": [X], "order": "ascending", "header": case.header, **case.call}
    _, result = run(case.source, **call)
    assert result.reports, "nothing was found"
    found = next((report for report in result.reports if report.detail is case.detail), result.reports[0])
    want = {"kind": case.kind, "detail": case.detail, "lane": case.lane, "line": line_with("here", case.source)}
    if case.lane is not None:
        want["text"] = case.source.splitlines()[want["line"] - 1].strip() if "line" not in case.report else found.text
    elif case.detail is not Detail.NONE:
        want.pop("lane")
    if case.other is not None:
        want["other_lane"] = case.other
    if line_with("there", case.source) and case.kind is not Kind.CRASH:
        want["other_line"] = line_with("there", case.source)
    want |= case.report
    assert {name: getattr(found, name) for name in want} == want
    assert result.finished is case.finished
    assert {report.kind for report in result.reports} == {case.kind}


@pytest.mark.parametrize(
    "case", [case for case in BROKEN if any(case.repair)], ids=lambda case: case.name.replace(" ", "-")
)
def test_the_repaired_kernel_has_nothing_reported(case: Broken) -> None:
    assert case.repair[0] in case.source
    call = {"inputs": [X], "header": case.header, **case.call}
    clean(case.source.replace(*case.repair), **call)


def test_a_fault_in_fast_mode_ends_the_kernel_and_not_the_process() -> None:
    for source, kind in (
        ("y[i * 100000] = 1; // here", Kind.OUT_OF_BOUNDS),
        ("y[i] = 7 % int(x[i]); // here", Kind.UNDEFINED),
        ("*(device float4*)(y + i % 8) = float4(1); // here", Kind.UNDEFINED),
    ):
        _, result = run(INDEX + source, [X], mode="fast", order="ascending")
        (report,) = result.reports
        assert (report.kind, report.line, result.finished) == (kind, 2, False)
    assert clean(INDEX + "y[i] = i;", mode="fast")[0][5].item() == 5


def test_poison_in_an_output_nobody_wrote_is_not_a_number_in_fast_mode() -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        (y,) = clean(INDEX + "if (i) y[i] = 0;", outputs=[((LANES,), dtype)], mode="fast")
        assert mx.isnan(y).tolist() == [True] + [False] * 63


def test_a_report_reads_as_one_finding() -> None:
    _, result = run(TILE + "tile[i] = i;\ny[i] = tile[i ? i - 1 : 0];", order="ascending")
    found = "race (read), tile at byte 0, 4 bytes, lane 1 of threadgroup (0, 0, 0)"
    other = "lane 0 of threadgroup (0, 0, 0) wrote it at case:3 with no barrier between"
    read = f"case:4: y[i] = tile[i ? i - 1 : 0];\n    {found}, {other}"
    assert [str(report) for report in result.reports] == [read]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (INDEX + "double v = 1;", "case:2:1: error: attempt to use a poisoned identifier"),
        (INDEX + "\ny[i] = nothing;", "case:3:8: error: use of undeclared identifier 'nothing'"),
        ("float4 v = float4(1);\nint4 w = v;", "case:2:6: error: cannot initialize a variable"),
        ("simdgroup_half8x8 m;\nsimdgroup_load(m, x, 8);", "a matrix is loaded from its own type"),
    ],
)
def test_what_is_not_the_language_is_refused_at_its_line(source: str, said: str) -> None:
    with pytest.raises(emulator.CompileError, match=re.escape(said)):
        run(source, [X])


def test_a_threadgroup_has_1024_threads_at_most() -> None:
    with pytest.raises(ValueError, match="a threadgroup of"):
        run("y[0] = 1;", lanes=4096, threadgroup=2048)


# ------------------------------------------------------------------------------------- in place of MLX's own kernels


def doubled(x: mx.array) -> mx.array:
    source = INDEX + "y[i] = 2 * x[i];"
    kernel = mx.fast.metal_kernel(name="doubled", input_names=["x"], output_names=["y"], source=source)
    return kernel(
        inputs=[x],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_install_takes_the_place_of_mlx_and_gives_it_back(mode: compiler.Mode) -> None:
    before = mx.fast.metal_kernel, mx.metal.is_available, mx.metal.is_available()
    with emulator.install(mode) as results:
        assert mx.metal.is_available()
        assert doubled(X).tolist() == [2 * i for i in range(LANES)]
        assert mx.compile(doubled)(X + 1)[0].item() == 2
    assert [result.kernel for result in results] == ["doubled", "doubled"]
    assert results[0].traffic["x"].read == (256 if mode == "check" else 0)
    assert (mx.fast.metal_kernel, mx.metal.is_available, mx.metal.is_available()) == before


def test_install_raises_what_a_kernel_did_wrong() -> None:
    with emulator.install("check"), pytest.raises(emulator.Reported, match="out of bounds"):
        kernel = mx.fast.metal_kernel("case", ["x"], ["y"], INDEX + "y[i] = x[i + 1];")
        call: dict[str, Any] = {"output_shapes": [(LANES,)], "output_dtypes": [mx.float32]}
        kernel(inputs=[X], grid=(LANES, 1, 1), threadgroup=(32, 1, 1), **call)


ALL_ATTRIBUTES = " ".join(f"{name};" for name in emulator.ATTRIBUTES)
GENERATED = {
    "shapes, scalars and a template": (
        "y[0] = T(x[0]) * x1[0] * x2 + x_shape[0] + x1_strides[0] + x_ndim; thread_index_in_simdgroup;",
        [mx.zeros((4, 5), mx.bfloat16), mx.zeros((7,), mx.float16)],
        [1e-5],
        [("T", mx.float32), ("N", -3), ("B", True), ("C", False)],
        [mx.float32],
        False,
    ),
    "every attribute": (ALL_ATTRIBUTES, [mx.zeros((9,), mx.uint8)], [], None, [mx.uint64, mx.bool_], False),
    "atomic outputs": ("", [mx.zeros((8,), mx.int64), mx.array(2.0)], [3, True], None, [mx.int32], True),
    "the smallest types": (
        "",
        [mx.zeros((8, 1), dtype) for dtype in (mx.int8, mx.int16, mx.uint16, mx.uint32)],
        [],
        [("T", mx.bfloat16)],
        [mx.int8, mx.float16],
        False,
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_function_is_the_one_mlx_would_compile(name: str) -> None:
    source, arrays, scalars, template, dtypes, atomic = GENERATED[name]
    made: dict[str, Any] = {
        "name": "case",
        "input_names": ["x", "x1", "x2", "x3"][: len(arrays) + len(scalars)],
        "output_names": ["y", "y1"][: len(dtypes)],
        "source": source,
        "header": "// what stands before it\n",
        "atomic_outputs": atomic,
    }
    call: dict[str, Any] = {"output_shapes": [(1,)] * len(dtypes), "output_dtypes": dtypes, "template": template}
    call |= {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    ours = emulator.metal_kernel(**made).text([*arrays, *scalars], dtypes, template).metal
    assert ours == emulator.mlx_text(made, arrays, scalars, call)


# -------------------------------------------------------------------------------------------------------- the compiler


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler.runtime()
    monkeypatch.setattr(compiler, "folder", lambda: tmp_path)
    ran: list[list[str]] = []
    real = subprocess.run

    def counted(command: list[str], **how: Any) -> Any:
        ran.append(command)
        return real(command, **how)

    monkeypatch.setattr(subprocess, "run", counted)
    for _ in range(2):
        clean(INDEX + "y[i] = 123;")
    assert len(ran) == 3  # compile, link, address spaces
    clean(INDEX + "y[i] = 124;")
    assert len(ran) == 6


def test_a_failed_compile_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler.runtime()
    monkeypatch.setattr(compiler, "folder", lambda: tmp_path)
    with pytest.raises(emulator.CompileError):
        run("y[0] = nothing;")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_compile_one_kernel_at_once(tmp_path: Path) -> None:
    code = "import emulator, mlx.core as mx; k = emulator.metal_kernel('k', [], ['y'], 'y[0] = 5;'); "
    code += "print(k(inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.int32]))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["[array([5], dtype=int32)]"] * 2


@pytest.fixture
def no_ziglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that is the whole PATH."""
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "ziglang" else real(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler.find.cache_clear()
    yield tmp_path
    compiler.find.cache_clear()


def clang(folder: Path, name: str, version: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho 'Debian clang version {version} (x)'\n")
    (folder / name).chmod(0o755)


def test_without_a_compiler_it_says_what_to_install(no_ziglang: Path) -> None:
    clang(no_ziglang, "clang++", "14.0.6")
    assert compiler.find() is None
    assert emulator.unavailable().endswith("pip install ziglang pyelftools")


def test_a_new_enough_clang_of_the_system_is_taken(no_ziglang: Path) -> None:
    clang(no_ziglang, "clang++", "14.0.6")
    clang(no_ziglang, "clang++-20", "20.1.2")
    found = compiler.find()
    assert found is not None and found.kernels == (str(no_ziglang / "clang++-20"),)
    assert emulator.unavailable() == ""
