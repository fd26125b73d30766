"""Logits -> filtered distribution -> token, with noise keyed by (seed, absolute position, token id).

Order of operations, everywhere: logit bias, penalties, constraint, temperature, top_k, top_p, min_p, then the draw.
Temperature comes before the filters, as in vLLM and transformers. R rows are consecutive positions, V is the
vocabulary, K the number of candidates that are still looked at (V without top_k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from lisa.types import Sampling

# The purposes noise is drawn for. Draws of different streams are independent of one another.
TARGET_STREAM = 0
DRAFT_STREAM = 1
ACCEPT_STREAM = 2
REDRAW_STREAM = 3

_NEVER = -float("inf")


@dataclass(frozen=True)
class Candidates:
    """A filtered distribution for each row.

    `logits` float32 [R, K] after temperature, -inf where filtered out; `ids` int32 [R, K], None when K = V and column j
    is token j.
    """

    logits: mx.array
    ids: mx.array | None = None

    def tokens(self, columns: mx.array) -> mx.array:
        """Token ids of one column a row: int [R] -> int32 [R]."""
        if self.ids is None:
            return columns.astype(mx.int32)
        return mx.take_along_axis(self.ids, columns[:, None], axis=1)[:, 0]


class Sampler:
    """One request's sampling over one timeline: the options, and the token counts that penalties need.

    Counts stay on the device, so that a step can be dispatched before the token it follows has been read.
    """

    def __init__(self, sampling: Sampling, vocab: int, prompt: Sequence[int] = ()):
        self.sampling = sampling
        self.vocab = vocab
        self._bias = _bias(sampling, vocab)
        self._prompt: mx.array | None = None
        self._answer: mx.array | None = None
        if sampling.penalised:
            self._prompt = (
                mx.zeros((vocab,)).at[mx.array(list(prompt), mx.int32)].add(1.0) if prompt else mx.zeros((vocab,))
            )
            self._answer = mx.zeros((vocab,))

    @property
    def bare(self) -> bool:
        """Whether the token is the one of the largest logit, as the target gives it."""
        return self.sampling.greedy and self._bias is None and self._answer is None

    def commit(self, tokens: mx.array) -> None:
        """Count delivered tokens, int32 [n], evaluated or not."""
        if self._answer is not None:
            self._answer = self._answer.at[tokens].add(1.0)

    def candidates(self, logits: mx.array, draft: mx.array, allowed: mx.array | None = None) -> Candidates:
        """Filtered distributions of all rows. `logits` [R, V]; `draft` int32 [R-1]: row j follows draft[:j]; `allowed`
        bool [R, V] or None for all: what is not allowed has no probability."""
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = logits + self._bias
        if self._answer is not None:
            logits = self._penalise(logits, draft)
        if allowed is not None:
            logits = mx.where(allowed, logits, _NEVER)
        return filtered(logits, self.sampling)

    def _penalise(self, logits: mx.array, draft: mx.array) -> mx.array:
        assert self._answer is not None and self._prompt is not None
        answer = self._answer[None]
        if draft.size:
            # Row j counts the draft before it as delivered: it is only kept if that draft is.
            ones = (draft[:, None] == mx.arange(self.vocab)[None]).astype(mx.float32)
            answer = answer + mx.concatenate([mx.zeros((1, self.vocab)), mx.cumsum(ones, axis=0)])
        s = self.sampling
        if s.repetition_penalty != 1.0:
            seen = (answer + self._prompt) > 0
            damped = mx.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
            logits = mx.where(seen, damped, logits)
        return logits - s.presence_penalty * (answer > 0) - s.frequency_penalty * answer


def _bias(sampling: Sampling, vocab: int) -> mx.array | None:
    if not sampling.logit_bias:
        return None
    ids, values = zip(*sampling.logit_bias, strict=True)
    return mx.zeros((vocab,)).at[mx.array(ids, mx.int32)].add(mx.array(values, mx.float32))


def filtered(logits: mx.array, sampling: Sampling) -> Candidates:
    """Temperature, then top_k, top_p, min_p on float32 [R, V]. Equal logits at a threshold stay in or out together,
    except at top_k, which takes the lower ids first."""
    if sampling.greedy:
        return Candidates(logits)
    logits = logits / sampling.temperature
    ids = None
    if 0 < sampling.top_k < logits.shape[-1]:
        ids, logits = top(logits, sampling.top_k)
    if sampling.top_p < 1.0:
        logits = mx.where(logits < _nucleus(logits, sampling.top_p), _NEVER, logits)
    if sampling.min_p > 0.0:
        floor = mx.max(logits, axis=-1, keepdims=True) + mx.log(mx.array(sampling.min_p))
        logits = mx.where(logits < floor, _NEVER, logits)
    return Candidates(logits, ids)


def top(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest of each row of [n, V], descending, lower ids first among equals: ids int32 and values, [n, k] each.

    Only the blocks of 64 that hold the k largest maxima can hold them: a tenth of the time of a partition of the row.
    """
    n, size = logits.shape
    blocks, k = size // 64, min(k, size)
    if blocks <= k:
        ids = mx.argsort(-logits, axis=-1)[:, :k].astype(mx.int32)
        return ids, mx.take_along_axis(logits, ids, axis=-1)
    maxima = logits[:, : blocks * 64].reshape(n, blocks, 64).max(axis=-1)
    best = mx.sort(mx.argpartition(-maxima, k - 1, axis=-1)[:, :k].astype(mx.int32), axis=-1)
    ids = (best[..., None] * 64 + mx.arange(64, dtype=mx.int32)).reshape(n, -1)
    rest = mx.broadcast_to(mx.arange(blocks * 64, size, dtype=mx.int32), (n, size - blocks * 64))
    ids = mx.concatenate([ids, rest], axis=-1)
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)[:, :k]
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _nucleus(logits: mx.array, top_p: float) -> mx.array:
    """The smallest logit of the smallest set that holds `top_p` of the mass: [R, K] -> [R, 1]."""
    descending = -mx.sort(-logits, axis=-1)
    mass = mx.softmax(descending, axis=-1, precise=True)
    before = mx.cumsum(mass, axis=-1) - mass
    return mx.min(mx.where(before < top_p, descending, float("inf")), axis=-1, keepdims=True)


