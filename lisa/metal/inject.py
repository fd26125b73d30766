"""inject: DSpine's adjacent causal injection after one drafter layer, for all slots of a block at once.

With f_i = sqrt(r) normalised(R h_i) and p_i = f_(i-1) (the anchor's code for slot 1), slot i >= 1 becomes
h_i + |h_i| / sqrt(H) * W (sigmoid(Gr f_i + Gp p_i + b) * (M p_i)); slot 0 is left alone. Used after every layer of a
dense DSpine drafter. Worth it because stock it is about fifteen small launches a layer that wait for one another: here
it is three, all slots share each weight read, and norms and sums are float32. Row-invariant: no slot's sum depends on
how many slots there are.

Three launches, since each needs all of the one before: readout (and the norms of h), gated message, write.
Source: "Draft in Parallel, Condition Through Depth", https://arxiv.org/abs/2609.36173.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from lisa.metal import FLOATS, MOST_ROWS, Case, Fit, Kernels, Source, dtype_name, first_reason
from lisa.metal.tiles import DENSE, LANES

SHORTEST = 1e-12
"""A feature shorter than this is not made longer."""

SOURCE = Source(
    "inject_read",
    ("h", "readout"),
    ("read", "lengths"),
    """
  threadgroup float partial[SPLIT * 128 * MT];
  const uint M = h_shape[0] - 1, H = h_shape[1], N = readout_shape[0];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint n0 = threadgroup_position_in_grid.x * 16;
  const Rows<T> slots = {h + H, H};
  if (n0 >= N) {  // the last threadgroup: norms of the slots
    for (uint m = simdgroup; m < M; m += SPLIT) {
      float squares = 0.0f;
      for (uint k = lane; k < H; k += 32) squares = fma(float(slots.x[m * H + k]), float(slots.x[m * H + k]), squares);
      squares = simd_sum(squares);
      if (lane == 0) lengths[m] = metal::precise::sqrt(squares);
    }
    return;
  }
  const Rows<T> weights = {readout, H};
  Tiles<2, MT> acc;
  acc.clear();
  multiply_dense(acc, weights, slots, n0, N, M, simdgroup, SPLIT, lane);
  acc.put(partial + simdgroup * 128 * MT, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_position_in_threadgroup.x; i < 128 * MT; i += 32 * SPLIT) {
    const uint m = i / 16, n = n0 + i % 16;
    float sum = 0.0f;
    for (uint s = 0; s < SPLIT; ++s) sum += partial[s * 128 * MT + i];
    if (m < M && n < N) read[m * N + n] = sum;
  }
