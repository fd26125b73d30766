"""EAGLE-3: one decoder layer that drafts token after token, the sequential counterpart of DSpine.

Row t of its context pairs the fused taps of position t with the embedding of the token at t + 1, and predicts t + 2. A
draft starts from the last fused row and the anchor; each further step pairs the layer's own output with the token just
drafted. Those rows are guesses and never kept: committed tokens are read again with the target's true features. Vd is
the size of the draft's own, usually reduced vocabulary; each step draws from its 32 most likely tokens.

Source: EAGLE-3, https://arxiv.org/abs/2503.01840, as published in SpecForge's and vLLM-speculators' layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding

from lisa.drafters.candidates import CANDIDATES, checked, noise, nothing, perturbed, proposal, usable_width
from lisa.drafters.checkpoint import Checkpoint, Kind, check_fit, refuse, same_vocabulary
from lisa.drafters.context import Context
from lisa.drafters.dflash import Layer, TargetSide, fill, linear, norm
from lisa.layers import give
from lisa.sampling import top
from lisa.types import MAX_WIDTH, Commit, Proposal, Sampling

WIDTH = 7
"""A pass a token makes long drafts dear: the most it proposes unless told otherwise."""

STRIDE = 16
"""Every 16th fused row is kept: a rewind can only go back to where the row before the next token is still known."""

Rows = tuple[mx.array, mx.array]
"""Keys and values, [1, heads, n, D] each."""


class EagleLayer(Layer):
    """A decoder layer whose attention reads a token's embedding beside a fused row; all [1, n, H]."""

    def __init__(self, weights: Mapping[str, mx.array], name: str, config: Mapping[str, Any]):
        super().__init__(weights, name, config)
        self.hidden_norm = norm(weights, f"{name}.hidden_norm", config)
        self.norm_before_residual = bool(config.get("norm_before_residual"))

    def pair(self, embedded: mx.array, fused: mx.array) -> mx.array:
        """What queries, keys and values are made of, [1, n, 2H]."""
        return mx.concatenate([self.input_layernorm(embedded), self.hidden_norm(fused)], axis=-1)

    def step(
        self, embedded: mx.array, fused: mx.array, context: Rows | None, guesses: Rows | None, position: int
    ) -> tuple[mx.array, Rows]:
        """One row at `position` after the context and the guesses so far: its output [1, 1, H], and all guesses."""
        x = self.pair(embedded, fused)
        own = self.self_attn.keys_values(x, position)
        if guesses is not None:
            own = (mx.concatenate([guesses[0], own[0]], axis=2), mx.concatenate([guesses[1], own[1]], axis=2))
        attended = _attend(self.self_attn.queries(x, position), context, own, self.self_attn.dims**-0.5)
        h = (self.hidden_norm(fused) if self.norm_before_residual else fused) + self.self_attn.merge(attended)
        return h + self.mlp(self.post_attention_layernorm(h)), own


def _attend(q: mx.array, context: Rows | None, own: Rows, scale: float) -> mx.array:
    """Attention of one row [1, heads, 1, D] over keys in two parts; joining them would copy the context each step."""
    parts = [own] if context is None else [context, own]
    grouped = (q * scale).reshape(1, own[0].shape[1], -1, q.shape[-1])
    scores = mx.concatenate([grouped @ keys.swapaxes(2, 3) for keys, _ in parts], axis=-1)
    weights = mx.split(mx.softmax(scores, axis=-1, precise=True), [keys.shape[2] for keys, _ in parts[:-1]], axis=-1)
    mixed = [w @ values for w, (_, values) in zip(weights, parts, strict=True)]
    return (mixed[0] if context is None else mixed[0] + mixed[1]).reshape(q.shape)


