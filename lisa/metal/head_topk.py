"""head_topk: the K largest logits of M = 1..16 rows over a packed head, without ever writing a row of logits.

x[M, H] @ dequantised(W)[V, H]^T at 4 or 8 bits, the K best taken inside, an optional packed mask of allowed tokens
(a grammar) applied before. Used by drafters for their candidates and, with K = 1 (head_argmax), by a greedy verify.
Worth it because stock writes and reads back 16 x 248320 logits and then sorts them; here the head is read once and
what leaves is K numbers for a thousand vocabulary rows. Row-invariant: a logit is summed in one order whatever M is.

Among equal logits the smaller id is first. Two launches: the K best of each span of the vocabulary, then of all spans.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.metal import FLOATS, Case, Fit, Kernels, Packed, Source, dtype_name, first_reason, rows_qmm
from lisa.metal.tiles import LANES, PACKED

MOST = 32
"""The largest K: a lane holds one of them."""

RANKING = """
constant constexpr float NEVER = -3.0e38f;
constant constexpr uint NOBODY = 0xffffffff;
METAL_FUNC bool precedes(float a, uint id_a, float b, uint id_b) { return a > b || (a == b && id_a < id_b); }

// The K best of a row so far, lane i holding the i-th. The simdgroup calls `offer` as one, each lane with its own.
template <int K>
struct Ranking {
  float value;
  uint id;

