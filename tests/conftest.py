"""Strict arithmetic for every test: equality of texts, logits and states is asked for in bits."""

from collections.abc import Iterator
from typing import Any

import pytest

from lisa import blas

BLAS = blas.use(strict=blas.STRICT_POSSIBLE)


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


def pytest_report_header() -> str:
    return f"BLAS: {BLAS}"
