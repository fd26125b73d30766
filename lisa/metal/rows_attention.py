"""rows_attention: softmax attention of the M = 1..16 newest positions over a long KV cache, causal, grouped queries.

q [B, Hq, M, D] against keys and values [B, Hkv, C, D] of which the first `length` rows hold; query row i sees the keys
before length - M + i + 1. Used by plain and verifying steps of every full-attention layer. Worth it because a step is
bound by reading K and V: all (query row x head of the group) pairs of a KV head go through the matrix units together,
so each key and value is read once per KV head. Row-invariant: keys are split at fixed positions, tiles are a function
of D and dtype alone, and keys a row does not see change none of its bits.

Two launches: one threadgroup a (chunk of keys, KV head) leaves an unnormalised output, its maximum and its sum; a
second merges the chunks. Source of the merge: online softmax, https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from lisa.metal import FLOATS, MOST_ROWS, Case, Fit, Kernels, Source, dtype_name, first_reason
from lisa.metal.tiles import LANES

CHUNK = 512
"""Keys a threadgroup reads. Fixed: where a row's sum is split must depend on nothing but positions."""

SOURCE = Source(
    "rows_attention",
    ("q", "k", "v", "length", "scale"),
    ("partial", "maximum", "total"),
    """
  // TILE keys and values at a time; a simdgroup owns 8 of the M * G query rows, or only helps to load.
  constexpr float LOG2E = 1.44269504f, NEVER = -3.0e38f;  // finite: no arithmetic on infinities
  threadgroup vec<T, 4> keys[TILE * D / 4], values[TILE * D / 4];
  const uint M = q_shape[2], HEADS = k_shape[1], CAPACITY = k_shape[2], G = q_shape[1] / HEADS, ROWS = M * G;
  const uint chunk = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const uint batch = threadgroup_position_in_grid.z, chunks = threadgroups_per_grid.x;
  const uint thread_index = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
  const uint lane = thread_index_in_simdgroup, row = tile_row(lane), column = tile_column(lane);
  const uint mine = simdgroup_index_in_threadgroup * 8 + row;  // query row i, head g of the group: i * G + g
  const bool real = mine < ROWS;
  const uint i = mine / G, query_head = head * G + mine % G;
  const uint begin = chunk * CHUNK, end = min(begin + CHUNK, uint(length));
  const uint sees = real ? min(uint(length) - M + i + 1, end) : 0;

  // Column c of the left operand stands for 4 neighbouring d, used one after another: wide loads on both sides.
  vec<T, 4> queries[D / 32][2];
  const device vec<T, 4>* query = (const device vec<T, 4>*)q + ((batch * HEADS * G + query_head) * M + i) * (D / 4);
  UNROLL for (int b = 0; b < D / 32; ++b)
    UNROLL for (uint e = 0; e < 2; ++e) queries[b][e] = real ? query[8 * b + column + e] : vec<T, 4>(T(0));
  simdgroup_matrix<float, 8, 8> out[D / 8];
  UNROLL for (int b = 0; b < D / 8; ++b) elements(out[b]) = float2(0.0f);
  float highest = NEVER, sum = 0.0f;

  for (uint tile = begin; tile < end; tile += TILE) {
    for (uint n = thread_index; n < TILE * D / 4; n += threads) {
      const uint key = tile + n / (D / 4);
      const ulong at = (ulong(batch * HEADS + head) * CAPACITY + key) * (D / 4) + n % (D / 4);
      keys[n] = key < end ? ((const device vec<T, 4>*)k)[at] : vec<T, 4>(T(0));
      values[n] = key < end ? ((const device vec<T, 4>*)v)[at] : vec<T, 4>(T(0));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_index_in_threadgroup * 8 < ROWS) {
      for (int part = 0; part < TILE / 8; ++part) {
        simdgroup_matrix<float, 8, 8> a, b, scores;
        elements(scores) = float2(0.0f);
        UNROLL for (int d = 0; d < D / 32; ++d) {
          vec<T, 4> pair[2];
          UNROLL for (uint e = 0; e < 2; ++e) pair[e] = keys[(8 * part + column + e) * (D / 4) + 8 * d + row];
          UNROLL for (int j = 0; j < 4; ++j) {
            elements(a) = float2(float(queries[d][0][j]), float(queries[d][1][j]));
            elements(b) = float2(float(pair[0][j]), float(pair[1][j]));
            simdgroup_multiply_accumulate(scores, a, b, scores);
          }
        }
        float s[2];
        bool seen[2];
        UNROLL for (uint e = 0; e < 2; ++e) {
          seen[e] = tile + 8 * part + column + e < sees;
          s[e] = seen[e] ? elements(scores)[e] * scale * LOG2E : NEVER;
        }
        float best = max(s[0], s[1]);
        best = max(best, simd_shuffle_xor(best, 1));
        best = max(best, simd_shuffle_xor(best, 8));
        const float now = max(highest, best), shrink = exp2(highest - now);
        UNROLL for (uint e = 0; e < 2; ++e) s[e] = seen[e] ? exp2(s[e] - now) : 0.0f;
        float added = s[0] + s[1];
        added += simd_shuffle_xor(added, 1);
        added += simd_shuffle_xor(added, 8);
        highest = now;
        sum = fma(sum, shrink, added);
        elements(a) = float2(s[0], s[1]);
        UNROLL for (int d = 0; d < D / 16; ++d) {
          const vec<T, 4> four = values[(8 * part + row) * (D / 4) + 4 * d + column / 2];
          UNROLL for (int p = 0; p < 2; ++p) {
            elements(b) = float2(float(four[2 * p]), float(four[2 * p + 1]));
            elements(out[2 * d + p]) = elements(out[2 * d + p]) * shrink;
            simdgroup_multiply_accumulate(out[2 * d + p], a, b, out[2 * d + p]);
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (real) {
    const uint at = ((batch * chunks + chunk) * HEADS + head) * ROWS + mine;
    UNROLL for (int d = 0; d < D / 16; ++d)
      ((device float4*)partial)[at * (D / 4) + 4 * d + column / 2] =
          float4(elements(out[2 * d]), elements(out[2 * d + 1]));
    if (column == 0) {
      maximum[at] = highest;
      total[at] = sum;
    }
  }
""",
    LANES,
)

