"""Who may ask, and how much: plain ASGI middleware in front of the routes, outermost first.

Hosts (DNS rebinding), Origins (other web sites) with CORS, Keys, Bodies (size, depth, patience).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lisa.server.problem import Problem

MAX_BODY = 8 << 20
MAX_DEPTH = 64
PATIENCE = 30.0
"""Seconds a body may take to arrive."""

_NESTING = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_OPEN_PATHS = frozenset(("/", "/health"))
_METHODS = "GET, POST, OPTIONS"
_HEADERS = "Authorization, Content-Type, X-Api-Key, Anthropic-Version, Anthropic-Beta"


def header(scope: Scope, name: bytes) -> str | None:
    """A request header; None unless it is there exactly once."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else None


async def refuse(why: Problem, scope: Scope, receive: Receive, send: Send, **headers: str) -> None:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    await JSONResponse(why.body(scope["path"]), why.status, names)(scope, receive, send)


def host_name(netloc: str) -> str:
    """The name of "name:port", in lower case, without the brackets of IPv6."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Hosts:
    """Requests must name this server: an address (which no rebinding can make), localhost, or an allowed name."""

    def __init__(self, app: ASGIApp, names: Collection[str] = ()):
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = host_name(header(scope, b"host") or "")
            if not name or not (name in self._names or is_address(name)):
                why = Problem(403, f"host {name!r} is not allowed; start lisa serve with --allow-host {name or 'NAME'}")
                return await refuse(why, scope, receive, send)
        await self._app(scope, receive, send)


class Origins:
    """Web pages of other origins are refused unless allowed; those get CORS headers, on errors too."""

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()):
        self._app = app
        self._origins = {origin.rstrip("/").lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = [value for key, value in scope.get("headers", ()) if key == b"origin"]
        if scope["type"] != "http" or not origins:
            return await self._app(scope, receive, send)
        origin = (header(scope, b"origin") or "").rstrip("/").lower()
        allowed = origin in self._origins or "*" in self._origins
        if not allowed and origin != f"{scope['scheme']}://{header(scope, b'host')}".lower():
            why = Problem(403, f"origin {origin!r} is not allowed; start lisa serve with --allow-origin to allow it")
            return await refuse(why, scope, receive, send)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and allowed:
                message["headers"] = [*message["headers"], *_cors(origin)]
            await send(message)

        if scope["method"] == "OPTIONS":
            return await self._preflight(answer)
        await self._app(scope, receive, answer)

    async def _preflight(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def _cors(origin: str) -> Iterable[tuple[bytes, bytes]]:
    yield b"access-control-allow-origin", origin.encode("latin-1")
    yield b"vary", b"Origin"
    yield b"access-control-allow-methods", _METHODS.encode()
    yield b"access-control-allow-headers", _HEADERS.encode()
    yield b"access-control-max-age", b"600"


class Keys:
    """An API key as a bearer token or in x-api-key, compared in constant time. None asks for none."""

    def __init__(self, app: ASGIApp, key: str | None):
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key is not None and scope["path"] not in _OPEN_PATHS:
            bearer = header(scope, b"authorization") or ""
            scheme, _, token = bearer.partition(" ")
            shown = token.strip() if scheme.lower() == "bearer" else header(scope, b"x-api-key") or ""
            if not hmac.compare_digest(shown.encode("latin-1"), self._key):
                why = Problem(
                    401, "a valid API key is needed, as a bearer token or in x-api-key", code="invalid_api_key"
                )
                return await refuse(why, scope, receive, send, WWW_Authenticate="Bearer")
        await self._app(scope, receive, send)


@dataclass(frozen=True)
class Limits:
    """`body` in bytes, `depth` of JSON nesting, `patience` in seconds for a body to arrive."""

    body: int = MAX_BODY
    depth: int = MAX_DEPTH
    patience: float = PATIENCE


class Bodies:
    """Reads a body whole before a route sees it, within the limits."""

    def __init__(self, app: ASGIApp, limits: Limits = Limits()):
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self._limits.patience)
            if body is None:
                return
            deep = await asyncio.to_thread(depth, body) if len(body) > 1 << 16 else depth(body)
            if deep > self._limits.depth:
                raise Problem(400, f"the JSON is nested {deep} deep, more than {self._limits.depth}")
        except asyncio.TimeoutError:
            why = Problem(408, f"the body did not arrive within {self._limits.patience:g} seconds")
            return await refuse(why, scope, receive, send, Connection="close")
        except Problem as why:
            return await refuse(why, scope, receive, send, Connection="close")
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        await self._app(scope, lambda: _first(whole, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None when the client went away in the middle of it."""
        said = header(scope, b"content-length") or ""
        if said.isdigit() and int(said) > self._limits.body:
            raise self._too_large()
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message: Any = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._limits.body:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than {self._limits.body} bytes")


async def _first(whole: list[Message], receive: Receive) -> Message:
    return whole.pop() if whole else await receive()


def depth(body: bytes) -> int:
    """How deep brackets are nested, strings left out."""
    now = most = 0
    for token in _NESTING.finditer(body):
        first = token[0][:1]
        if first in b"[{":
            now += 1
            most = max(most, now)
        elif first in b"]}":
            now -= 1
    return most
