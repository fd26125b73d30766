"""What MLX's own ops compute for the arguments of a kernel: what a kernel is raced against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from lisa.metal import Packed, inject, lattice


def stock(name: str) -> Callable[..., Any]:
    """What MLX's own ops compute for the arguments of a kernel."""
    functions: dict[str, Callable[..., Any]] = {
        "rows_qmm": _stock_qmm,
        "rows_attention": _stock_attention,
        "gdn_verify": _stock_delta,
        "gdn_conv": _stock_conv,
        "head_argmax": _stock_argmax,
        "head_topk": _stock_topk,
        "inject": inject.reference,
        "lattice": lattice.reference,
    }
    return functions[name]


def _stock_qmm(x: mx.array, weight: Packed) -> mx.array:
    w = weight
    return mx.quantized_matmul(x, w.w, w.scales, w.biases, True, group_size=w.group_size, bits=w.bits)


def _stock_attention(q: mx.array, k: mx.array, v: mx.array, length: int, *, scale: float) -> mx.array:
    k, v = k[:, :, :length], v[:, :, :length]
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")


def _stock_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, old: Any, kept: mx.array, state: mx.array) -> Any:
    n = _most(kept)
    if n:
        old_k, old_v, old_g, old_beta = (x[:, :n] for x in old)
        state = mx.fast.gated_delta_update(old_k, old_k, old_v, old_g, old_beta, state)[1]
    return mx.fast.gated_delta_update(q, k, v, g, beta, state)[0], state


def _stock_conv(old: mx.array, kept: mx.array, x: mx.array, w: mx.array, *, key_heads: int, dk: int, dv: int) -> Any:
    batch, rows, channels = x.shape
    n = _most(kept)
    inputs = mx.concatenate([old[:, n : n + 3], x], axis=1)
    mixed = mx.conv1d(inputs, w, groups=channels)
    q, k, v = mx.split(mixed * mx.sigmoid(mixed), [key_heads * dk, 2 * key_heads * dk], axis=-1)
    q, k = (mx.fast.rms_norm(a.reshape(batch, rows, key_heads, dk), None, 1e-6 / dk) for a in (q, k))
    return q / dk, k * dk**-0.5, v.reshape(batch, rows, -1, dv), inputs


def _most(kept: mx.array) -> int:
    counts: Any = kept.tolist()
    return int(max(counts))


def _stock_argmax(x: mx.array, head: Packed, *, vocab: int, mask: mx.array | None = None) -> mx.array:
    return mx.argmax(_stock_qmm(x, head)[:, :vocab], axis=-1)


def _stock_topk(x: mx.array, head: Packed, *, k: int, vocab: int, mask: mx.array | None = None) -> Any:
    logits = _stock_qmm(x, head)[:, :vocab]
    best = mx.argpartition(-logits, k - 1, axis=-1)[:, :k]
    return best, mx.take_along_axis(logits, best, axis=-1)
