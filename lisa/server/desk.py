"""What is being served, and the way of a request to the model and of the reply back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from anyio import to_thread
from fastapi import Request

from lisa.api import Model, Reply
from lisa.server.guard import Limits
from lisa.server.metrics import Metrics
from lisa.server.problem import Problem
from lisa.server.stream import EventStream, Tick, Tint, Wire, collect, frames, gone
from lisa.server.turn import Ask, Head, Nature, Turn, new_id
from lisa.text import CLOSE, OPEN

T = TypeVar("T")

KEEPALIVE = 10.0
"""Seconds between signs of life on a stream."""


@dataclass
class Service:
    """What is being served, which changes while it is loaded and when it is closed."""

    model: Model | None = None
    failed: str | None = None

    @property
    def status(self) -> Literal["loading", "ready", "failed"]:
        if self.failed is not None or (self.model is not None and not self.model.alive):
            return "failed"
        return "loading" if self.model is None else "ready"

    def ready(self) -> Model:
        """Raises Problem while there is nothing to ask."""
        if self.model is None or self.status != "ready":
            what = (
                "the model is loading; try again in a moment" if self.status == "loading" else "the engine has failed"
            )
            raise Problem(503, what, code=self.status)
        return self.model


@dataclass(frozen=True)
class Settings:
    """`key` is the API key, `hosts` and `origins` are allowed beside the server's own.

    `tick` comes true at every keep-alive. In seconds: `timeout` is the most a reply may take, `preparation` the most
    that rendering a prompt may, and `patience` how long a reader may take nothing.
    """

    key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    tick: Tick = lambda: asyncio.sleep(KEEPALIVE)
    timeout: float | None = None
    preparation: float = 60.0
    patience: float = 60.0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Desk:
    """One running server: takes an Ask to the model and brings the reply back, streamed or whole."""

    service: Service
    settings: Settings
    metrics: Metrics

    def model(self, name: str) -> Model:
        model = self.service.ready()
        if name != model.name:
            raise Problem(404, f"model {name!r} is not served here; {model.name!r} is", "model", "model_not_found")
        return model

    def nature(self, model: Model) -> Nature:
        return Nature(model.thinks, model.reads)

    async def ask(self, model: Model, ask: Ask) -> tuple[Reply, Turn]:
        """Queue the request; its reply, and an empty turn for it."""
        options = dict(ask.options) | {"sampling": replace(model.sampling, **ask.sampling)}
        reply = await self.prepare(lambda: model.chat(ask.messages, **options))
        several = bool(ask.options.get("parallel", True))
        return reply, self.turn(model, reply, ask.shown, several)

    async def prepare(self, work: Callable[[], T]) -> T:
        """Render and tokenise, outside both the engine's thread and the event loop, and for so long only.

        A thread cannot be ended: should a template never come back, its thread is left to it, and what it might still
        return is cancelled.
        """
        given_up = threading.Event()

        def run() -> T:
            made = work()
            if given_up.is_set() and isinstance(made, Reply):
                made.cancel()
            return made

        try:
            return await asyncio.wait_for(to_thread.run_sync(run, abandon_on_cancel=True), self.settings.preparation)
        except asyncio.TimeoutError:
            seconds = self.settings.preparation
            raise Problem(504, f"the prompt was not ready within {seconds:g} seconds", code="timeout") from None
        finally:
            given_up.set()

    def turn(self, model: Model, reply: Reply, tools: Sequence[Any] = (), several: bool = True) -> Turn:
        marks = tuple(model.tokenizer.raw.token_to_id(tag) for tag in (OPEN, CLOSE))
        tail = model.tokenizer.decode(reply.prompt[-16:]).rstrip()
        return Turn(tools, several=several, marks=(marks[0], marks[1]), thinking=tail.endswith(OPEN))

    def head(self, prefix: str, model: Model, reply: Reply) -> Head:
        return Head(new_id(prefix), model.name, int(time.time()), len(reply.prompt))

    def stops(self) -> list[Awaitable[Problem]]:
        return [] if self.settings.timeout is None else [_late(self.settings.timeout)]

    def stream(self, reply: Reply, turn: Turn, writer: Any, wire: Wire, tint: Tint | None = None) -> EventStream:
        body = frames(
            reply,
            turn,
            writer,
            wire,
            tick=self.settings.tick,
            watch=self.metrics.watch(),
            stops=self.stops(),
            tint=tint,
        )
        return EventStream(body, self.settings.patience, reply.cancel)

    async def collect(self, request: Request, reply: Reply, turn: Turn) -> None:
        await collect(reply, turn, self.metrics.watch(), [gone(request.receive), *self.stops()])

    def spell(self, model: Model) -> Callable[[int], bytes]:
        return lambda token: model.tokenizer.spell(token, False) or b""


async def _late(seconds: float) -> Problem:
    await asyncio.sleep(seconds)
    return Problem(504, f"the reply took more than {seconds:g} seconds and was ended", code="timeout")
