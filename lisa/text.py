"""Tokens into text while they are generated: characters -> reasoning split -> stop strings.

Every stage gives out what is certain and holds the rest, so the joined pieces never depend on where tokens or blocks
were cut. Nothing here knows a tokenizer or a model: `Spell` is all it asks for (lisa/tokenizer.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from lisa.errors import UsageError

Spell = Callable[[int, bool], bytes | None]
"""(token id, nothing visible stands before it) -> the UTF-8 bytes it adds; None for a token that is never shown."""

OPEN, CLOSE = "<think>", "</think>"

_LONGEST_LEAD = 64
"""An answer that opens with more white space than this is an answer, and is streamed."""


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """A request's `stop` field as a tuple; null is no stop. Raises UsageError for "" and for anything else."""
    stops = () if stop is None else tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(one, str) and one for one in stops):
        raise UsageError("stop must be a non-empty string or a list of them: leave out empty ones")
    return stops


def settled(text: str, needles: Sequence[str]) -> int:
    """Length of the part of `text` that cannot turn out to be the beginning of a needle."""
    first = max(0, len(text) - max(map(len, needles), default=0) + 1)
    return next((i for i in range(first, len(text)) if any(n.startswith(text[i:]) for n in needles)), len(text))


class Detokeniser:
    """Whole characters out of tokens that may be cut inside one. Linear in the output.

    Bytes that are not UTF-8 become U+FFFD as in any lossy decoder, an unfinished character only at `finish`.
    """

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._first = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        piece = self._spell(token, self._first)
        if piece is None:
            return ""
        self._first = False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class ReasoningSplit:
    """`<think>...</think>` apart from the answer. Both methods return (answer, reasoning).

    Tags count where a text begins: before the first word of the answer, and the closer inside thinking. An answer that
    has begun is verbatim, so that a model can write about the tags. White space next to a tag belongs to neither side,
    except in front of the closer. A prompt that ends in an open tag starts inside thinking.
    """

    def __init__(self, prompt: str = "") -> None:
        tail = prompt.rstrip()
        self._thinking = tail.endswith(OPEN)
        self._tagged = tail.endswith((OPEN, CLOSE))
        self._begun = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        while self._thinking or not self._begun:
            if not self._begun:
                certain = self._begin()
            else:
                certain, piece = self._think()
                reasoning += piece
            if not certain:
                return "", reasoning
        answer, self._held = self._held, ""
        return answer, reasoning

    def _begin(self) -> bool:
        """Take a tag or the white space in front of the first word; False when more text is needed to tell."""
        rest = self._held.lstrip()
        lead = len(self._held) - len(rest)
        if self._tagged:
            self._held = rest
        if not self._tagged and lead > _LONGEST_LEAD:
            self._begun = True
        elif rest.startswith((OPEN, CLOSE)):
            self._thinking = rest.startswith(OPEN)
            self._tagged = True
            self._held = rest.removeprefix(OPEN if self._thinking else CLOSE)
        elif OPEN.startswith(rest) or CLOSE.startswith(rest):
            return False
        else:
            self._begun = True
        return True

    def _think(self) -> tuple[bool, str]:
        """(the closer was found, reasoning that is certain)."""
        piece, closer, after = self._held.partition(CLOSE)
        if closer:
            self._thinking = self._begun = False
            self._held = after
            return True, piece
        end = settled(self._held, (CLOSE,))
        piece, self._held = self._held[:end], self._held[end:]
        return False, piece

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return ("", held) if self._thinking else (held, "")


class StopStrings:
    """Ends a text before the first stop string: the one complete earliest, the longest of those complete together."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certainly in front of any stop string, a stop string is complete)."""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        end = min(found)[1] if found else settled(self._held, self._stops)
        self.found = min(found)[2] if found else None
        piece, self._held = self._held[:end], "" if found else self._held[end:]
        return piece, bool(found)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class TextReader:
    """types.Reader: committed tokens in, (answer, reasoning) out. Stop strings apply to the answer alone.

    Text after a stop string, in the same token or a later one, is dropped. Where an answer begins a stop string may be
    noticed a few tokens late, because until then the text could still turn out to be a tag.
    """

    def __init__(self, detokeniser: Detokeniser, split: ReasoningSplit | None, stops: StopStrings) -> None:
        self._detokeniser = detokeniser
        self._split = split
        self._stops = stops
        self._stopped = False
        self._answer: list[str] = []
        self._reasoning: list[str] = []

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    def push(self, token: int) -> bool:
        if not self._stopped:
            self._read(self._detokeniser.push(token))
        return self._stopped

    def take(self) -> tuple[str, str]:
        taken = "".join(self._answer), "".join(self._reasoning)
        self._answer.clear()
        self._reasoning.clear()
        return taken

    def finish(self) -> tuple[str, str]:
        if not self._stopped:
            self._read(self._detokeniser.finish())
        if not self._stopped and self._split:
            self._deliver(*self._split.finish())
        if not self._stopped:
            self._answer.append(self._stops.finish())
        return self.take()

    def _read(self, text: str) -> None:
        self._deliver(*(self._split.push(text) if self._split else (text, "")))

    def _deliver(self, answer: str, reasoning: str) -> None:
        piece, self._stopped = self._stops.push(answer)
        self._answer.append(piece)
        self._reasoning.append(reasoning)
