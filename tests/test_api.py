"""import lisa: the same events from threads and coroutines, options that are checked, a close that ends everything."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import write_model

import lisa
from lisa.errors import Closed, ContextFull, MemoryFull, NotCached, NoTemplate, UsageError
from lisa.pace import Fixed

CHAT = [{"role": "user", "content": "hello there, hello there, hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, "qwen3_5")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[lisa.Model]:
    with lisa.load(str(folder), slots=2) as loaded:
        yield loaded


def test_a_reply_is_a_stream_of_events_that_ends_with_done(model: lisa.Model) -> None:
    events = list(model.chat(CHAT, max_tokens=8))
    assert isinstance(events[0], lisa.Progress) and isinstance(events[-1], lisa.Done)
    ids = [i for e in events if isinstance(e, lisa.Tokens) for i in e.ids]
    assert len(ids) == events[-1].stats.completion_tokens <= 8
    answer = model.chat(CHAT, max_tokens=8).read()
    assert list(answer.ids) == ids and answer.stats.drafter == "ngram" and answer.stats.why


def test_drafting_is_invisible_in_the_text(folder: Path, model: lisa.Model) -> None:
    sampling = lisa.Sampling(temperature=1.0, seed=5)
    drafted = model.chat(CHAT, sampling=sampling, max_tokens=40).read()
    with lisa.load(str(folder), drafter="none") as other:
        plain = other.chat(CHAT, sampling=sampling, max_tokens=40).read()
    assert (plain.text, plain.ids, plain.reason) == (drafted.text, drafted.ids, drafted.reason)


def _pacers(model: lisa.Model) -> list[Any]:
    assert model._loaded is not None
    return [model._loaded.engine.session().pacer for _ in range(2)]


def test_sessions_share_what_their_pacer_learns_and_the_next_load_starts_from_it(folder: Path, pace_file: Path) -> None:
    pace_file.unlink(missing_ok=True)
    with lisa.load(str(folder)) as first:
        mine, same = _pacers(first)
        assert mine is same and not mine.sources
        first.chat(CHAT, max_tokens=40).read()
        assert mine.costs.plain(0) > 0 and mine.sources
    with lisa.load(str(folder)) as second:
        assert _pacers(second)[0].costs.plain(40) == pytest.approx(mine.costs.plain(40))
        assert _pacers(second)[0].sources.keys() == mine.sources.keys()
    with lisa.load(str(folder), kv_bits=8, drafter="none") as other:
        assert _pacers(other)[0] == Fixed(0)


def test_a_drafter_whose_loading_is_interrupted_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lisa.load(str(folder)) as model:
        call = model._worker.call

        def interrupted(function: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(model._worker, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.redraft("none")
        monkeypatch.setattr(model._worker, "call", call)
        assert model.drafter == "ngram" and model.chat(CHAT, max_tokens=4).read().stats.drafter == "ngram"
        model.redraft("none")
        assert model.drafter == "none" and model.chat(CHAT, max_tokens=4).read().stats.drafter == "none"


def test_a_given_width_is_kept_and_nothing_is_learnt(folder: Path, pace_file: Path) -> None:
    before = pace_file.read_text() if pace_file.is_file() else ""
    with lisa.load(str(folder), width=2) as model:
        assert _pacers(model)[0] == Fixed(2)
        assert len(model.chat(CHAT, max_tokens=40).read().stats.proposed_at) <= 2
    assert (pace_file.read_text() if pace_file.is_file() else "") == before


def test_threads_and_coroutines_get_what_a_lone_caller_gets(model: lisa.Model) -> None:
    def ask(n: int) -> tuple[int, ...]:
        return model.generate([n, n + 1, 3], max_tokens=12, sampling=lisa.Sampling(temperature=1.0, seed=n)).read().ids

    alone = [ask(n) for n in range(6)]
    together: dict[int, tuple[int, ...]] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: ask(n)})) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [together[n] for n in range(6)] == alone

    async def gather() -> list[tuple[int, ...]]:
        replies = [
            model.generate([n, n + 1, 3], max_tokens=12, sampling=lisa.Sampling(temperature=1.0, seed=n))
            for n in range(6)
        ]
        return [answer.ids for answer in await asyncio.gather(*(reply.aread() for reply in replies))]

    assert asyncio.run(gather()) == alone


def test_cancelling_and_leaving_end_a_reply_and_the_next_one_is_unharmed(model: lisa.Model) -> None:
    whole = model.generate([1, 2, 3], max_tokens=30).read().ids
    reply = model.generate([1, 2, 3], max_tokens=400)
    got: list[int] = []
    for event in reply:
        got += event.ids if isinstance(event, lisa.Tokens) else ()
        if len(got) >= 5:
            reply.cancel()
    assert (
        isinstance(event, lisa.Done) and event.reason == "cancelled" and event.stats.completion_tokens == len(got) < 400
    )
    for _ in model.generate([1, 2, 3], max_tokens=400):
        break
    assert model.generate([1, 2, 3], max_tokens=30).read().ids == whole


def test_the_second_turn_reuses_the_first(model: lisa.Model) -> None:
    first = model.generate([1, 2, 3, 4, 5], max_tokens=6).read()
    second = model.generate([1, 2, 3, 4, 5, *first.ids, 7], max_tokens=2).read()
    assert second.stats.cached_tokens == 5 + len(first.ids) - 1


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_as_many_conversations_as_slots_take_turns_and_each_keeps_its_context(folder: Path, slots: int) -> None:
    with lisa.load(str(folder), slots=slots) as model:
        talks = [[n, n + 1, n + 2, n + 3, n + 4] for n in range(1, 1 + 10 * slots, 10)]
        for _ in range(3):
            for talk in talks:
                answer = model.generate(talk, max_tokens=4).read()
                assert answer.stats.cached_tokens == (0 if len(talk) == 5 else len(talk) - 2)
                talk += [*answer.ids, 7]
        assert len(model._timelines.idle) == slots


def test_conversations_are_kept_while_there_is_room_and_the_oldest_go_first(folder: Path) -> None:
    with lisa.load(str(folder), slots=2) as model:
        for n in range(4):
            model.generate([10 * n + 1, 2, 3], max_tokens=3).read()
        kept = list(model._timelines.idle)
        assert len(kept) == 4
        budget = model._budget
        budget.limit = budget.weights + 4 * sum(session.nbytes for session in kept[:3])
        model.generate([9, 2, 3], max_tokens=3).read()
        assert model._timelines.nbytes <= budget.caches and model._timelines.idle[:2] == kept[2:]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling": lisa.Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": lisa.Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": lisa.Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": lisa.Sampling(top_k=-1)}, "top_k"),
        ({"sampling": lisa.Sampling(min_p=1.5)}, "min_p"),
        ({"sampling": lisa.Sampling(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": lisa.Sampling(frequency_penalty=float("inf"))}, "frequency_penalty"),
        ({"sampling": lisa.Sampling(seed=-3)}, "seed"),
        ({"sampling": lisa.Sampling(rule="other")}, "rule"),  # type: ignore[arg-type]
        ({"sampling": lisa.Sampling(logit_bias=((10**6, 1.0),))}, "1000000"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
    ],
)
def test_an_option_outside_its_range_is_refused_by_name(
    model: lisa.Model, options: dict[str, object], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        model.generate([1, 2], **options)  # type: ignore[arg-type]


def test_a_misspelt_option_is_an_error(model: lisa.Model) -> None:
    with pytest.raises(TypeError):
        model.generate([1], max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        lisa.load("smollm2-135m", draftr="none")  # type: ignore[call-arg]


def test_a_prompt_that_fills_the_context_is_refused_and_nothing_is_lost(model: lisa.Model) -> None:
    assert model.context is not None
    with pytest.raises(ContextFull, match=str(model.context)):
        model.generate([1] * model.context).read()
    assert model.generate([1, 2], max_tokens=3).read().ids


def test_logprobs_come_one_a_token(model: lisa.Model) -> None:
    answer = model.generate([1, 2, 3], max_tokens=9, logprobs=2).read()
    assert [entry.token for entry in answer.logprobs] == list(answer.ids)
    assert all(len(entry.top) == 2 for entry in answer.logprobs)


def test_closing_ends_replies_and_refuses_more(folder: Path) -> None:
    model = lisa.load(str(folder))
    reply = model.generate([1, 2, 3], max_tokens=450)
    events = iter(reply)
    next(events)
    model.close()
    model.close()
    assert list(events)[-1].reason == "cancelled"  # type: ignore[union-attr]
    with pytest.raises(Closed):
        model.generate([1])


def test_F6_without_a_template_completion_works_and_chat_says_why_not(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "llama")
    config = tmp_path / "base" / "tokenizer_config.json"
    import json

    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    config.write_text(json.dumps(settings))
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    with lisa.load(str(tmp_path / "base")) as base:
        assert base.generate("hello", max_tokens=3).read().ids
        with pytest.raises(NoTemplate, match="completion"):
            base.chat(CHAT)


@pytest.mark.parametrize("options", [{"drafter": "dspin"}, {"width": 16}, {"quantisation": "4bit"}])
def test_load_refuses_what_it_cannot_do(folder: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(options.values())))):
        lisa.load(str(folder), **options)  # type: ignore[arg-type]


def test_contexts_kept_for_reuse_give_way_to_a_request(folder: Path) -> None:
    with lisa.load(str(folder), drafter="none", slots=2) as model:
        budget = model._budget
        talk = [1, 2, 3, *model.generate([1, 2, 3], max_tokens=5).read().ids, 4]
        model.generate([9, 9, 9], max_tokens=5).read()
        first, second = model._timelines.idle
        budget.limit = budget.weights + 4 * (first.nbytes + second.nbytes)
        talk += [*model.generate(talk, max_tokens=5).read().ids, 4]
        assert model._timelines.idle == [second, first], "there is room, and both are kept"
        budget.limit = budget.weights + first.nbytes + second.nbytes - 1
        model.generate(talk, max_tokens=5).read()
        assert model._timelines.idle == [first], "the one that was not asked for has given way"
        assert model.memory == budget.weights + model._timelines.nbytes


def test_a_request_that_does_not_fit_is_refused_and_no_context_is_lost(folder: Path) -> None:
    with lisa.load(str(folder), drafter="none", slots=2) as model:
        budget = model._budget
        model.generate([1, 2, 3], max_tokens=5).read()
        model.generate([9, 9, 9], max_tokens=5).read()
        kept = list(model._timelines.idle)
        budget.limit = budget.weights + budget.need(60)
        with pytest.raises(MemoryFull, match="may be resident"):
            model.generate([1, 2, 3, 4], max_tokens=90)
        with budget.held(budget.need(30)), pytest.raises(MemoryFull, match="may be resident"):
            model.generate([1, 2, 3, 4], max_tokens=50).read()
        assert {id(session) for session in model._timelines.idle} == {id(session) for session in kept}
        assert model.generate([4] * 10, max_tokens=3).read().ids and budget.in_use == 0


def test_what_a_request_is_booked_with_is_never_less_than_its_session_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lisa.load(str(folder), drafter="none") as model:
        budget = model._budget
        model.generate([5] * 300, max_tokens=3).read()
        (long,) = model._timelines.idle
        talk = [*long.tokens, 7]
        assert long.nbytes > budget.need(len(talk) + 10)
        booked: list[int] = []
        held = budget.held
        monkeypatch.setattr(budget, "held", lambda need: booked.append(need) or held(need))
        model.generate(talk, max_tokens=10).read()
        assert booked == [long.nbytes] and model._timelines.idle == [long] and budget.in_use == 0


def test_buffers_that_do_not_fit_beside_what_runs_are_left_and_the_request_is_served(folder: Path) -> None:
    with lisa.load(str(folder), drafter="none") as model:
        budget = model._budget
        model.generate([5] * 300, max_tokens=3).read()
        (long,) = model._timelines.idle
        budget.limit = budget.weights + long.nbytes
        with budget.held(budget.need(20)):
            assert len(model.generate([*long.tokens, 7], max_tokens=10).read().ids) == 10
        assert len(model._timelines.idle) == 1 and model._timelines.idle[0] is not long


@pytest.mark.parametrize("cancelled", [False, True])
def test_after_a_change_of_drafter_no_request_runs_with_the_old_one(
    folder: Path, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lisa.load(str(folder), drafter="ngram", slots=2) as model:
        assert model._loaded is not None
        target, both, changed = model._loaded.engine.target, threading.Event(), threading.Event()
        forward, calls = target.forward, iter(range(1, 1000))

        def gated(*args: Any, **options: Any) -> Any:
            if next(calls) == 3:  # each of the two has read its prompt
                both.set()
                changed.wait(60)
            return forward(*args, **options)

        monkeypatch.setattr(target, "forward", gated)
        replies = [model.generate([n, 2, 3], max_tokens=20) for n in (1, 9)]
        assert both.wait(60)
        change = threading.Thread(target=model.redraft, args=("none",))
        change.start()
        while model._worker._inbox.empty():
            change.join(0.01)
        if cancelled:
            for reply in replies:
                reply.cancel()
        changed.set()
        change.join()
        for reply in replies:
            done = list(reply)[-1]
            assert isinstance(done, lisa.Done) and done.stats.drafter == "ngram", "what runs is not disturbed"
        assert not model._timelines.idle and model._budget.in_use == 0 and model.memory == model._budget.weights
        for n in (1, 9):
            assert model.generate([n, 2, 3], max_tokens=20).read().stats.drafter == "none"


def test_a_context_smaller_than_the_models_limits_prompt_and_answer(folder: Path) -> None:
    with lisa.load(str(folder), context=12) as model:
        answer = model.generate([1] * 8, max_tokens=50).read()
        assert (len(answer.ids), answer.reason) == (4, "length")
        with pytest.raises(ContextFull, match="12 tokens and the context holds 12"):
            model.generate([1] * 12)
    with pytest.raises(UsageError, match="context"):
        lisa.load(str(folder), context=1)


def test_an_answer_fits_a_schema_with_drafting_and_without(folder: Path, model: lisa.Model) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b", 17]}, "minItems": 2, "maxItems": 6}
    for sampling in (lisa.Sampling(), lisa.Sampling(temperature=1.0, seed=3)):
        drafted = model.chat(CHAT, sampling=sampling, max_tokens=200, schema=schema, thinking=False).read()
        with lisa.load(str(folder), drafter="none") as other:
            plain = other.chat(CHAT, sampling=sampling, max_tokens=200, schema=schema, thinking=False).read()
        assert plain.ids == drafted.ids and plain.reason == "stop"
        assert set(json.loads(plain.text)) <= {"a", "b", 17}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [TOOL], "tool_choice": "g"}, "'g'"),
        ({"tools": [{"name": "f"}]}, "function"),
        ({"tools": [TOOL], "tool_choice": "required", "schema": "object"}, "exclude"),
        ({"schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
def test_what_a_constraint_cannot_do_is_refused_by_name(model: lisa.Model, options: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        model.chat(CHAT, **options)


def test_another_drafter_takes_over_and_the_text_stays(folder: Path, no_network: None) -> None:
    sampling = lisa.Sampling(temperature=1.0, seed=5)
    with lisa.load(str(folder), offline=True) as model:
        before = model.chat(CHAT, sampling=sampling, max_tokens=20).read()
        model.redraft("none")
        after = model.chat(CHAT, sampling=sampling, max_tokens=20).read()
        assert (before.stats.drafter, after.stats.drafter) == ("ngram", "none") and after.ids == before.ids
        assert "drafter none (asked for)" in model.about
        with pytest.raises(UsageError, match="unknown drafter 'oracle'"):
            model.redraft("oracle")
        with pytest.raises(NotCached, match="this run is offline"):  # as the model was loaded
            model.redraft("owner/name")
        assert model.chat(CHAT, sampling=sampling, max_tokens=20).read().ids == before.ids
