"""The routes. What they do is in the translation modules; how bytes leave is in stream.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, JSONResponse, Response

from lisa import __version__
from lisa.api import Model, Reply
from lisa.errors import LisaError
from lisa.server import anthropic, completions, openai, responses
from lisa.server.desk import Desk, Service, Settings
from lisa.server.guard import Bodies, Hosts, Keys, Origins
from lisa.server.metrics import Metrics
from lisa.server.problem import Problem, problem
from lisa.server.stream import DataWire, EventStream, EventWire, Tint, frames, told
from lisa.server.turn import Head, Turn


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in (
        (400, "The request cannot be honoured; the message names the field"),
        (401, "No valid API key"),
        (403, "Host or origin not allowed"),
        (404, "No such model"),
        (408, "The body was too slow"),
        (413, "The body is too large"),
        (500, "A bug"),
        (503, "Loading, busy, out of memory, or shutting down"),
        (504, "The reply took too long"),
    )
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The reply, or server-sent events", "content": {"text/event-stream": {}}},
    **_ERRORS,
}


def make_app(service: Service, settings: Settings) -> FastAPI:
    """The application over a service that may still be loading."""
    desk = Desk(service, settings, Metrics(settings.clock))
    guards = [
        Middleware(Outermost, metrics=desk.metrics),
        Middleware(Hosts, names=settings.hosts),
        Middleware(Origins, origins=settings.origins),
        Middleware(Keys, key=settings.key),
        Middleware(Bodies, limits=settings.limits),
    ]
    app = FastAPI(title="Lisa", version=__version__, middleware=guards, docs_url=None, redoc_url=None)
    _add_failures(app)
    _add_house(app, desk)
    _add_openai(app, desk)
    _add_responses(app, desk)
    _add_anthropic(app, desk)
    return app


class Outermost:
    """Counts requests by route and status. A bug ends its own request, with a line in the log."""

    def __init__(self, app: Any, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def count(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, receive, count)
        except Exception as error:
            told(error)
            if not started:
                why = problem(error)
                await JSONResponse(why.body(scope["path"]), why.status)(scope, receive, count)


def _add_failures(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        told(error)
        why = problem(error)
        headers = {"Retry-After": "2"} if why.status == 503 else None
        return JSONResponse(why.body(request.url.path), why.status, headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return JSONResponse(_invalid(error).body(request.url.path), 400)

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}".lower())
        return JSONResponse(why.body(request.url.path), error.status_code, error.headers)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, missing)
    app.add_exception_handler(Problem, refused)
    app.add_exception_handler(LisaError, refused)


def _invalid(error: RequestValidationError) -> Problem:
    """The first thing wrong, by the name of its field. Of a union, the member that was got into furthest."""
    errors = error.errors()
    top = [e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]]
    first = max(top, key=lambda e: len(_path(e["loc"][1:], error.body)))
    path = _path(first["loc"][1:], error.body)
    if first["type"] == "missing" and path[-1:] != [first["loc"][-1]]:
        path.append(first["loc"][-1])
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    if first["type"] == "extra_forbidden":
        return Problem(400, f"{where} is not supported: leave it out", where, "unknown_field")
    if first["type"] == "json_invalid":
        return Problem(400, "the body is not JSON")
    message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    return Problem(400, f"{where or 'body'}: {message}", where or None)


def _path(loc: Sequence[Any], body: Any) -> list[Any]:
    """The keys of `loc` that lead into the body; pydantic puts the names of a union's members among them."""
    path = []
    for part in loc:
        inside = part in body if isinstance(body, dict) else isinstance(part, int) and isinstance(body, list)
        if inside:
            path.append(part)
            body = body[part]
    return path


