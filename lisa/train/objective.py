"""What a row of logits should be, and how far it is from that.

N rows; the columns are the whole vocabulary or, where that is slow, a sample of it: the tokens the target uses most,
the labels of the step, and some others whose logits are raised by the log of how many each stands for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from lisa.target import Target
from lisa.train.settings import Objective

_OTHERS = 2048
_CORE = 6144


def _numpy_softmax(x: mx.array) -> tuple[mx.array, mx.array]:
    a = np.array(x)
    largest = a.max(axis=-1, keepdims=True)
    np.subtract(a, largest, out=a)
    np.exp(a, out=a)
    total = a.sum(axis=-1, keepdims=True)
    np.divide(a, total, out=a)
    return mx.array(a), mx.array((largest + np.log(total))[..., 0])


_vectorised: Any = mx.custom_function(_numpy_softmax)


@_vectorised.vjp  # type: ignore[untyped-decorator]
def _vectorised_vjp(x: mx.array, cotangents: Any, outputs: Any) -> mx.array:
    (dy, dl), (y, _) = cotangents, outputs
    dx: mx.array = y * (dy - (dy * y).sum(axis=-1, keepdims=True) + dl[..., None])
    return dx


def _mlx_softmax(x: mx.array) -> tuple[mx.array, mx.array]:
    return mx.softmax(x, axis=-1), mx.logsumexp(x, axis=-1)


def softmax() -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """float32 [..., V] -> (softmax, log of the sum of exponentials [...]).

    MLX's exponential is scalar on x86, and slower than all the rest of a step; NumPy's is not.
    """
    slow = mx.default_device() == mx.cpu and sys.platform != "darwin"
    return _vectorised if slow else _mlx_softmax


class Vocabulary:
    """The columns of one step. `index` maps token ids to columns; -1 for a token that has none.

    Without `weight` the columns are the target's own. Else they are rows of the draft's head, float32 [V, H], `own` the
    same rows of the target's where those differ, and `correction` [V] is added to the logits of both.
    """

    def __init__(
        self,
        target: Target,
        index: Any,
        weight: mx.array | None = None,
        own: mx.array | None = None,
        correction: mx.array | None = None,
    ):
        self.target, self.index, self.weight = target, index, weight
        self._own = weight if own is None else own
        self._correction = mx.array(0.0) if correction is None else correction

    def logits(self, hidden: mx.array) -> mx.array:
        """Normed hiddens [N, H] -> float32 [N, V]."""
        if self.weight is None:
            return self.target.head(hidden)
        return hidden @ self.weight.T + self._correction

    def teacher(self, last: mx.array) -> mx.array:
        """Outputs of the target's last layer [N, H] -> its distribution float32 [N, V]."""
        normed = self.target.norm(last.astype(mx.float32))
        if self._own is None:
            return softmax()(self.target.head(normed))[0]
        return softmax()(normed @ self._own.T + self._correction)[0]

    def rows(self, columns: mx.array) -> tuple[mx.array, mx.array]:
        """Head rows float32 [..., H] of columns, and what is added to their logits [...]."""
        if self.weight is None:
            return self.target.head_rows(columns), mx.array(0.0)
        correction = self._correction[columns] if self._correction.size > 1 else self._correction
        return self.weight[columns], correction


class Vocabularies:
    """Makes the columns of each step. `counts` int [V]: how often the target's answers use each token.

    `ids` int [Vd] and `head` [Vd, H] are those of a drafter with a vocabulary of its own.
    """

    def __init__(self, target: Target, counts: Any, sampled: bool, ids: Any = None, head: mx.array | None = None):
        self.target, self._ids, self._head = target, np.arange(target.vocab) if ids is None else ids, head
        self.full = not sampled or len(self._ids) <= _CORE + 2 * _OTHERS
        self._own = None if head is None else target.head_rows(mx.array(self._ids))
        # Among equals the low ids, which are the early and frequent merges of a BPE.
        order = np.argsort(-counts[self._ids], kind="stable")
        self._core, self._rest = np.sort(order[:_CORE]), np.sort(order[_CORE:])
        self._core_rows = None if self.full else self._rows(self._core)
        self._index = np.full(target.vocab, -1)
        self._index[self._ids] = np.arange(len(self._ids))

    def _rows(self, places: Any) -> tuple[mx.array, mx.array]:
        """Head rows of the draft and of the target."""
        at = mx.array(places)
        if self._head is None or self._own is None:
            rows = self.target.head_rows(at)
            return rows, rows
        return self._head[at], self._own[at]

    def step(self, labels: Any, rng: Any) -> Vocabulary:
        """Columns that hold all of `labels`, token ids, as far as the draft knows them."""
        if self.full:
            return Vocabulary(self.target, self._index, self._head, self._own)
        places = self._index[labels]
        extra = np.setdiff1d(places[places >= 0], self._core)
        others = np.setdiff1d(rng.choice(self._rest, min(_OTHERS, len(self._rest)), replace=False), extra)
        chosen = np.concatenate([self._core, extra, others])
        correction = np.zeros(len(chosen), np.float32)
        correction[len(chosen) - len(others) :] = np.log(len(self._rest) / max(len(others), 1))
        index = np.full(self.target.vocab, -1)
        index[self._ids[chosen]] = np.arange(len(chosen))
        assert self._core_rows is not None
        more = self._rows(chosen[len(self._core) :])
        draft, own = (mx.concatenate([core, rest]) for core, rest in zip(self._core_rows, more, strict=True))
        return Vocabulary(self.target, index, draft, None if self._head is None else own, mx.array(correction))


def losses(
    objective: Objective, logits: mx.array, teacher: mx.array, labels: mx.array, known: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """(loss, cross-entropy) of each row, float32 [N] each.

    `teacher` [N, V] is the target's distribution, `labels` int [N] columns, `known` [N] 0 for a label that has none.
    "published": 0.1 cross-entropy + 0.9 total difference. "mixed": half soft, half hard cross-entropy.
    """
    probabilities, total = softmax()(logits)
    hard = total - mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    if known is not None:
        hard = hard * known
    if objective == "published":
        return 0.1 * hard + 0.9 * mx.abs(probabilities - teacher).sum(axis=-1), hard
    soft = total - (teacher * logits).sum(axis=-1)
    return 0.5 * soft + 0.5 * hard, hard
