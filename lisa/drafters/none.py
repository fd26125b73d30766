"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

import mlx.core as mx

from lisa.types import Commit, Proposal, Sampling


class Nothing:
    source = "none"
    taps: tuple[int, ...] = ()
    width = 0
    limit: int | None = None

    def __init__(self) -> None:
        self.length = 0

    def observe(self, commit: Commit) -> None:
        if commit.start != self.length:
            raise RuntimeError(f"gap: {self.length} tokens observed, next commit starts at {commit.start}")
        self.length += len(commit.tokens)

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        return Proposal(mx.zeros((0,), mx.int32), 0, self.source)

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
