"""A training step: which conversations and anchors it reads, and the loss on them.

Everything drawn is a function of the seed and the step, so a run goes on after a kill as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from lisa.train import block, sequential
from lisa.train.block import Blocks, Rows
from lisa.train.networks import Draft
from lisa.train.objective import Vocabularies, losses
from lisa.train.settings import Settings
from lisa.train.store import Conversation, Features

_SHUFFLE, _DRAW = 2, 3  # streams of random numbers; 1 is the initial weights'


class Data:
    """The conversations that are trained on, in memory as tokens and on disk as features divided by `scale`."""

    def __init__(self, features: Features, indices: Sequence[int], taps: tuple[int, ...], scale: Any):
        self.features, self.taps, self.scale = features, taps, scale
        everything = features.store.conversations
        self.train = [i for i in indices if not everything[i].held and _long_enough(everything[i])]
        self.held = [i for i in indices if everything[i].held and _long_enough(everything[i])]

    def conversation(self, index: int) -> Conversation:
        return self.features.store.conversations[index]

    def counts(self, vocab: int) -> Any:
        """How often each token occurs in the answers that are trained on, int [vocab]."""
        answers = [self.conversation(i).ids[self.conversation(i).prompt :] for i in self.train]
        return np.bincount([token for ids in answers for token in ids], minlength=vocab)

    def batch(self, step: int, size: int, seed: int) -> list[int]:
        """Conversations of similar length; each once an epoch, but for a remainder smaller than a batch."""
        size = min(size, len(self.train))
        batches = len(self.train) // size
        rng = np.random.default_rng([seed, _SHUFFLE, step // batches])
        lengths = np.array([len(self.conversation(i).ids) for i in self.train])
        order = np.argsort(lengths * np.exp(0.1 * rng.standard_normal(len(lengths))), kind="stable")
        order = order[rng.integers(0, len(order) - batches * size + 1) :]
        chosen = rng.permutation(batches)[step % batches]
        return [self.train[i] for i in order[chosen * size : (chosen + 1) * size]]

    def read(self, indices: Sequence[int]) -> tuple[mx.array, mx.array, Any]:
        """Scaled taps float32 [B, T, taps*H], last layer's outputs [B, T, H], tokens int [B, T], -1 past each end."""
        length = max(len(self.conversation(i).ids) for i in indices)
        hidden = len(self.scale) // len(self.taps)
        taps = np.zeros((len(indices), length, len(self.scale)), np.float32)
        last = np.zeros((len(indices), length, hidden), np.float16)
        tokens = np.full((len(indices), length), -1)
        for row, i in enumerate(indices):
            ids = self.conversation(i).ids
            some, final = self.features.of(i, self.taps)
            taps[row, : len(ids)] = some / self.scale
            last[row, : len(ids)] = final
            tokens[row, : len(ids)] = ids
        return mx.array(taps), mx.array(last), tokens


def _long_enough(conversation: Conversation) -> bool:
    """An anchor and at least one token after it."""
    return len(conversation.ids) - conversation.prompt >= 2


