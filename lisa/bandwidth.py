"""How fast this machine reads memory, which is what bounds plain decoding: every token reads every weight once.

Measured by `lisa bench` (lisa/measure.py) and kept in the user's cache; until then what Apple publishes for the chip.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lisa import remember

# GB/s from Apple's technical specifications; of a chip sold with two, the larger.
_PUBLISHED = {
    **{"M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800},
    **{"M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800},
    **{"M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819},
    **{"M4": 120, "M4 Pro": 273, "M4 Max": 546},
    **{"M5": 153, "M5 Pro": 307, "M5 Max": 614},
}


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, and where the number is from."""

    bytes: float
    source: str

    def __str__(self) -> str:
        return f"{self.bytes / 1e9:.0f} GB/s, {self.source}"


def known(cpu: str, folder: Path) -> Bandwidth | None:
    """What was measured on a machine with this chip, else what its maker says, else None."""
    measured = remember.load(_file(folder), cpu)
    if isinstance(measured, (int, float)):
        return Bandwidth(float(measured), "measured by lisa bench")
    chip = re.fullmatch(r"Apple (M\d+(?: \w+)?)", cpu)
    if chip and chip[1] in _PUBLISHED:
        return Bandwidth(_PUBLISHED[chip[1]] * 1e9, "as Apple publishes it")
    return None


def keep(cpu: str, measured: float, folder: Path) -> None:
    with suppress(OSError):  # a cache that cannot be written costs a number in `lisa show`
        remember.save(_file(folder), cpu, measured)


def _file(folder: Path) -> Path:
    return folder / "bandwidth.json"


def ceiling(bandwidth: float, weights: int, state: int, kv: int, context: int) -> float:
    """Most tokens a second of plain decoding: weights and K/V are read once a token, the state read and written."""
    return bandwidth / (weights + 2 * state + context * kv)
