"""The contract every drafter passes, with random weights on tiny targets: it may be wrong, but never quietly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from drafters_tiny import KINDS, drafter
from tiny import VOCAB, events, outcome, session, target

from lisa.drafters.none import Nothing
from lisa.types import Commit, Drafter, Request, Sampling

PROMPT = tuple((7 * i + 3) % VOCAB for i in range(23))
SAMPLINGS = [Sampling(seed=0), Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=6)]
TARGETS = ["dense", "hybrid", "sliding"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def heard(kind: str, tokens: tuple[int, ...], following: int, pieces: int = 64, on: str = "dense") -> Drafter:
    """A drafter that has heard `tokens` as a prefill in chunks tells it."""
    made = drafter(kind, on)()
    tell(made, tokens, following, pieces, on)
    return made


def tell(made: Drafter, tokens: tuple[int, ...], following: int, pieces: int = 64, on: str = "dense") -> None:
    """What is still unheard of `tokens`."""
    state = target(on).new_state()
    _, features = target(on).forward(mx.array(tokens, mx.int32), state, made.taps, rows=0)
    for start in range(made.length, len(tokens), pieces):
        chunk = tokens[start : start + pieces]
        after = (*tokens, following)[start + len(chunk)]
        made.observe(Commit(chunk, None if features is None else features[start : start + len(chunk)], after, start))


def draft(made: Drafter, last: int, width: int, sampling: Sampling = SAMPLINGS[0]) -> list[int]:
    proposal = made.propose(last, width, sampling, made.length)
    assert proposal.size <= width and proposal.tokens.shape == (proposal.size,)
    tokens: list[int] = proposal.tokens.tolist()  # type: ignore[assignment]
    assert all(0 <= token < VOCAB for token in tokens)
    return tokens


@every_kind
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=1"])
@pytest.mark.parametrize("width", [0, 1, 4, 15])
def test_the_text_equals_plain_text(kind: str, on: str, sampling: Sampling, width: int) -> None:
    request = Request(PROMPT, sampling, max_tokens=30, eos=frozenset({11}), logprobs=1)
    plain = outcome(events(session(target(on), Nothing), request))
    made = outcome(events(session(target(on), drafter(kind, on), width), request))
    assert made[:4] == plain[:4]
    if kind not in ("none", "ngram") and width and len(plain[0]) > 2:
        assert made[4].drafted > 0, "it drafts at all"


@every_kind
@pytest.mark.parametrize("on", TARGETS)
def test_an_end_of_turn_inside_a_block_ends_the_text_there(kind: str, on: str) -> None:
    free = Request(PROMPT, SAMPLINGS[1], max_tokens=30)
    whole = outcome(events(session(target(on), Nothing), free))[0]
    for end in sorted(set(whole[4:12])):
        ids, _, _, reason, stats = outcome(
            events(session(target(on), drafter(kind, on), 7), replace(free, eos=frozenset({end})))
        )
        assert ids == whole[: whole.index(end)] and reason == "stop"
        assert stats.completion_tokens == len(ids)


@every_kind
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=1"])
def test_proposing_twice_gives_the_same_and_leaves_no_trace(kind: str, sampling: Sampling) -> None:
    made, other = heard(kind, PROMPT, 5), heard(kind, PROMPT, 5)
    first = draft(made, 5, 15, sampling)
    assert draft(made, 5, 15, sampling) == first == draft(other, 5, 15, sampling)
    longer = (*PROMPT, 5, 9, 2)
    tell(made, longer, 3)
    assert draft(made, 3, 15, sampling) == draft(heard(kind, longer, 3), 3, 15, sampling)


@every_kind
def test_a_gap_raises(kind: str) -> None:
    made = heard(kind, PROMPT, 5)
    features = mx.zeros((1, len(made.taps) * 32)) if made.taps else None
    for start in (made.length + 1, made.length - 1, 0):
        with pytest.raises(RuntimeError, match="gap"):
            made.observe(Commit((5,), features, 6, start))


@every_kind
@pytest.mark.parametrize("length", [0, 1, 5, 16, 17, 22, 23])
@pytest.mark.parametrize("proposed", [False, True])
def test_rewind_then_observe_equals_fresh(kind: str, length: int, proposed: bool) -> None:
    made = heard(kind, PROMPT, 5)
    if proposed:
        draft(made, 5, 4)
    reached = made.rewind(length)
    assert reached == made.length <= length
    other = (*PROMPT[:reached], 30, 31, 32, 33)
    tell(made, other, 34)
    assert draft(made, 34, 15) == draft(heard(kind, other, 34), 34, 15)


@every_kind
@pytest.mark.parametrize("proposed", [False, True])
def test_a_snapshot_is_restored_whatever_happened_since(kind: str, proposed: bool) -> None:
    made = heard(kind, PROMPT, 5)
    if proposed:
        draft(made, 5, 4)
    expected, saved = draft(heard(kind, PROMPT, 5), 5, 15), made.snapshot()
    tell(made, (*PROMPT, 5, 6, 7), 8)
    draft(made, 8, 4)
    made.rewind(3)
    tell(made, (*PROMPT[: made.length], 40, 41), 42)
    made.restore(saved)
    assert made.length == len(PROMPT) and draft(made, 5, 15) == expected
    branch = drafter(kind, "dense")()
    branch.restore(saved)
    assert draft(branch, 5, 15) == expected


@every_kind
def test_a_narrower_draft_is_no_longer_than_asked_and_width_0_is_empty(kind: str) -> None:
    made = heard(kind, PROMPT, 5)
    for width in range(made.width + 1):
        assert len(draft(made, 5, width)) <= width
    assert draft(made, 5, 0) == []


@every_kind
@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_D1_the_first_draft_does_not_depend_on_the_pieces_of_the_prompt(kind: str, chunk: int) -> None:
    assert draft(heard(kind, PROMPT, 5, chunk), 5, 15) == draft(heard(kind, PROMPT, 5), 5, 15)


@every_kind
@pytest.mark.parametrize("on", TARGETS)
def test_cancelling_mid_stream_leaves_the_session_fit_for_the_next_request(kind: str, on: str) -> None:
    request = Request(PROMPT, SAMPLINGS[1], max_tokens=20)
    plain = outcome(events(session(target(on), Nothing), request))[0]
    for steps in (2, 4, 7):
        s = session(target(on), drafter(kind, on), 5)
        stream = s.run(request)
        for _ in range(steps):
            next(stream, None)
        stream.close()
        assert outcome(events(s, request))[0] == plain


@every_kind
@pytest.mark.parametrize("on", TARGETS)
def test_B9_a_second_shorter_request_drafts_as_a_fresh_session_does(kind: str, on: str) -> None:
    short = Request(PROMPT[5:9], SAMPLINGS[0], max_tokens=12)
    fresh = outcome(events(session(target(on), drafter(kind, on), 6), short))
    s = session(target(on), drafter(kind, on), 6)
    outcome(events(s, Request((*PROMPT, *PROMPT), SAMPLINGS[0], max_tokens=40)))
    again = outcome(events(s, short))
    assert again[0] == fresh[0]
    for count in ("drafted", "accepted", "rounds"):
        assert getattr(again[4], count) == getattr(fresh[4], count)


@every_kind
def test_D2_a_long_prompt_leaves_features_of_one_chunk_at_most(kind: str) -> None:
    held: list[int] = []
    made = drafter(kind, "dense")()
    watched: Callable[[Commit], None] = made.observe

    def observe(commit: Commit) -> None:
        watched(commit)
        queue: Any = getattr(getattr(made, "second", made), "queue", ())
        arrays = [rows[0] if isinstance(rows, tuple) else rows for rows in queue]
        held.append(sum(array.nbytes for array in arrays))

    made.observe = observe  # type: ignore[method-assign]
    prompt = tuple(i % VOCAB for i in range(300))
    outcome(events(session(target("dense"), lambda: made, 4, chunk=16), Request(prompt, max_tokens=2)))
    row = len(made.taps) * 32 * 4
    assert max(held) <= 16 * row