class Step:
    """The loss of step `number` as a function of the network, once `prepare` has read its data."""

    def __init__(self, draft: Draft, data: Data, vocabularies: Vocabularies, settings: Settings):
        self.draft, self.data, self.vocabularies, self.settings = draft, data, vocabularies, settings

    def prepare(self, number: int, progress: float) -> Any:
        """A function () -> loss, and how many anchors it looks at. `progress` of the training is between 0 and 1."""
        rng = np.random.default_rng([self.settings.seed, _DRAW, number])
        indices = self.data.batch(number, self.settings.batch, self.settings.seed)
        some = [self.data.conversation(i) for i in indices]
        taps, last, tokens = self.data.read(indices)
        if self.draft.kind == "eagle":
            return self._sequential(taps, last, tokens, some, rng)
        return self._blocks(taps, last, tokens, some, rng, number, progress)

    def _blocks(
        self,
        taps: mx.array,
        last: mx.array,
        tokens: Any,
        some: list[Conversation],
        rng: Any,
        number: int,
        progress: float,
    ) -> Any:
        draft, objective = self.draft, self.settings.objective
        anchors = np.stack([_anchors(each, self.settings.anchors, rng) for each in some])
        blocks = Blocks(taps, anchors, block_tokens(tokens, anchors, draft.block))
        labels = blocks.tokens[:, 1:]
        n, slot = np.nonzero(labels >= 0)
        at = anchors.reshape(-1)[n] + slot
        weight = np.exp(-slot / decay(draft.block))
        vocabulary = self.vocabularies.step(labels[n, slot], rng)
        rows = Rows(
            n,
            slot,
            mx.array(vocabulary.index[labels[n, slot]]),
            mx.array(labels[n, slot]),
            mx.array(blocks.tokens[n, slot]),
            mx.array((weight / weight.sum()).astype(np.float32)),
            _teacher(vocabulary, last, n // anchors.shape[1], at),
        )
        rate = replacement(progress)
        replaced = rng.random(len(labels)) < rate if rate > 0 and draft.codes is not None else None
        alignment = (0.5 if objective == "published" else 0.05) * min(number / 146, 1.0)
        return lambda: block.loss(draft, blocks, rows, vocabulary, objective, alignment, replaced), len(labels)

    def _sequential(self, taps: mx.array, last: mx.array, tokens: Any, some: list[Conversation], rng: Any) -> Any:
        draft, steps, objective = self.draft, self.settings.unroll, self.settings.objective
        length = tokens.shape[1] - 1
        first = min(each.prompt for each in some) - 1
        padded = np.pad(tokens, ((0, 0), (0, steps + 1)), constant_values=-1)
        vocabulary = self.vocabularies.step(tokens[tokens >= 0], rng)
        starts = np.array([each.prompt - 1 for each in some])[:, None]
        rows, drafts = [], 0
        for j in range(steps):
            labels = padded[:, first + 2 + j : length + 2 + j]
            valid = (labels >= 0) & (np.arange(first, length) >= starts)
            valid &= vocabulary.index[np.maximum(labels, 0)] >= 0
            b, t = np.nonzero(valid)
            teacher = _teacher(vocabulary, last, b, t + first + 1 + j)
            rows.append((mx.array(b * (length - first) + t), mx.array(vocabulary.index[labels[b, t]]), teacher, 0.8**j))
            drafts = max(drafts, len(b))

        def loss() -> mx.array:
            outputs = sequential.forward(draft, taps[:, :length], padded, first, steps)
            total, share = mx.array(0.0), 0.0
            for h, (flat, labels, teacher, weight) in zip(outputs, rows, strict=True):
                if labels.size:
                    logits = vocabulary.logits(h.reshape(-1, h.shape[-1])[flat])
                    total = total + weight * losses(objective, logits, teacher, labels)[0].mean()
                    share += weight
            return total / max(share, 1e-6)

        return loss, drafts


def _anchors(conversation: Conversation, count: int, rng: Any) -> Any:
    """Places of anchors in an answer, each followed by at least one token; again and again in a short one."""
    places = np.arange(conversation.prompt, len(conversation.ids) - 1)
    return np.sort(rng.choice(places, count, replace=count > len(places)))


def block_tokens(tokens: Any, anchors: Any, block: int) -> Any:
    """The true tokens of blocks at `anchors` int [B, A] of `tokens` int [B, T]: int [B * A, block], -1 past the end."""
    padded = np.pad(tokens, ((0, 0), (0, block)), constant_values=-1)
    rows = np.arange(len(tokens))[:, None, None]
    return padded[rows, anchors[:, :, None] + np.arange(block)].reshape(-1, block)


def _teacher(vocabulary: Any, last: mx.array, row: Any, at: Any) -> mx.array:
    """The target's distributions [N, V] at positions `at` of conversations `row`; computed once where they repeat."""
    unique, back = np.unique(row * last.shape[1] + at, return_inverse=True)
    teacher = vocabulary.teacher(last.reshape(-1, last.shape[-1])[mx.array(unique)])
    mx.eval(teacher)
    repeated: mx.array = teacher[mx.array(back)]
    return repeated


def decay(block: int) -> float:
    """Slots before a weight falls to 1/e: the published 7 for blocks of 16, less for small ones."""
    return min(7.0, max((block - 1) / 2, 1.0))


def replacement(progress: float) -> float:
    """The share of blocks told true predecessors: a half until a sixth of the training, none after a third."""
    return 0.5 if progress < 1 / 6 else max(0.0, 0.5 * (1 / 3 - progress) * 6)
