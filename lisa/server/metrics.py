"""Numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lisa.server.stream import Watch
from lisa.types import MAX_WIDTH, Done, Event, Tokens

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """`clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        r = self._registry = CollectorRegistry()
        self.requests = Counter("lisa_requests", "Requests by route and status", ["route", "status"], registry=r)
        self._ends = Counter("lisa_replies", "Replies by what ended them", ["reason"], registry=r)
        self._prompt = Counter("lisa_prompt_tokens", "Prompt tokens", registry=r)
        self._cached = Counter("lisa_cached_tokens", "Prompt tokens that were not read again", registry=r)
        self._hits = Counter("lisa_prefix_hits", "Replies that reused a prefix", registry=r)
        self._completion = Counter("lisa_completion_tokens", "Delivered tokens", registry=r)
        self._rounds = Counter("lisa_rounds", "Rounds of decoding", registry=r)
        self._proposed = Counter("lisa_proposed", "Draft tokens by position from 1", ["position"], registry=r)
        self._accepted = Counter("lisa_accepted", "Accepted draft tokens by position from 1", ["position"], registry=r)
        self._ttft = Histogram("lisa_first_token_seconds", "From request to first token", registry=r, buckets=_SECONDS)
        self._gap = Histogram("lisa_inter_token_seconds", "Between tokens, over a round", registry=r, buckets=_GAPS)
        self._width = Histogram("lisa_draft_width", "Draft tokens a round", registry=r, buckets=range(MAX_WIDTH + 1))
        self._memory = Gauge("lisa_memory_bytes", "Weights and idle contexts", registry=r)
        self._unfinished = Gauge("lisa_unfinished_requests", "Requests that run or wait", registry=r)

    def watch(self) -> Watch:
        """Something to show one reply's events to, from the request on."""
        began = latest = self._clock()
        first = True

        def see(event: Event) -> None:
            nonlocal latest, first
            now = self._clock()
            if isinstance(event, Tokens) and first:
                self._ttft.observe(now - began)
                first, latest = False, now
            elif isinstance(event, Tokens) and event.ids:
                self._gap.observe((now - latest) / len(event.ids))
                self._width.observe(event.drafted)
                latest = now
            elif isinstance(event, Done):
                self._done(event)

        return see

    def _done(self, event: Done) -> None:
        s = event.stats
        self._ends.labels(event.reason).inc()
        self._prompt.inc(s.prompt_tokens)
        self._cached.inc(s.cached_tokens)
        self._hits.inc(s.cached_tokens > 0)
        self._completion.inc(s.completion_tokens)
        self._rounds.inc(s.rounds)
        for i, (proposed, accepted) in enumerate(zip(s.proposed_at, s.accepted_at, strict=True)):
            self._proposed.labels(i + 1).inc(proposed)
            self._accepted.labels(i + 1).inc(accepted)

    def text(self, memory: int, unfinished: int) -> bytes:
        self._memory.set(memory)
        self._unfinished.set(unfinished)
        return generate_latest(self._registry)
