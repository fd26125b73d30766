"""What may come next: a grammar for the answer, and a limit on thinking, as masks over tokens.

Rows of a verify pass are masked each after its own part of the draft, so a draft that breaks the grammar is rejected
like any other wrong draft and the text stays that of plain decoding. llguidance computes the masks
(https://github.com/guidance-ai/llguidance); it is part of the extra "serve".
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lisa.errors import LisaError, UsageError
from lisa.text import CLOSE, OPEN
from lisa.tokenizer import Tokenizer

MAX_GRAMMAR = 1 << 18
"""Characters of a grammar, schemas included."""
_FORCED = f"\n{CLOSE}"
"""What ends thinking when its budget is used up; models write the same."""
_GRACE = 4
"""Tokens a budget may be overdrawn by, to end on a whole character."""

Phase = Literal["begin", "thinking", "closing", "answer"]


class Grammars:
    """Compiles grammars for one tokenizer; used from any thread."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: Any = None

    def literal(self, token: str) -> str:
        """How Lark text names a piece of markup that may be a token of its own."""
        index = self._tokenizer.raw.token_to_id(token)
        return token if index is not None and self._vocabulary().is_special_token(index) else json.dumps(token)

    def matcher(self, grammar: str) -> Any:
        """A fresh matcher. Raises UsageError for what llguidance does not support, naming it."""
        if len(grammar) > MAX_GRAMMAR:
            raise UsageError(f"the schemas come to {len(grammar)} characters, more than {MAX_GRAMMAR}: shorten them")
        vocabulary = self._vocabulary()
        wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
        if wrong or messages:
            first = messages[0].strip().splitlines()[0].removeprefix("WARNING: ")
            raise UsageError(f"the schema cannot be enforced: {first[:300]}")
        return _llguidance().LLMatcher(vocabulary, grammar)

    def _vocabulary(self) -> Any:
        with self._lock:  # it takes a second for a large vocabulary, once
            if self._compiled is None:
                t = self._tokenizer
                self._compiled = _llguidance().LLTokenizer(t.raw.to_str(), n_vocab=t.vocab, eos_token=sorted(t.eos))
            return self._compiled


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError('structured output needs llguidance: pip install "lisa[serve]"') from error
    return llguidance


@dataclass(frozen=True)
class _Place:
    """Where a text stands. `spent` tokens of thinking, `tail` their last bytes; `forced` of the closing are out."""

    phase: Phase
    spent: int = 0
    tail: bytes = b""
    forced: int = 0


class Constrained:
    """types.Constraint: a grammar that begins behind the thinking, and a budget of thinking tokens.

    `prompt_tail` is the end of the prompt's text: it tells whether thinking has been opened or ruled out. `vocab` is V.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, prompt_tail: str, matcher: Any, budget: int | None):
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._matcher = matcher
        self._budget = budget
        self._open, self._close = (tokenizer.raw.token_to_id(tag) for tag in (OPEN, CLOSE))
        self._closing = tokenizer.encode(_FORCED)
        self._place = _Place(self._first(prompt_tail.rstrip()))

    def _first(self, tail: str) -> Phase:
        if self._close is None or tail.endswith(CLOSE):
            return "answer"
        return "thinking" if tail.endswith(OPEN) else "begin"

    def free(self, rows: int) -> bool:
        if self._matcher is not None:
            return False
        return self._place.phase == "answer" or self._budget is None or self._place.spent + rows <= self._budget

    def allowed(self, draft: Sequence[int]) -> Any:
        import numpy as np

        place, read = self._place, 0
        rows: list[Any] = [self._row(place)]
        for token in draft:
            if rows[-1] is not None and not rows[-1][token]:
                break  # rows behind a draft token that cannot be kept are never looked at
            place = self._after(place, token)
            if place.phase == "answer" and self._matcher is not None and not self._leads(token):
                read += self._consume(token)
            rows.append(self._row(place))
        if read:
            self._matcher.rollback(read)
        if all(row is None for row in rows):
            return None
        anything = np.ones(self._vocab, bool)
        rows += [None] * (len(draft) + 1 - len(rows))
        return np.stack([anything if row is None else row for row in rows])

    def push(self, token: int) -> None:
        self._place = self._after(self._place, token)
        if self._place.phase == "answer" and self._matcher is not None and not self._leads(token):
            self._consume(token)

    def _leads(self, token: int) -> bool:
        """Whether `token` leads to the answer without being part of it, or ends the turn."""
        return token in self._tokenizer.eos or token == self._close

    def _consume(self, token: int) -> int:
        if not self._matcher.consume_token(token):
            raise LisaError(f"the grammar could not be followed: {self._matcher.get_error()[:200]}")
        return 1

    def _after(self, place: _Place, token: int) -> _Place:
        if place.phase == "answer":
            return place
        if token == self._close:
            return _Place("answer")
        if place.phase == "begin":
            if token == self._open:
                return _Place("thinking")
            blank = self._matcher is None and not (self._tokenizer.spell(token, False) or b"").strip()
            return place if blank else _Place("answer")
        tail = (place.tail + (self._tokenizer.spell(token, False) or b""))[-8:]
        forced = place.forced + 1 if place.phase == "closing" or self._spent(place) else 0
        return _Place("closing" if forced else "thinking", place.spent + 1, tail, forced)

    def _spent(self, place: _Place) -> bool:
        if self._budget is None or place.spent < self._budget:
            return False
        return place.spent >= self._budget + _GRACE or not _cut(place.tail)

    def _row(self, place: _Place) -> Any:
        """bool [V], or None for anything."""
        import numpy as np

        if place.phase == "closing" or (place.phase == "thinking" and self._spent(place)):
            row = np.zeros(self._vocab, bool)
            row[self._closing[place.forced]] = True
            return row
        if self._matcher is None:
            return None
        if place.phase == "thinking":  # an answer is owed, so the turn does not end here
            row = np.ones(self._vocab, bool)
            row[[token for token in self._tokenizer.eos if token < self._vocab]] = False
            return row
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        row = np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)
        if place.phase == "begin" and self._open is not None:
            row[self._open] = True
        return row


def _cut(tail: bytes) -> bool:
    """Whether `tail` ends inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return bool(decoder.getstate()[0])
