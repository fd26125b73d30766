"""The loop: whatever the drafter proposes, what is delivered is what plain decoding delivers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from tiny import VOCAB, ScriptedDrafter, ScriptedTarget, SelfDrafter, events, outcome, session, target

from lisa.drafters.ngram import Ngram
from lisa.drafters.none import Nothing
from lisa.errors import Cancelled, ContextFull
from lisa.text import Detokeniser, StopStrings, TextReader
from lisa.types import Done, Progress, Request, Sampling, Tokens

PROMPT = (5, 3, 8, 1, 9, 2, 7, 4, 5, 3, 8, 6)

SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(presence_penalty=0.7, frequency_penalty=0.4),
    Sampling(logit_bias=((3, 4.0), (7, -50.0))),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.2, top_p=0.8),
    Sampling(temperature=1.0, top_k=12, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.9, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((1, 2.0),)),
]


def spell(token: int, first: bool) -> bytes:
    """Token ids as text: letters, some of two, so that stop strings fall across and inside tokens."""
    return bytes([97 + token % 5]) if token % 3 else bytes([97 + token % 5, 98])


def reader(stop: Sequence[str]) -> TextReader:
    return TextReader(Detokeniser(spell), None, StopStrings(tuple(stop)))


def run(
    kind: str, request: Request, drafter: Callable[[], Any] = Nothing, width: int = 0, chunk: int = 7
) -> tuple[Any, ...]:
    """(ids, text, logprobs, reason): everything that must not depend on the drafter."""
    stops = request.reader
    fresh = replace(request, reader=reader(stops) if isinstance(stops, tuple) else None)  # type: ignore[arg-type]
    ids, text, logprobs, reason, stats = outcome(events(session(target(kind), drafter, width, chunk), fresh))
    assert stats.completion_tokens == len(ids) and (request.logprobs is None or len(logprobs) == len(ids))
    assert stats.accepted <= stats.drafted and stats.completion_tokens <= 1 + stats.accepted + stats.rounds
    return ids, text, logprobs, reason


def random_request(rng: random.Random) -> Request:
    sampling = replace(rng.choice(SAMPLINGS), seed=rng.randrange(1 << 40))
    stops = rng.choice([(), (), ("ab",), ("cab", "dd"), ("eabc",), ("b",)])
    return Request(
        tokens=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))),
        sampling=sampling,
        max_tokens=rng.choice([1, 2, 3, 5, 9, 14, 20]),
        eos=frozenset(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 2]))),
        logprobs=rng.choice([None, None, 0, 5]),
        reader=stops,  # type: ignore[arg-type]
    )


def adversaries(rng: random.Random, truth: list[int]) -> list[Callable[[int, int], list[int]]]:
    """Drafters that know the text `truth` (prompt, answer and what would follow it) and use it in every way."""
    right_for = rng.randint(0, 4)

    def right(position: int, width: int) -> list[int]:
        return truth[position + 1 : position + 1 + width]

    def wrong(position: int, width: int) -> list[int]:
        return [(token + 1) % VOCAB for token in right(position, width)]

    def then_wrong(position: int, width: int) -> list[int]:
        return [t if i < right_for else (t + 1) % VOCAB for i, t in enumerate(right(position, width))]

    def anything(position: int, width: int) -> list[int]:
        return [rng.choice((t, rng.randrange(VOCAB))) for t in right(position, rng.randint(0, width))]

    def empty(position: int, width: int) -> list[int]:
        return []

    return [right, wrong, then_wrong, anything, empty]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("seed", range(15))
def test_speculative_output_equals_plain_output(kind: str, seed: int) -> None:
    """15 x 7 requests x 5 drafters x 2 kinds = 1,050 speculative runs, beside the plain ones they are compared with."""
    rng = random.Random(seed)
    for _ in range(7):
        request = random_request(rng)
        plain = run(kind, request)
        longer = replace(request, max_tokens=(request.max_tokens or 0) + 16, eos=frozenset(), reader=None)
        truth = [*request.tokens, *run(kind, longer)[0]]
        for script in adversaries(rng, truth):
            taps = rng.choice([(), (0, 2), (1,)])
            got = run(
                kind,
                request,
                lambda s=script, t=taps: ScriptedDrafter(s, t),
                rng.randint(0, 15),
                rng.choice([1, 3, 64]),
            )
            assert got == plain, (script.__name__, request)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
@pytest.mark.parametrize("width", [1, 4, 15])
@pytest.mark.parametrize(
    "sampling", [Sampling(seed=1), Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=4)]
)
def test_a_drafter_that_is_the_target_accepts_everything(kind: str, width: int, sampling: Sampling) -> None:
    t = target(kind)
    request = Request(PROMPT, sampling, max_tokens=40)
    ids, _, _, _, stats = outcome(events(session(t, lambda: SelfDrafter(t), width), request))
    assert ids == run(kind, request)[0]
    assert stats.drafted > 0 and stats.acceptance == 1.0


def test_a_drafter_with_noise_of_its_own_is_rejected_most_of_the_time() -> None:
    t = target("dense")
    request = Request(PROMPT, Sampling(temperature=1.0, seed=4), max_tokens=60)
    *_, stats = outcome(events(session(t, lambda: SelfDrafter(t, stream=1), 3), request))
    assert stats.acceptance is not None and stats.acceptance < 0.6


def test_A1_a_target_drafting_for_itself_gives_its_own_text_at_every_width() -> None:
    t = target("dense")
    request = Request(PROMPT, Sampling(), max_tokens=200)
    plain = run("dense", request)
    assert run("dense", request) == plain
    for width in range(1, 16):
        assert (
            run(
                "dense", request, lambda: ScriptedDrafter(lambda p, w: ([*PROMPT, *plain[0]])[p + 1 : p + 1 + w]), width
            )
            == plain
        )
    assert outcome(events(session(t, lambda: SelfDrafter(t), 15), replace(request, max_tokens=40)))[0] == plain[0][:40]


@pytest.mark.parametrize("right_for", range(9))
def test_A2_a_counted_list_keeps_every_item_at_every_accept_length(right_for: int) -> None:
    request = Request(PROMPT, Sampling(), max_tokens=60)
    plain = run("hybrid", request)
    truth = [*PROMPT, *plain[0]]

    def script(position: int, width: int) -> list[int]:
        return [
            t if i < right_for else (t + 1) % VOCAB for i, t in enumerate(truth[position + 1 : position + 1 + width])
        ]

    assert run("hybrid", request, lambda: ScriptedDrafter(script), 8) == plain


def counting(vocab: int = 10, context: int | None = None) -> ScriptedTarget:
    """A target that always says last token + 1."""
    return ScriptedTarget(lambda tokens: [float(i == (tokens[-1] + 1) % vocab) for i in range(vocab)], vocab, context)


def test_A3_a_single_wrong_draft_is_checked_and_counted() -> None:
    request = Request((0,), max_tokens=4)
    ids, _, _, _, stats = outcome(
        events(session(counting(), lambda: ScriptedDrafter(lambda p, w: [9], width=1)), request)
    )
    assert ids == [1, 2, 3, 4]
    assert (stats.accepted, stats.drafted, stats.accepted_at) == (0, 2, (0,))


def test_A4_nothing_after_an_end_of_turn_inside_a_block_is_seen_anywhere() -> None:
    eos = 4
    s = session(counting(), lambda: ScriptedDrafter(lambda p, w: [p + 1 + i for i in range(w)]), 6)
    request = Request((0, 1), max_tokens=9, eos=frozenset({eos}), logprobs=0, reader=reader(()))
    ids, text, logprobs, reason, stats = outcome(events(s, request))
    assert (ids, reason) == ([2, 3], "stop")
    assert text == (spell(2, False) + spell(3, False)).decode()
    assert [entry.token for entry in logprobs] == [2, 3]
    assert (stats.completion_tokens, stats.accepted, stats.drafted) == (2, 1, 1)
    assert s.tokens == [0, 1, 2, 3, eos] and s.state.tokens == (0, 1, 2, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", range(1, 10))
def test_A6_a_limit_is_met_exactly_whatever_the_block(limit: int) -> None:
    for width in range(1, 16):
        drafter = ScriptedDrafter(lambda p, w: [(p + 1 + i) % 10 for i in range(w)])
        request = Request((0,), max_tokens=limit, logprobs=1)
        ids, _, logprobs, reason, stats = outcome(events(session(counting(), lambda d=drafter: d, width), request))
        assert len(ids) == len(logprobs) == stats.completion_tokens == limit and reason == "length"


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.8}, {"frequency_penalty": 0.4}, {"presence_penalty": 0.9}, {"frequency_penalty": -0.2}],
)
def test_A10_penalties_follow_what_is_committed(penalty: dict[str, float]) -> None:
    loves = ScriptedTarget(lambda tokens: [2.0, 1.5, 1.0, 0.5], 4)
    request = Request((3,), Sampling(**penalty), max_tokens=30)  # type: ignore[arg-type]
    plain = outcome(events(session(loves, Nothing), request))
    repeated = outcome(events(session(loves, lambda: ScriptedDrafter(lambda p, w: [0] * w), 8), request))
    assert repeated[0] == plain[0]
    if penalty.get("frequency_penalty", 0) > 0:
        assert set(plain[0]) == {0, 1, 2, 3}, "the penalty breaks the loop"


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_A11_logprobs_are_the_targets_own_with_or_without_a_draft(kind: str) -> None:
    request = Request(PROMPT, Sampling(temperature=0.9, top_k=6, seed=2), max_tokens=25, logprobs=5)
    ids, _, plain, _ = run(kind, request)
    _, _, drafted, _ = run(kind, request, lambda: ScriptedDrafter(lambda p, w: [*PROMPT, *ids][p + 1 : p + 1 + w]), 7)
    assert drafted == plain and len(plain) == 25
    assert all(entry.logprob < 0 and len(entry.top) == 5 for entry in plain)
    t = target(kind)
    state = t.new_state()
    logits, _ = t.forward(mx.array([*PROMPT, *ids[:-1]], mx.int32), state, rows=25)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for i, entry in enumerate(plain):
        assert entry.token == ids[i] and abs(entry.logprob - scores[i, ids[i]].item()) < 1e-3
        assert entry.top[0][1] == pytest.approx(mx.max(scores[i]).item(), abs=1e-3)


def test_the_context_is_never_overrun() -> None:
    drafter = ScriptedDrafter(lambda p, w: [(p + 1 + i) % 10 for i in range(w)])
    ids, *_, reason, _ = outcome(events(session(counting(context=8), lambda: drafter), Request((0, 1, 2))))
    assert (len(ids), reason) == (5, "length")
    with pytest.raises(ContextFull, match="8 tokens and the context holds 8"):
        list(session(counting(context=8), Nothing).run(Request(tuple(range(8)))))
    with pytest.raises(ContextFull, match="empty"):
        list(session(counting(), Nothing).run(Request(())))


def test_a_drafter_stops_at_its_own_limit_and_decoding_goes_on() -> None:
    drafter = ScriptedDrafter(lambda p, w: [(p + 1 + i) % 10 for i in range(w)])
    drafter.limit = 10
    ids, *_, stats = outcome(events(session(counting(), lambda: drafter, 4), Request((0,), max_tokens=20)))
    assert ids == [(1 + i) % 10 for i in range(20)]
    furthest = max(c.start + len(c.tokens) for c in drafter.commits if len(c.tokens) > 1)
    assert furthest <= 10 and stats.drafted == stats.accepted > 0
    assert stats.notes == ("drafter scripted drafts up to position 10; past it decoding went on plainly",)
    *_, stats = outcome(events(session(counting(), Nothing), Request((0,), max_tokens=20)))
    assert stats.notes == ()


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 13])
def test_D1_the_drafter_hears_every_prompt_position_once_in_order(chunk: int) -> None:
    drafter = ScriptedDrafter(lambda p, w: [(prompt[-1] + p - 11) % 10, 9, 9], taps=(1, 3))
    prompt = (0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3)
    *_, stats = outcome(events(session(counting(), lambda: drafter, 4, chunk), Request(prompt, max_tokens=6)))
    assert drafter.heard == [*prompt, 4, 5, 6, 7, 8] and 0 < stats.accepted < stats.drafted
    rows = mx.concatenate([c.features for c in drafter.commits]).tolist()
    assert [row[1] for row in rows] == [float(i) for i in range(len(drafter.heard))], "features in order of position"
    assert [row[0] for row in rows] == drafter.heard, "features of the kept rows"
    assert all(row[2] == 1.0 and row[6] == 3.0 for row in rows), "taps in the order asked for"


def test_no_forward_of_a_prefill_is_wider_than_a_chunk() -> None:
    sizes: list[int] = []
    scripted = counting()
    forward = scripted.forward

    def recorded(tokens: mx.array, *rest: Any, **more: Any) -> Any:
        sizes.append(tokens.shape[0])
        return forward(tokens, *rest, **more)

    scripted.forward = recorded  # type: ignore[method-assign]
    outcome(
        events(
            session(scripted, lambda: ScriptedDrafter(lambda p, w: [], taps=(0,)), 4, 16),
            Request((1,) * 250, max_tokens=2),
        )
    )
    assert sizes[:16] == [16] * 15 + [10] and max(sizes[16:]) == 1


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
@pytest.mark.parametrize("width", [0, 5])
def test_closing_anywhere_leaves_the_session_fit_for_the_next_request(kind: str, width: int) -> None:
    request = Request(PROMPT, Sampling(temperature=1.0, seed=3), max_tokens=12)
    truth = [*PROMPT, *run(kind, request)[0]]
    for steps in range(1, 12):
        s = session(target(kind), lambda: ScriptedDrafter(lambda p, w: truth[p + 1 : p + 1 + w], taps=(1,)), width, 5)
        stream = s.run(request)
        for _ in range(steps):
            if next(stream, None) is None:
                break
        stream.close()
        assert not s.state.opened and s.state.length in (len(s.tokens), len(s.tokens) - 1)
        s.pacer = replace(s.pacer, size=5 - width)  # type: ignore[type-var]
        assert outcome(events(s, request))[0] == truth[len(PROMPT) :]


def test_cancelling_ends_with_done_and_delivered_tokens_only() -> None:
    s = session(counting(), Nothing)
    stream = s.run(Request((0,), max_tokens=50))
    delivered = 0
    for event in stream:
        delivered += len(event.ids) if isinstance(event, Tokens) else 0
        if delivered == 7:
            break
    done = stream.throw(Cancelled())
    assert isinstance(done, Done) and done.reason == "cancelled" and done.stats.completion_tokens == 7
    assert next(stream, None) is None
    assert s.tokens == list(range(8)) and s.state.length == 7


def test_an_error_in_a_forward_leaves_the_session_as_it_was() -> None:
    scripted = counting()
    s = session(scripted, lambda: ScriptedDrafter(lambda p, w: [1] * w), 3)
    forward = scripted.forward
    calls = 0

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("out of memory")
        return forward(*args, **named)

    scripted.forward = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        list(s.run(Request((0,), max_tokens=50)))
    assert not s.state.opened and s.state.length == len(s.tokens) - 1
    assert outcome(events(s, Request((0,), max_tokens=5)))[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_second_turn_reads_only_what_is_new_and_gives_the_same_text(kind: str) -> None:
    t = target(kind)
    s = session(t, Nothing)
    first = Request(PROMPT, max_tokens=10)
    answer = outcome(events(s, first))[0]
    second = Request((*PROMPT, *answer, 1, 2, 3), max_tokens=10)
    ids, *_, stats = outcome(events(s, second))
    assert stats.cached_tokens == len(PROMPT) + len(answer) - 1
    assert ids == run(kind, second)[0]
    again = outcome(events(s, first))
    assert again[0] == answer, "a shorter, diverging request on the same session"


def test_progress_counts_up_to_the_whole_prompt() -> None:
    seen = [
        e
        for e in session(counting(), Nothing, 0, 4).run(Request(tuple(range(10)), max_tokens=1))
        if isinstance(e, Progress)
    ]
    assert [(p.done, p.total) for p in seen] == [(0, 10), (4, 10), (8, 10), (10, 10)]


def test_a_fresh_seed_is_drawn_and_reported() -> None:
    request = Request(PROMPT, Sampling(temperature=1.0), max_tokens=12)
    a, b = (outcome(events(session(target("dense"), Nothing), request)) for _ in range(2))
    assert a[4].seed != b[4].seed and a[0] != b[0]
    again = replace(request, sampling=replace(request.sampling, seed=a[4].seed))
    assert outcome(events(session(target("dense"), Nothing), again))[0] == a[0]


def test_one_evaluation_a_round(reads: list[Any]) -> None:
    truth = [*PROMPT, *run("dense", Request(PROMPT, max_tokens=30))[0]]
    reads.clear()
    right = session(target("dense"), lambda: ScriptedDrafter(lambda p, w: truth[p + 1 : p + 1 + w]), 4)
    *_, stats = outcome(events(right, Request(PROMPT, max_tokens=30)))
    assert len(reads) == 1 + stats.rounds


def test_prompt_lookup_accepts_a_repetition() -> None:
    cycle = ScriptedTarget(lambda tokens: [float(i == (tokens[-1] + 1) % 6) for i in range(6)], 6)
    ids, *_, stats = outcome(events(session(cycle, Ngram, 15), Request(tuple(range(6)), max_tokens=60)))
    assert ids == [i % 6 for i in range(60)]
    assert stats.acceptance == 1.0 and stats.rounds <= 10


def test_A_counters_pool_real_proposals_by_position() -> None:
    right = {2: 0, 3: 2, 6: 5}  # accepted tokens of the proposal made at that position

    def script(position: int, width: int) -> list[int]:
        return [(position + 1 + i if i < right.get(position, 0) else position + 7 + i) % 10 for i in range(5)]

    *_, stats = outcome(events(session(counting(), lambda: ScriptedDrafter(script), 5), Request((0, 1), max_tokens=11)))
    assert (stats.drafted, stats.accepted, stats.rounds) == (15, 7, 3)
    assert stats.acceptance == 7 / 15 and stats.accepted_length == 10 / 3
    assert stats.accepted_at == (2, 2, 1, 1, 1) and stats.proposed_at == (3,) * 5
