"""gdn_conv: what a Gated DeltaNet layer does to its projected rows before the recurrence, in one launch.

The depthwise convolution over 4 positions, SiLU, and the normalisation of query and key heads, over T = 1..16 new rows
that follow the first `kept` of the previous round's. Worth it because stock it is six small launches a layer and a
sliced copy of the window: here each input is read once, the window being taken where the previous round left it.
Row-invariant: a row is computed from its 4 inputs alone.

One simdgroup goes down all rows of one head. Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.metal import FLOATS, MOST_ROWS, Case, Fit, Kernels, Source, dtype_name, first_reason

TAPS = 4
EPSILON = 1e-6
"""Added to the sum of squares of a query or key head, as the Qwen3-Next and Qwen3.5 models do."""

SOURCE = Source(
    "gdn_conv",
    ("old", "kept", "x", "w"),
    ("q", "k", "v", "inputs"),
    """
  // Heads in the order of the channels: HK query heads, HK key heads, then value heads. A lane has every 32nd channel.
  const uint head = threadgroup_position_in_grid.y, batch = threadgroup_position_in_grid.z;
  const uint lane = thread_index_in_simdgroup;
  const uint C = x_shape[2], ROWS = x_shape[1], OLD = old_shape[1], HV = (C - 2 * HK * DK) / DV;
  const bool value_head = head >= 2 * HK;
  const uint width = value_head ? DV : DK;
  const uint first = value_head ? 2 * HK * DK + (head - 2 * HK) * DV : head * DK;
  constexpr uint MOST = (DK > DV ? DK : DV) / 32;
  float window[MOST][4], taps[MOST][4];
  const uint begin = kept[batch];
  for (uint i = 0; i < width / 32; ++i) {
    const uint c = first + 32 * i + lane;
    for (uint t = 0; t < 4; ++t) taps[i][t] = float(w[c * 4 + t]);
    for (uint t = 0; t < 3; ++t) {
      const T before = old[(batch * OLD + begin + t) * C + c];
      window[i][t + 1] = float(before);
      inputs[(batch * (ROWS + 3) + t) * C + c] = before;
    }
  }
  for (uint row = 0; row < ROWS; ++row) {
    float value[MOST], squares = 0.0f;
    for (uint i = 0; i < width / 32; ++i) {
      const uint c = first + 32 * i + lane;
      const T entered = x[(batch * ROWS + row) * C + c];
      inputs[(batch * (ROWS + 3) + row + 3) * C + c] = entered;
      for (uint t = 0; t < 3; ++t) window[i][t] = window[i][t + 1];
      window[i][3] = float(entered);
      float sum = 0.0f;
      for (uint t = 0; t < 4; ++t) sum = fma(window[i][t], taps[i][t], sum);
      value[i] = sum / (1.0f + exp(-sum));
      squares = fma(value[i], value[i], squares);
    }
    squares = simd_sum(squares);
    float scale = metal::precise::rsqrt(squares + epsilon);
    if (head < HK) scale *= metal::precise::rsqrt(float(DK));
    for (uint i = 0; i < width / 32; ++i) {
      const uint at = 32 * i + lane;
      if (value_head) v[((batch * ROWS + row) * HV + head - 2 * HK) * DV + at] = T(value[i]);
      else if (head < HK) q[((batch * ROWS + row) * HK + head) * DK + at] = T(value[i] * scale);
      else k[((batch * ROWS + row) * HK + head - HK) * DK + at] = T(value[i] * scale);
    }
  }
""".replace("epsilon", f"{EPSILON}f"),
)


def reference(
    old: mx.array, kept: mx.array, x: mx.array, w: mx.array, *, key_heads: int, dk: int, dv: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The same in float32 throughout, cast to x's dtype at the end."""
    batch, rows, channels = x.shape
    at = (kept[:, None] + mx.arange(TAPS - 1))[..., None]
    window = mx.take_along_axis(old, mx.broadcast_to(at, (batch, TAPS - 1, channels)), axis=1)
    inputs = mx.concatenate([window, x], axis=1)
    taps = w.reshape(channels, TAPS).astype(mx.float32)
    entered = inputs.astype(mx.float32)
    conv = sum((entered[:, t : t + rows] * taps[:, t] for t in range(TAPS)), mx.zeros((batch, rows, channels)))
    conv = conv * mx.sigmoid(conv)
    q, k, v = mx.split(conv, [key_heads * dk, 2 * key_heads * dk], axis=-1)
    q, k = (a.reshape(batch, rows, key_heads, dk) for a in (q, k))
    q, k = (a * mx.rsqrt((a * a).sum(-1, keepdims=True) + EPSILON) for a in (q, k))
    v = v.reshape(batch, rows, -1, dv)
    return (q * dk**-0.5).astype(x.dtype), k.astype(x.dtype), v.astype(x.dtype), inputs


