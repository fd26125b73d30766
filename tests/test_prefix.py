"""Prompts that begin like earlier ones: what is kept is exact, what it costs is bounded, and requests come first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters_tiny import drafter
from folders import write_model
from tiny import VOCAB, events, outcome, session, target

import lisa
from lisa.engine import Session
from lisa.errors import UsageError
from lisa.memory import Budget
from lisa.prefix import LAST, LEAST, Timelines, places
from lisa.types import MARKS, Request, Sampling

A = tuple((7 * i + 3) % VOCAB for i in range(23))
PLACES = (4, 9, 16, 20)
SAMPLING = Sampling(temperature=1.0, top_k=20, seed=6)


def other(m: int) -> Request:
    """A prompt that shares exactly `m` tokens with A."""
    rest = tuple((11 * i + 5) % VOCAB for i in range(23 - m))
    differing = (A[m] + 1) % VOCAB
    return Request((*A[:m], differing, *rest), SAMPLING, max_tokens=5, logprobs=2, marks=PLACES)


def ran(on: str, kind: str) -> Session:
    """A session that has read A, with marks, and answered it."""
    made = session(target(on), drafter(kind, on), 4)
    outcome(events(made, Request(A, SAMPLING, max_tokens=8, marks=PLACES)))
    return made


def told(made: Session, request: Request) -> tuple[Any, ...]:
    """What must equal a cold run: text, log-probabilities, and what the drafter proposed and had accepted."""
    *said, stats = outcome(events(made, request))
    return (*said, stats.drafted, stats.accepted, stats.proposed_at)


@pytest.mark.parametrize(
    ("on", "kind"), [("hybrid", "dspine"), ("hybrid", "eagle"), ("dense", "dspine"), ("sliding", "ngram")]
)
def test_a_prompt_that_shares_any_m_tokens_is_answered_as_by_a_cold_run(on: str, kind: str) -> None:
    for m in range(len(A)):
        request = other(m)
        cold = told(session(target(on), drafter(kind, on), 4), request)
        warm = ran(on, kind)
        usable = warm.usable(request.tokens)
        assert usable == (m if on == "dense" else max((p for p in PLACES if p <= m), default=0)) or on == "sliding"
        child = warm.branch(request.tokens)
        assert told(child, request) == cold, f"a branch at {m}"
        assert told(warm, request) == cold, f"gone back to {m}"
        assert all(mark.length <= len(request.tokens) for mark in warm.marks)


@pytest.mark.parametrize("on", ["hybrid", "dense"])
def test_a_branch_leaves_the_timeline_it_came_from_as_it_was(on: str) -> None:
    longer = Request((*A, 1, 2, 3, 4), SAMPLING, max_tokens=5, marks=(*PLACES, len(A)))
    cold = told(session(target(on), drafter("dspine", on), 4), longer)
    one = ran(on, "dspine")
    tokens, marks = list(one.tokens), list(one.marks)
    child = one.branch(other(16).tokens)
    told(child, other(16))
    assert (one.tokens, one.marks, child.common, one.common) == (tokens, marks, 16, 16)
    assert told(one, longer) == cold


def test_what_a_branch_copies_is_counted_and_told() -> None:
    child = ran("dense", "none").branch(other(16).tokens)
    per_token = 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 heads of 8 floats
    assert child.branched is not None and child.branched[0] == 16 * per_token
    *_, stats = outcome(events(child, other(16)))
    assert stats.cached_tokens == 16 and any("branch" in note for note in stats.notes)
    *_, stats = outcome(events(child, other(16)))
    assert not any("branch" in note for note in stats.notes), "once"


def test_marks_are_few_and_the_first_and_the_last_stay() -> None:
    made = session(target("hybrid"), drafter("none", "hybrid"), 0)
    tokens = tuple(i % VOCAB for i in range(60))
    told(made, Request(tokens, SAMPLING, max_tokens=2, marks=tuple(range(3, 60, 3))))
    kept = [mark.length for mark in made.marks]
    assert len(kept) == MARKS and kept[0] == 3 and kept[-LAST:] == [51, 54, 57]
    assert made.nbytes == made.state.nbytes + sum(mark.nbytes for mark in made.marks)
    states = sum(a.nbytes for cache in made.state.caches[:3] for a in cache.cache)
    assert {mark.nbytes for mark in made.marks} == {states}, "a mark holds the recurrent states and no K/V"


def test_a_context_that_can_go_back_anywhere_keeps_no_marks() -> None:
    assert ran("dense", "eagle").marks == [] and ran("hybrid", "none").marks != []


def test_places_are_behind_the_system_text_at_the_last_turns_and_every_few_chunks() -> None:
    assert places([10, 20, 30, 40, 50], 60, 512) == (10, 30, 40, 50)
    assert places([], 60, 512) == () and places([0, 60, 61], 60, 512) == ()
    assert places([7], 50, 5) == (7, 20, 40)


# Conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3_5")


@pytest.fixture
def model(folder: Path) -> Iterator[lisa.Model]:
    with lisa.load(str(folder), width=4) as loaded:
        yield loaded


SYSTEM = {"role": "system", "content": "You are kind, and the world is round. " * 4}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked(model: lisa.Model, messages: list[dict[str, Any]], max_tokens: int = 6, **options: Any) -> lisa.Answer:
    return model.chat(messages, max_tokens=max_tokens, sampling=Sampling(), **options).read()


def turns(model: lisa.Model, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return model.tokenizer.turns(model.tokenizer.render(messages, **options))


@pytest.mark.parametrize("empty", [False, True])
def test_B5_a_template_that_drops_old_thinking_costs_that_turn_and_no_more(
    folder: Path, model: lisa.Model, empty: bool
) -> None:
    talk = [SYSTEM, user("hello")]
    first = asked(model, talk, thinking=not empty)
    talk += [{"role": "assistant", "content": "the answer alone"}, user("and now?")]
    second = asked(model, talk, thinking=not empty, logprobs=3)
    assert second.stats.cached_tokens == turns(model, talk[:2], thinking=not empty)[-1]
    assert first.stats.prompt_tokens - second.stats.cached_tokens < 30
    with lisa.load(str(folder), width=4) as fresh:
        cold = asked(fresh, talk, thinking=not empty, logprobs=3)
    assert (second.ids, second.logprobs) == (cold.ids, cold.logprobs)


def test_B11_the_same_request_and_the_same_system_text_are_hits(model: lisa.Model) -> None:
    talk = [SYSTEM, user("hello")]
    first, second = asked(model, talk), asked(model, talk)
    assert first.stats.cached_tokens == 0 and second.ids == first.ids
    assert second.stats.cached_tokens == turns(model, talk)[-1]
    third = asked(model, [SYSTEM, user("something else altogether")])
    assert third.stats.cached_tokens == turns(model, talk)[0]
    assert any("branch" in note for note in third.stats.notes)
    assert asked(model, talk).stats.cached_tokens == second.stats.cached_tokens, "the first conversation is still there"


def test_D6_a_turn_costs_its_tokens_and_bounded_marks(model: lisa.Model) -> None:
    budget, talk, sizes = model._budget, [{"role": "system", "content": "be kind"}], []
    for n in range(20):
        talk.append(user(chr(97 + n)))
        answer = asked(model, talk)
        assert n == 0 or answer.stats.cached_tokens > 0
        talk.append({"role": "assistant", "content": "b"})
        assert len(model._timelines.idle) == 1 and model._timelines.nbytes <= budget.caches
        sizes.append(model._timelines.nbytes)
    (held,) = model._timelines.idle
    tokens = -(-len(held.tokens) // 256) * 256 + 256
    assert sizes[-1] <= budget.need(tokens) + budget.marks(MARKS + 1)


def test_G8_the_same_request_again_and_again_is_drafted_alike(model: lisa.Model) -> None:
    few = Sampling(logit_bias=tuple((token, 50.0) for token in model.tokenizer.encode("hello the")))
    stats = [model.chat([SYSTEM], max_tokens=30, sampling=few).read().stats for _ in range(5)]
    assert stats[0].cached_tokens == 0 < stats[1].cached_tokens
    assert all(each.drafted > 0 for each in stats)
    assert len({(each.drafted, each.accepted, each.proposed_at) for each in stats}) == 1


# Who gives way


def told_apart(tokens: list[int], common: int = 0) -> Session:
    made = session(target("dense"), drafter("none", "dense"), 0)
    outcome(events(made, Request(tuple(tokens), Sampling(), max_tokens=2)))
    made.common = common
    return made


def test_the_least_recently_used_give_way_and_a_shared_prefix_last() -> None:
    alone = told_apart([1, 2, 3, 4, 5, 6], common=4)
    plain, late = told_apart([9, 8, 7]), told_apart([9, 9, 9])
    timelines = Timelines()
    for each in (alone, plain, late):
        timelines.keep(each)
    left = iter((False, False, True))
    assert timelines.make_room(lambda: next(left)) and timelines.idle == [alone]
    again = told_apart([1, 2, 3, 4, 9, 9], common=4)
    timelines.keep(plain)
    timelines.keep(again)
    left = iter((False, True))
    assert timelines.make_room(lambda: next(left)) and timelines.idle == [plain, again], "another one holds it"
    assert not timelines.make_room(lambda: False, spare=again) and timelines.idle == [again]


def test_a_prompt_takes_the_conversation_it_goes_on_from_and_branches_from_one_it_begins_like() -> None:
    timelines, long = Timelines(), told_apart(list(A))
    timelines.keep(long)
    assert timelines.find((30, 31, 32)) is None
    found = timelines.find((*A, 1, 2))
    assert found is not None and found.goes_on and found.session is long
    found = timelines.find((*A[:LEAST], 40, 41))
    assert found is not None and not found.goes_on
    assert timelines.find((*A[: LEAST - 1], 40, 41)) is None, "not worth a branch"


def test_marks_are_left_out_before_a_request_is_refused(model: lisa.Model) -> None:
    budget = model._budget
    prompt = model.tokenizer.render([SYSTEM, user("hello")])
    budget.limit = budget.weights + budget.need(len(prompt) + 6)
    first, second = asked(model, [SYSTEM, user("hello")]), asked(model, [SYSTEM, user("hello")])
    assert first.ids == second.ids and second.stats.cached_tokens == 0
    assert all(not each.marks for each in model._timelines.idle)


def test_caches_are_a_part_of_what_the_weights_leave_or_what_was_said() -> None:
    assert Budget(1000, 600, 1, 10).caches == 100 and Budget(500, 600, 1, 10).caches == 0
    assert Budget(1000, 600, 1, 10, kept=50).caches == 50 and Budget(1000, 600, 1, 10, kept=900).caches == 400
    assert Budget(1000, 600, 1, 10).marks(3) == 30


@pytest.mark.parametrize(("cache", "kept"), [(0.0, 0), (1e-9, 1), (None, 3)])
def test_as_much_is_kept_as_was_said_and_the_latest_if_any(folder: Path, cache: float | None, kept: int) -> None:
    with lisa.load(str(folder), cache=cache) as model:
        for word in ("hello", "and", "the"):
            asked(model, [user(word)])
        assert len(model._timelines.idle) == kept


@pytest.mark.parametrize("cache", [-1.0, float("nan"), float("inf")])
def test_a_cache_of_no_size_is_refused(folder: Path, cache: float) -> None:
    with pytest.raises(UsageError, match="GB"):
        lisa.load(str(folder), cache=cache)
