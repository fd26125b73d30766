"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from lisa.drafters.candidates import in_order, nothing
from lisa.types import Commit, Proposal, Sampling


class Nothing:
    source = "none"
    taps: tuple[int, ...] = ()
    width = 0
    limit: int | None = None

    def __init__(self) -> None:
        self.length = 0

    def observe(self, commit: Commit) -> None:
        in_order(commit, self.length)
        self.length += len(commit.tokens)

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        return nothing(self.source)

    def rewind(self, length: int) -> int:
        self.length = min(length, self.length)
        return self.length

    def snapshot(self) -> int:
        return self.length

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, int)
        self.length = snapshot

    @property
    def nbytes(self) -> int:
        return 0
