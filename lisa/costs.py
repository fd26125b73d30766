"""What a round takes on this machine, by source and width, learnt from rounds (lisa/pace.py decides with it)."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lisa.types import MAX_WIDTH

WIDTHS = tuple(range(1, MAX_WIDTH + 1))
PLAIN = "none"
"""The source of a step that nobody was asked to draft for."""

FULL = 12  # samples that settle a cost
ENOUGH = 4  # samples of plain decoding before anything is compared with it
LIFE, LONGEST_LIFE = 256, 4096  # rounds out of use after which a cost is measured anew; the first doubles each time
JUMP = 1024  # tokens between two rounds in a row that tell a deep context from a slow clock
OPTIMISM = 0.9  # on a cost never measured: a wrong guess costs two rounds, a width never tried costs for ever
FLATTER = 0.7  # the slope beyond the widest measured width: costs bend down


@dataclass
class _Cell:
    """The cost of one width: seconds of a clock at 1, and the position it was measured at. 0 is not known."""

    seconds: float = 0.0
    position: float = 0.0
    samples: list[tuple[float, float]] = field(default_factory=list)
    used: int = 0
    life: int = LIFE
    warm: bool = False  # has run in this process


class Costs:
    """cost = clock * (seconds of the cell + depth * positions since it was measured).

    A settled cell stays as it is, and what it takes from then on moves the clock, which all share: a machine that slows
    down leaves every comparison as it was. Cells out of use are measured anew against that clock after a while.
    """

    def __init__(self) -> None:
        self.cells: dict[str, dict[int, _Cell]] = {}
        self.clock = 1.0
        self.depth = 0.0
        self._ratios: deque[float] = deque(maxlen=5)
        self._now = 0
        self._place: int | None = None
        self._jump: tuple[float, int] | None = None  # the clock before it, and how far
        self._weight = 4096.0**2  # jumps much shorter than this say little

    def learn(self, source: str, width: int, position: int, seconds: float, steady: bool) -> bool:
        """Take in a round; False where its time means nothing, being the first of its kind: that one compiles.

        `steady`: the round before asked for the same, just before this one, so that no switch is in the time.
        """
        self._now += 1
        self._move(position)
        cell = self.cells.setdefault(source, {}).setdefault(width, _Cell())
        warm, cell.warm = cell.warm, True
        if not (warm and steady):
            return warm
        if self._aged(cell):
            cell.samples, cell.life = [], min(2 * cell.life, LONGEST_LIFE)
        cell.used = self._now
        if len(cell.samples) == FULL:
            self._tick(cell, position, seconds)
            return True
        cell.samples.append((seconds / self.clock, position))
        cell.seconds, cell.position = (_middle(values) for values in zip(*cell.samples, strict=True))
        if len(cell.samples) == 1:
            cell.seconds *= 0.97  # one sample ends a bad trial, but does not tell near ones apart
        return True

    def plain(self, position: int) -> float:
        """Seconds of a plain step, 0 while it is not known."""
        return self.known(PLAIN, 0, position)

    def known(self, source: str, width: int, position: int) -> float:
        """Seconds of a round as measured, 0 where that was never done."""
        cell = self.cells.get(source, {}).get(width)
        return self._at(cell, position) if cell and cell.seconds else 0.0

    def plain_wanted(self) -> bool:
        """Whether plain steps are to be measured (again) now."""
        cell = self.cells.get(PLAIN, {}).get(0)
        return cell is None or len(cell.samples) < ENOUGH or self._aged(cell)

    def measured(self, source: str) -> list[int]:
        """Widths whose cost is known and not too old."""
        return [w for w, cell in self.cells.get(source, {}).items() if w and cell.seconds and not self._aged(cell)]

    def curve(self, source: str, position: int, plain: float, hope: float = 1.0) -> list[float]:
        """Seconds of a round by width; at 0 of one in which the source was asked and had nothing.

        A width never measured lies between its neighbours, times `hope`.
        """
        cells = self.cells.get(source, {})
        widths = sorted(self.measured(source) or [w for w, cell in cells.items() if w and cell.seconds])
        x, y = [0, *widths], [plain, *(self._at(cells[w], position) for w in widths)]
        if not widths:
            x, y = [0, 10], [plain, 2 * plain]
        out = [self.known(source, 0, position) or plain]
        for w in WIDTHS:
            right = bisect_left(x, w)
            out.append(y[right] if w in widths else max(plain, hope * _line(x, y, right, w)))
        return out

    def settled(self) -> dict[str, dict[str, list[float]]]:
        """[seconds, position, life] by source and width, for another run."""
        return {
            source: {str(w): [self.clock * c.seconds, c.position, c.life] for w, c in cells.items() if c.seconds}
            for source, cells in self.cells.items()
        }

    def settle(self, source: str, width: int, seconds: float, position: float, life: float) -> None:
        """Take in a cost that another run has settled."""
        at = (seconds, position)
        life = int(min(max(life, LIFE), LONGEST_LIFE))
        self.cells.setdefault(source, {})[width] = _Cell(*at, [at] * FULL, 0, life)

    def _aged(self, cell: _Cell) -> bool:
        return self._now - cell.used > cell.life

    def _at(self, cell: _Cell, position: int) -> float:
        return self.clock * max(cell.seconds / 4, cell.seconds + self.depth * (position - cell.position))

    def _move(self, position: int) -> None:
        """Depth shows where the context jumps (another request): along one answer it cannot be told from the clock."""
        if self._place is not None and abs(position - self._place) > JUMP:
            before, moved = self._jump or (self.clock, 0)
            self._jump = (before, moved + position - self._place)
            self._ratios.clear()
        self._place = position

    def _tick(self, cell: _Cell, position: int, seconds: float) -> None:
        """Move the clock to where the last five rounds put it or, after a jump, find the depth that explains them."""
        self._ratios.append(seconds * self.clock / self._at(cell, position))
        if len(self._ratios) < 5:
            return
        self.clock = statistics.median(self._ratios)
        if self._jump is None:
            return
        (before, moved), self._jump = self._jump, None
        if abs(moved) > JUMP:
            now = self._at(cell, position)
            self._weight = 0.8 * self._weight + moved**2
            slope = now * (1 - max(before / self.clock, 0.25)) / before / moved
            self.depth = max(0.0, self.depth + moved**2 / self._weight * slope)
            self.clock *= now / self._at(cell, position)
            self._ratios.clear()


def _line(x: list[int], y: list[float], right: int, w: int) -> float:
    """At w, which comes just before x[right]: linear between two points, flatter beyond the last one."""
    if right < len(x):
        return y[right] - (y[right] - y[right - 1]) / (x[right] - x[right - 1]) * (x[right] - w)
    far = bisect_right(x, x[-1] // 2) - 1  # neighbours would give a slope of noise
    return y[-1] + FLATTER * max(0.0, y[-1] - y[far]) / (x[-1] - x[far]) * (w - x[-1])


def _middle(values: Iterable[float]) -> float:
    """A trimmed mean that leans low, since delays only ever add."""
    ordered = sorted(values)
    return statistics.fmean(ordered[len(ordered) // 4 : max(1, len(ordered) - (len(ordered) + 1) // 3)])
