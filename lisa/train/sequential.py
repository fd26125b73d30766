"""One training pass over every draft of many conversations, for EAGLE-3.

Row t of step 0 pairs the features of position t with the token at t + 1 and predicts t + 2; step j of the same draft
sits at t + j, reads the layer's own output of step j - 1 and the true token at t + 1 + j ("training-time test"). Each
step attends to the rows up to t of step 0 and to its own draft's rows. B conversations of T tokens, n drafts from row
`first`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from lisa.train.networks import Draft
from lisa.train.objective import softmax

_FORBIDDEN = -1e30


def forward(draft: Draft, taps: mx.array, tokens: Any, first: int, steps: int) -> list[mx.array]:
    """Normed outputs [B, n, H] of each step. `taps` [B, T, taps*H], `tokens` int [B, T + steps], n = T - first."""
    network = draft.network
    layer, attention = network.layer, network.layer.self_attn
    batch, length, _ = taps.shape
    count = length - first
    known = mx.array(np.maximum(tokens, 0), mx.int32)
    h = network.fuse(taps)
    x = layer.pair(_embedded(draft, known[:, 1 : length + 1]), h)
    keys, values = attention.keys_values(x, 0)
    h, x = h[:, first:], x[:, first:]
    rows = np.arange(length)
    seen = mx.array(np.where(rows <= np.arange(first, length)[:, None], 0.0, _FORBIDDEN).astype(np.float32))
    own: list[tuple[mx.array, mx.array]] = []
    outputs = []
    for step in range(steps):
        if step:
            x = layer.pair(_embedded(draft, known[:, first + 1 + step : length + 1 + step]), h)
            own.append(attention.keys_values(x, first + step))
        q = attention.queries(x, first + step) * attention.dims**-0.5
        h = h + attention.merge(_attend(q, keys, values, own, seen))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        outputs.append(network.norm(h))
    assert outputs[0].shape[:2] == (batch, count)
    return outputs


def _embedded(draft: Draft, tokens: mx.array) -> mx.array:
    table = draft.network.embed_tokens if "embed_tokens" in draft.network else draft.model.target.embed
    embedded: mx.array = table(tokens).astype(mx.float32)
    return embedded


def _attend(
    q: mx.array, keys: mx.array, values: mx.array, own: list[tuple[mx.array, mx.array]], seen: mx.array
) -> mx.array:
    """q [B, heads, n, D] over the rows of step 0 [B, kv, T, D] that `seen` [n, T] lets through, and over the same
    draft's later rows, [B, kv, n, D] a step."""
    batch, heads, n, dims = q.shape
    kv, length = keys.shape[1:3]
    grouped = q.reshape(batch, kv, heads // kv, n, dims)
    scores = (grouped.reshape(batch, kv, -1, dims) @ keys.swapaxes(2, 3)).reshape(batch, kv, -1, n, length) + seen
    beside = [(grouped * k[:, :, None]).sum(axis=-1, keepdims=True) for k, _ in own]
    weights, _ = softmax()(mx.concatenate([scores, *beside], axis=-1))
    mixed = (weights[..., :length].reshape(batch, kv, -1, length) @ values).reshape(grouped.shape)
    for i, (_, v) in enumerate(own):
        mixed = mixed + weights[..., length + i : length + i + 1] * v[:, :, None]
    return mixed.reshape(q.shape)


def greedy(draft: Draft, taps: mx.array, tokens: Any, first: int, steps: int) -> mx.array:
    """What each step proposes at temperature 0 while everything before it was right, int [B, n, steps]."""
    ids = mx.array(draft.ids, mx.int32)
    outputs = forward(draft, taps, tokens, first, steps)
    return mx.stack([ids[mx.argmax(draft.network.lm_head(h), axis=-1)] for h in outputs], axis=-1)
