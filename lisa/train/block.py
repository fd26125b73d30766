"""One training pass over many blocks of many conversations, for the drafters that draft a block at once.

B conversations padded to T tokens, A anchors in each, S slots a block, N = B * A blocks. The layers and the injection
are the drafter's own (lisa/drafters); what is here is how many blocks share one context.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from lisa.sampling import top
from lisa.train.networks import Draft
from lisa.train.objective import Vocabulary, losses, softmax
from lisa.train.settings import Objective

_REPLACED_LAYERS = 3
_FORBIDDEN = -1e30


class Pass(NamedTuple):
    """`final` [N, S-1, H] after the last norm, `pre` before the last injection, `after` each layer's injection."""

    final: mx.array
    pre: mx.array
    after: list[mx.array]


class Blocks(NamedTuple):
    """`taps` [B, T, taps*H], `anchors` int [B, A], `tokens` int [N, S]: each block's true tokens, -1 past the end."""

    taps: mx.array
    anchors: Any
    tokens: Any


def forward(draft: Draft, blocks: Blocks, replaced: Any = None) -> Pass:
    """`replaced` bool [N]: blocks whose first layers are told the true predecessors (DSpine)."""
    network, model = draft.network, draft.model
    true = mx.array(np.maximum(blocks.tokens, 0), mx.int32)
    n, slots = true.shape
    inputs = mx.concatenate([true[:, :1], mx.full((n, slots - 1), model.mask, mx.int32)], axis=1)
    h = model.target.embed(inputs).astype(mx.float32)
    context = network.fuse(blocks.taps)
    starts = mx.array(blocks.anchors.reshape(-1), mx.int32)
    hides = _hidden(blocks.anchors, slots, blocks.taps.shape[1], set(model.windows))
    pre, after = h, []
    for i, layer in enumerate(network.layers):
        own = _own_mask(slots, model.causal[i], model.windows[i])
        pre = _layer(layer, h, context, starts, hides[model.windows[i]], own)
        h = pre
        if draft.codes is not None:
            teach = None if replaced is None or i >= _REPLACED_LAYERS else mx.array(replaced)[:, None, None]
            h = _inject(draft, pre, true, i, teach)
            after.append(h[:, 1:])
    return Pass(network.norm(h)[:, 1:], pre[:, 1:], after)


def _hidden(anchors: Any, slots: int, length: int, windows: set[int | None]) -> dict[int | None, mx.array]:
    """For each window: 0 where a block's slot sees a context row, else very negative, [B, 1, A, 1, S or 1, T]."""
    rows, first = np.arange(length), anchors[:, None, :, None, None, None]
    masks = {}
    for window in windows:
        seen = rows < first
        if window is not None:
            seen = seen & (rows > first + np.arange(slots)[:, None] - window)
        masks[window] = mx.array(np.where(seen, 0.0, _FORBIDDEN).astype(np.float32))
    return masks


def _own_mask(slots: int, causal: bool, window: int | None) -> mx.array:
    at, other = np.arange(slots)[:, None], np.arange(slots)
    seen = (other <= at) if causal else np.ones((slots, slots), bool)
    if window is not None:
        seen = seen & (other > at - window)
    return mx.array(np.where(seen, 0.0, _FORBIDDEN).astype(np.float32))


def _layer(
    layer: Any, h: mx.array, context: mx.array, starts: mx.array, hides: mx.array, own_mask: mx.array
) -> mx.array:
    attention = layer.self_attn
    x = layer.input_layernorm(h)
    q = attention.queries(x, starts)
    keys, values = attention.keys_values(context, 0)
    own_keys, own_values = attention.keys_values(x, starts)
    mixed = _attend(q * attention.dims**-0.5, (keys, values), (own_keys, own_values), hides, own_mask)
    h = h + attention.merge(mixed)
    out: mx.array = h + layer.mlp(layer.post_attention_layernorm(h))
    return out


def _attend(q: mx.array, context: Any, own: Any, hides: mx.array, own_mask: mx.array) -> mx.array:
    """q [N, heads, S, D] over its conversation's context [B, kv, T, D] and its own block [N, kv, S, D]."""
    (keys, values), (own_keys, own_values) = context, own
    n, heads, slots, dims = q.shape
    batch, kv, length, _ = keys.shape
    anchors, group = n // batch, heads // kv
    own_scores = q.reshape(n, kv, group * slots, dims) @ own_keys.swapaxes(2, 3)
    own_scores = own_scores.reshape(n, heads, slots, slots) + own_mask
    wide = q.reshape(batch, anchors, kv, group, slots, dims).transpose(0, 2, 1, 3, 4, 5)
    scores = wide.reshape(batch, kv, anchors * group * slots, dims) @ keys.swapaxes(2, 3)
    scores = scores.reshape(batch, kv, anchors, group, slots, length) + hides
    beside = own_scores.reshape(batch, anchors, kv, group, slots, slots).transpose(0, 2, 1, 3, 4, 5)
    weights, _ = softmax()(mx.concatenate([scores, beside], axis=-1))
    far, near = weights[..., :length], weights[..., length:]
    mixed = (far.reshape(batch, kv, -1, length) @ values).reshape(batch, kv, anchors, group, slots, dims)
    near = near.transpose(0, 2, 1, 3, 4, 5).reshape(n, kv, group * slots, slots) @ own_values
    both: mx.array = mixed.transpose(0, 2, 1, 3, 4, 5).reshape(n, heads, slots, dims) + near.reshape(q.shape)
    return both


