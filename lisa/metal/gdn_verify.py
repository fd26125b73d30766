"""gdn_verify: the gated delta recurrence over T = 1..16 new rows, from a commit that was left pending.

Used by every Gated DeltaNet layer of a plain or verifying step. A round cannot know how many of its rows will be kept,
so it stores the state from BEFORE them; the next round is told the number n kept, replays those n of the previous
rows in registers, stores the state reached (the committed one), and goes on through its own rows. Worth it because the
state is what a step moves: it is read once and written once whatever n is, where storing every row's state, or running
the kept rows again in a launch of their own, moves it several times. Row-invariant: a row's arithmetic does not depend
on the rows beside it, and a replayed row does what it did as a new one.

A simdgroup owns 8 value rows of one head, 4 lanes a row. Source of the recurrence: Gated Delta Networks,
https://arxiv.org/abs/2412.06464: S = g S; S += beta (v - S k) k^T; y = S q.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.metal import FLOATS, MOST_ROWS, Case, Fit, Kernels, Source, dtype_name, first_reason
from lisa.metal.tiles import UNROLL

Steps = tuple[mx.array, mx.array, mx.array, mx.array]
"""What a replay needs of earlier rows: k [B, P, Hk, Dk], v [B, P, Hv, Dv], g and beta [B, P, Hv]."""

HEADER = """
// A lane's share of one value row of the state: numbers 16 i + 4 quarter .. + 3 of its Dk.
template <int DK>
struct StateRow {
  float4 s[DK / 16];

  template <typename K>
  void step(const threadgroup K* k, uint quarter, float v, float g, float beta) {
    float remembered = 0.0f;
    UNROLL for (int i = 0; i < DK / 16; ++i)
      UNROLL for (int j = 0; j < 4; ++j) {
        s[i][j] *= g;
        remembered = fma(s[i][j], float(k[16 * i + 4 * quarter + j]), remembered);
      }
    remembered += simd_shuffle_xor(remembered, 1);
    remembered += simd_shuffle_xor(remembered, 2);
    const float change = (v - remembered) * beta;
    UNROLL for (int i = 0; i < DK / 16; ++i)
      UNROLL for (int j = 0; j < 4; ++j) s[i][j] = fma(float(k[16 * i + 4 * quarter + j]), change, s[i][j]);
  }

  template <typename Q>
  float read(const threadgroup Q* q, uint quarter) {
    float y = 0.0f;
    UNROLL for (int i = 0; i < DK / 16; ++i)
      UNROLL for (int j = 0; j < 4; ++j) y = fma(s[i][j], float(q[16 * i + 4 * quarter + j]), y);
    y += simd_shuffle_xor(y, 1);
    y += simd_shuffle_xor(y, 2);
    return y;
  }
};
"""

SOURCE = Source(
    "gdn_verify",
    ("q", "k", "v", "g", "beta", "old_k", "old_v", "old_g", "old_beta", "kept", "state"),
    ("y", "committed"),
    """
  // Keys of the replayed rows, then of the new ones: read once for all value rows of the threadgroup.
  threadgroup T keys[2 * ROOM * DK], queries[ROOM * DK];
  const uint R = k_shape[1], P = old_k_shape[1];
  const uint HK = k_shape[2], HV = v_shape[2], DV = v_shape[3];
  const uint head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
  const uint key_head = head / (HV / HK);
  const uint thread_index = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
  const uint quarter = thread_index % 4, row = thread_position_in_grid.x / 4;
  const uint replayed = min(uint(kept[batch]), P);
  for (uint i = thread_index; i < replayed * DK; i += threads)
    keys[i] = old_k[((batch * P + i / DK) * HK + key_head) * DK + i % DK];
  for (uint i = thread_index; i < R * DK; i += threads) {
    const uint at = ((batch * R + i / DK) * HK + key_head) * DK + i % DK;
    keys[replayed * DK + i] = k[at];
    queries[i] = q[at];
  }
  StateRow<DK> mine;
  const uint base = ((batch * HV + head) * DV + row) * (DK / 4) + quarter;
  UNROLL for (int i = 0; i < DK / 16; ++i) mine.s[i] = ((const device float4*)state)[base + 4 * i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint t = 0; t < replayed; ++t) {
    const uint at = (batch * P + t) * HV + head;
    mine.step(keys + t * DK, quarter, float(old_v[at * DV + row]), float(old_g[at]), float(old_beta[at]));
  }
  UNROLL for (int i = 0; i < DK / 16; ++i) ((device float4*)committed)[base + 4 * i] = mine.s[i];
  for (uint t = 0; t < R; ++t) {
    const uint at = (batch * R + t) * HV + head;
    mine.step(keys + (replayed + t) * DK, quarter, float(v[at * DV + row]), float(g[at]), float(beta[at]));
    const float read = mine.read(queries + t * DK, quarter);
    if (quarter == 0) y[at * DV + row] = T(read);
  }
