"""What drafters have in common: checking what they are told, and turning scores into a proposal.

n slots have K candidates each, the most likely tokens of the slot; everything is drawn from those.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lisa.sampling import DRAFT_STREAM, TARGET_STREAM, gumbel
from lisa.types import Commit, Distribution, Proposal, Sampling

CANDIDATES = 32
"""K of the drafters whose format does not say it: draws and confidence are over these."""


def in_order(commit: Commit, length: int) -> None:
    """Raises RuntimeError unless the commit follows `length` tokens."""
    if commit.start != length:
        raise RuntimeError(f"gap: {length} tokens observed, next commit starts at {commit.start}")


def checked(commit: Commit, length: int) -> mx.array:
    """The features of the commit that follows `length` tokens."""
    in_order(commit, length)
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
