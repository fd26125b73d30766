"""What this machine has, and the byte budget of everything resident."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lisa.errors import MemoryFull


@dataclass(frozen=True)
class Machine:
    """`metal`: an Apple silicon Mac, whose GPU shares the memory. `memory` in bytes."""

    metal: bool
    memory: int


def machine() -> Machine:
    """Told without MLX, so that the command line can choose a model before it loads one."""
    metal = sys.platform == "darwin" and platform.machine() == "arm64"
    return Machine(metal, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@cache
def cpu() -> str:
    """The chip's own name, asked for once: on a Mac that takes a process."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


class Budget:
    """Who may use how much of `limit` bytes: `weights`, running requests, and caches, which yield first.

    A context takes `kv_bytes` for each token and `state_bytes` whatever its length. `kept` is the most that contexts of
    earlier conversations may take, None for a quarter of what the weights leave. `held` is for one thread; the rest may
    be asked from any.
    """

    def __init__(self, limit: int, weights: int, kv_bytes: int, state_bytes: int, kept: int | None = None):
        self.in_use = 0
        self._kept = kept
        self.resize(limit, weights, kv_bytes, state_bytes)

    def resize(self, limit: int, weights: int, kv_bytes: int, state_bytes: int) -> None:
        """Other weights and other contexts from now on; what runs stays booked as it was."""
        self.limit = limit
        self.weights = weights
        self._kv_bytes = kv_bytes
        self._state_bytes = state_bytes

    @property
    def caches(self) -> int:
        """Bytes that contexts of earlier conversations may take."""
        left = max(0, self.limit - self.weights)
        return left // 4 if self._kept is None else min(left, self._kept)

    def marks(self, n: int) -> int:
        """Bytes of `n` marks on a context."""
        return n * self._state_bytes

    def need(self, tokens: int) -> int:
        """Bytes of a context of `tokens`."""
        return self._state_bytes + tokens * self._kv_bytes

    def fits(self, need: int, others: int) -> bool:
        return self.weights + self.in_use + others + need <= self.limit

    def check(self, need: int, others: int = 0) -> None:
        """Raises MemoryFull with both numbers."""
        if self.weights + others + need > self.limit:
            raise MemoryFull(
                f"the request needs {gigabytes(need)} beside {gigabytes(self.weights + others)} in use, and "
                f"{gigabytes(self.limit)} may be resident; shorten the prompt or set a smaller max_tokens"
            )

    @contextmanager
    def held(self, need: int) -> Iterator[None]:
        self.in_use += need
        try:
            yield
        finally:
            self.in_use -= need


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