def draw(
    candidates: Candidates, sampling: Sampling, positions: mx.array, vocab: int, stream: int = TARGET_STREAM
) -> mx.array:
    """One token a row, int32 [R]; row j stands at positions[j]. Greedy rows take the first largest logit."""
    logits = candidates.logits
    if not sampling.greedy:
        assert sampling.seed is not None
        logits = logits + gumbel(sampling.seed, positions, candidates.ids, vocab, stream)
    return candidates.tokens(mx.argmax(logits, axis=-1))


def gumbel(seed: int, positions: mx.array, ids: mx.array | None, vocab: int, stream: int = TARGET_STREAM) -> mx.array:
    """Standard Gumbel noise, float32 [n, K], a function of (seed, stream, position, token id) alone.

    `positions` int [n]; `ids` int [n, K], None for all `vocab` tokens.
    """
    tokens = mx.arange(vocab, dtype=mx.uint32)[None] if ids is None else ids.astype(mx.uint32)
    # -log1p(-v) keeps its precision for the small v that make large noise.
    return -mx.log(-mx.log1p(-_uniform(seed, positions, tokens, stream)))


def uniform(seed: int, positions: mx.array, stream: int) -> mx.array:
    """One number in (0, 1) a position, float32 [n]."""
    return _uniform(seed, positions, mx.zeros((1, 1), mx.uint32), stream)[:, 0]


def _uniform(seed: int, positions: mx.array, tokens: mx.array, stream: int) -> mx.array:
    low = mx.array(seed & 0xFFFFFFFF, mx.uint32)
    high = mx.array(((seed >> 32) ^ (stream * 0x9E3779B9)) & 0xFFFFFFFF, mx.uint32)
    key = _mix(_mix(positions.astype(mx.uint32) ^ low) + high)[:, None]
    hashed = _mix(_mix(tokens * mx.array(0x9E3779B1, mx.uint32) + key) ^ _mix(key + low))
    # float32 rounds the largest hashes up to 1, which is not a draw below 1.
    return mx.minimum((hashed.astype(mx.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)


def _mix(x: mx.array) -> mx.array:
    """A bijection of uint32 in which every input bit reaches every output bit (the "lowbias32" constants,
    https://nullprogram.com/blog/2018/07/31/)."""
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def logprobs(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probabilities under the plain softmax of `logits` [R, V]: of `tokens` int [R] -> float32 [R], and the `top`
    most likely ids int32 [R, top] with theirs float32 [R, top], most likely first, lower ids first among equals."""
    logits = logits.astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, tokens[:, None].astype(mx.int32), axis=-1)[:, 0]
    best = mx.argsort(-scores, axis=-1)[:, :top].astype(mx.int32)
    return chosen, best, mx.take_along_axis(scores, best, axis=-1)
