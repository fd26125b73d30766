"""What every drafter with a network does around it: check what it is told, and turn scores into a proposal.

n slots have K candidates each, the most likely tokens of the slot; everything is drawn from those.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.sampling import DRAFT_STREAM, TARGET_STREAM, gumbel
from lisa.types import Commit, Distribution, Proposal, Sampling

CANDIDATES = 32
"""K of the drafters whose format does not say it: draws and confidence are over these."""


def checked(commit: Commit, length: int) -> mx.array:
    """The features of the commit that follows `length` tokens."""
    if commit.start != length:
        raise RuntimeError(f"gap: {length} tokens observed, next commit starts at {commit.start}")
    features: mx.array | None = commit.features
    if features is None or features.shape[0] != len(commit.tokens):
        raise RuntimeError(f"{len(commit.tokens)} tokens need as many rows of features")
    return features


def usable_width(drafter: Any, width: int, position: int) -> int:
    """At most what the drafter proposes, up to its position limit."""
    if position != drafter.length:
        raise RuntimeError(f"gap: {drafter.length} tokens observed, asked to draft after position {position}")
    room = width if drafter.limit is None else drafter.limit - 1 - position
    return int(min(width, drafter.width, room))


def nothing(source: str) -> Proposal:
    return Proposal(mx.zeros((0,), mx.int32), 0, source)


def top(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest of each row of [n, V], descending, lower ids first among equals: ids int32 and values, [n, k] each.

    Only the blocks of 64 that hold the k largest maxima can hold them: a tenth of the time of a partition of the row.
    """
    n, size = logits.shape
    blocks, k = size // 64, min(k, size)
    if blocks <= k:
        ids = mx.argsort(-logits, axis=-1)[:, :k].astype(mx.int32)
        return ids, mx.take_along_axis(logits, ids, axis=-1)
    maxima = logits[:, : blocks * 64].reshape(n, blocks, 64).max(axis=-1)
    best = mx.sort(mx.argpartition(-maxima, k - 1, axis=-1)[:, :k].astype(mx.int32), axis=-1)
    ids = (best[..., None] * 64 + mx.arange(64, dtype=mx.int32)).reshape(n, -1)
    rest = mx.broadcast_to(mx.arange(blocks * 64, size, dtype=mx.int32), (n, size - blocks * 64))
    ids = mx.concatenate([ids, rest], axis=-1)
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)[:, :k]
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def noise(ids: mx.array, sampling: Sampling, position: int) -> mx.array | None:
    """The noise of slots 1, 2 ... after `position` at their candidates int32 [n, K]; None at temperature 0.

    Coupled drafts share the target's noise; for rejection the draft must be independent of the verifier's draws.
    """
    if sampling.greedy:
        return None
    assert sampling.seed is not None
    positions = mx.arange(position + 1, position + 1 + ids.shape[0])
    return gumbel(sampling.seed, positions, ids, 0, DRAFT_STREAM if sampling.rule == "rejection" else TARGET_STREAM)


def perturbed(scores: mx.array, gumbels: mx.array | None, sampling: Sampling) -> mx.array:
    """What the argmax of is a draw from softmax(scores / temperature)."""
    return scores if gumbels is None else scores / sampling.temperature + gumbels


def proposal(source: str, ids: mx.array, scores: mx.array, columns: mx.array, sampling: Sampling) -> Proposal:
    """The tokens at `columns` int [n] of candidates int32 [n, K] with their scores [n, K]."""
    probabilities = mx.softmax(scores if sampling.greedy else scores / sampling.temperature, axis=-1)
    tokens, confidence = (mx.take_along_axis(x, columns[:, None], axis=-1)[:, 0] for x in (ids, probabilities))
    drawn = not sampling.greedy and sampling.rule == "rejection"
    return Proposal(tokens, ids.shape[0], source, Distribution(ids, probabilities) if drawn else None, confidence)
