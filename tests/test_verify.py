"""Both acceptance rules give the target's distribution for any drafter; what is accepted is what agrees."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lisa.sampling import DRAFT_STREAM, Candidates, Sampler, draw
from lisa.types import Distribution, Proposal, Sampling
from lisa.verify import verify

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.2, 0.2, 0.2, 0.4])
N = 50_000


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = counts.sum() * p
    return float(((counts - expected) ** 2 / expected).sum())


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    scaled = p ** (1 / temperature)
    return scaled / scaled.sum()


def independent(proposal: str, temperature: float, rule: str = "rejection", honest: bool = True) -> np.ndarray:
    """First tokens of N rounds of width 1: every row of a wide proposal is such a round, at a position of its own."""
    sampling = Sampling(temperature=temperature, seed=5, rule=rule)  # type: ignore[arg-type]
    logits = mx.broadcast_to(mx.log(mx.array(P, mx.float32)), (N + 1, 4))
    if proposal == "one-hot":
        tokens, distribution = mx.full((N,), 1, mx.int32), None
    else:
        q = mx.broadcast_to(mx.log(mx.array(Q, mx.float32)), (N, 4))
        drawn = Candidates(q / temperature)
        tokens = draw(drawn, sampling, mx.arange(1, N + 1), 4, DRAFT_STREAM)
        if not honest:
            tokens = mx.full((N,), 3, mx.int32)  # the mode of q, though q is what it claims to have drawn from
        ids = mx.broadcast_to(mx.arange(4, dtype=mx.int32), (N, 4))
        distribution = Distribution(ids, mx.softmax(drawn.logits, axis=-1))
    verdict = verify(Proposal(tokens, N, "test", distribution), logits, Sampler(sampling, 4), 0)
    return np.bincount(np.array(verdict.rows[:-1]), minlength=4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("proposal", ["sampled", "one-hot"])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_A8_single_tokens_follow_the_target(proposal: str, temperature: float, rule: str) -> None:
    counts = independent(proposal, temperature, rule)
    assert chi_square(counts, tempered(P, temperature)) < 22.0, "3 degrees of freedom, p = 0.001 over 16 tests"


def test_A8_a_drafter_that_lies_about_its_draw_is_noticed() -> None:
    assert chi_square(independent("sampled", 1.0, honest=False), P) > 100


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_A8_pairs_of_tokens_follow_the_target(rule: str) -> None:
    """Blocks of two; a block cut after its first token is finished by the next round, as the engine does."""
    conditional = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]])
    counts = np.zeros((4, 4))
    blocks = 2500
    sampling = Sampling(temperature=1.0, seed=9, rule=rule)  # type: ignore[arg-type]
    sampler = Sampler(sampling, 4)
    table = mx.log(mx.array(np.vstack([P, conditional]), mx.float32))
    q = mx.log(mx.array(Q, mx.float32))
    ids = mx.broadcast_to(mx.arange(4, dtype=mx.int32), (2, 4))
    distribution = Distribution(ids, mx.broadcast_to(mx.array(Q, mx.float32), (2, 4)))
    stream = DRAFT_STREAM if rule == "rejection" else 0
    verdicts = []
    for block in range(blocks):
        position = 10 * block
        at = mx.arange(position + 1, position + 3)
        draft = draw(Candidates(mx.broadcast_to(q, (2, 4))), sampling, at, 4, stream)
        rows = mx.concatenate([table[:1], table[1 + draft]])
        first = verify(Proposal(draft, 2, "test", distribution), rows, sampler, position)
        after = verify(Proposal(mx.zeros((0,), mx.int32), 0, "none"), table[1 + first.rows[:1]], sampler, position + 1)
        verdicts.append((first, after))
    mx.eval([v.packed for pair in verdicts for v in pair])
    for first, after in verdicts:
        tokens = first.read().tokens
        pair = tokens[:2] if len(tokens) > 1 else (tokens[0], after.read().next)
        counts[pair[0], pair[1]] += 1
    assert chi_square(counts.ravel(), (P[:, None] * conditional).ravel()) < 44, "15 degrees of freedom, p = 0.0001"


def test_coupling_accepts_what_shares_the_noise_and_independent_noise_does_not() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    logits = mx.random.normal((1001, 50), key=mx.random.key(0))
    positions = mx.arange(1, 1001)
    rates = {}
    for stream in (0, DRAFT_STREAM):
        draft = draw(Candidates(logits[:-1]), sampling, positions, 50, stream)
        verdict = verify(Proposal(draft, 1000, "self"), logits, Sampler(sampling, 50), 0)
        agree = np.array(verdict.packed[1000:2000])
        rates[stream] = agree.mean()
    assert rates[0] == 1.0
    assert rates[DRAFT_STREAM] < 0.1


def test_a_drafter_that_is_the_target_is_never_rejected_under_rejection() -> None:
    sampling = Sampling(temperature=1.0, top_k=8, seed=3, rule="rejection")
    sampler = Sampler(sampling, 50)
    logits = mx.random.normal((1001, 50), key=mx.random.key(0))
    candidates = sampler.candidates(logits[:-1], mx.zeros((1000,), mx.int32))
    draft = draw(candidates, sampling, mx.arange(1, 1001), 50, DRAFT_STREAM)
    assert candidates.ids is not None
    distribution = Distribution(candidates.ids, mx.softmax(candidates.logits, axis=-1, precise=True))
    verdict = verify(Proposal(draft, 1000, "self", distribution), logits, sampler, 0)
    assert np.array(verdict.packed[1000:2000]).all()


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_A3_at_temperature_0_acceptance_is_agreement_with_the_argmax(rule: str) -> None:
    logits = mx.array([[0.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    sampler = Sampler(Sampling(seed=0, rule=rule), 3)  # type: ignore[arg-type]
    outcome = verify(Proposal(mx.array([1, 1], mx.int32), 2, "test"), logits, sampler, 7).read()
    assert (outcome.drafted, outcome.accepted, outcome.next, outcome.tokens) == ((1, 1), 1, 0, (1, 0))
    outcome = verify(Proposal(mx.array([2], mx.int32), 1, "test"), logits[:2], sampler, 7).read()
    assert (outcome.accepted, outcome.tokens) == (0, (1,))
    outcome = verify(Proposal(mx.array([1, 0], mx.int32), 2, "test"), logits, sampler, 7).read()
    assert (outcome.accepted, outcome.tokens) == (2, (1, 0, 2))
