"""Prompt lookup in front of another drafter: copy where the text repeats, ask the other one elsewhere."""

from __future__ import annotations

from typing import Any

from lisa.drafters.ngram import Ngram
from lisa.types import MAX_WIDTH, Commit, Drafter, Proposal, Sampling


class Composed:
    """Both hear everything. A proposal carries the source that made it, so that pace can tell them apart."""

    width = MAX_WIDTH
    limit: int | None = None  # each part minds its own

    def __init__(self, second: Drafter):
        self.lookup = Ngram()
        self.second = second
        self.source = f"{second.source}+ngram"
        self.taps = second.taps

    @property
    def length(self) -> int:
        return self.second.length

    def observe(self, commit: Commit) -> None:
        self.lookup.observe(commit)
        self.second.observe(commit)

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        copied = self.lookup.propose(last, width, sampling, position)
        return copied if copied.size else self.second.propose(last, width, sampling, position)

    def rewind(self, length: int) -> int:
        return self.lookup.rewind(self.second.rewind(length))

    def snapshot(self) -> object:
        return self.lookup.snapshot(), self.second.snapshot()

    def restore(self, snapshot: Any) -> None:
        copied, second = snapshot
        self.lookup.restore(copied)
        self.second.restore(second)

    @property
    def nbytes(self) -> int:
        return self.lookup.nbytes + self.second.nbytes
