"""How many tokens a round delivers on held-out answers, without decoding them.

At temperature 0 a draft is kept up to its first token that differs from the target's. The stored answers are the
target's own, so drafting at every place of them with the true tokens before it tells each round's length exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from lisa.drafters.eagle import WIDTH
from lisa.train import block, sequential
from lisa.train.block import Blocks
from lisa.train.networks import Draft
from lisa.train.steps import Data, block_tokens

_ANCHORS = 64


@dataclass(frozen=True)
class Acceptance:
    """`length` is the mean tokens of a round, the target's own included; `slots` how often slot i is right once all
    before it are; `widths[w]` the length of drafts of at most w tokens."""

    length: float
    slots: tuple[float, ...]
    widths: dict[int, float]


def measure(draft: Draft, data: Data, indices: Sequence[int], width: int | None = None) -> Acceptance:
    """Over whole conversations. `width` caps the drafts."""
    kept = [right(draft, data, i) for i in indices]
    widest = draft_width(draft) if width is None else width
    rounds = [r for matches in kept for r in walk(matches, widest)]
    slots = [(sum(r > i for r in rounds), sum(r >= i for r in rounds)) for i in range(widest)]
    return Acceptance(
        _mean(rounds),
        tuple(hits / max(tries, 1) for hits, tries in slots),
        {w: _mean([r for m in kept for r in walk(m, w)]) for w in range(1, widest + 1)},
    )


def draft_width(draft: Draft) -> int:
    return WIDTH if draft.kind == "eagle" else draft.block - 1


def _mean(rounds: Sequence[int]) -> float:
    return (sum(rounds) + len(rounds)) / len(rounds) if rounds else 1.0


def walk(matches: Sequence[int], width: int) -> list[int]:
    """Tokens accepted in each round of an answer; matches[i] is how much of a draft at its i-th token is right.

    The token after an accepted draft is the target's own, so the last token of an answer never counts as accepted.
    """
    i, rounds = 0, []
    while i < len(matches):
        rounds.append(min(matches[i], width, len(matches) - i - 1))
        i += rounds[-1] + 1
    return rounds


def right(draft: Draft, data: Data, index: int) -> list[int]:
    """For each token of the answer but the last, how many tokens of a draft after it are the answer's."""
    conversation = data.conversation(index)
    taps, _, tokens = data.read([index])
    hits = (_sequential if draft.kind == "eagle" else _blocks)(draft, taps, tokens, conversation.prompt)
    matches: list[int] = np.cumprod(hits, axis=-1).sum(axis=-1).tolist()
    return matches


def _blocks(draft: Draft, taps: mx.array, tokens: Any, prompt: int) -> Any:
    anchors, hits = np.arange(prompt, tokens.shape[1] - 1), []
    for start in range(0, len(anchors), _ANCHORS):
        some = anchors[None, start : start + _ANCHORS]
        blocks = Blocks(taps, some, block_tokens(tokens, some, draft.block))
        hits.append(np.array(block.greedy(draft, blocks)) == blocks.tokens[:, 1:])
    return np.concatenate(hits)


def _sequential(draft: Draft, taps: mx.array, tokens: Any, prompt: int) -> Any:
    """The draft after token a starts from the features before it."""
    length = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, WIDTH + 1)), constant_values=-1)
    drafted = np.array(sequential.greedy(draft, taps[:, : length - 2], padded, prompt - 1, WIDTH))[0]
    anchors = np.arange(prompt, length - 1)
    return drafted == padded[0][anchors[:, None] + 1 + np.arange(WIDTH)]
