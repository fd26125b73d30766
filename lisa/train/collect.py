"""Fills a store: prompts, then the target's answers to them, until there are enough tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from lisa.errors import LisaError
from lisa.target import Target
from lisa.tokenizer import Tokenizer
from lisa.train import questions
from lisa.train.answers import answer
from lisa.train.questions import Question
from lisa.train.settings import Settings
from lisa.train.store import Conversation, Store

Say = Callable[[str], None]

_LONGEST_PROMPT = 96
_DRY = 8  # batches without a single new usable prompt, after which sampling more is hopeless


def collect(store: Store, target: Target, tokenizer: Tokenizer, settings: Settings, say: Say) -> None:
    """Answer prompts until `settings.tokens` of trainable answers are stored, or there are no more prompts."""
    if _enough(store, settings.tokens):
        say(f"{len(store.conversations)} conversations, {store.answered} answer tokens on disk")
        return
    known = {each.key for each in store.conversations}
    first = 1 + max((each.batch for each in store.conversations), default=-1)
    meter = _Meter(store, settings.tokens, say)
    for batch, some in _batches(target, tokenizer, settings, first):
        fresh = [each for each in some if each.key not in known]
        known |= {each.key for each in fresh}
        if fresh:
            store.add(_answered(target, tokenizer, fresh, settings, batch))
            meter.line()
        if _enough(store, settings.tokens):
            break
    else:
        say(f"every prompt is answered: {store.answered} of {settings.tokens} tokens")
    if not _enough(store, 1):
        raise LisaError(f"{len(store.conversations)} prompts are too few to train on some and measure on others")


def _enough(store: Store, tokens: int) -> bool:
    return store.answered >= tokens and any(each.held for each in store.conversations)


def _batches(
    target: Target, tokenizer: Tokenizer, settings: Settings, first: int
) -> Iterator[tuple[int, Sequence[Question]]]:
    """Numbered from `first`: what was stored before is not made again."""
    n = settings.parallel
    if settings.data is not None:
        given = questions.read(settings.data)
        for batch, start in enumerate(range(0, len(given), n)):
            yield batch, given[start : start + n]
        return
    begin, empty = questions.opening(tokenizer), 0
    for batch in range(first, 1 << 30):
        seeds = [(settings.seed << 40) + (batch << 16) + i for i in range(n)]
        turns = answer(target, [begin] * n, tokenizer.hidden, _LONGEST_PROMPT, seeds)
        usable = questions.sampled(tokenizer, [(turn.tokens, turn.reason) for turn in turns])
        empty = 0 if usable else empty + 1
        if empty == _DRY:
            raise LisaError(f"{target.name} writes no usable prompts by itself: give some with --data")
        yield batch, usable


def _answered(
    target: Target, tokenizer: Tokenizer, some: Sequence[Question], settings: Settings, batch: int
) -> list[Conversation]:
    rendered = [each.prompt.render(tokenizer, settings.thinking) for each in some]
    drawn = [not each.held and int(each.key[8:], 16) % 1000 < 1000 * settings.sampled for each in some]
    seeds = [
        int(each.key, 16) % (1 << 60) + settings.seed if draw else None for each, draw in zip(some, drawn, strict=True)
    ]
    order = sorted(range(len(some)), key=lambda i: len(rendered[i]))
    room = settings.answer if target.context is None else target.context - max(map(len, rendered))
    if room < 1:
        raise LisaError(f"a prompt fills the context of {target.context} tokens: shorten it")
    answers = answer(
        target, [rendered[i] for i in order], tokenizer.eos, min(room, settings.answer), [seeds[i] for i in order]
    )
    return [
        Conversation((*rendered[i], *a.tokens), len(rendered[i]), some[i].key, some[i].held, a.reason, drawn[i], batch)
        for i, a in zip(order, answers, strict=True)
    ]


class _Meter:
    """Progress lines while answers come in."""

    def __init__(self, store: Store, wanted: int, say: Say):
        self.store, self.wanted, self.say = store, wanted, say
        self.began, self.before = time.perf_counter(), store.answered
        self.said = self.began

    def line(self) -> None:
        now, done = time.perf_counter(), self.store.answered
        if now - self.said < 10 and done < self.wanted:
            return
        self.said = now
        speed = (done - self.before) / (now - self.began)
        loops = sum(c.reason == "loop" for c in self.store.conversations)
        self.say(
            f"answers: {done} of {self.wanted} tokens, {len(self.store.conversations)} conversations, "
            f"{speed:.0f} tokens/s, {loops} loops cut"
        )
