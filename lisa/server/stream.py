"""Events of a reply as bytes on the wire: server-sent events, keep-alives, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from anyio import fail_after
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lisa.errors import LisaError
from lisa.server.problem import Problem, problem, shutdown
from lisa.server.turn import Thought, Turn
from lisa.text import TextReader
from lisa.tools import Piece
from lisa.types import Done, Event, Tokens

log = logging.getLogger("lisa.server")

Tick = Callable[[], Awaitable[object]]
Watch = Callable[[Event], None]


class Reply(Protocol):
    """What is needed of api.Reply."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def cancel(self) -> None: ...


class Writer(Protocol):
    """Pieces of a turn as JSON objects of one API."""

    def opening(self) -> Iterable[Mapping[str, Any]]: ...
    def feed(
        self, pieces: Sequence[Piece | Thought], rounds: Mapping[str, Any] | None
    ) -> Iterable[Mapping[str, Any]]: ...
    def closing(self) -> Iterable[Mapping[str, Any]]: ...


class Wire(Protocol):
    """How one API puts objects on the wire."""

    def frame(self, item: Mapping[str, Any]) -> bytes: ...
    def keepalive(self) -> bytes: ...
    def failed(self, why: Problem) -> Iterable[bytes]: ...
    def end(self) -> bytes: ...


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class DataWire:
    """Chat completions and completions: bare data lines, comments to keep alive, [DONE] at the end."""

    def frame(self, item: Mapping[str, Any]) -> bytes:
        return b"data: " + dumps(item) + b"\n\n"

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def failed(self, why: Problem) -> Iterator[bytes]:
        yield self.frame(why.openai())

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"


class EventWire:
    """Messages: each object is an event of its own type."""

    def frame(self, item: Mapping[str, Any]) -> bytes:
        return b"event: " + str(item["type"]).encode() + b"\ndata: " + dumps(item) + b"\n\n"

    def keepalive(self) -> bytes:
        return self.frame({"type": "ping"})

    def failed(self, why: Problem) -> Iterator[bytes]:
        yield self.frame(why.anthropic())

    def end(self) -> bytes:
        return b""


async def paced(
    events: AsyncIterator[Event], tick: Tick, stops: Sequence[Awaitable[Problem]] = ()
) -> AsyncIterator[Event | None]:
    """The events, with a None for every tick of a clock that does not look at them.

    The first of `stops` to come true ends it by raising what it returns. Leaving early closes `events`.
    """
    clock: asyncio.Future[object] = asyncio.ensure_future(tick())
    alarms = [asyncio.ensure_future(stop) for stop in stops]
    event: asyncio.Future[Event] = asyncio.ensure_future(_next(events))
    try:
        while True:
            waiting: list[asyncio.Future[Any]] = [event, clock, *alarms]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for alarm in alarms:
                if alarm.done():
                    raise alarm.result()
            if clock.done():
                clock.result()
                clock = asyncio.ensure_future(tick())
                yield None
            if event.done():
                try:
                    got = event.result()
                except StopAsyncIteration:
                    return
                event = asyncio.ensure_future(_next(events))
                yield got
    finally:
        left: list[asyncio.Future[Any]] = [clock, event, *alarms]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if hasattr(events, "aclose"):
            await events.aclose()


async def _next(events: AsyncIterator[Event]) -> Event:
    return await events.__anext__()


async def never() -> None:
    await asyncio.Event().wait()


async def frames(
    reply: Reply,
    turn: Turn,
    writer: Writer,
    wire: Wire,
    *,
    tick: Tick,
    watch: Watch,
    stops: Sequence[Awaitable[Problem]] = (),
    tint: Tint | None = None,
) -> AsyncGenerator[bytes, None]:
    """A whole reply: something at once, then what comes; an error that comes late is an event, and then the end."""
    try:
        for item in writer.opening():
            yield wire.frame(item)
        async for event in paced(reply.__aiter__(), tick, stops):
            if event is None:
                yield wire.keepalive()
                continue
            watch(event)
            pieces = turn.feed(event)
            rounds = tint(event) if tint is not None and isinstance(event, Tokens) else None
            for item in writer.feed(pieces, rounds):
                yield wire.frame(item)
            if turn.complete and not isinstance(event, Done):
                reply.cancel()
        if turn.reason == "cancelled":
            raise shutdown()
        for item in writer.closing():
            yield wire.frame(item)
        yield wire.end()
    except Exception as error:
        told(error)
        for frame in wire.failed(problem(error)):
            yield frame
        yield wire.end()
    finally:
        reply.cancel()  # a reader who leaves at the opening has not begun to iterate the reply, which would cancel it


async def collect(reply: Reply, turn: Turn, watch: Watch, stops: Sequence[Awaitable[Problem]] = ()) -> None:
    """Feed a whole reply to its turn. Raises what ended it early."""
    async for event in paced(reply.__aiter__(), never, stops):
        if event is not None:
            watch(event)
            turn.feed(event)
            if turn.complete and not isinstance(event, Done):
                reply.cancel()
    if turn.reason == "cancelled":
        raise shutdown()


def told(error: BaseException) -> None:
    """A bug goes to the log, where its client's message points."""
    if not isinstance(error, LisaError | Problem):
        log.error("a request failed", exc_info=error)


class Tint:
    """Which text came from a draft: the page colours it. Reads the tokens a second time, on its own."""

    def __init__(self, reader: TextReader):
        self._reader = reader

    def __call__(self, event: Tokens) -> dict[str, Any]:
        pieces = []
        for i, token in enumerate(event.ids):
            self._reader.push(token)
            text, reasoning = self._reader.take()
            pieces.append({"text": text, "reasoning": reasoning, "drafted": i < event.accepted})
        return {"drafted": event.drafted, "accepted": event.accepted, "pieces": pieces}


GONE = 499
"""The status, seen by nobody but the metrics, of a request whose client went away."""


async def gone(receive: Receive) -> Problem:
    """Comes true when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return Problem(GONE, "the client went away")


class EventStream(Response):
    """Server-sent events. The generator is closed when the client goes away or takes nothing for `patience` s.

    `leave` is called at the end, however it comes: closing a generator that never began runs nothing of it.
    """

    media_type = "text/event-stream"

    def __init__(self, body: AsyncIterator[bytes], patience: float = 60.0, leave: Callable[[], object] = lambda: None):
        self.body = b""
        self.status_code = 200
        self.background = None
        self._body = body
        self._patience = patience
        self._leave = leave
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave()
            for task in (pump, watch):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(pump, watch, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        async def put(message: Message) -> None:
            # Not asyncio.wait_for: before Python 3.12 it loses a cancel that comes in the turn in which sending ends.
            with fail_after(self._patience):
                await send(message)

        try:
            await put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._body:
                if piece:
                    await put({"type": "http.response.body", "body": piece, "more_body": True})
            await put({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._body.aclose()  # type: ignore[attr-defined]