""",
    LANES + DENSE,
)

MESSAGE_HEADER = """
// Slot m's feature, and what its left neighbour sends it, from the readouts and what brings each to length sqrt(r).
struct Features {
  const device float* read;
  const threadgroup float* scale;
  uint width;
  float4 at(uint m, uint k) { return ((const device float4*)read)[(m * width + k) / 4] * scale[m]; }
};
template <typename T>
struct Predecessors {
  Features features;
  Rows<T> code;
  float4 at(uint m, uint k) { return m == 0 ? code.at(0, k) : features.at(m - 1, k); }
};
"""

MESSAGE = Source(
    "inject_message",
    ("read", "code", "receiver", "predecessor", "message", "bias"),
    ("sent",),
    """
  threadgroup float scale[16], partial[SPLIT * 3 * 64 * MT];
  const uint M = read_shape[0], R = read_shape[1], N = message_shape[0];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint n0 = threadgroup_position_in_grid.x * 8;
  for (uint m = simdgroup; m < M; m += SPLIT) {
    float squares = 0.0f;
    for (uint k = lane; k < R; k += 32) squares = fma(read[m * R + k], read[m * R + k], squares);
    squares = simd_sum(squares);
    if (lane == 0) scale[m] = metal::precise::sqrt(float(R)) / max(metal::precise::sqrt(squares), SHORTEST);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Features features = {read, scale, R};
  const Predecessors<T> predecessors = {features, {code, R}};
  const Rows<T> matrices[3] = {{receiver, R}, {predecessor, R}, {message, R}};
  for (int part = 0; part < 3; ++part) {
    Tiles<1, MT> acc;
    acc.clear();
    if (part == 0) multiply_dense(acc, matrices[part], features, n0, N, M, simdgroup, SPLIT, lane);
    else multiply_dense(acc, matrices[part], predecessors, n0, N, M, simdgroup, SPLIT, lane);
    acc.put(partial + (simdgroup * 3 + part) * 64 * MT, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_position_in_threadgroup.x; i < 64 * MT; i += 32 * SPLIT) {
    const uint m = i / 8, n = n0 + i % 8;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    for (uint s = 0; s < SPLIT; ++s)
      for (uint part = 0; part < 3; ++part) sums[part] += partial[(s * 3 + part) * 64 * MT + i];
    if (m < M && n < N) sent[m * N + n] = sums[2] / (1.0f + exp(-(sums[0] + sums[1] + float(bias[n]))));
  }
""".replace("SHORTEST", f"{SHORTEST}f"),
    LANES + DENSE + MESSAGE_HEADER,
)

WRITE = Source(
    "inject_write",
    ("h", "write", "sent", "lengths"),
    ("out",),
    """
  threadgroup float partial[SPLIT * 128 * MT];
  const uint M = sent_shape[0], K = sent_shape[1], H = write_shape[0];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint n0 = threadgroup_position_in_grid.x * 16;
  const Rows<T> weights = {write, K};
  const Rows<float> messages = {sent, K};
  Tiles<2, MT> acc;
  acc.clear();
  multiply_dense(acc, weights, messages, n0, H, M, simdgroup, SPLIT, lane);
  acc.put(partial + simdgroup * 128 * MT, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_position_in_threadgroup.x; i < 128 * MT; i += 32 * SPLIT) {
    const uint m = i / 16, n = n0 + i % 16;
    float sum = 0.0f;
    for (uint s = 0; s < SPLIT; ++s) sum += partial[s * 128 * MT + i];
    if (m < M && n < H) {
      const float scale = lengths[m] * metal::precise::rsqrt(float(H));
      out[(m + 1) * H + n] = T(fma(scale, sum, float(h[(m + 1) * H + n])));
      if (m == 0) out[n] = h[n];
    }
  }
""",
    LANES + DENSE,
)

SPLIT = 8
"""Simdgroups that share the k of a tile."""


def reference(
    h: mx.array,
    code: mx.array,
    readout: mx.array,
    write: mx.array,
    receiver: mx.array,
    predecessor: mx.array,
    message: mx.array,
    bias: mx.array,
) -> mx.array:
    """The same in float32 throughout, cast to h's dtype at the end."""
    slots, code, readout, write, receiver, predecessor, message, bias = (
        a.astype(mx.float32) for a in (h[1:], code, readout, write, receiver, predecessor, message, bias)
    )
    read = slots @ readout.T
    length = mx.maximum(mx.linalg.norm(read, axis=-1, keepdims=True), SHORTEST)
    features = math.sqrt(read.shape[-1]) * read / length
    before = mx.concatenate([code.reshape(1, -1), features[:-1]])
    gate = mx.sigmoid(features @ receiver.T + before @ predecessor.T + bias)
    scale = mx.linalg.norm(slots, axis=-1, keepdims=True) / math.sqrt(slots.shape[-1])
    written = slots + scale * ((gate * (before @ message.T)) @ write.T)
    return mx.concatenate([h[:1], written.astype(h.dtype)])


def fits(
    h: mx.array,
    code: mx.array,
    readout: mx.array,
    write: mx.array,
    receiver: mx.array,
    predecessor: mx.array,
    message: mx.array,
    bias: mx.array,
) -> Fit:
    weights = (code, readout, write, receiver, predecessor, message, bias)
    widths = (h.shape[1], message.shape[1], message.shape[0])
    return first_reason(
        (h.ndim == 2 and 2 <= h.shape[0] <= MOST_ROWS, "a block of other than 2 to 16 slots"),
        (h.dtype in FLOATS, f"hiddens in {dtype_name(h.dtype)}"),
        (all(w.dtype == h.dtype for w in weights), "weights in another dtype than the hiddens, or packed"),
        (all(width % 32 == 0 for width in widths), f"widths {widths}, not all multiples of 32"),
    )


def inject(
    h: mx.array,
    code: mx.array,
    readout: mx.array,
    write: mx.array,
    receiver: mx.array,
    predecessor: mx.array,
    message: mx.array,
    bias: mx.array,
    *,
    kernels: Kernels,
) -> mx.array:
    """h [T, H], the anchor's code [r], readout [r, H], write [H, m]; receiver and predecessor gates and message [m, r],
    bias [m] -> [T, H]."""
    weights = (readout, write, receiver, predecessor, message, bias)
    if not (kernels.may_run("inject") and fits(h, code, *weights)):
        return reference(h, code, *weights)
    rows, hidden = h.shape[0] - 1, h.shape[1]
    rank, size = message.shape[1], message.shape[0]
    template = [("T", h.dtype), ("MT", (rows + 7) // 8), ("SPLIT", SPLIT)]
    threads = 32 * SPLIT
    read, lengths = kernels(SOURCE)(
        inputs=[h, readout],
        template=template,
        grid=((-(-rank // 16) + 1) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, rank), (rows,)],
        output_dtypes=[mx.float32] * 2,
    )
    (sent,) = kernels(MESSAGE)(
        inputs=[read, code, receiver, predecessor, message, bias],
        template=template,
        grid=(-(-size // 8) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, size)],
        output_dtypes=[mx.float32],
    )
    (out,) = kernels(WRITE)(
        inputs=[h, write, sent, lengths],
        template=template,
        grid=(-(-hidden // 16) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[h.shape],
        output_dtypes=[h.dtype],
    )
    return out


ONCE = ("readout", "write", "receiver", "predecessor", "message")
"""Buffers every byte of which is read exactly once."""


def example(slots: int, hidden: int, rank: int, size: int, dtype: mx.Dtype) -> dict[str, Any]:
    shapes = {
        **{"h": (slots, hidden), "code": (rank,), "readout": (rank, hidden), "write": (hidden, size)},
        **{name: (size, rank) for name in ("receiver", "predecessor", "message")},
        "bias": (size,),
    }
    made = {
        name: mx.random.normal(shape, key=mx.random.key(i)) / math.sqrt(shape[-1] if len(shape) > 1 else 1)
        for i, (name, shape) in enumerate(shapes.items())
    }
    made["h"] = 3 * made["h"]
    return {name: value.astype(dtype) for name, value in made.items()}


def _case(slots: int, hidden: int, rank: int, size: int, dtype: mx.Dtype, long: bool = False) -> Case:
    name = f"T{slots} H{hidden} r{rank} m{size} {dtype_name(dtype)}"
    return Case(name, slots - 1, lambda: example(slots, hidden, rank, size, dtype), long=long)


CASES = (
    _case(16, 96, 64, 32, mx.float32),
    _case(2, 64, 96, 64, mx.float16),
    _case(8, 320, 32, 32, mx.bfloat16),
    *(_case(slots, 160, 96, 64, dtype, long=True) for slots in range(2, 17) for dtype in FLOATS),
)
