"""How many tokens to draft next: the width with the most expected tokens a second, 0 where plain decoding is best.

`Costs` is what a round takes on this machine, `Acceptance` what a draft yields, and `Adaptive` decides.
A width is asked for before it is known who answers (lookup may stand in front of a drafter), so cost and acceptance are
kept by source, and a width is judged by the mix of sources that answered lately, rounds without any draft included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from lisa.acceptance import Acceptance
from lisa.costs import OPTIMISM, WIDTHS, Costs
from lisa.types import MAX_WIDTH, Sampling


@dataclass(frozen=True)
class Round:
    """What a round taught.

    Of the `asked` tokens `source` proposed some (0 where it had nothing), and `accepted` of them hold. `position` is
    the index of the anchor. `seconds` is the time since the round before was read, None when others had a part in it.
    `ended` marks a round cut short by an end of turn, a stop or a limit: that is not a rejection.
    """

    source: str
    asked: int
    proposed: int
    accepted: int
    position: int
    seconds: float | None
    ended: bool = False


class Pacer(Protocol):
    """Decides the width of the next round; 0 decodes plainly. The sessions of an engine may share one."""

    def width(self, position: int, most: int) -> int:
        """Tokens to draft after the anchor at `position`, at most `most`. Asking changes nothing."""

    def learn(self, round: Round) -> None: ...

    def note(self) -> str | None:
        """One line on why nothing is drafted; None otherwise."""


@dataclass(frozen=True)
class Fixed:
    """Always the same width, or the widest allowed one below it."""

    size: int
    allowed: tuple[int, ...] = WIDTHS

    def width(self, position: int, most: int) -> int:
        return max((w for w in self.allowed if w <= min(self.size, most)), default=0)

    def learn(self, round: Round) -> None:
        pass

    def note(self) -> str | None:
        return None


SEEDED = 4


def for_request(pacer: Pacer, sampling: Sampling) -> Pacer:
    """The pacer of one request: of SEEDED tokens where the text depends on the width and a seed is to reproduce it.

    `sampling.seed` is as the user gave it: one drawn for the request promises nothing.
    """
    tied = sampling.rule == "rejection" and not sampling.greedy and sampling.seed is not None
    return Fixed(SEEDED, pacer.allowed) if tied and isinstance(pacer, Adaptive) else pacer


START = 2  # the first width ever asked for; each later one is at most twice as wide as what was measured
DWELL = 2  # rounds that measure a width: one to compile, one to time
BETTER = 1.02  # a change of width, or a return from parking, must promise this much
PROBE = 0.01  # of the time while parked may be lost to probes
PURSE, SAVED, DEBT = 10.0, 30.0, -6.0  # in plain steps: at the start, at most, at least
RECENT = 0.5 ** (1 / 32)  # what the mix of sources keeps a round


class Adaptive:
    """Learns, decides, parks and comes back.

    What it may lose against plain decoding comes out of a purse counted in plain steps. It starts with PURSE; drafting
    that gains fills it up to SAVED; parking empties it, and from then on each token adds PROBE. A probe starts when
    the purse can pay for it, and goes on while drafts are accepted. `allowed` are the widths that the drafter can
    propose and that passed every check of exactness.
    """

    def __init__(self, allowed: Iterable[int] = WIDTHS) -> None:
        self.allowed = tuple(sorted(set(allowed) & set(WIDTHS)))
        self.costs = Costs()
        self.sources: dict[str, Acceptance] = {}
        self.shares: dict[tuple[str, bool], float] = {}  # by source, with and without a draft
        self.parked = False
        self._purse = PURSE
        self._width = self._dwell = self._trial = self._untimed = 0
        self._last: Round | None = None
        self._why = ""

    def width(self, position: int, most: int) -> int:
        return Fixed(self._width, self.allowed).width(position, most)

    def note(self) -> str | None:
        if self._untimed >= 16 and not self.costs.plain(0):
            return "drafting waits until a plain step can be timed"
        return self._why if self.parked else None

    def learn(self, round: Round) -> None:
        last, self._last = self._last, round
        steady = last is not None and (last.asked, last.position + last.accepted + 1) == (round.asked, round.position)
        seconds, kind = round.seconds, round.asked if round.proposed else 0
        self._untimed = self._untimed + 1 if seconds is None else 0
        if seconds is not None and not self.costs.learn(round.source, kind, round.position, seconds, steady):
            seconds = None
        if round.asked:
            self._count(round)
        here = round.position + round.accepted + 1
        plain = self.costs.plain(here)
        if plain:
            self._pay(round, kind, seconds, plain)
        waits = not plain or not self.allowed or (self.costs.plain_wanted() and not self._untimed)
        width = 0 if waits else self._decide(here, plain)
        self._dwell = self._dwell + (round.asked > 0) if width == self._width else 0
        self._width = width

    def _count(self, round: Round) -> None:
        hit = round.proposed > 0
        self.shares = {key: share * RECENT for key, share in self.shares.items()}
        self.shares[round.source, hit] = self.shares.get((round.source, hit), 0.0) + 1
        seen = self.sources.setdefault(round.source, Acceptance())
        if hit:
            seen.learn(round.asked, round.accepted, round.ended)

    def _pay(self, round: Round, kind: int, seconds: float | None, plain: float) -> None:
        if round.asked:
            here = (round.source, kind, round.position)
            expected = self.costs.known(*here) or self.costs.curve(round.source, round.position, plain)[kind]
            self._purse += round.accepted + 1 - min(seconds or expected, 3 * expected) / plain
        elif self.parked:
            self._purse += PROBE
        self._purse = max(DEBT, min(self._purse, SAVED))

    def _decide(self, position: int, plain: float) -> int:
        if not self.shares:
            return next((w for w in self.allowed if w >= START), self.allowed[-1])
        width, tokens, cost = self._best(position, plain)
        if self.parked and tokens > BETTER * cost and self._purse > DEBT / 3:
            self.parked = False
        elif not self.parked and (tokens <= cost or self._purse <= DEBT):
            self.parked, self._trial, self._purse = True, 0, min(self._purse, 0.0)
        if not self.parked:
            return width
        self._why = self._reason(width, tokens, cost)
        return width if self._probe(width, cost) else 0

    def _best(self, position: int, plain: float) -> tuple[int, float, float]:
        """The best width, the tokens of such a round, and its time in plain steps."""
        tokens, cost = [0.0] * (MAX_WIDTH + 1), [0.0] * (MAX_WIDTH + 1)
        unit = plain * sum(self.shares.values())
        for (source, hit), share in self.shares.items():
            # Hope for costs never measured is for times when drafting pays.
            curve = self.costs.curve(source, position, plain, 1.0 if self.parked else OPTIMISM)
            yields = self.sources[source].tokens(self._width or MAX_WIDTH)
            for w in self.allowed:
                tokens[w] += share * plain * (yields[w] if hit else 1) / unit
                cost[w] += share * curve[w if hit else 0] / unit
        measured = {w for source in self.sources for w in self.costs.measured(source)}
        reach = max(2 * max(measured, default=0), START, self.allowed[0])
        best = max((w for w in self.allowed if w <= reach), key=lambda w: tokens[w] / cost[w])
        now = self._width
        if now and tokens[now] > cost[now]:
            measuring = self._dwell < DWELL and now not in measured
            if measuring or tokens[best] / cost[best] < BETTER * tokens[now] / cost[now]:
                best = now
        return best, tokens[best], cost[best]

    def _probe(self, width: int, cost: float) -> bool:
        """Whether to draft although it does not pay, to see whether that is still so."""
        assert self._last is not None
        if self._last.asked:
            self._trial = max(0, self._trial - 1)
            return self._trial > 0 or (self._width > 0 and self._last.accepted > 0 and self._purse > DEBT)
        if self._trial == 0:
            rounds = 1 if any(width in self.costs.measured(source) for source in self.sources) else DWELL
            self._trial = rounds if self._purse >= rounds * max(cost - 1, 0.1) else 0
        return self._trial > 0

    def _reason(self, width: int, tokens: float, cost: float) -> str:
        name = max(self.shares, key=lambda key: (key[1], self.shares[key]))[0]
        seen = self.sources[name]
        if seen.drafts and not seen.agreed:
            return f"{name} parked: it agreed 0 times in {seen.drafts} drafts"
        if tokens > cost:
            return f"{name} parked: it gave less than its {tokens:.2f} tokens in the time of {cost:.2f}"
        return f"{name} parked: a draft of {width} yields {tokens:.2f} tokens in the time of {cost:.2f}"

    def to_json(self) -> dict[str, Any]:
        """What is worth keeping for another run of this pair on this machine."""
        return {
            "costs": self.costs.settled(),
            "depth": self.costs.clock * self.costs.depth,
            "slots": {source: seen.slots for source, seen in self.sources.items()},
            "shares": [[source, hit, share] for (source, hit), share in self.shares.items()],
        }

    @classmethod
    def from_json(cls, data: object, allowed: Iterable[int] = WIDTHS) -> Adaptive:
        """A pacer that starts warm, or fresh from anything that `to_json` did not write."""
        pacer = cls(allowed)
        try:
            pacer._restore(data)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return cls(pacer.allowed)
        return pacer

    def _restore(self, data: Any) -> None:
        for source, cells in data["costs"].items():
            for width, (seconds, position, life) in cells.items():
                self.costs.settle(source, int(width), _number(seconds, 1e-9), _number(position), _number(life))
        self.costs.depth = _number(data["depth"])
        for source, slots in data["slots"].items():
            self.sources[source] = Acceptance()
            self.sources[source].recall([(_number(tried), _number(held)) for tried, held in slots])
        self.shares = {(source, bool(hit)): _number(share, 1e-9) for source, hit, share in data["shares"]}
        if not all(source in self.sources for source, _ in self.shares):
            raise ValueError("a share of nobody")


def _number(value: Any, least: float = 0.0) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise ValueError(f"{value} is not a number of at least {least}")
    return float(value)
