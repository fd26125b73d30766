"""Batched decoding: many answers of the target at once.

Prompts are read one by one, exactly; their caches are then laid side by side (attention left-padded, recurrent states
stacked), and a step reads one token of every answer. Rounding may differ from decoding alone in near ties: an answer
only has to be one the target could have given. A cache that cannot be laid beside others is decoded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from lisa.sampling import gumbel, top
from lisa.target import Target

_CANDIDATES = 64
_LOOP_CHECK = 8

Reason = Literal["stop", "length", "loop"]


@dataclass(frozen=True)
class Answer:
    """`tokens` of an answer, an end of turn included; a loop is cut after its second period."""

    tokens: tuple[int, ...]
    reason: Reason


def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ends: frozenset[int],
    limit: int,
    seeds: Sequence[int | None],
    chunk: int = 512,
) -> list[Answer]:
    """Answer all `prompts` (token ids) side by side. Row i is greedy where seeds[i] is None, else it is drawn at
    temperature 1 from the 64 likeliest tokens with noise of that seed."""
    different = {prompt: _read(target, prompt, chunk) for prompt in dict.fromkeys(map(tuple, prompts))}
    states = [different[tuple(prompt)] for prompt in prompts]
    if len(prompts) > 1 and not all(type(c) is KVCache or isinstance(c, ArraysCache) for c in states[0][0]):
        return [answer(target, [p], ends, limit, [s], chunk)[0] for p, s in zip(prompts, seeds, strict=True)]
    caches = _beside([caches for caches, _ in states]) if len(states) > 1 else states[0][0]
    logits = mx.concatenate([row for _, row in states])
    done: list[Answer | None] = [None] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    while True:
        chosen = _choose(logits, [seeds[i] for i in rows], [len(tokens[i]) for i in rows])
        for i, token in zip(rows, chosen, strict=True):
            if done[i] is None:
                tokens[i].append(token)
                done[i] = _ended(tokens[i], ends, limit, seeds[i] is None)
        going = [j for j, i in enumerate(rows) if done[i] is None]
        if not going:
            return [each for each in done if each is not None]
        if len(rows) > 1 and len(going) <= 0.85 * len(rows):
            _keep(caches, going)
            chosen, rows = [chosen[j] for j in going], [rows[j] for j in going]
        logits = target.model(mx.array(chosen, mx.int32)[:, None], cache=caches)[:, -1, : target.vocab]


def _read(target: Target, prompt: Sequence[int], chunk: int) -> tuple[list[Any], mx.array]:
    state = target.new_state()
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        logits, _ = target.forward(mx.array(list(piece), mx.int32), state)
        mx.eval(logits, state.arrays())
    return state.caches, logits


def _beside(each: list[list[Any]]) -> list[Any]:
    """Caches of several timelines -> one list of batched ones."""
    layers = []
    for caches in zip(*each, strict=True):
        if type(caches[0]) is KVCache:
            layers.append(KVCache.merge(caches))
            continue
        stacked = type(caches[0])(len(caches[0].cache))
        for i in range(len(caches[0].cache)):
            stacked[i] = mx.concatenate([cache[i] for cache in caches])
        layers.append(stacked)
    return layers


def _keep(caches: list[Any], rows: list[int]) -> None:
    chosen = mx.array(rows)
    for cache in caches:
        cache.filter(chosen)
    mx.eval([[a for a in _arrays(cache)] for cache in caches])


def _arrays(cache: Any) -> list[mx.array]:
    return list(cache.cache) if isinstance(cache, ArraysCache) else [cache.keys, cache.values]


def _choose(logits: mx.array, seeds: list[int | None], positions: list[int]) -> list[int]:
    chosen: Any = mx.argmax(logits, axis=-1).tolist()
    drawn = [j for j, seed in enumerate(seeds) if seed is not None]
    if not drawn:
        return list(chosen)
    ids, scores = top(logits[mx.array(drawn)].astype(mx.float32), _CANDIDATES)
    noise = [gumbel(seeds[j] or 0, mx.array([positions[j]]), ids[n : n + 1], 0) for n, j in enumerate(drawn)]
    columns = mx.argmax(scores + mx.concatenate(noise), axis=-1)
    tokens: Any = mx.take_along_axis(ids, columns[:, None], axis=-1)[:, 0].tolist()
    for j, token in zip(drawn, tokens, strict=True):
        chosen[j] = token
    return list(chosen)


def _ended(tokens: list[int], ends: frozenset[int], limit: int, greedy: bool) -> Answer | None:
    if tokens[-1] in ends:
        return Answer(tuple(tokens), "stop")
    if greedy and len(tokens) % _LOOP_CHECK == 0 and (cut := loop(tokens)):
        return Answer(tuple(tokens[:cut]), "loop")
    return Answer(tuple(tokens), "length") if len(tokens) >= limit else None


def loop(tokens: Sequence[int], longest: int = 48) -> int | None:
    """Where to cut an answer that ends in a repetition: after two periods of it. None where it does not.

    A repetition is three periods or more, and at least 24 tokens: lists and tables repeat less exactly.
    """
    n = len(tokens)
    for period in range(1, longest + 1):
        length = max(3 * period, 24)
        if n < length:
            return None
        if tokens[n - length + period :] == tokens[n - length : n - period]:
            start = n - length
            while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
                start -= 1
            return start + max(2 * period, 8)
    return None
