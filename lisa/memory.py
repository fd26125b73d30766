"""What this machine has. The byte budget of everything resident will live here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """`metal`: an Apple silicon Mac, whose GPU shares the memory. `memory` in bytes."""

    metal: bool
    memory: int


def machine() -> Machine:
    """Told without MLX, so that the command line can choose a model before it loads one."""
    metal = sys.platform == "darwin" and platform.machine() == "arm64"
    return Machine(metal, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def cpu() -> str:
    """The chip's own name."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
