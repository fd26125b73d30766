"""DSpine: a causal DFlash block whose slots tell their right neighbour, after every layer, which token they predict.

After each layer every slot writes a feature of itself into its right neighbour, all slots at once, so what is known of
the preceding tokens travels one slot a layer. At the end the last write is done again for each of the K most likely
tokens of the previous slot, which scores every pair of neighbouring candidates; the draft is the path that takes the
best candidate after each chosen one. r is the rank of the features, m the size of a message.

Source: "Draft in Parallel, Condition Through Depth", https://arxiv.org/abs/2609.36173, and its published checkpoints.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module

from lisa.drafters.candidates import noise, perturbed, proposal
from lisa.drafters.checkpoint import Checkpoint, Kind, refuse
from lisa.drafters.dflash import Backbone, DFlash, TargetSide, Trace, fill, linear, norm
from lisa.metal.inject import fits as inject_fits
from lisa.metal.inject import inject
from lisa.metal.lattice import lattice
from lisa.types import Proposal, Sampling

Scoring = Literal["pairs", "path"]

TOP_K = 16


class Injection(Module):
    """What passes between neighbouring slots. A readout and a write belong to one layer, gates and message to all."""

    def __init__(self, weights: Mapping[str, mx.array], layers: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.readouts = [linear(weights, f"injection.readouts.{i}") for i in range(layers)]
        self.writes = [linear(weights, f"injection.writes.{i}") for i in range(layers)]
        self.message = linear(weights, "injection.message")
        self.receiver_gate = linear(weights, "injection.receiver_gate")
        self.predecessor_gate = linear(weights, "injection.predecessor_gate")
        self.bias = weights["injection.bias"]

    def feature(self, h: mx.array, layer: int) -> mx.array:
        """phi_l: hiddens [..., H] -> [..., r], of length sqrt(r). Normalised in float32."""
        read = self.readouts[layer](h).astype(mx.float32)
        length = mx.maximum(mx.linalg.norm(read, axis=-1, keepdims=True), 1e-12)
        feature: mx.array = (math.sqrt(read.shape[-1]) * read / length).astype(h.dtype)
        return feature

    def write(self, h: mx.array, feature: mx.array, predecessor: mx.array, layer: int) -> mx.array:
        """Hiddens [..., H] once they have heard of `predecessor` [..., r], a neighbour's feature or a token's code."""
        gate = mx.sigmoid(self.receiver_gate(feature) + self.predecessor_gate(predecessor) + self.bias)
        scale = mx.linalg.norm(h.astype(mx.float32), axis=-1, keepdims=True) / math.sqrt(h.shape[-1])
        written: mx.array = h + scale.astype(h.dtype) * self.writes[layer](gate * self.message(predecessor))
        return written

    def __call__(self, h: mx.array, anchor: mx.array, layer: int) -> mx.array:
        """Every slot of [1, T, H] hears its left neighbour; slot 1 hears the anchor's code [1, 1, r]."""
        features = self.feature(h[:, 1:], layer)
        predecessors = mx.concatenate([anchor, features[:, :-1]], axis=1)
        return mx.concatenate([h[:, :1], self.write(h[:, 1:], features, predecessors, layer)], axis=1)


class SpineBackbone(Backbone):
    """The network of a DSpine checkpoint, under the checkpoint's own tensor names."""

    def __init__(self, weights: Mapping[str, mx.array], config: Mapping[str, Any]):
        super().__init__(weights, config)
        self.injection = Injection(weights, len(self.layers))


