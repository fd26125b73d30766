"""How often the slots of a draft hold, a moving estimate (lisa/pace.py decides with it)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lisa.types import MAX_WIDTH

LONG, SHORT = 0.5 ** (1 / 128), 0.5 ** (1 / 6)  # what a slot's two memories keep at each new trial
FADE = 0.5 ** (1 / 512)  # what the long ones keep a round, so that slots out of use are tried again
FIRST, WEIGHT = 0.6, 3.0  # a slot is taken to be like the one before it, as if seen WEIGHT times; the first like FIRST
SURPRISE = 3.0  # standard deviations between the memories at which the short one is right
HOPE = 0.3  # standard deviations in favour of slots past the ones in use


class Acceptance:
    """How often each slot holds once it is reached, moving with the text: [tried, held] by slot, long and short."""

    def __init__(self) -> None:
        self.slots = [[0.0, 0.0] for _ in range(MAX_WIDTH)]
        self._short = [[0.0, 0.0] for _ in range(MAX_WIDTH)]
        self.drafts = self.agreed = 0

    def learn(self, asked: int, accepted: int, ended: bool) -> None:
        """A slot asked for, reached and not delivered counts as rejected, unless the turn ended there."""
        self.drafts += 1
        self.agreed += accepted > 0
        self._fade(0, FADE)
        for i in range(min(asked, accepted + (not ended))):
            self.slots[i] = [self.slots[i][0] * LONG + 1, self.slots[i][1] * LONG + (i < accepted)]
            tried, held = self._short[i] = [self._short[i][0] * SHORT + 1, self._short[i][1] * SHORT + (i < accepted)]
            rate = (self.slots[i][1] + 0.5) / (self.slots[i][0] + 1)
            if abs(held / tried - rate) > SURPRISE * math.sqrt(rate * (1 - rate) / tried):
                self.slots[i] = [tried, held]
                self._fade(i + 1, 1 / 64)  # the later slots were learnt from another text

    def _fade(self, start: int, keep: float) -> None:
        for slot in self.slots[start:]:
            slot[0], slot[1] = slot[0] * keep, slot[1] * keep

    def tokens(self, used: int = MAX_WIDTH) -> list[float]:
        """Expected tokens of a round by width, the target's own included; hopeful about slots past the `used` ones."""
        expected, reach, rate = [1.0], 1.0, FIRST
        for i, (tried, held) in enumerate(self.slots):
            rate = (held + WEIGHT * rate) / (tried + WEIGHT)
            reach *= rate + (i >= used) * HOPE * math.sqrt(rate * (1 - rate) / (tried + WEIGHT))
            expected.append(expected[-1] + reach)
        return expected

    def recall(self, slots: Iterable[tuple[float, float]]) -> None:
        """Take in [tried, held] of another run, which weighs less than what this one will see."""
        for slot, (tried, held) in zip(self.slots, slots, strict=True):
            weight = min(1.0, 16 / max(tried, 1.0))
            slot[0], slot[1] = weight * tried, weight * min(held, tried)
