"""Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from lisa.errors import LisaError


class Stopped(LisaError):
    """Ctrl-C before there was anything to save that is not saved already."""

    exit_code = 130


class Interrupt:
    """Ctrl-C as something to look at between steps, so that none is left half done; a second one ends at once.

    Off the main thread nothing is caught.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # a second one means now
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