class EagleNetwork(Module):
    """The network of an EAGLE-3 checkpoint. EAGLE-3.1's norms of the taps are used where the checkpoint has them."""

    def __init__(self, weights: Mapping[str, mx.array], config: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.fc = linear(weights, "fc")
        self.layer = EagleLayer(weights, "layer", config)
        self.norm = norm(weights, "norm", config)
        self.lm_head = linear(weights, "lm_head")
        self.norm_output = bool(config.get("norm_output"))
        if "embed_tokens.weight" in weights:
            self.embed_tokens = Embedding(*weights["embed_tokens.weight"].shape)
        if "input_norm.weight" in weights:
            self.input_norm = norm(weights, "input_norm", config)
        taps = sum(key.startswith("fc_norm.") for key in weights)
        if taps:
            self.fc_norm = [norm(weights, f"fc_norm.{i}", config) for i in range(taps)]

    def fuse(self, features: mx.array) -> mx.array:
        """Taps [n, taps*H] -> [n, H]."""
        if "fc_norm" in self:
            pieces = mx.split(features, len(self.fc_norm), axis=-1)
            features = mx.concatenate([each(piece) for each, piece in zip(self.fc_norm, pieces, strict=True)], axis=-1)
        if "input_norm" in self:
            features = self.input_norm(features)
        fused: mx.array = self.fc(features)
        return fused


class Eagle:
    """A loaded EAGLE-3 drafter: immutable, shared by all sessions; `new()` makes the drafter of one session.

    `dtype` None computes in the target's dtype. `bits` 4 or 8 packs the matrices, the draft's own head included, in
    groups of 64; norms and the embedding stay. `chunk` and `warning` as in DFlash. Raises BadDrafter for a misfit.
    """

    kind: Kind = "eagle"

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetSide,
        *,
        dtype: mx.Dtype | None = None,
        bits: int | None = None,
        chunk: int = 512,
        width: int = WIDTH,
    ):
        self.warning = check_fit(checkpoint, target)
        self.checkpoint = replace(checkpoint, weights={})
        self.target, self.chunk = target, chunk
        self.taps = checkpoint.taps_on(target.layers)
        self.width = min(width, MAX_WIDTH)
        self.limit: int | None = checkpoint.config.get("max_position_embeddings")
        self.dtype = dtype or target.embed(mx.zeros((1,), mx.int32)).dtype
        usable, self.ids = _vocabulary(checkpoint, target)
        self.network: Any = fill(EagleNetwork, usable, self.dtype, bits, apart=("d2t",))
        give(self.network, target.kernels)

    def new(self) -> EagleDrafter:
        return EagleDrafter(self)

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens int32 [n] -> [1, n, H], by the draft's own embedding where it has one."""
        table = self.network.embed_tokens if "embed_tokens" in self.network else self.target.embed
        embedded: mx.array = table(tokens)[None].astype(self.dtype)
        return embedded

    def draft(
        self, context: Rows | None, fused: mx.array, last: int, width: int, sampling: Sampling, position: int
    ) -> Proposal:
        """`last` stands at `position`, `fused` [1, H] is the row before it, `context` the rows before that one."""
        network, h, token, guesses = self.network, fused[None], mx.array([last], mx.int32), None
        steps = []
        for i in range(width):
            h, guesses = network.layer.step(self.embed(token), h, context, guesses, position - 1 + i)
            normed = network.norm(h)
            rows, scores = top(network.lm_head(normed)[0].astype(mx.float32), CANDIDATES)
            ids = self.ids[rows]
            column = mx.argmax(perturbed(scores, noise(ids, sampling, position + i), sampling), axis=-1)
            token = mx.take_along_axis(ids, column[:, None], axis=-1)[0]
            steps.append((ids, scores, column))
            h = normed if network.norm_output else h
        ids, scores, columns = (mx.concatenate(list(x)) for x in zip(*steps, strict=True))
        return proposal(self.kind, ids, scores, columns, sampling)


def _vocabulary(checkpoint: Checkpoint, target: TargetSide) -> tuple[Checkpoint, mx.array]:
    """The checkpoint without head rows that stand for padding, and the target's id of each remaining row, int32 [Vd].

    `d2t` holds offsets: draft id d is target id d + d2t[d]. A head that is not there is those rows of the target's.
    """
    head, offsets = checkpoint.weights.get("lm_head.weight"), checkpoint.weights.get("d2t")
    listed = offsets if head is None else head
    if listed is None:
        return checkpoint, mx.zeros((0,), mx.int32)  # refused with the rest of the tensors

    size = listed.shape[0]
    if offsets is None and size < target.vocab and not same_vocabulary(size, target):
        refuse(checkpoint.name, f"knows {size} of {target.vocab} tokens, and has no d2t table that says which")
    if offsets is not None and offsets.shape != (size,):
        refuse(checkpoint.name, f"has a d2t table of {offsets.size} entries for the {size} tokens of lm_head")
    ids = mx.arange(size, dtype=mx.int32) + (0 if offsets is None else offsets.astype(mx.int32))
    known: list[int] = ids.tolist()  # type: ignore[assignment]
    if min(known) < 0 or max(known) >= max(target.rows, size):
        refuse(checkpoint.name, f"has a d2t table that leads past the {target.rows} tokens of {target.name}")
    if head is None:
        head = target.head_rows(ids)
        checkpoint = replace(checkpoint, weights={**checkpoint.weights, "lm_head.weight": head})
    kept = mx.array([row for row, token in enumerate(known) if token < target.vocab])
    if kept.size < size:
        checkpoint, ids = replace(checkpoint, weights={**checkpoint.weights, "lm_head.weight": head[kept]}), ids[kept]
    return checkpoint, ids