MERGE = Source(
    "rows_attention_merge",
    ("partial", "maximum", "total", "groups"),
    ("out",),
    """
  // One threadgroup a (query row, KV head), a thread an element; groups = Hq / Hkv.
  const uint CHUNKS = partial_shape[1], HEADS = partial_shape[2], ROWS = partial_shape[3], D = partial_shape[4];
  const uint d = thread_position_in_grid.x, row = thread_position_in_grid.y;
  const uint head = thread_position_in_grid.z % HEADS, batch = thread_position_in_grid.z / HEADS;
  float highest = -3.0e38f, sum = 0.0f, value = 0.0f;
  for (uint c = 0; c < CHUNKS; ++c)
    highest = max(highest, maximum[((batch * CHUNKS + c) * HEADS + head) * ROWS + row]);
  for (uint c = 0; c < CHUNKS; ++c) {
    const uint at = ((batch * CHUNKS + c) * HEADS + head) * ROWS + row;
    const float weight = exp2(maximum[at] - highest);
    if (weight > 0.0f) {
      sum = fma(weight, total[at], sum);
      value = fma(weight, partial[at * D + d], value);
    }
  }
  const uint G = groups, M = ROWS / G;
  out[((batch * HEADS * G + head * G + row % G) * M + row / G) * D + d] = T(value / sum);
""",
)


def reference(q: mx.array, k: mx.array, v: mx.array, length: int, *, scale: float) -> mx.array:
    """The same in float32 throughout, cast to q's dtype at the end."""
    rows, groups = q.shape[2], q.shape[1] // k.shape[1]
    keys, values = (mx.repeat(a[:, :, :length].astype(mx.float32), groups, axis=1) for a in (k, v))
    scores = scale * (q.astype(mx.float32) @ keys.swapaxes(-1, -2))
    seen = mx.arange(length)[None] <= mx.arange(length - rows, length)[:, None]
    weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
    return (weights @ values).astype(q.dtype)