def _inject(draft: Draft, h: mx.array, true: mx.array, layer: int, teach: mx.array | None) -> mx.array:
    """Every slot hears its left neighbour's feature, slot 1 the anchor's code; or, where `teach` says, true codes."""
    injection = draft.network.injection
    features = injection.feature(h[:, 1:], layer)
    heard = mx.concatenate([code(draft, true[:, :1]), features[:, :-1]], axis=1)
    if teach is not None:
        heard = mx.where(teach, code(draft, true[:, :-1]), heard)
    return mx.concatenate([h[:, :1], injection.write(h[:, 1:], features, heard, layer)], axis=1)


def code(draft: Draft, tokens: mx.array) -> mx.array:
    """int [...] -> float32 [..., r], of length sqrt(r)."""
    assert draft.codes is not None
    return math.sqrt(draft.codes.shape[1]) * draft.codes[tokens]


def refined(draft: Draft, pre: mx.array, predecessors: mx.array) -> mx.array:
    """Final hiddens [..., H], had each slot been told its predecessor, int [...]."""
    network = draft.network
    last = len(network.layers) - 1
    feature = network.injection.feature(pre, last)
    out: mx.array = network.norm(network.injection.write(pre, feature, code(draft, predecessors), last))
    return out


class Rows(NamedTuple):
    """The slots that have a label, flattened: `block` and `slot` (from 0 for the first proposed one) int [M], `label`
    columns int [M], their true `token` and `before`, `weight` float [M] summing to 1, `teacher` [M, columns]."""

    block: Any
    slot: Any
    label: mx.array
    token: mx.array
    before: mx.array
    weight: mx.array
    teacher: mx.array


def loss(
    draft: Draft,
    blocks: Blocks,
    rows: Rows,
    vocabulary: Vocabulary,
    objective: Objective,
    alignment: float,
    replaced: Any,
) -> mx.array:
    """The objective over all blocks of a step. `alignment` is the share the features' agreement with the codes has."""
    out = forward(draft, blocks, replaced)
    flat = mx.array(rows.block * (blocks.tokens.shape[1] - 1) + rows.slot)

    def pick(x: mx.array) -> mx.array:
        return x.reshape(-1, x.shape[-1])[flat]

    logits = vocabulary.logits(pick(out.final))
    each, hard = losses(objective, logits, rows.teacher, rows.label)
    total = (each * rows.weight).sum()
    if draft.codes is None:
        return total
    total = total + (_refinement(draft, pick(out.pre), logits, rows, vocabulary, objective) * rows.weight).sum()
    wanted = draft.codes[rows.token]
    agreement = sum(
        ((1 - _cosine(draft.network.injection.readouts[i](pick(h)), wanted)) * rows.weight).sum()
        for i, h in enumerate(out.after)
    )
    strength = alignment * mx.stop_gradient((hard * rows.weight).sum())
    return total + strength * agreement


def _refinement(
    draft: Draft, pre: mx.array, logits: mx.array, rows: Rows, vocabulary: Vocabulary, objective: Objective
) -> mx.array:
    """The last write with the true predecessor, over the K candidates: loss of each row."""
    columns = top(mx.stop_gradient(logits), draft.model.top_k)[0]
    mass = mx.take_along_axis(rows.teacher, columns, axis=-1)
    covered = mass.sum(axis=-1)
    teacher = mass / mx.maximum(covered, 1e-6)[:, None]
    hidden = refined(draft, pre, rows.before)
    heads, correction = vocabulary.rows(columns)
    scores = (heads @ hidden[..., None])[..., 0] + correction
    hits = columns == rows.label[:, None]
    known = hits.any(axis=-1)
    each, hard = losses(objective, scores, teacher, mx.argmax(hits, axis=-1), known.astype(mx.float32))
    share = 0.1 if objective == "published" else 0.5
    soft = each - share * hard
    return share * hard + soft * (covered > 1e-4)


def _cosine(a: mx.array, b: mx.array) -> mx.array:
    lengths = mx.linalg.norm(a, axis=-1) * mx.linalg.norm(b, axis=-1)
    return (a * b).sum(axis=-1) / mx.maximum(lengths, 1e-8)


def greedy(draft: Draft, blocks: Blocks) -> mx.array:
    """What each slot proposes at temperature 0 while everything before it was right, int [N, S-1]."""
    out, model = forward(draft, blocks), draft.model
    n, width, hidden = out.final.shape
    logits = model.target.head(out.final.reshape(-1, hidden))
    if draft.codes is None:
        return mx.argmax(logits, axis=-1).reshape(n, width)
    ids, _ = top(logits[:, : model.vocab], model.top_k)
    before = mx.array(np.maximum(blocks.tokens[:, :-1], 0), mx.int32).reshape(-1)
    scores = (model.target.head_rows(ids) @ refined(draft, out.pre.reshape(-1, hidden), before)[..., None])[..., 0]
    chosen = mx.take_along_axis(ids, mx.argmax(scores, axis=-1)[:, None], axis=-1)
    return chosen.reshape(n, width)
