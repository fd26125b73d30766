"""Sampling: options in one order, noise that is uniform, independent, and a function of its key alone."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from lisa.sampling import Candidates, Sampler, draw, filtered, gumbel, logprobs, uniform
from lisa.types import Sampling

NONE = mx.array([], mx.int32)


def kept(candidates: Candidates, row: int = 0) -> set[int]:
    """Token ids that can still be drawn."""
    logits = candidates.logits[row].tolist()
    ids = range(len(logits)) if candidates.ids is None else candidates.ids[row].tolist()
    return {i for i, logit in zip(ids, logits, strict=True) if logit > -math.inf}


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = mx.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    greedy = Sampling(top_k=1, top_p=0.1)
    assert draw(filtered(logits, greedy), greedy, mx.array([4, 5]), 3).tolist() == [1, 0]


def test_temperature_comes_before_the_filters() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    # At temperature 2 the distribution is flatter, and 0.6 of the mass takes two tokens.
    assert kept(filtered(logits, Sampling(temperature=1.0, top_p=0.5))) == {0}
    assert kept(filtered(logits, Sampling(temperature=2.0, top_p=0.5))) == {0, 1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"min_p": 0.6}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),  # after top_k the three hold 4/9, 3/9, 2/9
        ({"top_k": 1, "top_p": 0.01, "min_p": 1.0}, {0}),
    ],
)
def test_filters_keep_exactly(options: dict[str, float], expected: set[int]) -> None:
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    assert kept(filtered(logits, Sampling(temperature=1.0, **options))) == expected  # type: ignore[arg-type]


def test_filters_judge_each_row_by_itself() -> None:
    rows = mx.random.normal((16, 40), key=mx.random.key(1))
    sampling = Sampling(temperature=0.8, top_k=12, top_p=0.8, min_p=0.05)
    together = filtered(rows, sampling)
    for i in range(16):
        assert kept(together, i) == kept(filtered(rows[i : i + 1], sampling))


def test_penalties_see_prompt_and_answer_as_documented() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), 4, prompt=[0])
    sampler.commit(mx.array([1, 1, 2], mx.int32))
    logits = mx.array([[4.0, 4.0, -4.0, 4.0]])
    # 0 is in the prompt only, 1 twice and 2 once in the answer, 3 nowhere.
    assert sampler.candidates(logits, NONE).logits.tolist() == [[2.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 4.0]]


def test_A10_each_row_counts_the_draft_before_it_and_a_rejected_draft_leaves_no_trace() -> None:
    sampler = Sampler(Sampling(frequency_penalty=1.0), 3)
    rows = sampler.candidates(mx.zeros((4, 3)), mx.array([1, 1, 2], mx.int32)).logits.tolist()
    assert rows == [[0, 0, 0], [0, -1, 0], [0, -2, 0], [0, -2, -1]]
    assert sampler.candidates(mx.zeros((1, 3)), NONE).logits.tolist() == [[0, 0, 0]]


def test_logit_bias_decides_before_everything_else() -> None:
    sampler = Sampler(Sampling(temperature=1.0, top_k=1, logit_bias=((2, 100.0), (0, -100.0))), 3)
    assert kept(sampler.candidates(mx.array([[5.0, 4.0, 0.0]]), NONE)) == {2}


def test_noise_depends_on_seed_position_token_and_stream_and_on_nothing_else() -> None:
    ids = mx.array([[5, 900, 17]], mx.int32)
    base = gumbel(42, mx.array([1000]), ids, 1000)
    whole = gumbel(42, mx.array([999, 1000, 1001]), None, 1000)
    assert mx.array_equal(whole[1][mx.array([5, 900, 17])], base[0])
    for other in (gumbel(43, mx.array([1000]), ids, 1000), gumbel(42 + (1 << 40), mx.array([1000]), ids, 1000)):
        assert not mx.any(other == base).item()
    assert not mx.any(gumbel(42, mx.array([1001]), ids, 1000) == base).item()
    assert not mx.any(gumbel(42, mx.array([1000]), ids, 1000, stream=1) == base).item()


def test_noise_is_gumbel_and_finite() -> None:
    noise = np.array(gumbel(7, mx.arange(200), None, 5000)).ravel()
    assert np.isfinite(noise).all()
    # Mean is Euler's constant, variance pi^2 / 6; a million draws put the mean within 0.005 (four sigma).
    assert abs(noise.mean() - 0.5772) < 0.0052
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    assert noise.max() > 11, "the tail that lets unlikely tokens win is there"


def test_neighbouring_positions_tokens_and_seeds_are_uncorrelated() -> None:
    noise = np.array(gumbel(7, mx.arange(300), None, 1000))
    other = np.array(gumbel(8, mx.arange(300), None, 1000))
    pairs = [(noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, other)]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01  # five sigma at 300,000 draws


def test_uniform_is_uniform() -> None:
    u = np.sort(np.array(uniform(3, mx.arange(20000), 2)))
    assert u[0] > 0 and u[-1] < 1
    assert np.abs(u - (np.arange(20000) + 0.5) / 20000).max() < 1.95 / math.sqrt(20000)  # Kolmogorov, p = 0.001


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3), Sampling(temperature=1.3, top_p=0.8)]
)
def test_draws_follow_the_filtered_distribution(sampling: Sampling) -> None:
    logits = mx.array([[1.0, 0.5, 0.0, -0.5, -1.0]])
    n = 50_000
    rows = Candidates(
        *(None if x is None else mx.broadcast_to(x, (n, x.shape[1])) for x in vars(filtered(logits, sampling)).values())
    )
    from dataclasses import replace

    tokens = np.array(draw(rows, replace(sampling, seed=11), mx.arange(n), 5))
    one = filtered(logits, sampling)
    p = np.zeros(5)
    ids = range(5) if one.ids is None else one.ids[0].tolist()
    for i, value in zip(ids, mx.softmax(one.logits, axis=-1)[0].tolist(), strict=True):
        p[i] = value
    counts = np.bincount(tokens, minlength=5)
    assert counts[p == 0].sum() == 0
    chi2 = ((counts - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum()
    assert chi2 < {5: 18.47, 4: 16.27, 3: 13.82}[int((p > 0).sum())], "chi-square, p = 0.001"


def test_logprobs_are_those_of_the_plain_softmax() -> None:
    logits = mx.log(mx.array([[0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]))
    chosen, ids, values = logprobs(logits, mx.array([2, 0]), 2)
    np.testing.assert_allclose(np.exp(np.array(chosen)), [0.3, 0.25], rtol=1e-5)
    assert ids.tolist() == [[1, 2], [2, 0]]
    np.testing.assert_allclose(np.exp(np.array(values)), [[0.6, 0.3], [0.5, 0.25]], rtol=1e-5)
