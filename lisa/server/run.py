"""The process of `lisa serve`: the socket first, then the weights, then requests, until a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from lisa.api import Model
from lisa.errors import UsageError
from lisa.server.app import make_app
from lisa.server.desk import Service, Settings

Say = Callable[[str], None]

_GRACE = 5
"""Seconds that open connections get to take in their last bytes."""


def bind(host: str, port: int, key: str | None) -> socket.socket:
    """A listening socket. Raises UsageError for a host or port that cannot be had, or is not safe without a key."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine ({error.strerror or error})") from error
    family, kind, protocol, _, address = found[0]
    if key is None and not all(ipaddress.ip_address(str(a[4][0]).split("%")[0]).is_loopback for a in found):
        raise UsageError(f"--host {host} can be reached from other machines: give --api-key-file, or set LISA_API_KEY")
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{host}:{port} cannot be listened on ({why}); choose another --port or --host") from error
    return listening


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A first signal ends replies and then the server; a second one ends it at once."""

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None]):
        super().__init__(config)
        self._leave = leave

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not the library's own, which raises the signal again in the end.
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True
            threading.Thread(target=self._leave, daemon=True).start()


def serve(listening: socket.socket, load: Callable[[], Model], settings: Settings, say: Say) -> None:
    """Answer on the socket at once, load beside it, and serve until SIGINT or SIGTERM. Raises what loading raised.

    Ends the process when the signal comes while the model is loaded.
    """
    service = Service()
    logging.getLogger("lisa.server").setLevel(logging.INFO)

    def close() -> None:
        if service.model is not None:
            service.model.close()

    config = uvicorn.Config(
        make_app(service, settings),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = _Server(config, close)
    failure: list[BaseException] = []

    def bring_up() -> None:
        try:
            service.model = load()
        except BaseException as error:
            service.failed = str(error)
            failure.append(error)
            server.should_exit = True
            return
        if server.should_exit:
            return close()
        say(service.model.about)
        say(f"serving {service.model.name} at {url(listening)} (Ctrl-C ends it)")

    loading = threading.Thread(target=bring_up, name="lisa-load", daemon=True)
    loading.start()
    asyncio.run(server.serve(sockets=[listening]))
    close()
    if failure:
        raise failure[0]
    say("stopped")
    if loading.is_alive():
        # Loading may take minutes and cannot be interrupted; MLX aborts a process that ends in order under its work.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def read_key(path: str | None, environment: str | None) -> str | None:
    """The API key, of a file or else of the environment. Raises UsageError."""
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                key = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {path} cannot be read ({error})") from error
    elif environment is not None:
        key = environment.strip()
    else:
        return None
    if len(key) < 8 or not key.isascii() or not key.isprintable():
        raise UsageError("the API key must be at least 8 printable ASCII characters")
    return key
