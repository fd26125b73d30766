"""Strict arithmetic for every test: equality of texts, logits and states is asked for in bits."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopback
import pytest

from lisa import blas

BLAS = blas.use(strict=blas.STRICT_POSSIBLE)


@pytest.fixture(scope="session", autouse=True)
def pace_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where pacers (and verdicts on kernels) are remembered: not in the user's cache."""
    import lisa.loader
    import lisa.verdicts

    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lisa.loader, "_pace_file", lambda: folder / "pace.json")
        patch.setattr(lisa.verdicts, "file", lambda: folder / "kernels.json")
        yield folder / "pace.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The verdicts read so far: each is one synchronisation with the device."""
    from lisa.verify import Outcome, Verdict

    seen: list[Any] = []
    read = Verdict.read

    def counted(self: Verdict) -> Outcome:
        seen.append(self)
        return read(self)

    monkeypatch.setattr(Verdict, "read", counted)
    yield seen


@pytest.fixture
def fake() -> Iterator[loopback.FakeHub]:
    with loopback.running() as server:
        yield server


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token, and no word of being offline."""
    monkeypatch.setenv("HF_TOKEN", loopback.TOKEN)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection is a failure."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def pytest_report_header() -> str:
    return f"BLAS: {BLAS}"
