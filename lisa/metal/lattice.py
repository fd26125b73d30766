"""lattice: the scores of every (predecessor, candidate) pair of neighbouring slots, and the path through them.

DSpine's last step: S[i, k, j] = <hidden of slot i had its predecessor been candidate k, head row of candidate j>, then
left to right the best j after the k chosen before, of S / temperature + noise where the draft is drawn. Used once a
round of a DSpine drafter. Worth it for its latency: stock, the walk is four dependent launches a slot; here all scores
are one launch and the whole walk is another, in one simdgroup. Everything is float32; among equals the first is taken.
Not row-invariant in the sense of the others: a slot's path depends on the slots before it, its scores on nothing else.

Source: "Draft in Parallel, Condition Through Depth", https://arxiv.org/abs/2609.36173.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.metal import MOST_ROWS, Case, Fit, Kernels, Source, first_reason
from lisa.metal.tiles import DENSE, LANES

SOURCE = Source(
    "lattice_scores",
    ("refined", "heads"),
    ("table",),
    """
  // One threadgroup a slot; simdgroups share H.
  threadgroup float partial[SPLIT * 64 * NT * NT];
  const uint K = refined_shape[1], H = refined_shape[2];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint slot = threadgroup_position_in_grid.x;
  const Rows<float> candidates = {heads + slot * K * H, H}, hiddens = {refined + slot * K * H, H};
  Tiles<NT, NT> acc;
  acc.clear();
  multiply_dense(acc, candidates, hiddens, 0, K, K, simdgroup, SPLIT, lane);
  acc.put(partial + simdgroup * 64 * NT * NT, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_position_in_threadgroup.x; i < 64 * NT * NT; i += 32 * SPLIT) {
    const uint k = i / (8 * NT), j = i % (8 * NT);
    float sum = 0.0f;
    for (uint s = 0; s < SPLIT; ++s) sum += partial[s * 64 * NT * NT + i];
    if (k < K && j < K) table[(slot * K + k) * K + j] = sum;
  }
""",
    LANES + DENSE,
)

WALK = Source(
    "lattice_walk",
    ("table", "noise", "temperature"),
    ("columns", "scores"),
    """
  // Fetched before the walk, so that no step of it waits for memory.
  threadgroup float held[MOST_SLOTS * MOST_K * MOST_K];
  const uint SLOTS = table_shape[0], K = table_shape[1], lane = thread_index_in_simdgroup;
  for (uint i = lane; i < SLOTS * K * K; i += 32) held[i] = table[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint chosen = 0;
  for (uint slot = 0; slot < SLOTS; ++slot) {
    const float score = lane < K ? held[(slot * K + chosen) * K + lane] : -3.0e38f;
    float value = score;
    if (DRAWN && lane < K) value = score / temperature + noise[slot * K + lane];
    const float best = simd_max(value);
    chosen = simd_min(value == best ? lane : 32u);
    if (lane < K) scores[slot * K + lane] = score;
    if (lane == 0) columns[slot] = int(chosen);
  }
""",
)

SPLIT = 8
"""Simdgroups that share the H of a slot."""


def reference(
    refined: mx.array, heads: mx.array, noise: mx.array | None = None, temperature: float = 0.0
) -> tuple[mx.array, mx.array]:
    """The same as MLX ops."""
    table = refined @ heads.swapaxes(1, 2)
    column, columns, rows = mx.array(0), [], []
    for slot in range(table.shape[0]):
        rows.append(table[slot, column])
        column = mx.argmax(rows[-1] if noise is None else rows[-1] / temperature + noise[slot])
        columns.append(column)
    return mx.stack(columns).astype(mx.int32), mx.stack(rows)


def fits(refined: mx.array, heads: mx.array, noise: mx.array | None = None, temperature: float = 0.0) -> Fit:
    slots, k, hidden = refined.shape
    return first_reason(
        (refined.dtype == heads.dtype == mx.float32, "scores in another dtype than float32"),
        (1 <= slots < MOST_ROWS, f"{slots} slots, more than {MOST_ROWS - 1}"),
        (1 <= k <= 16, f"{k} candidates a slot, more than 16"),
        (hidden % 32 == 0, f"hiddens of {hidden} numbers"),
    )


def lattice(
    refined: mx.array, heads: mx.array, noise: mx.array | None = None, temperature: float = 0.0, *, kernels: Kernels
) -> tuple[mx.array, mx.array]:
    """refined float32 [w, K, H]: normed hiddens of each slot for each predecessor; heads float32 [w, K, H]: head rows
    of its candidates; `noise` float32 [w, K] or None (greedy). The first slot follows the anchor: its row 0 is taken.

    Returns the chosen columns int32 [w] and the scores each was chosen from, float32 [w, K], noise not included.
    """
    if not (kernels.may_run("lattice") and fits(refined, heads, noise, temperature)):
        return reference(refined, heads, noise, temperature)
    slots, k, _ = refined.shape
    (table,) = kernels(SOURCE)(
        inputs=[refined, heads],
        template=[("NT", (k + 7) // 8), ("SPLIT", SPLIT)],
        grid=(slots * 32 * SPLIT, 1, 1),
        threadgroup=(32 * SPLIT, 1, 1),
        output_shapes=[(slots, k, k)],
        output_dtypes=[mx.float32],
    )
    columns, scores = kernels(WALK)(
        inputs=[table, mx.zeros((1, 1)) if noise is None else noise, float(temperature)],
        template=[("DRAWN", noise is not None), ("MOST_SLOTS", MOST_ROWS - 1), ("MOST_K", 16)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(slots,), (slots, k)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return columns, scores


ONCE = ("refined", "heads")
"""Buffers every byte of which is read exactly once."""


def example(slots: int, k: int, hidden: int, temperature: float) -> dict[str, Any]:
    refined, heads = (mx.random.normal((slots, k, hidden), key=mx.random.key(i)) for i in range(2))
    noise = mx.random.gumbel((slots, k), key=mx.random.key(2)) if temperature else None
    return {"refined": refined, "heads": heads / hidden**0.5, "noise": noise, "temperature": temperature}


def _case(slots: int, k: int, hidden: int, temperature: float = 0.0, long: bool = False) -> Case:
    name = f"w{slots} K{k} H{hidden} temperature {temperature}"
    return Case(name, slots, lambda: example(slots, k, hidden, temperature), long=long)


CASES = (
    _case(15, 16, 96),
    _case(7, 5, 288, 3.0),
    _case(1, 8, 64),
    *(_case(slots, 16, 160, t, long=True) for slots in range(1, 16) for t in (0.0, 1.0)),
)
