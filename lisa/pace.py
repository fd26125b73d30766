"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Round:
    """What a round taught: who drafted, how many were proposed and accepted, and how long it took in seconds.

    `ended` marks a round cut short by an end of turn, a stop or a limit: that is not a rejection.
    """

    source: str
    proposed: int
    accepted: int
    seconds: float
    ended: bool = False


class Pacer(Protocol):
    """Decides the width of the next round; 0 decodes plainly."""

    def width(self) -> int: ...

    def learn(self, round: Round) -> None: ...


@dataclass(frozen=True)
class Fixed:
    """Always the same width."""

    size: int

    def width(self) -> int:
        return self.size

    def learn(self, round: Round) -> None:
        pass