class Refinement(Module):
    """The last layer's write and the final norm."""

    def __init__(self, weights: Mapping[str, mx.array], config: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm = norm(weights, "norm", config)
        self.injection = Injection(weights, 1)

    def feature(self, pre: mx.array) -> mx.array:
        return self.injection.feature(pre, 0)

    def __call__(self, pre: mx.array, feature: mx.array, code: mx.array) -> mx.array:
        """Pre-injection hiddens [..., H] -> final hiddens, had the predecessor been the token of `code` [..., r]."""
        refined: mx.array = self.norm(self.injection.write(pre, feature, code, 0))
        return refined


class DSpine(DFlash):
    """A loaded DSpine drafter; see DFlash. The refinement and all scores are float32 whatever the dtype.

    `scoring` "pairs" scores all pairs at once, "path" one slot after another along the chosen path: a K-th of the work,
    but each slot waits for the last. None times both and keeps the faster. They choose the same tokens.
    """

    kind: Kind = "dspine"
    apart = ("transfer_codes", "transfer_mean", "transfer_basis")

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetSide,
        *,
        dtype: mx.Dtype | None = None,
        bits: int | None = None,
        chunk: int = 512,
        scoring: Scoring | None = None,
    ):
        super().__init__(checkpoint, target, dtype=dtype, bits=bits, chunk=chunk)
        weights = checkpoint.weights
        self.codes = weights["transfer_codes"] if "transfer_codes" in weights else codes_from(weights, target)
        rank = self.network.injection.message.weight.shape[1]
        if self.codes.shape[1] != rank:
            refuse(
                checkpoint.name, f"has codes of {self.codes.shape[1]} numbers for features of {rank}", "fetch it again"
            )
        self.vocab = min(target.vocab, self.codes.shape[0])
        self.top_k = min(checkpoint.config.get("top_k") or TOP_K, self.vocab)
        self.refinement: Any = self._refinement(checkpoint)
        mx.eval(self.codes)
        self.scoring: Scoring = scoring or self._faster()

    def build(self, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> Module:
        return SpineBackbone(weights, config)

    def _causal(self) -> list[bool]:
        return [True] * len(self.windows)

    def _refinement(self, checkpoint: Checkpoint) -> Module:
        """float32 keeps close scores in the same order on every machine and in both ways of scoring."""
        last, weights = len(self.windows) - 1, checkpoint.weights
        shared = {
            k: v for k, v in weights.items() if k == "norm.weight" or re.match(r"injection\.(?!readouts|writes)", k)
        }
        own = {
            f"injection.{part}.0.weight": weights[f"injection.{part}.{last}.weight"] for part in ("readouts", "writes")
        }
        return fill(Refinement, replace(checkpoint, weights={**shared, **own}), mx.float32, None)

    def code(self, tokens: mx.array) -> mx.array:
        """int [...] -> float32 [..., r], of length sqrt(r)."""
        return math.sqrt(self.codes.shape[1]) * self.codes[tokens].astype(mx.float32)

    def after_layer(self, h: mx.array, layer: int, tokens: mx.array) -> mx.array:
        own, anchor = self.network.injection, self.code(tokens[:1]).astype(h.dtype)
        gates = (own.receiver_gate.weight, own.predecessor_gate.weight, own.message.weight, own.bias)
        weights = (own.readouts[layer].weight, own.writes[layer].weight, *gates)
        if self.target.kernels.may_run("inject") and inject_fits(h[0], anchor[0], *weights):
            return inject(h[0], anchor[0], *weights, kernels=self.target.kernels)[None]
        injected: mx.array = own(h, anchor[None], layer)
        return injected

    def choose(self, trace: Trace, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        ids, _ = self.target.top(trace.final[0, 1:], self.top_k, self.vocab)
        pre, gumbels = trace.pre[0, 1:], noise(ids, sampling, position)
        if self.target.kernels.may_run("lattice"):
            refined, heads = self._pairs(pre, ids, last)
            columns, scores = lattice(refined, heads, gumbels, sampling.temperature, kernels=self.target.kernels)
        else:
            columns, scores = walk(self.row_scores(pre, ids, last, self.scoring), gumbels, width, sampling)
        return proposal(self.kind, ids, scores, columns, sampling)

    def row_scores(self, pre: mx.array, ids: mx.array, last: int, scoring: Scoring) -> Row:
        """How well each candidate follows a predecessor, from the hiddens [w, H] before the last injection and the
        candidates int32 [w, K]. Row 0 is the first proposed slot; it follows `last`, whatever the column."""
        if scoring == "path":
            pre = pre.astype(mx.float32)
            features, heads, before = self.refinement.feature(pre), self.target.head_rows(ids), self._before(ids, last)
            return lambda i, column: heads[i] @ self.refinement(pre[i], features[i], before[i, column])
        refined, heads = self._pairs(pre, ids, last)
        table = refined @ heads.swapaxes(1, 2)
        return lambda i, column: table[i, column]

    def _pairs(self, pre: mx.array, ids: mx.array, last: int) -> tuple[mx.array, mx.array]:
        """Hiddens of each slot after each predecessor, and head rows of its candidates, float32 [w, K, H] each."""
        pre = pre.astype(mx.float32)
        features = self.refinement.feature(pre)
        refined = self.refinement(pre[:, None], features[:, None], self._before(ids, last))
        return refined, self.target.head_rows(ids)

    def _before(self, ids: mx.array, last: int) -> mx.array:
        """Codes of the predecessors, float32 [w, K, r]."""
        return self.code(mx.concatenate([mx.full((1, ids.shape[1]), last, mx.int32), ids[:-1]]))

    def _faster(self, clock: Callable[[], float] = time.perf_counter) -> Scoring:
        """Times both on this machine, on the shapes of a full block."""
        ids = mx.broadcast_to(mx.arange(self.top_k, dtype=mx.int32), (self.width, self.top_k))
        pre = mx.random.normal((self.width, self.target.hidden), key=mx.random.key(0))
        seconds: dict[Scoring, float] = {}
        for scoring in ("pairs", "path"):
            for attempt in range(4):
                began = clock()
                mx.eval(walk(self.row_scores(pre, ids, 0, scoring), None, self.width, Sampling()))
                if attempt:  # the first one compiles
                    seconds[scoring] = min(seconds.get(scoring, math.inf), clock() - began)
        return min(seconds, key=lambda scoring: seconds[scoring])


def codes_from(weights: Mapping[str, mx.array], target: TargetSide, chunk: int = 16384) -> mx.array:
    """The codes of all tokens, float16 [V, r]: the head's unit rows less `transfer_mean` [H], along `transfer_basis`
    [H, r], at length 1."""
    mean, basis = (weights[name].astype(mx.float32) for name in ("transfer_mean", "transfer_basis"))
    codes = []
    for start in range(0, target.vocab, chunk):
        rows = target.head_rows(mx.arange(start, min(start + chunk, target.vocab)))
        moved = (_unit(rows) - mean) @ basis
        codes.append(_unit(moved).astype(mx.float16))
        mx.eval(codes)
    return mx.concatenate(codes)


def _unit(rows: mx.array) -> mx.array:
    return rows / mx.maximum(mx.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


Row = Callable[[int, mx.array], mx.array]
"""(slot, column of the token before it) -> scores of the slot's candidates, float32 [K]."""


def walk(row: Row, gumbels: mx.array | None, width: int, sampling: Sampling) -> tuple[mx.array, mx.array]:
    """The best candidate of each slot after the one chosen before, left to right; the first among equals.

    `gumbels` float32 [w, K] or None. Returns the columns chosen, int [w], and the scores they were chosen from, [w, K].
    """
    column, columns, rows = mx.array(0), [], []
    for i in range(width):
        rows.append(row(i, column))
        column = mx.argmax(perturbed(rows[-1], None if gumbels is None else gumbels[i], sampling))
        columns.append(column)
    return mx.stack(columns), mx.stack(rows)