def fits(old: mx.array, kept: mx.array, x: mx.array, w: mx.array, *, key_heads: int, dk: int, dv: int) -> Fit:
    return first_reason(
        (x.dtype in FLOATS, f"rows in {dtype_name(x.dtype)}"),
        (old.dtype == x.dtype, "a window in another dtype than the rows"),
        (w.size == TAPS * x.shape[2], f"a convolution over other than {TAPS} positions"),
        (1 <= x.shape[1] <= MOST_ROWS, f"{x.shape[1]} rows, more than {MOST_ROWS}"),
        (dk % 32 == 0 and dv % 32 == 0, f"heads of {dk} and {dv} numbers"),
        ((x.shape[2] - 2 * key_heads * dk) % dv == 0, "channels that do not divide into heads"),
    )


def gdn_conv(
    old: mx.array, kept: mx.array, x: mx.array, w: mx.array, *, key_heads: int, dk: int, dv: int, kernels: Kernels
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """`old` [B, 3 + P, C] the inputs of the previous round, window included, `kept` int32 [B] <= P how many of its rows
    hold, x [B, T, C] the new rows (queries, keys, values), w [C, 4, 1] the taps.

    Returns q and k [B, T, Hk, Dk] (unit length, q also by Dk^-1/2), v [B, T, Hv, Dv], and the inputs [B, 3 + T, C] for
    the next round's `old`.
    """
    if not (kernels.may_run("gdn_conv") and fits(old, kept, x, w, key_heads=key_heads, dk=dk, dv=dv)):
        return reference(old, kept, x, w, key_heads=key_heads, dk=dk, dv=dv)
    batch, rows, channels = x.shape
    value_heads = (channels - 2 * key_heads * dk) // dv
    keys = (batch, rows, key_heads, dk)
    q, k, v, inputs = kernels(SOURCE)(
        inputs=[old, kept, x, w],
        template=[("T", x.dtype), ("HK", key_heads), ("DK", dk), ("DV", dv)],
        grid=(32, 2 * key_heads + value_heads, batch),
        threadgroup=(32, 1, 1),
        output_shapes=[keys, keys, (batch, rows, value_heads, dv), (batch, rows + TAPS - 1, channels)],
        output_dtypes=[x.dtype] * 4,
    )
    return q, k, v, inputs


ONCE = ("x",)
"""Buffers every byte of which is read exactly once."""


def example(
    rows: int, old_rows: int, kept: list[int], key_heads: int, value_heads: int, dk: int, dv: int, dtype: mx.Dtype
) -> dict[str, Any]:
    channels = 2 * key_heads * dk + value_heads * dv
    old, x = (
        mx.random.normal((len(kept), n, channels), key=mx.random.key(i)).astype(dtype)
        for i, n in enumerate((old_rows + TAPS - 1, rows))
    )
    w = mx.random.normal((channels, TAPS, 1), key=mx.random.key(2)).astype(dtype)
    sizes = {"key_heads": key_heads, "dk": dk, "dv": dv}
    return {"old": old, "kept": mx.array(kept, mx.int32), "x": x, "w": w, **sizes}


def _case(
    rows: int, old_rows: int, kept: list[int], heads: tuple[int, int, int, int], dtype: mx.Dtype, long: bool = False
) -> Case:
    name = f"T{rows} kept {kept} of {old_rows} heads {heads} {dtype_name(dtype)}"
    return Case(name, rows, lambda: example(rows, old_rows, kept, *heads, dtype), long=long)


CASES = (
    _case(1, 0, [0], (2, 4, 32, 32), mx.float32),
    _case(5, 4, [3], (1, 3, 64, 32), mx.float32),
    _case(16, 16, [16, 5], (2, 4, 32, 64), mx.float16),
    _case(9, 8, [0], (1, 2, 128, 128), mx.bfloat16),
    *(_case(rows, 16, [rows], (2, 6, 64, 64), dtype, long=True) for rows in range(1, 17) for dtype in FLOATS),
)