def _add_house(app: FastAPI, desk: Desk) -> None:
    page = (files("lisa.server") / "web" / "index.html").read_text("utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """A page to talk to the model."""
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    @app.get("/health", responses={503: {"description": "Loading or failed"}})
    async def health() -> JSONResponse:
        """200 only while the engine's thread lives."""
        status = desk.service.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text."""
        model = desk.service.model
        text = desk.metrics.text(model.memory if model else 0, model.unfinished if model else 0)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        """What is served."""
        return {"object": "list", "data": [_card(desk.service.ready())]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """One model: its context, its drafter, what is loaded."""
        return _card(desk.model(name))


_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def _card(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "lisa",
        "context_length": model.context,
        "drafter": model.drafter,
        "loaded": model.about,
        "thinks": model.thinks,
    }


def _add_openai(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/chat/completions", responses=STREAMED, response_model=None)
    async def chat(body: openai.ChatRequest, request: Request) -> Response:
        """The assistant's next message."""
        model = desk.model(body.model)
        reply, turn = await desk.ask(model, openai.chat_ask(body, desk.nature(model)))
        writer = openai.ChatWriter(body, desk.head("chatcmpl-", model, reply), turn, desk.spell(model))
        if body.stream:
            return desk.stream(reply, turn, writer, DataWire(), _tint(model, body, reply, reasoning=True))
        await desk.collect(request, reply, turn)
        return JSONResponse(writer.whole())

    @app.post("/v1/completions", responses=STREAMED, response_model=None)
    async def complete(body: completions.CompletionRequest, request: Request) -> Response:
        """What follows a text, without a template. Several prompts are answered one after another."""
        model = desk.model(body.model)
        runs = _Completions(desk, model, body, completions.completion_prompts(body))
        if body.stream:
            begun = await runs.begin(0)
            return EventStream(runs.stream(begun), desk.settings.patience, begun[0].cancel)
        return JSONResponse(await runs.whole(request))


def _add_responses(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/responses", responses=STREAMED, response_model=None)
    async def respond(body: responses.ResponsesRequest, request: Request) -> Response:
        """The next message, as items. Nothing is kept between requests."""
        model = desk.model(body.model)
        reply, turn = await desk.ask(model, responses.responses_ask(body, desk.nature(model)))
        writer = responses.ResponsesWriter(body, desk.head("resp_", model, reply), turn)
        if body.stream:
            return desk.stream(reply, turn, writer, responses.ResponsesWire(writer))
        await desk.collect(request, reply, turn)
        return JSONResponse(writer.whole())


def _add_anthropic(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/messages", responses=STREAMED, response_model=None)
    async def messages(body: anthropic.MessagesRequest, request: Request) -> Response:
        """The assistant's next message, as blocks."""
        model = desk.model(body.model)
        reply, turn = await desk.ask(model, anthropic.messages_ask(body, desk.nature(model)))
        writer = anthropic.MessagesWriter(desk.head("msg_", model, reply), turn, lambda: reply.stopped_by)
        if body.stream:
            return desk.stream(reply, turn, writer, EventWire())
        await desk.collect(request, reply, turn)
        return JSONResponse(writer.whole())

    @app.post("/v1/messages/count_tokens", responses=_ERRORS)
    async def count_tokens(body: anthropic.CountRequest) -> dict[str, int]:
        """Tokens of the prompt that such a message would read."""
        model = desk.model(body.model)
        ask = anthropic.messages_ask(body, desk.nature(model))
        tools = ask.options.get("tools") if ask.shown else None
        thinking = ask.options.get("thinking")
        count = await desk.prepare(lambda: model.prompt_tokens(ask.messages, tools, thinking))
        return {"input_tokens": count}


def _tint(model: Model, body: openai.Sampled, reply: Reply, reasoning: bool) -> Tint | None:
    if not (body.stream_options and body.stream_options.include_rounds):
        return None
    return Tint(model.tokenizer.reader(stop=body.stop, prompt=reply.prompt, reasoning=reasoning))


Begun = tuple[Reply, Turn, completions.CompletionWriter]


class _Completions:
    """The choices of one completion request."""

    def __init__(self, desk: Desk, model: Model, body: completions.CompletionRequest, prompts: Sequence[Any]):
        self._desk = desk
        self._model = model
        self._body = body
        self._prompts = prompts
        self._head: Head | None = None
        self._turns: list[Turn] = []

    async def begin(self, index: int) -> Begun:
        model, body, prompt = self._model, self._body, self._prompts[index]
        sampling = replace(model.sampling, **body.sampling())
        options = completions.completion_options(body) | {"sampling": sampling}
        reply = await self._desk.prepare(lambda: model.generate(prompt, **options))
        turn = Turn()
        self._turns.append(turn)
        self._head = self._head or self._desk.head("cmpl-", model, reply)
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        echoed = text if body.echo else ""
        writer = completions.CompletionWriter(body, self._head, turn, self._desk.spell(model), index, echoed)
        return reply, turn, writer

    async def whole(self, request: Request) -> Mapping[str, Any]:
        choices, begun = [], None
        for index in range(len(self._prompts)):
            begun = await self.begin(index)
            await self._desk.collect(request, begun[0], begun[1])
            choices.append(begun[2].choice())
        assert begun is not None
        usage = completions.completions_usage(self._turns)
        return begun[2].envelope() | {"choices": choices, "usage": usage, "timings": self._turns[0].timings}

    async def stream(self, begun: Begun) -> AsyncIterator[bytes]:
        wire, settings = DataWire(), self._desk.settings
        for index in range(len(self._prompts)):
            reply, turn, writer = begun if index == 0 else await self.begin(index)
            watch, stops = self._desk.metrics.watch(), self._desk.stops()
            tint = _tint(self._model, self._body, reply, reasoning=False)
            body = frames(reply, turn, writer, wire, tick=settings.tick, watch=watch, stops=stops, tint=tint)
            async with aclosing(body):
                async for frame in body:
                    if frame != wire.end():
                        yield frame
            if turn.reason == "cancelled" or not turn.complete:
                break
        if self._body.usage_chunk:
            usage = completions.completions_usage(self._turns)
            yield wire.frame(writer.envelope() | {"choices": [], "usage": usage})
        yield wire.end()
