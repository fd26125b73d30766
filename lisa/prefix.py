"""Earlier conversations that a prompt may go on from, kept in memory for as long as there is room.

A conversation is a Session with marks, places it can be taken back to. The next turn of it takes the session itself; a
prompt that only begins alike (the same system text and tools) takes a branch, and the session stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it brings MLX in
    from lisa.engine import Session

LAST = 3
"""Turns at the end of a prompt that are marked, beside the first: the next prompt often strips their thinking."""
LEAST = 16
"""Tokens that another conversation must share to be branched from; every prompt of a template begins with some."""
STRIDE = 4
"""Chunks of a long prompt from mark to mark."""


def places(turns: Sequence[int], length: int, chunk: int) -> tuple[int, ...]:
    """Where to mark a prompt of `length` tokens whose turns begin at `turns`: behind the system text and tools, at the
    last turns, the answer's own included, and every STRIDE chunks."""
    inside = [turn for turn in turns if 0 < turn < length]
    return tuple(sorted({*inside[:1], *inside[-LAST:], *range(STRIDE * chunk, length, STRIDE * chunk)}))


@dataclass(frozen=True, eq=False)
class Found:
    """A session and what a prompt makes of it: `goes_on`, or it only begins alike."""

    session: Session
    goes_on: bool


class Timelines:
    """Idle sessions, the least recently used first. For one thread."""

    def __init__(self) -> None:
        self.idle: list[Session] = []

    def find(self, tokens: tuple[int, ...]) -> Found | None:
        """The session that spares most of reading `tokens`; None when none spares any."""
        usable = [(session.usable(tokens), i) for i, session in enumerate(self.idle)]
        most, at = max(usable, default=(0, 0))
        if not most:
            return None
        session = self.idle[at]
        # What is lost then is at most the last turn's answer, which nobody else will ask for.
        goes_on = session.shared(tokens) >= session.turn
        return Found(session, goes_on) if goes_on or most >= LEAST else None

    def take(self, session: Session) -> Session:
        self.idle.remove(session)
        return session

    def keep(self, session: Session) -> None:
        """Keep it as the most recently used."""
        if session in self.idle:
            self.idle.remove(session)
        self.idle.append(session)

    def make_room(self, enough: Callable[[], bool], spare: Session | None = None) -> bool:
        """Drop sessions until there is `enough` room, `spare` excepted; whether there is."""
        while not enough():
            droppable = [session for session in self.idle if session is not spare]
            if not droppable:
                return False
            self.idle.remove(next((s for s in droppable if not self._sole(s)), droppable[0]))
        return True

    def _sole(self, session: Session) -> bool:
        """Whether it alone still holds a prefix that several have begun with."""
        prefix = tuple(session.tokens[: session.common])
        others = [other for other in self.idle if other is not session]
        return bool(prefix) and not any(other.shared(prefix) == len(prefix) for other in others)

    def clear(self) -> None:
        self.idle.clear()

    @property
    def nbytes(self) -> int:
        return sum(session.nbytes for session in self.idle)
