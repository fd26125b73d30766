"""The worker: one thread does the work, anyone may ask, cancel or close, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

import pytest

from lisa.errors import Busy, Cancelled, Closed, TooSlow
from lisa.types import Done, Event, Progress
from lisa.worker import Worker


def count(n: int, seen: list[str] | None = None, name: str = "") -> Generator[Event, None, None]:
    try:
        for i in range(n):
            if seen is not None:
                seen.append(f"{name}{i}")
            yield Progress(i, n)
        yield Done("stop")
    except Cancelled:
        yield Done("cancelled")


def test_work_and_events_run_on_the_one_thread() -> None:
    worker = Worker()
    names: list[str] = []

    def work() -> Generator[Event, None, None]:
        names.append(threading.current_thread().name)
        yield Done("stop")

    assert worker.call(lambda: threading.current_thread().name) == "lisa-worker"
    assert [type(e) for e in worker.stream(work)] == [Done] and names == ["lisa-worker"]
    worker.close()


def test_jobs_wait_in_order_and_interleave_up_to_the_slots() -> None:
    for slots, expected in ((1, ["a0", "a1", "a2", "b0", "b1", "b2"]), (2, ["a0", "b0", "a1", "b1", "a2", "b2"])):
        worker, seen = Worker(slots), []
        busy, gate = threading.Event(), threading.Event()
        hold = threading.Thread(target=worker.call, args=(lambda b=busy, g=gate: b.set() or g.wait(),))
        hold.start()
        assert busy.wait(60)
        jobs = [worker.stream(lambda n=name, s=seen: count(3, s, n)) for name in "ab"]
        gate.set()
        for job in jobs:
            assert len(list(job)) == 4
        hold.join()
        worker.close()
        assert seen == expected


def test_cancelling_takes_effect_at_the_next_event_and_ends_with_done() -> None:
    worker = Worker()
    job = worker.stream(lambda: count(10**9))
    events = iter(job)
    next(events)
    job.cancel()
    rest = list(events)
    assert rest[-1] == Done("cancelled") and len(rest) < 10**6
    assert list(worker.stream(lambda: count(1)))[-1] == Done("stop"), "the next job runs"
    worker.close()


def test_a_job_cancelled_while_queued_never_starts() -> None:
    worker, started = Worker(), []
    running = worker.stream(lambda: count(10**9))
    queued = worker.stream(lambda: count(3, started))
    queued.cancel()
    running.cancel()
    assert list(queued) == [Done("cancelled")] and started == []
    worker.close()


def test_leaving_the_loop_early_cancels() -> None:
    worker = Worker()
    job = worker.stream(lambda: count(10**9))
    for _ in job:
        break
    assert job.cancelled
    assert list(worker.stream(lambda: count(1)))[-1] == Done("stop")
    worker.close()


def test_an_exception_ends_its_own_job_only() -> None:
    worker = Worker(2)

    def broken() -> Generator[Event, None, None]:
        yield Progress(0, 1)
        raise ValueError("bug")

    other = worker.stream(lambda: count(50))
    with pytest.raises(ValueError, match="bug"):
        list(worker.stream(broken))
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)
    assert list(other)[-1] == Done("stop")
    worker.close()


def test_closing_cancels_what_runs_and_what_waits_and_refuses_more() -> None:
    worker = Worker()
    jobs = [worker.stream(lambda: count(10**9)) for _ in range(3)]
    ends: list[Event] = []
    readers = [threading.Thread(target=lambda j=job: ends.append(list(j)[-1])) for job in jobs]
    for reader in readers:
        reader.start()
    worker.close()
    worker.close()
    for reader in readers:
        reader.join(timeout=60)
    assert ends == [Done("cancelled")] * 3 and not worker.alive
    with pytest.raises(Closed):
        worker.stream(lambda: count(1))
    with pytest.raises(Closed):
        worker.call(lambda: None)


def test_coroutines_read_the_same_events() -> None:
    worker = Worker(2)

    async def read(n: int) -> int:
        return len([event async for event in worker.stream(lambda: count(n))])

    async def both() -> list[int]:
        return list(await asyncio.gather(read(200), read(300)))

    assert asyncio.run(both()) == [201, 301]
    worker.close()


def test_a_cancelled_coroutine_cancels_its_job() -> None:
    worker = Worker()

    async def main() -> None:
        job = worker.stream(lambda: count(10**9))

        async def read() -> None:
            async for _ in job:
                await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert job.cancelled

    asyncio.run(main())
    assert list(worker.stream(lambda: count(1)))[-1] == Done("stop")
    worker.close()


def test_calls_from_many_threads_all_answer() -> None:
    worker, sums = Worker(3), []
    threads = [
        threading.Thread(
            target=lambda n=n: sums.append(len(list(worker.stream(lambda: count(n)))) + worker.call(lambda: n))
        )
        for n in range(1, 21)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(sums) == [2 * n + 1 for n in range(1, 21)]
    worker.close()


def hold(worker: Worker) -> tuple[threading.Event, threading.Event]:
    """Keep the thread busy until the second event is set; the first tells that it is."""
    busy, gate = threading.Event(), threading.Event()
    threading.Thread(target=worker.call, args=(lambda: busy.set() or gate.wait(60),), daemon=True).start()
    assert busy.wait(60)
    return busy, gate


def test_no_more_than_slots_and_queue_are_taken_in() -> None:
    worker = Worker(slots=2, queue=1)
    _, gate = hold(worker)
    jobs = [worker.stream(lambda: count(3)) for _ in range(3)]
    with pytest.raises(Busy, match="3 requests"):
        worker.stream(lambda: count(3))
    assert worker.unfinished == 3
    gate.set()
    for job in jobs:
        assert list(job)[-1] == Done("stop")
    assert worker.unfinished == 0 and list(worker.stream(lambda: count(1)))
    worker.close()


def test_a_job_cancelled_while_queued_ends_at_once_though_every_slot_is_taken() -> None:
    worker, started = Worker(), []
    running = worker.stream(lambda: count(10**9))
    queued = worker.stream(lambda: count(3, started))
    queued.cancel()
    assert list(queued) == [Done("cancelled")] and started == [] and not running.cancelled
    running.cancel()
    worker.close()


def test_a_reader_that_falls_too_far_behind_loses_its_reply_and_nobody_elses() -> None:
    worker = Worker(slots=2, backlog=10)
    unread = worker.stream(lambda: count(10**9))
    assert len(list(worker.stream(lambda: count(5)))) == 6
    with pytest.raises(TooSlow, match="10 events"):
        list(unread)
    worker.close()


def test_work_that_fails_before_its_first_event_ends_its_own_job_only() -> None:
    worker = Worker()

    def broken() -> Generator[Event, None, None]:
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        list(worker.stream(broken))
    assert worker.alive and list(worker.stream(lambda: count(1)))
    worker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_should_the_thread_die_nobody_is_left_waiting() -> None:
    worker = Worker()
    _, gate = hold(worker)
    jobs = [worker.stream(lambda: count(10**9)) for _ in range(3)]
    worker._advance = lambda: 1 // 0  # type: ignore[assignment,method-assign]
    gate.set()
    for job in jobs:
        with pytest.raises(Closed, match="stopped"):
            list(job)
    worker._thread.join(60)
    assert not worker.alive and worker.unfinished == 0
    with pytest.raises(Closed):
        worker.stream(lambda: count(1))


def test_a_loop_that_is_closed_over_its_reader_harms_nobody() -> None:
    worker = Worker()
    _, gate = hold(worker)
    job = worker.stream(lambda: count(5))
    loop = asyncio.new_event_loop()
    events = job.__aiter__()
    waiting = loop.create_task(events.__anext__())  # type: ignore[arg-type]
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel = lambda *_: False  # type: ignore[method-assign,assignment]
    loop.close()
    gate.set()
    assert list(worker.stream(lambda: count(1)))[-1] == Done("stop") and worker.alive
    worker.close()
