"""The one thread that owns MLX. Everyone else hands it work and reads what comes back.

Jobs advance by one event at a time, in turn, up to `slots` of them at once; the rest wait in order. A job is a
generator of events: one for each chunk of prefill and for each round, so a long prompt holds nobody up for longer than
a chunk. Cancelling takes effect before the job's next event, and at once for a job that waits.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from lisa.errors import Busy, Cancelled, Closed, TooSlow
from lisa.types import Done, Event

T = TypeVar("T")
Work = Callable[[], Generator[Event, None, None]]

_END = object()


class Job:
    """A stream of events. Iterate it once, from a thread or from a coroutine; abandoning the iteration cancels it.

    `backlog` is the number of events that may wait to be read; one more and the job ends with TooSlow.
    """

    def __init__(self, work: Work, backlog: int | None = None):
        self.work = work
        self.backlog = backlog
        self.cancelled = False
        self.done = False  # Done has been put
        self._items: deque[object] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Ask for the end; the events up to Done("cancelled") still arrive. Harmless at any time, from any thread."""
        self.cancelled = True

    def put(self, item: object) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            if self._wake is not None:
                self._wake()

    @property
    def overdue(self) -> bool:
        """Whether the reader has fallen too far behind."""
        return self.backlog is not None and len(self._items) > self.backlog

    def __iter__(self) -> Iterator[Event]:
        try:
            while True:
                with self._changed:
                    while not self._items:
                        self._changed.wait()
                    item = self._items.popleft()
                if item is _END:
                    return
                yield _event(item)
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._wake = lambda: _set(loop, ready)
        try:
            while True:
                ready.clear()
                while self._items:
                    item = self._items.popleft()
                    if item is _END:
                        return
                    yield _event(item)
                    ready.clear()
                if not self._items:
                    await ready.wait()
        finally:
            with self._changed:
                self._wake = None
            self.cancel()


def _set(loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has been closed over its reader
        loop.call_soon_threadsafe(ready.set)


def _event(item: object) -> Event:
    if isinstance(item, BaseException):
        raise item
    return item  # type: ignore[return-value]


class Worker:
    """Owns a thread from the first call until `close`.

    `slots` jobs run at once and `queue` more may wait (None: any number). `backlog` bounds what a job keeps unread.
    """

    def __init__(self, slots: int = 1, queue: int | None = None, backlog: int | None = None):
        self._slots = slots
        self._queue = queue
        self._backlog = backlog
        self._unfinished = 0  # jobs accepted and not yet over; guarded by the lock
        self._inbox: SimpleQueue[Job | Callable[[], None] | None] = SimpleQueue()
        self._active: deque[tuple[Job, Generator[Event, None, None]]] = deque()
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._live, name="lisa-worker", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, between events, and return what it returns or raise what it raises."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # the caller's to handle
                future.set_exception(error)

        self._submit(answer)
        return future.result()

    def stream(self, work: Work) -> Job:
        """Queue a job. Raises Busy when the queue is full, Closed after `close`."""
        job = Job(work, self._backlog)
        self._submit(job)
        return job

    def _submit(self, item: Job | Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise Closed("the model has been closed; load it again")
            if isinstance(item, Job):
                if self._queue is not None and self._unfinished >= self._slots + self._queue:
                    raise Busy(f"{self._unfinished} requests run or wait already; try again in a moment")
                self._unfinished += 1
            self._inbox.put(item)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def slots(self) -> int:
        """Jobs that run at once."""
        return self._slots

    @property
    def unfinished(self) -> int:
        """Jobs that run or wait."""
        return self._unfinished

    def close(self, wait: bool = True) -> None:
        """Cancel everything and end the thread, by default waiting for it. Harmless to repeat."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        atexit.unregister(self.close)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _live(self) -> None:
        try:
            self._run()
        finally:
            self._abandon()
            # MLX gave this thread streams with threads of their own; left running they abort the process at its exit.
            if "mlx.core" in sys.modules:
                mx = sys.modules["mlx.core"]
                mx.synchronize()
                mx.clear_streams()

    def _run(self) -> None:
        while self._receive():
            self._start()
            self._advance()
        for job in (*self._waiting, *(job for job, _ in self._active)):
            job.cancel()
        while self._active or self._waiting:
            self._start()
            self._advance()

    def _abandon(self) -> None:
        """Should a bug end the thread, nobody is left waiting for it. Nothing to do after an orderly end."""
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Job):
                self._waiting.append(item)
            elif item is not None:
                item()
        for job in [*(job for job, _ in self._active), *self._waiting]:
            self._end(job, Closed("the engine has stopped; start it again"))

    def _receive(self) -> bool:
        """Take in what has arrived, waiting only when there is nothing to do; False once closed."""
        while not self._inbox.empty() or not (self._active or self._waiting):
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, Job):
                self._waiting.append(item)
            else:
                item()
        return True

    def _start(self) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._end(job, Done("cancelled"))
        while self._waiting and len(self._active) < self._slots:
            job = self._waiting.popleft()
            self._active.append((job, _events(job)))

    def _advance(self) -> None:
        """One event of the job whose turn it is."""
        if not self._active:
            return
        job, events = self._active.popleft()
        try:
            event = events.throw(Cancelled()) if job.cancelled and not job.done else next(events)
        except StopIteration:
            self._end(job)
        except Cancelled:  # before it had begun
            self._end(job, Done("cancelled"))
        except BaseException as error:  # ends this request only
            self._end(job, error)
        else:
            job.done = isinstance(event, Done)
            job.put(event)
            if job.overdue and not job.done:
                events.close()
                self._end(job, TooSlow(f"{job.backlog} events of this reply were left unread; it has been ended"))
            else:
                self._active.append((job, events))

    def _end(self, job: Job, last: object = None) -> None:
        with self._lock:
            self._unfinished -= 1
        if last is not None:
            job.put(last)
        job.put(_END)


def _events(job: Job) -> Generator[Event, None, None]:
    """The job's events; what `work` raises before there are any is the job's too."""
    yield from job.work()
