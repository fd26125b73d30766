"""Comparing speeds honestly: alternating arms in one process, medians, and an interval that says how sure they are."""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def alternate(arms: Mapping[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """Each arm's measurements; the arms take turns, and every second round runs them in reverse."""
    measured: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(pairs):
        names = list(arms)[:: 1 if i % 2 == 0 else -1]
        for name in names:
            measured[name].append(arms[name]())
    return measured


def ratio(a: Sequence[float], b: Sequence[float], draws: int = 2000) -> Ratio:
    """Median of a over median of b; pairs are resampled together, since they ran side by side."""
    rng = random.Random(0)
    n = len(a)
    values = []
    for _ in range(draws):
        picked = [rng.randrange(n) for _ in range(n)]
        values.append(statistics.median(a[i] for i in picked) / statistics.median(b[i] for i in picked))
    values.sort()
    middle = statistics.median(a) / statistics.median(b)
    return Ratio(middle, values[int(0.025 * draws)], values[int(0.975 * draws) - 1])


def machine() -> dict[str, object]:
    """What a result depends on besides the code. `cpu` is the processor's name."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "transformers")},
    }


def _cpu() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    """The checkout's commit, "-dirty" when it has changes, "" outside a checkout."""
    folder = Path(__file__).parent.parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def today() -> str:
    return time.strftime("%Y-%m-%d")