def fits(q: mx.array, k: mx.array, v: mx.array, length: int, *, scale: float) -> Fit:
    heads, rows, d = q.shape[1], q.shape[2], q.shape[3]
    return first_reason(
        (q.dtype in FLOATS, f"queries in {dtype_name(q.dtype)}"),
        (q.dtype == k.dtype == v.dtype, "keys or values in another dtype than the queries"),
        (d in (64, 96, 128, 160, 192, 256), f"heads of {d} numbers"),
        (v.shape == k.shape, "values of another shape than the keys"),
        (heads % k.shape[1] == 0, "query heads that do not divide among the KV heads"),
        (1 <= rows <= MOST_ROWS, f"{rows} rows, more than {MOST_ROWS}"),
        (rows * heads // k.shape[1] <= 128, "more than 128 query rows to a KV head"),
        (rows <= length <= k.shape[2], "a length the cache does not hold"),
    )


def rows_attention(q: mx.array, k: mx.array, v: mx.array, length: int, *, scale: float, kernels: Kernels) -> mx.array:
    """q [B, Hq, M, D]; k, v [B, Hkv, C, D], the cache's whole buffers (a slice would be copied), `length` <= C rows of
    which hold, the M newest included -> [B, Hq, M, D]."""
    if not (kernels.may_run("rows_attention") and fits(q, k, v, length, scale=scale)):
        return reference(q, k, v, length, scale=scale)
    batch, heads, rows, d = q.shape
    groups, chunks = heads // k.shape[1], -(-length // CHUNK)
    pairs = rows * groups
    # A few simdgroups more than rows need help to load the keys.
    simdgroups = max(4, -(-pairs // 8))
    shape = (batch, chunks, k.shape[1], pairs)
    partials = kernels(SOURCE)(
        inputs=[q, k, v, length, scale],
        template=[("T", q.dtype), ("D", d), ("TILE", tile_keys(d, q.dtype)), ("CHUNK", CHUNK)],
        grid=(chunks * 32 * simdgroups, k.shape[1], batch),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(*shape, d), shape, shape],
        output_dtypes=[mx.float32] * 3,
    )
    (out,) = kernels(MERGE)(
        inputs=[*partials, groups],
        template=[("T", q.dtype)],
        grid=(d, pairs, batch * k.shape[1]),
        threadgroup=(d, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )
    return out


def tile_keys(d: int, dtype: mx.Dtype) -> int:
    """Keys held in threadgroup memory at once: 16 KiB of keys and values at most."""
    return max(8, min(32, 8192 // (d * dtype.size) // 8 * 8))


ONCE = ("k", "v")
"""Buffers every byte of which is read exactly once, up to `length`."""


def example(
    rows: int, length: int, heads: int, kv_heads: int, d: int, dtype: mx.Dtype, spare: int = 3
) -> dict[str, Any]:
    q, k, v = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate(((1, heads, rows, d), *((1, kv_heads, length + spare, d),) * 2))
    )
    # What lies past `length` was never written: it must not be used.
    unused = mx.arange(length + spare)[:, None] >= length
    k, v = (mx.where(unused, mx.array(mx.nan, dtype), a) for a in (k, v))
    return {"q": q, "k": k, "v": v, "length": length, "scale": 1 / math.sqrt(d)}


def _case(rows: int, length: int, heads: int, kv: int, d: int, dtype: mx.Dtype, long: bool = False) -> Case:
    name = f"M{rows} L{length} heads {heads}/{kv} D{d} {dtype_name(dtype)}"
    return Case(name, rows, lambda: example(rows, length, heads, kv, d, dtype), long=long)


CASES = (
    *(_case(rows, 70, 4, 2, 64, mx.float32) for rows in (1, 5, 16)),
    _case(9, 61, 6, 1, 128, mx.float16),
    _case(7, 39, 3, 3, 64, mx.bfloat16),
    _case(2, 530, 1, 1, 160, mx.float16),
    _case(16, 24, 6, 1, 256, mx.bfloat16),
    *(_case(rows, 100, 8, 2, 64, dtype, long=True) for rows in range(1, 17) for dtype in FLOATS),
    *(_case(3, 1100, 4, 2, d, dtype, long=True) for d in (96, 128, 160, 192, 256) for dtype in FLOATS),
    _case(16, 45, 16, 2, 128, mx.float16, long=True),
)
