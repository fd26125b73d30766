"""Proposal and target logits -> Verdict. Pure, and lazy until the caller evaluates `Verdict.packed`.

Both rules give an exact sample of the target for any drafter (docs/how-it-works.md, "The acceptance rule"):
coupled: draft and target share the noise of a draw, so a draft token is kept while it equals the target's own draw;
rejection: a draft token x is kept with probability min(1, p(x)/q(x)), else redrawn from the normalised (p - q)+.
At temperature 0 they are the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lisa.sampling import ACCEPT_STREAM, REDRAW_STREAM, Candidates, Sampler, draw, gumbel, uniform
from lisa.types import Proposal


@dataclass(frozen=True)
class Outcome:
    """A verdict as read on the host. `drafted` [k]; `accepted` of them hold; `next` is the target's own token."""

    drafted: tuple[int, ...]
    accepted: int
    next: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the round yields: the accepted draft and the target's own token."""
        return (*self.drafted[: self.accepted], self.next)


@dataclass(frozen=True)
class Verdict:
    """Everything the host must know of a round in one array.

    `packed` int32 [3k + 1] = draft [k], agreement [k] and what the target says at each row [k + 1]. `rows` int32
    [k + 1] is the token each row delivers, should it be reached.
    """

    packed: mx.array
    rows: mx.array
    size: int

    @property
    def next(self) -> mx.array:
        """The token of a round without a draft, int32 [1], before it has been read."""
        assert self.size == 0
        return self.rows

    def read(self) -> Outcome:
        """Evaluates `packed` where that has not been done: the one host sync of a round."""
        values: list[int] = self.packed.tolist()  # type: ignore[assignment]
        k = self.size
        agree = values[k : 2 * k]
        accepted = agree.index(0) if 0 in agree else k
        return Outcome(tuple(values[:k]), accepted, values[2 * k + accepted])


def verify(
    proposal: Proposal, logits: mx.array, sampler: Sampler, position: int, allowed: mx.array | None = None
) -> Verdict:
    """`logits` [k + 1, V]: row j was computed after the anchor, which stands at `position`, and draft tokens [:j].
    `allowed` bool [k + 1, V] is what a constraint leaves of each row."""
    candidates = sampler.candidates(logits, proposal.tokens, allowed)
    positions = mx.arange(position + 1, position + proposal.size + 2)
    if sampler.sampling.greedy or sampler.sampling.rule == "coupled":
        agree, draws = _coupled(proposal, candidates, sampler, positions)
    else:
        agree, draws = _rejection(proposal, candidates, sampler, positions)
    return _verdict(proposal, agree, draws)


def verify_best(proposal: Proposal, best: mx.array) -> Verdict:
    """`best` int32 [k + 1]: the target's own token of each row, where nothing but the largest logit counts."""
    return _verdict(proposal, best[:-1] == proposal.tokens, best)


def _verdict(proposal: Proposal, agree: mx.array, draws: mx.array) -> Verdict:
    if not proposal.size:
        return Verdict(draws, draws, 0)
    rows = mx.concatenate([mx.where(agree, proposal.tokens, draws[:-1]), draws[-1:]])
    return Verdict(mx.concatenate([proposal.tokens, agree.astype(mx.int32), draws]), rows, proposal.size)


def _coupled(
    proposal: Proposal, candidates: Candidates, sampler: Sampler, positions: mx.array
) -> tuple[mx.array, mx.array]:
    draws = draw(candidates, sampler.sampling, positions, sampler.vocab)
    return draws[:-1] == proposal.tokens, draws


def _rejection(
    proposal: Proposal, candidates: Candidates, sampler: Sampler, positions: mx.array
) -> tuple[mx.array, mx.array]:
    seed = sampler.sampling.seed
    assert seed is not None
    p = _dense(mx.softmax(candidates.logits, axis=-1, precise=True), candidates.ids, sampler.vocab)
    k = proposal.size
    rest = p
    agree = mx.zeros((0,), mx.bool_)
    if k:
        tokens = proposal.tokens[:, None]
        q = _draft_distribution(proposal, sampler.vocab)
        ratio = mx.take_along_axis(p[:k], tokens, axis=1)[:, 0] / mx.take_along_axis(q, tokens, axis=1)[:, 0]
        agree = uniform(seed, positions[:k], ACCEPT_STREAM) < ratio
        rest = mx.concatenate([mx.maximum(p[:k] - q, 0.0), p[k:]])
    # Where p equals q nothing is left over, and such a row is never redrawn.
    noise = gumbel(seed, positions, None, sampler.vocab, REDRAW_STREAM)
    return agree, mx.argmax(mx.log(rest) + noise, axis=-1).astype(mx.int32)


def _draft_distribution(proposal: Proposal, vocab: int) -> mx.array:
    """q as float32 [k, V]; a drafter that gave none was certain."""
    if proposal.distribution is not None:
        return _dense(proposal.distribution.probabilities, proposal.distribution.ids, vocab)
    certain: mx.array = proposal.tokens[:, None] == mx.arange(vocab)[None]
    return certain.astype(mx.float32)


def _dense(probabilities: mx.array, ids: mx.array | None, vocab: int) -> mx.array:
    if ids is None:
        return probabilities
    empty = mx.zeros((probabilities.shape[0], vocab))
    return mx.put_along_axis(empty, ids, probabilities, axis=1)
