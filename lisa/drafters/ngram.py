"""Prompt lookup: when the last few tokens occurred before, propose what followed them then.

Source: "Prompt Lookup Decoding", https://github.com/apoorvumang/prompt-lookup-decoding. Costs no forward and needs no
weights; it gains where the answer copies from the context.
"""

from __future__ import annotations

import mlx.core as mx

from lisa.drafters.candidates import in_order
from lisa.types import MAX_WIDTH, Commit, Proposal, Sampling

LONGEST = 4
SHORTEST = 2


class Ngram:
    """Looks for the longest of the last 4, 3, 2 tokens that stood in the context before, latest occurrence first.

    `_after[n]` maps n tokens to the index that follows their latest occurrence; the anchor is not in it yet.
    """

    source = "ngram"
    taps: tuple[int, ...] = ()
    width = MAX_WIDTH
    limit: int | None = None

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    @property
    def length(self) -> int:
        return len(self._tokens)

    def observe(self, commit: Commit) -> None:
        in_order(commit, self.length)
        for token in commit.tokens:
            self._tokens.append(token)
            self._index(len(self._tokens))

    def _index(self, end: int) -> None:
        """The n-grams that end just before `end` are followed by what will stand at `end`."""
        for n in range(SHORTEST, LONGEST + 1):
            if end >= n:
                self._after[tuple(self._tokens[end - n : end])] = end

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        found = self._continuation([*self._tokens[-LONGEST + 1 :], last], width)
        return Proposal(mx.array(found, mx.int32), len(found), self.source)

    def _continuation(self, tail: list[int], width: int) -> list[int]:
        for n in range(min(LONGEST, len(tail)), SHORTEST - 1, -1):
            start = self._after.get(tuple(tail[-n:]))
            if start is not None:
                # A continuation that reaches the anchor goes on with its own copy: the text repeats with that period.
                known = [*self._tokens[start:], tail[-1]]
                return [known[i % len(known)] for i in range(width)]
        return []

    def rewind(self, length: int) -> int:
        if length < self.length:
            self._tokens = self._tokens[:length]
            self._rebuild()
        return self.length

    def _rebuild(self) -> None:
        self._after = {}
        for end in range(1, self.length + 1):
            self._index(end)

    def snapshot(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, tuple)
        self._tokens = list(snapshot)
        self._rebuild()

    @property
    def nbytes(self) -> int:
        return 0
