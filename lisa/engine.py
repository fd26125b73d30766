"""Engine: loaded weights. Session: one timeline. The only decoding loop.

The invariant of a round: `state` holds `tokens[:-1]`; the last token is emitted but not yet read by the target.
Plain decoding is the drafter that proposes nothing (docs/how-it-works.md walks through a round).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from lisa import sampling
from lisa.errors import Cancelled, ContextFull
from lisa.pace import Fixed, Pacer, Round, for_request
from lisa.state import Snapshot, State
from lisa.target import Target
from lisa.types import (
    MARKS,
    MAX_WIDTH,
    Array,
    Commit,
    Done,
    Drafter,
    Event,
    Progress,
    Proposal,
    Reason,
    Request,
    Stats,
    TokenLogprob,
    Tokens,
)
from lisa.verify import Outcome, Verdict, verify, verify_best

_UNBOUNDED = 1 << 31


@dataclass(frozen=True)
class Engine:
    """What sessions share: the weights, how to make a drafter and a pacer, and the tokens a prefill forward reads.

    `why` says how the drafter came to be chosen; every result's stats repeat it. `clock` in seconds times the rounds
    for the pacer.
    """

    target: Target
    drafter: Callable[[], Drafter]
    pacer: Callable[[], Pacer] = lambda: Fixed(MAX_WIDTH)
    chunk: int = 512
    why: str = ""
    clock: Callable[[], float] = time.perf_counter

    def session(self) -> Session:
        return Session(self)


@dataclass(frozen=True, eq=False)
class Mark:
    """A place on a timeline that it can be taken back to: what state and drafter were there."""

    state: Snapshot
    drafter: object
    nbytes: int

    @property
    def length(self) -> int:
        return self.state.length


class Session:
    """One timeline: its tokens, the target's state and the drafter, which agree with one another between rounds.

    `marks` are places to go back to, in order. `turn` is where the last turn of the last prompt began, `common` the
    length of a prefix that other timelines have begun with, `branched` the bytes copied and the seconds taken when this
    one left another.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.tokens: list[int] = []
        self.state: State = engine.target.new_state()
        self.drafter = engine.drafter()
        self.pacer = engine.pacer()
        self.marks: list[Mark] = []
        self.turn = self.common = 0
        self.branched: tuple[int, float] | None = None

    def run(self, request: Request) -> Generator[Event, None, None]:
        """Generate after `request.tokens`, yielding events of which the last is Done.

        Throwing Cancelled in ends it with Done("cancelled"); closing the generator or an exception ends it at once. In
        each case what was not delivered is taken back. Raises ContextFull when the prompt leaves no room for an answer.
        """
        run = _Run(self, request)
        try:
            yield from run.prefill()
            yield from run.decode()
        except Cancelled:
            yield Done("cancelled", run.stats())
        finally:
            if self.state.opened:
                self.state.commit(0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory this timeline holds; going back frees none of them but those of marks."""
        return self.state.nbytes + self.drafter.nbytes + sum(mark.nbytes for mark in self.marks)

    def shared(self, tokens: tuple[int, ...]) -> int:
        """Length of the prefix of `tokens` that this timeline begins with."""
        return _common(self.tokens, tokens)

    def usable(self, tokens: tuple[int, ...]) -> int:
        """How many of `tokens`, short of their last one, need not be read again, by what the target can go back to."""
        length = min(self.shared(tokens), len(tokens) - 1, self.state.length)
        marked = max((mark.length for mark in self.marks if mark.length <= length), default=0)
        return max(self.state.reach(length), marked)

    def sync(self, tokens: tuple[int, ...]) -> int:
        """Go back to the longest usable prefix of `tokens`, short of their last one, which must be read for its logits.

        Returns the number of tokens that need not be read again.
        """
        length = self._back(min(self.shared(tokens), len(tokens) - 1))
        self.tokens = list(tokens[:length])
        return length

    def _back(self, length: int) -> int:
        """Take state and drafter back to at most `length`, by going back or to the last mark before it."""
        self.marks = [mark for mark in self.marks if mark.length <= length]
        mark = self.marks[-1] if self.marks else None
        reached = self.drafter.rewind(min(length, self.state.length))
        while (further := self.state.reach(reached)) < reached and further > (mark.length if mark else 0):
            reached = self.drafter.rewind(further)
        if further == reached and (mark is None or reached >= mark.length):
            return self.state.rewind(reached)
        if mark is None:
            return self.drafter.rewind(self.state.rewind(0))
        self.state.restore(mark.state)
        self.drafter.restore(mark.drafter)
        return mark.length

    def mark(self) -> None:
        """Make the place reached one to go back to; past MARKS the closest neighbours are thinned out.

        The first mark, which stands behind what many conversations begin with, and the last few stay.
        """
        if self.state.anywhere or (self.marks and self.marks[-1].length == self.state.length):
            return
        state, drafter = self.state.snapshot(), self.drafter.snapshot()
        self.marks.append(Mark(state, drafter, state.nbytes + _bytes(drafter)))
        if len(self.marks) > MARKS:
            gaps = {i: self.marks[i + 1].length - self.marks[i - 1].length for i in range(1, MARKS // 2 + 1)}
            del self.marks[min(gaps, key=lambda i: gaps[i])]

    def branch(self, tokens: tuple[int, ...]) -> Session:
        """Another timeline that begins with the usable prefix of `tokens`, which is copied; this one stays as it is."""
        began = self.engine.clock()
        length = self.usable(tokens)
        mark = next((mark for mark in self.marks if mark.length == length), None)
        if mark is None and not self.state.anywhere:
            return self.engine.session()
        child = self.engine.session()
        child.state.restore(self.state.snapshot(length) if mark is None else mark.state)
        child.drafter.restore(self.drafter.snapshot() if mark is None else mark.drafter)
        child.tokens = list(tokens[: child._back(length)])
        child.mark()
        child.common = len(child.tokens)
        self.common = max(self.common, child.common)
        child.branched = child.state.copied, self.engine.clock() - began
        return child


def _bytes(snapshot: object) -> int:
    """Bytes of the arrays that a drafter's snapshot holds itself; its contexts are held by reference."""
    if isinstance(snapshot, mx.array):
        return snapshot.nbytes
    if isinstance(snapshot, (tuple, list)) and not (snapshot and isinstance(snapshot[0], int)):
        return sum(_bytes(part) for part in snapshot)
    return 0


@dataclass(frozen=True)
class _Step:
    """A forward under way: everything here is lazy. `asked` tokens were asked of the drafter."""

    proposal: Proposal
    verdict: Verdict
    features: Array | None
    logprobs: tuple[Array, ...]
    position: int
    asked: int = 0


class _Run:
    """One request on a session."""

    def __init__(self, session: Session, request: Request):
        self.session = session
        self.target = session.engine.target
        self.request = request
        self.pacer = for_request(session.pacer, request.sampling)
        seed = request.sampling.seed
        self.sampling = replace(request.sampling, seed=secrets.randbits(63) if seed is None else seed)
        self.sampler = sampling.Sampler(self.sampling, self.target.vocab, request.tokens)
        self.bare = self.sampler.bare and request.logprobs is None and request.constraint is None
        self.ledger = _Ledger(request, _room(request, self.target.context))
        self.branched, session.branched = session.branched, None
        self.fresh = mx.array([], mx.int32)  # delivered, not yet counted by the sampler nor read by the target

    def prefill(self) -> Iterator[Event]:
        """Read the prompt in chunks, handing taps on chunk by chunk; ends with the first token."""
        session, prompt = self.session, self.request.tokens
        self.ledger.cached = session.sync(prompt)
        yield Progress(self.ledger.cached, len(prompt))
        session.turn = max(self.request.marks, default=len(prompt))
        chunk: tuple[int, ...] = ()
        step: _Step | None = None
        for start, end in self._chunks():
            chunk, final = prompt[start:end], end == len(prompt)
            tokens = mx.array(chunk, mx.int32)
            taps, best = session.drafter.taps, self.bare and final
            logits, features = self.target.forward(tokens, session.state, taps, rows=int(final), best=best)
            session.tokens += chunk
            if final:
                step = self._judge(_nothing(), logits, features, len(prompt) - 1)
            else:
                # Evaluated here, so that the graph and the taps of one chunk at most are ever held.
                mx.eval(session.state.arrays(), [] if features is None else features)
                session.drafter.observe(Commit(chunk, features, prompt[end], start))
                if end in self.request.marks:
                    session.mark()
                yield Progress(end, len(prompt))
        assert step is not None
        kept, event = self.ledger.take(step, step.verdict.read())
        session.tokens += kept
        session.drafter.observe(Commit(chunk, step.features, kept[0], len(prompt) - len(chunk)))
        self.fresh = mx.array(kept, mx.int32)
        yield Progress(len(prompt), len(prompt))
        yield event

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Where each chunk of the prompt begins and ends. One ends at each mark, so that a prompt read on from a mark
        has the chunks of one read from the start."""
        start, prompt = self.ledger.cached, len(self.request.tokens)
        stops = sorted({*(place for place in self.request.marks if start < place < prompt), prompt})
        for stop in stops:
            for at in range(start, stop, self.session.engine.chunk):
                yield at, min(at + self.session.engine.chunk, stop)
            start = stop

    def decode(self) -> Iterator[Event]:
        """Rounds of draft, verify, commit, emit, until the ledger says why to stop."""
        step: _Step | None = None
        clock = self.session.engine.clock
        began = left = clock()
        while self.ledger.reason is None:
            away = clock() - left
            if step is None:
                step = self._dispatch(*self._draft())
            ahead = self._dispatch_ahead(step)
            outcome = step.verdict.read()
            event = self._settle(step, outcome, committed=ahead is not None)
            now = clock()
            self._learn(step, event, now - began, away)
            began, left = now, clock()
            yield event
            step = ahead
        if self.session.state.opened:  # the step ahead read a token that nothing follows
            self.session.state.commit(0)
        yield Done(self.ledger.reason, self.stats())

    def _draft(self) -> tuple[Proposal, int]:
        """A draft, and how many tokens were asked for."""
        position = self.session.state.length
        width = self._width(position)
        if width <= 0:
            return _nothing(), 0
        return self.session.drafter.propose(self.session.tokens[-1], width, self.sampling, position), width

    def _width(self, position: int) -> int:
        """Tokens to draft after the anchor at `position`: what the pacer wants, within what can be used."""
        drafter = self.session.drafter
        room = self.ledger.room - self.ledger.delivered - 1
        if drafter.limit is not None:
            room = min(room, drafter.limit - 1 - position)
        return 0 if room <= 0 else self.pacer.width(position, min(drafter.width, MAX_WIDTH, room))

    def _dispatch(self, proposal: Proposal, asked: int = 0) -> _Step:
        """Start the forward over the anchor and its draft, and its verdict."""
        session = self.session
        position = session.state.length
        self.sampler.commit(self.fresh)
        rows = 1 + proposal.size
        inputs = mx.concatenate([self.fresh[-1:], proposal.tokens]) if proposal.size else self.fresh[-1:]
        session.state.open(rows)
        logits, features = self.target.forward(inputs, session.state, session.drafter.taps, rows, self.bare)
        step = self._judge(proposal, logits, features, position, asked)
        mx.async_eval(step.verdict.packed, *step.logprobs)  # type: ignore[no-untyped-call]
        return step

    def _dispatch_ahead(self, step: _Step) -> _Step | None:
        """While parked, start the next plain step before the last one is read."""
        more = self.ledger.room - self.ledger.delivered > 1
        constraint = self.request.constraint
        if constraint is not None and not constraint.free(2):  # it must see the token first
            return None
        if step.proposal.size or not more or self._width(step.position + 1) > 0:
            return None
        self.session.state.commit(1)
        self.fresh = step.verdict.next
        return self._dispatch(_nothing())

    def _judge(self, proposal: Proposal, logits: Array, features: Array | None, position: int, asked: int = 0) -> _Step:
        if self.bare:
            verdict = verify_best(proposal, logits)
        else:
            verdict = verify(proposal, logits, self.sampler, position, self._allowed(proposal, logits))
        logprobs: tuple[Array, ...] = ()
        if self.request.logprobs is not None:
            logprobs = sampling.logprobs(logits, verdict.rows, self.request.logprobs)
        return _Step(proposal, verdict, features, logprobs, position, asked)

    def _allowed(self, proposal: Proposal, logits: Array) -> Array | None:
        """What the constraint leaves of each row. The draft is read on the host while the forward runs."""
        constraint = self.request.constraint
        if constraint is None or constraint.free(1 + proposal.size):
            return None
        mx.async_eval(proposal.tokens, logits)  # type: ignore[no-untyped-call]
        rows = constraint.allowed(proposal.tokens.tolist())
        return None if rows is None else mx.array(rows)

    def _settle(self, step: _Step, outcome: Outcome, committed: bool) -> Tokens:
        """Make the kept tokens true in the state, the drafter and the session."""
        session = self.session
        kept, event = self.ledger.take(step, outcome)
        if not committed:
            session.state.commit(len(kept))
            self.fresh = mx.array(kept, mx.int32)
        read = (session.tokens[-1], *kept[:-1])
        features = None if step.features is None else step.features[: len(kept)]
        session.drafter.observe(Commit(read, features, kept[-1], step.position))
        session.tokens += kept
        return event

    def _learn(self, step: _Step, event: Tokens, seconds: float, away: float) -> None:
        """`seconds` from the end of the round before, `away` of them spent by whoever iterates (or other sessions)."""
        source, size = step.proposal.source, step.proposal.size
        timed = seconds if away < seconds / 4 else None
        ended = self.ledger.reason is not None
        self.pacer.learn(Round(source, step.asked, size, event.accepted, step.position, timed, ended))

    def stats(self) -> Stats:
        assert self.sampling.seed is not None
        stats = self.ledger.stats(self.sampling.seed, self.session.drafter.source, self.session.engine.why)
        return replace(stats, notes=tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        drafter = self.session.drafter
        if drafter.limit is not None and self.session.state.length >= drafter.limit - 1:
            yield f"drafter {drafter.source} drafts up to position {drafter.limit}; past it decoding went on plainly"
        if parked := self.pacer.note():
            yield parked
        if self.branched is not None:
            copied, seconds = self.branched
            yield f"began as a branch of another conversation: {copied / 1e6:.1f} MB copied in {seconds * 1e3:.1f} ms"


class _Ledger:
    """The one place where end of turn, stop strings, limits, logprobs and counters are applied, token by token."""

    def __init__(self, request: Request, room: int):
        self.request = request
        self.room = room
        self.reason: Reason | None = None if room > 0 else "length"
        self.cached = self.delivered = self.rounds = self.drafted = self.accepted = 0
        self._proposed_at = [0] * MAX_WIDTH
        self._accepted_at = [0] * MAX_WIDTH
        self._began = time.perf_counter()
        self._first: float | None = None
        self._latest = self._began

    def take(self, step: _Step, outcome: Outcome) -> tuple[tuple[int, ...], Tokens]:
        """The tokens of a round that are kept (an end of turn included), and the event that delivers them."""
        kept: list[int] = []
        for token in outcome.tokens:
            kept.append(token)
            self.reason = self._after(token)
            if self.reason is not None:
                break
        ids = tuple(kept[:-1] if kept[-1] in self.request.eos else kept)
        accepted = min(outcome.accepted, len(ids))
        # What stood in the draft past the end was not judged.
        drafted = len(outcome.drafted) if len(kept) == len(outcome.tokens) else accepted
        self._count(step, drafted, accepted)
        text, reasoning = self._text()
        return tuple(kept), Tokens(ids, text, reasoning, drafted, accepted, self._logprobs(step, ids))

    def _after(self, token: int) -> Reason | None:
        if self.request.constraint is not None:
            self.request.constraint.push(token)
        if token in self.request.eos:
            return "stop"
        self.delivered += 1
        if self.request.reader is not None and self.request.reader.push(token):
            return "stop"
        return "length" if self.delivered >= self.room else None

    def _count(self, step: _Step, drafted: int, accepted: int) -> None:
        self._latest = time.perf_counter()
        if self._first is None:
            self._first = self._latest  # the token that prefill ends with belongs to no round
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for i in range(drafted):
            self._proposed_at[i] += 1
            self._accepted_at[i] += i < accepted

    def _text(self) -> tuple[str, str]:
        reader = self.request.reader
        if reader is None:
            return "", ""
        text, reasoning = reader.take()
        if self.reason is not None:
            rest, rest_reasoning = reader.finish()
            return text + rest, reasoning + rest_reasoning
        return text, reasoning

    def _logprobs(self, step: _Step, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        if not step.logprobs:
            return ()
        chosen, best, scores = (a.tolist() for a in step.logprobs)
        return tuple(
            TokenLogprob(token, chosen[i], tuple(zip(best[i], scores[i], strict=True))) for i, token in enumerate(ids)
        )

    def stats(self, seed: int, drafter: str, why: str) -> Stats:
        width = sum(n > 0 for n in self._proposed_at)
        first = self._latest if self._first is None else self._first
        return Stats(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached,
            completion_tokens=self.delivered,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            proposed_at=tuple(self._proposed_at[:width]),
            accepted_at=tuple(self._accepted_at[:width]),
            ttft=first - self._began,
            decode=self._latest - first,
            seed=seed,
            drafter=drafter,
            why=why,
        )


def _room(request: Request, context: int | None) -> int:
    """Tokens a request may deliver."""
    prompt = len(request.tokens)
    if not prompt:
        raise ContextFull("the prompt is empty; give at least one token")
    if context is not None and prompt >= context:
        raise ContextFull(f"the prompt has {prompt} tokens and the context holds {context}; shorten the conversation")
    room = _UNBOUNDED if context is None else context - prompt
    return room if request.max_tokens is None else min(room, request.max_tokens)


def _nothing() -> Proposal:
    return Proposal(mx.zeros((0,), mx.int32), 0, "none")


def _common(a: list[int], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
