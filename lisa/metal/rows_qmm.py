"""rows_qmm: y[M, N] = x[M, K] @ dequantised(W)[N, K]^T for the M = 1..16 rows of a plain or a verifying step.

Used for every quantised projection of target and drafter: affine 4 and 8 bit, groups of 32, 64 or 128, activations
float32, float16 or bfloat16. Worth it because the step is bound by reading W: here each packed word is read once for
all rows, goes straight to registers, and no barrier stands in the loop over K. Row-invariant: a row's sum runs over the
same k in the same order whatever M is, so row i of an M-row call has the bits of its own 1-row call.

Format: MLX affine quantisation, w = q * scale + bias per group (mx.quantize).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.metal import FLOATS, MOST_ROWS, Case, Fit, Kernels, Packed, Source, dtype_name, first_reason
from lisa.metal.tiles import LANES, PACKED

SOURCE = Source(
    "rows_qmm",
    ("x", "w", "scales", "biases"),
    ("y",),
    """
  threadgroup float partial[SPLIT * 64 * NT * MT];
  const uint M = x_shape[0], K = x_shape[1], N = w_shape[0];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint n0 = threadgroup_position_in_grid.x * 8 * NT;
  Tiles<NT, MT> acc;
  acc.clear();
  multiply_packed<T, BITS, GROUP>(acc, w, scales, biases, x, n0, N, M, K, simdgroup, SPLIT, lane);
  acc.put(partial + simdgroup * 64 * NT * MT, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_position_in_threadgroup.x; i < 64 * NT * MT; i += 32 * SPLIT) {
    const uint m = i / (8 * NT), n = i % (8 * NT);
    float sum = 0.0f;
    for (uint s = 0; s < SPLIT; ++s) sum += partial[s * 64 * NT * MT + i];
    if (m < M && n0 + n < N) y[m * N + n0 + n] = T(sum);
  }
""",
    LANES + PACKED,
)


def reference(x: mx.array, weight: Packed) -> mx.array:
    """The same in float32 throughout, cast to x's dtype at the end."""
    return (x.astype(mx.float32) @ weight.dequantized().T).astype(x.dtype)


def fits(x: mx.array, weight: Packed) -> Fit:
    rows = x.size // x.shape[-1]
    return first_reason(
        (weight.mode == "affine", f"quantised in mode {weight.mode}, not affine"),
        (weight.bits in (4, 8), f"{weight.bits} bits, not 4 or 8"),
        (weight.group_size in (32, 64, 128), f"groups of {weight.group_size}, not 32, 64 or 128"),
        (x.dtype in FLOATS, f"activations in {dtype_name(x.dtype)}"),
        (1 <= rows <= MOST_ROWS, f"{rows} rows, more than {MOST_ROWS}"),
        # MLX hands arrays of fewer than 8 numbers over in another address space.
        (weight.scales.size >= 8, "a weight of fewer than 8 groups"),
    )


def rows_qmm(x: mx.array, weight: Packed, *, kernels: Kernels) -> mx.array:
    """x [..., K], at most 16 rows in all, weight [N, K] -> [..., N]."""
    if not (kernels.may_run("rows_qmm") and fits(x, weight)):
        return reference(x, weight)
    k, n = x.shape[-1], weight.w.shape[0]
    rows = x.reshape(-1, k)
    tiles, split = tiles_at_once(weight.bits), simdgroups(k)
    (y,) = kernels(SOURCE)(
        inputs=[rows, weight.w, weight.scales, weight.biases],
        template=[
            *(("T", x.dtype), ("BITS", weight.bits), ("GROUP", weight.group_size)),
            *(("NT", tiles), ("MT", (rows.shape[0] + 7) // 8), ("SPLIT", split)),
        ],
        grid=(-(-n // (8 * tiles)) * 32 * split, 1, 1),
        threadgroup=(32 * split, 1, 1),
        output_shapes=[(rows.shape[0], n)],
        output_dtypes=[x.dtype],
    )
    return y.reshape(*x.shape[:-1], n)


def tiles_at_once(bits: int) -> int:
    """Tiles of 8 weight rows a simdgroup holds: each activation it loads serves all of them."""
    return 16 // bits


def simdgroups(k: int) -> int:
    """Simdgroups that share the k of a tile, by K alone: the order of a sum must not depend on the rows."""
    return min(8, -(-k // 128))


ONCE = ("w", "scales", "biases")
"""Buffers every byte of which is read exactly once."""


def example(rows: int, k: int, n: int, bits: int, group_size: int, dtype: mx.Dtype) -> dict[str, Any]:
    x, w = (mx.random.normal(s, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(((rows, k), (n, k))))
    return {"x": x, "weight": Packed.quantized(w, group_size, bits)}


def _case(rows: int, k: int, n: int, bits: int, group: int, dtype: mx.Dtype, long: bool = False) -> Case:
    name = f"M{rows} K{k} N{n} {bits}bit g{group} {dtype_name(dtype)}"
    return Case(name, rows, lambda: example(rows, k, n, bits, group, dtype), bits, long)


CASES = (
    *(_case(rows, 320, 37, bits, 64, mx.float32) for bits in (4, 8) for rows in (1, 5, 16)),
    *(_case(9, 288, 24, bits, 32, dtype) for bits, dtype in ((4, mx.float16), (8, mx.bfloat16))),
    *(_case(8, 256, 40, bits, 128, dtype) for bits, dtype in ((4, mx.bfloat16), (8, mx.float16))),
    _case(3, 1536, 16, 4, 64, mx.float16),
    *(
        _case(rows, k, n, bits, group, dtype, long=True)
        for rows in range(1, 17)
        for bits in (4, 8)
        for group in (32, 64, 128)
        for dtype in FLOATS
        for k, n in ((384, 29),)
    ),
)
