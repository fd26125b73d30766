"""Verdicts on Lisa's kernels, found by lisa/selfcheck.py and kept in the user's cache."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lisa import hub, remember
from lisa.memory import cpu

ALONE, TOGETHER = 1, 8
"""Rows of a plain step, and of the verifying step that is raced."""


@dataclass(frozen=True)
class Verdict:
    """`ratio` and `alone` are MLX's seconds over the kernel's, for a verifying step and for one row."""

    right: bool
    ratio: float = 0.0
    alone: float = 0.0
    why: str = ""

    @property
    def used(self) -> bool:
        return self.right and self.ratio >= 1.0

    def __str__(self) -> str:
        if not self.right:
            return f"not used: {self.why}"
        speed = f"{self.ratio:.2f} times MLX's speed at {TOGETHER} rows, {self.alone:.2f} at one"
        return f"used, {speed}" if self.used else f"not used: {speed}"


def machine() -> str:
    """What a verdict holds for, beside a kernel's text and shapes."""
    return f"{cpu()}, macOS {platform.mac_ver()[0]}, mlx {version('mlx')}"


def file() -> Path:
    return hub.cache_folder() / "kernels.json"


def stored() -> dict[str, Verdict]:
    """Every verdict found on this machine as it is now, by kernel, text and shapes."""
    kept = {}
    for key, value in remember.everything(file()).items():
        place, _, what = key.partition(": ")
        with suppress(TypeError):
            if place == machine():
                kept[what] = Verdict(**value)
    return kept