  void clear() {
    value = NEVER;
    id = NOBODY;
  }
  void offer(float offered, uint offered_id, uint lane) {
    for (;;) {
      const float top = simd_max(offered);
      const uint top_id = simd_min(offered == top ? offered_id : NOBODY);
      if (!precedes(top, top_id, simd_broadcast(value, K - 1), simd_broadcast(id, K - 1))) return;
      if (offered_id == top_id) {
        offered = NEVER;
        offered_id = NOBODY;
      }
      const float left = simd_shuffle_up(value, 1);
      const uint left_id = simd_shuffle_up(id, 1);
      if (!precedes(value, id, top, top_id)) {
        const bool here = lane == 0 || precedes(left, left_id, top, top_id);
        value = here ? top : left;
        id = here ? top_id : left_id;
      }
    }
  }
};
"""

SOURCE = Source(
    "head_topk",
    ("x", "w", "scales", "biases", "mask", "vocab"),
    ("values", "ids"),
    """
  // Each simdgroup sums up a tile of the span on its own; then simdgroup s ranks rows s and s + 8 of all 8 tiles.
  threadgroup float logits[8][64 * NT * MT];
  const uint M = x_shape[0], K = x_shape[1], N = vocab, MASK_ROWS = mask_shape[0], MASK_WORDS = mask_shape[1];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint span = threadgroup_position_in_grid.x;
  Ranking<TOP> best[MT];
  for (int j = 0; j < MT; ++j) best[j].clear();
  for (uint begin = span * SPAN; begin < min((span + 1) * SPAN, N); begin += 64 * NT) {
    Tiles<NT, MT> acc;
    acc.clear();
    multiply_packed<T, BITS, GROUP>(acc, w, scales, biases, x, begin + simdgroup * 8 * NT, N, M, K, 0, 1, lane);
    acc.put(logits[simdgroup], lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < MT; ++j) {
      const uint m = simdgroup + 8 * j;
      if (m < M) {
        for (uint tile = 0; tile < 8; ++tile) {
          const uint id = begin + tile * 8 * NT + lane;
          bool allowed = lane < 8 * NT && id < N;
          if (MASKED && allowed) allowed = mask[(m % MASK_ROWS) * MASK_WORDS + id / 32] >> (id % 32) & 1;
          best[j].offer(allowed ? logits[tile][m * 8 * NT + lane] : NEVER, allowed ? id : NOBODY, lane);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int j = 0; j < MT; ++j) {
    const uint m = simdgroup + 8 * j;
    if (m < M && lane < TOP) {
      values[(span * M + m) * TOP + lane] = best[j].value;
      ids[(span * M + m) * TOP + lane] = best[j].id;
    }
  }
""",
    LANES + PACKED + RANKING,
)

MERGE = Source(
    "head_topk_merge",
    ("values", "ids"),
    ("top_values", "top_ids"),
    """
  const uint SPANS = values_shape[0], M = values_shape[1];
  const uint m = threadgroup_position_in_grid.x, lane = thread_index_in_simdgroup;
  Ranking<TOP> best;
  best.clear();
  for (uint i = 0; i < SPANS * TOP; i += 32) {
    const uint span = (i + lane) / TOP, at = (span * M + m) * TOP + (i + lane) % TOP;
    const bool real = span < SPANS;
    best.offer(real ? values[at] : NEVER, real ? ids[at] : NOBODY, lane);
  }
  if (lane < TOP) {
    top_values[m * TOP + lane] = best.id == NOBODY ? -INFINITY : best.value;
    top_ids[m * TOP + lane] = int(best.id);
  }
""",
    RANKING,
)


def reference(
    x: mx.array, head: Packed, *, k: int, vocab: int, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The same in float32 throughout."""
    logits = rows_qmm.reference(x.astype(mx.float32), head[:vocab])
    if mask is not None:
        ids = mx.arange(vocab)
        logits = mx.where((mask[:, ids // 32] >> (ids % 32).astype(mx.uint32)) & 1, logits, -mx.inf)
    best = mx.argsort(-logits, axis=-1)[:, :k].astype(mx.int32)
    values = mx.take_along_axis(logits, best, axis=-1)
    return mx.where(values == -mx.inf, -1, best), values


def fits(x: mx.array, head: Packed, *, k: int, vocab: int, mask: mx.array | None = None) -> Fit:
    return rows_qmm.fits(x, head) and first_reason(
        (x.ndim == 2, "more than one batch of rows"),
        (1 <= k <= min(MOST, vocab), f"the best {k} of {vocab}, more than {MOST} or all"),
    )


def head_topk(
    x: mx.array, head: Packed, *, k: int, vocab: int, mask: mx.array | None = None, kernels: Kernels
) -> tuple[mx.array, mx.array]:
    """Normed hiddens x [M, H], head [>= vocab, H]; tokens from `vocab` on do not exist. `mask` uint32 [M or 1,
    ceil(vocab / 32)], bit i of word j set: token 32 j + i is allowed.

    Returns ids int32 [M, K] and their logits float32 [M, K], best first; -1 and -inf where fewer are allowed.
    """
    if not (kernels.may_run("head_topk") and fits(x, head, k=k, vocab=vocab, mask=mask)):
        return reference(x, head, k=k, vocab=vocab, mask=mask)
    return best_of(x, head, k, vocab, mask, kernels)


def best_of(
    x: mx.array, head: Packed, k: int, vocab: int, mask: mx.array | None, kernels: Kernels
) -> tuple[mx.array, mx.array]:
    """The two launches."""
    rows, reach = x.shape[0], span(vocab)
    spans = -(-vocab // reach)
    allowed = mx.zeros((1, 1), mx.uint32) if mask is None else mask
    partials = kernels(SOURCE)(
        inputs=[x, head.w, head.scales, head.biases, allowed, vocab],
        template=[
            *(("T", x.dtype), ("BITS", head.bits), ("GROUP", head.group_size)),
            *(("TOP", k), ("MASKED", mask is not None)),
            *(("NT", rows_qmm.tiles_at_once(head.bits)), ("MT", (rows + 7) // 8), ("SPAN", reach)),
        ],
        grid=(spans * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(spans, rows, k)] * 2,
        output_dtypes=[mx.float32, mx.uint32],
    )
    values, ids = kernels(MERGE)(
        inputs=partials,
        template=[("TOP", k)],
        grid=(rows * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, k)] * 2,
        output_dtypes=[mx.float32, mx.int32],
    )
    return ids, values


def span(vocab: int) -> int:
    """Vocabulary rows a threadgroup ranks: few lists to merge from a large head, many threadgroups for a small one."""
    return 1024 if vocab >= 65536 else 256


ONCE = ("w", "scales", "biases")
"""Buffers every byte of which is read exactly once (a head's padding rows are not read)."""


def example(
    rows: int, hidden: int, vocab: int, bits: int, group_size: int, dtype: mx.Dtype, masked: bool = False, pad: int = 0
) -> dict[str, Any]:
    """Every row of the head stands in it twice, so that there are ties; `pad` rows of it are no tokens. Masked, half of
    the tokens are allowed, and in the last row none."""
    made = rows_qmm.example(rows, hidden, vocab + pad, bits, group_size, dtype)
    weight = made["weight"].dequantized()[mx.arange(vocab + pad) % (vocab // 2)]
    words = mx.random.randint(0, 1 << 16, (rows, -(-vocab // 32)), key=mx.random.key(7)).astype(mx.uint32)
    words[-1] = 0
    head = Packed.quantized(weight.astype(dtype), group_size, bits)
    return {"x": made["x"], "head": head, "vocab": vocab, "mask": words if masked else None}


def _case(
    rows: int,
    hidden: int,
    vocab: int,
    bits: int,
    group: int,
    dtype: mx.Dtype,
    k: int,
    masked: bool = False,
    pad: int = 0,
    long: bool = False,
) -> Case:
    name = f"M{rows} H{hidden} V{vocab} {bits}bit g{group} K{k}{' masked' * masked} {dtype_name(dtype)}"

    def arguments() -> dict[str, Any]:
        return example(rows, hidden, vocab, bits, group, dtype, masked, pad) | {"k": k}

    return Case(name, rows, arguments, bits, long)


CASES = (
    _case(1, 128, 300, 4, 64, mx.float32, k=16, pad=20),
    _case(16, 128, 290, 4, 32, mx.float32, k=5, masked=True),
    _case(9, 64, 46, 8, 64, mx.float16, k=32),
    _case(3, 128, 520, 8, 128, mx.bfloat16, k=20, masked=True),
    *(
        _case(rows, 192, 600, bits, 64, dtype, k=16, masked=rows % 2 == 0, pad=8, long=True)
        for rows in range(1, 17)
        for bits in (4, 8)
        for dtype in FLOATS
    ),
)