""",
    UNROLL + HEADER,
)


def reference(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, old: Steps, kept: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The same in float32 throughout, y cast to v's dtype at the end."""
    repeats = v.shape[2] // k.shape[2]

    def wide(x: mx.array) -> mx.array:
        return mx.repeat(x.astype(mx.float32), repeats, axis=2)

    def step(s: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> mx.array:
        s = s * g[..., None, None]
        change = (v - (s * k[..., None, :]).sum(-1)) * beta[..., None]
        return s + change[..., None] * k[..., None, :]

    old_k, old_v, old_g, old_beta = wide(old[0]), *(x.astype(mx.float32) for x in old[1:])
    for t in range(old_k.shape[1]):
        after = step(state, old_k[:, t], old_v[:, t], old_g[:, t], old_beta[:, t])
        state = mx.where((t < kept)[:, None, None, None], after, state)
    s, rows, queries, keys = state, [], wide(q), wide(k)
    values, g, beta = (x.astype(mx.float32) for x in (v, g, beta))
    for t in range(q.shape[1]):
        s = step(s, keys[:, t], values[:, t], g[:, t], beta[:, t])
        rows.append((s * queries[:, t][..., None, :]).sum(-1))
    return mx.stack(rows, axis=1).astype(v.dtype), state


def fits(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, old: Steps, kept: mx.array, state: mx.array
) -> Fit:
    rows, replayed, dk, dv = q.shape[1], old[0].shape[1], q.shape[3], v.shape[3]
    memory = 3 * room(rows, replayed) * dk * q.dtype.size
    return first_reason(
        (v.dtype in FLOATS, f"values in {dtype_name(v.dtype)}"),
        (q.dtype == k.dtype == v.dtype, "queries or keys in another dtype than the values"),
        (old[0].dtype == k.dtype, "replayed keys in another dtype than the new ones"),
        (state.dtype == mx.float32, f"a state in {dtype_name(state.dtype)}"),
        (1 <= rows <= MOST_ROWS and 1 <= replayed <= MOST_ROWS, f"{max(rows, replayed)} rows"),
        (dk % 32 == 0 and dk <= 256, f"key heads of {dk} numbers"),
        (dv % 8 == 0, f"value heads of {dv} numbers"),
        (g.ndim == 3, "a decay for every number of a key"),
        (memory <= 32768, f"{memory} bytes of keys and queries, more than a threadgroup holds"),
    )


def gdn_verify(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    old: Steps | None,
    kept: mx.array,
    state: mx.array,
    *,
    kernels: Kernels,
) -> tuple[mx.array, mx.array]:
    """q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], decay g and beta [B, T, Hv]; `old` the previous round's rows (None: none),
    `kept` int32 [B] how many of those hold, `state` float32 [B, Hv, Dv, Dk] from before them.

    Returns y [B, T, Hv, Dv] and the committed state: after the kept old rows, before the new ones.
    """
    if old is None:
        old, kept = (k[:, :1], v[:, :1], g[:, :1], beta[:, :1]), mx.zeros_like(kept)
    if not (kernels.may_run("gdn_verify") and fits(q, k, v, g, beta, old, kept, state)):
        return reference(q, k, v, g, beta, old, kept, state)
    batch, rows, _, dk = q.shape
    heads, dv = v.shape[2:]
    y, committed = kernels(SOURCE)(
        inputs=[q, k, v, g, beta, *old, kept, state],
        template=[("T", v.dtype), ("DK", dk), ("ROOM", room(rows, old[0].shape[1]))],
        grid=(dv * 4, heads, batch),
        threadgroup=(value_rows(dv) * 4, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[v.dtype, mx.float32],
    )
    return y, committed


def settled(old: Steps, kept: mx.array, state: mx.array, *, kernels: Kernels) -> mx.array:
    """The committed state alone, with the bits the next round would give it: for a snapshot or a rewind."""
    k, v, g, beta = (x[:, :1] for x in old)
    return gdn_verify(k, k, v, g, beta, old, kept, state, kernels=kernels)[1]


def room(rows: int, replayed: int) -> int:
    """Rows threadgroup memory is held for: a power of two, so that few variants are ever compiled."""
    return 1 << (max(rows, replayed) - 1).bit_length()


def value_rows(dv: int) -> int:
    """Value rows a threadgroup owns: all of a head where 512 threads are enough."""
    return max(n for n in range(8, 129, 8) if dv % n == 0)


ONCE = ("state",)
"""Buffers every byte of which is read exactly once."""


def example(
    rows: int, old_rows: int, kept: list[int], heads: int, key_heads: int, dk: int, dv: int, dtype: mx.Dtype
) -> dict[str, Any]:
    batch, keys = len(kept), iter(range(100))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(next(keys)))

    def unit(n: int) -> mx.array:
        x = normal(batch, n, key_heads, dk)
        return (x / mx.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)

    def steps(n: int) -> Steps:
        g, beta = (mx.sigmoid(shift + normal(batch, n, heads)) for shift in (2.0, 0.0))
        return unit(n), normal(batch, n, heads, dv).astype(dtype), g, beta.astype(dtype)

    new = dict(zip(("k", "v", "g", "beta"), steps(rows), strict=True))
    state = normal(batch, heads, dv, dk)
    return {"q": unit(rows), **new, "old": steps(old_rows), "kept": mx.array(kept, mx.int32), "state": state}


def _case(
    rows: int,
    old_rows: int,
    kept: list[int],
    dtype: mx.Dtype,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 16),
    long: bool = False,
) -> Case:
    name = f"T{rows} kept {kept} of {old_rows} heads {heads} D{dims} {dtype_name(dtype)}"
    return Case(name, rows, lambda: example(rows, old_rows, kept, *heads, *dims, dtype), long=long)


CASES = (
    *(_case(5, 4, [kept], mx.float32) for kept in (0, 3, 4)),
    _case(1, 1, [1], mx.float32),
    _case(16, 16, [9, 0], mx.float16),
    _case(3, 16, [16, 2], mx.bfloat16, heads=(3, 1), dims=(64, 24)),
    _case(2, 3, [2], mx.bfloat16, heads=(1, 1), dims=(128, 128)),
    *(_case(rows, 16, [kept], dtype, long=True) for rows in range(1, 17) for kept in (0, 7, 16) for dtype in FLOATS),
    _case(16, 16, [5], mx.float16, heads=(3, 1), dims=(128, 128), long=True),
)