class EagleDrafter:
    """The drafter of one session: a context of rows paired with the token after them, the last fused row, which waits
    for its token (`tail`), and behind it features and tokens that are not fused yet."""

    def __init__(self, model: Eagle):
        self.model = model
        self.source: str = model.kind
        self.taps, self.width, self.limit = model.taps, model.width, model.limit
        self.context = Context()
        self.tail: mx.array | None = None
        self.marks: tuple[mx.array, ...] = ()
        self.queue: tuple[tuple[mx.array, tuple[int, ...]], ...] = ()

    @property
    def length(self) -> int:
        return self._fused + sum(len(tokens) for _, tokens in self.queue)

    @property
    def _fused(self) -> int:
        return self.context.length + (self.tail is not None)

    def observe(self, commit: Commit) -> None:
        self.queue = (*self.queue, (checked(commit, self.length), commit.tokens))
        if self.length - self._fused > self.model.chunk:
            self._fuse()
        # Started, not waited for: no draft depends on the marks, and left lazy they would keep features alive.
        mx.async_eval(self.context.arrays, self.tail, self.marks[-self.model.chunk // STRIDE :])  # type: ignore[no-untyped-call]

    def _fuse(self) -> None:
        """Turn the queue into rows, and pair all but the last with the token that follows."""
        if not self.queue:
            return
        network, first = self.model.network, self._fused
        features = mx.concatenate([rows for rows, _ in self.queue]).astype(self.model.dtype)
        tokens = [token for _, some in self.queue for token in some]
        new = network.fuse(features)
        rows, following = (new, tokens[1:]) if self.tail is None else (mx.concatenate([self.tail, new]), tokens)
        if following:
            x = network.layer.pair(self.model.embed(mx.array(following, mx.int32)), rows[None, :-1])
            self.context.append(*network.layer.self_attn.keys_values(x, self.context.length))
        marked = mx.contiguous(new[(-first - 1) % STRIDE :: STRIDE])
        self.marks += tuple(mx.split(marked, marked.shape[0])) if marked.shape[0] else ()
        self.tail, self.queue = new[-1:], ()

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        width = usable_width(self, width, position)
        if width <= 0 or position == 0:
            return nothing(self.source)
        self._fuse()
        assert self.tail is not None
        context = self.context.view() if self.context.length else None
        return self.model.draft(context, self.tail, last, width, sampling, position)

    def rewind(self, length: int) -> int:
        """Exact inside the queue, else to a multiple of 16: the row before the next token must still be known."""
        length = min(length, self.length)
        if length < self._fused:
            length -= length % STRIDE
            self.marks = self.marks[: length // STRIDE]
            self.tail = self.marks[-1] if length else None
            self.context.rewind(max(0, length - 1))
        queued = length - self._fused
        if queued > 0:
            features = mx.concatenate([rows for rows, _ in self.queue])[:queued]
            self.queue = ((features, tuple(token for _, some in self.queue for token in some)[:queued]),)
        else:
            self.queue = ()
        return length

    def snapshot(self) -> object:
        return self.context.save(), self.tail, self.marks, self.queue

    def restore(self, snapshot: Any) -> None:
        saved, self.tail, self.marks, self.queue = snapshot
        self.context.load(saved)

    @property
    def nbytes(self) -> int:
        tail = () if self.tail is None else (self.tail,)
        return sum(a.nbytes for a in (*self.context.arrays, *tail, *self.marks, *(rows for rows, _ in self.queue)))
