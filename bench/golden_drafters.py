"""Compares drafters with numbers that independent implementations computed: a folder of tests/golden at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.golden_vectors import cases, error
from lisa.drafters.checkpoint import Checkpoint, read
from lisa.drafters.dflash import DFlash, Trace
from lisa.drafters.dspine import DSpine
from lisa.drafters.eagle import Eagle
from lisa.metal import NONE, Kernels
from lisa.sampling import top
from lisa.types import Commit, Sampling

GREEDY = Sampling()


@dataclass(frozen=True)
class Ends:
    """The target's side of a drafter as two matrices [rows, H]; the last `padding` rows stand for no token."""

    embedding: mx.array
    matrix: mx.array
    name: str = "golden-target"
    layers: int = 9
    padding: int = 0
    kernels: Kernels = NONE

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def rows(self) -> int:
        return self.embedding.shape[0]

    @property
    def vocab(self) -> int:
        return self.rows - self.padding

    def embed(self, tokens: mx.array) -> mx.array:
        return self.embedding[tokens]

    def head(self, hidden: mx.array) -> mx.array:
        return (hidden @ self.matrix.T)[..., : self.vocab].astype(mx.float32)

    def top(self, hidden: mx.array, k: int, vocab: int) -> tuple[mx.array, mx.array]:
        return top(self.head(hidden)[:, :vocab], k)

    def head_rows(self, ids: mx.array) -> mx.array:
        return self.matrix[ids].astype(mx.float32)


def ends(folder: Path, checkpoint: Checkpoint) -> Ends:
    """The ends a golden drafter was run with; an EAGLE-3 drafter has its own."""
    if checkpoint.kind == "eagle":
        embedding = checkpoint.weights["embed_tokens.weight"]
        return Ends(embedding, embedding)
    vectors = mx.load(str(folder / "vectors.safetensors"))
    return Ends(vectors["embed"], vectors["head"])


def commit(tokens: Any, features: mx.array, start: int = 0, following: int = 0) -> Commit:
    """The commit of `tokens` (or of that many nondescript ones), which stand at `start` and after."""
    tokens = tuple([0] * tokens if isinstance(tokens, int) else tokens)
    return Commit(tokens, features, following, start)


def check(folder: Path) -> dict[str, float]:
    """The largest error of every vector over all cases of a drafter folder."""
    checkpoint = read(folder)
    target = ends(folder, checkpoint)
    errors: dict[str, float] = {}
    for given in cases(folder):
        if checkpoint.kind == "eagle":
            ours = eagle_vectors(Eagle(checkpoint, target), given)
        else:
            ours = block_vectors((DSpine if checkpoint.kind == "dspine" else DFlash)(checkpoint, target), given)
        for name, value in ours.items():
            errors[name] = max(errors.get(name, 0.0), error(value, given[name]))
    return errors


def block_vectors(model: DFlash, given: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """What DFlash or DSpine compute in one pass over the context of a case."""
    features, anchor = given["target_hidden"][0], int(given["anchor"][0])
    drafter = model.new()
    drafter.observe(commit(len(features), features))
    tokens = drafter.propose(anchor, model.width, GREEDY, len(features)).tokens
    trace = model.forward(mx.array([anchor] + [model.mask] * model.width), drafter.contexts, len(features))
    ours = {"final_hidden": trace.final, "base_logits": model.target.head(trace.final[:, 1:])}
    return ours | (_spine_vectors(model, trace, anchor, tokens) if isinstance(model, DSpine) else {})


def _spine_vectors(model: DSpine, trace: Trace, anchor: int, selected: mx.array) -> dict[str, mx.array]:
    pre, injection = trace.pre[0, 1:], model.network.injection
    ids, _ = top(model.target.head(trace.final[0, 1:]), model.top_k)
    row = model.row_scores(pre, ids, anchor, "pairs")
    table = [mx.stack([row(i, mx.array(k)) for k in range(model.top_k)]) for i in range(model.width)]
    before = mx.concatenate([mx.array([anchor], mx.int32), selected[:-1]])
    refined = model.refinement(pre, model.refinement.feature(pre), model.code(before))
    return {
        "layer_outputs": mx.stack(trace.layers),
        "pre_injection": trace.pre,
        "layer_features": mx.stack([injection.feature(h, i) for i, h in enumerate(trace.layers)]),
        "candidates": ids[None],
        "transition_scores": mx.stack(table)[None],
        "selected": selected[None],
        "refined_logits_along_selected": model.target.head(refined)[None],
    }


def eagle_vectors(model: Eagle, given: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """A greedy chain after the context of a case."""
    features, following = given["target_hidden"][0], given["next_tokens"][0].tolist()
    position, network, drafter = len(features), model.network, model.new()
    drafter.observe(commit([0, *following[:-1]], features))
    tokens = drafter.propose(following[-1], given["draft_tokens"].shape[1], GREEDY, position).tokens
    h, context, guesses, hiddens = drafter.tail[None], drafter.context.view(), None, []
    for i, token in enumerate(mx.concatenate([mx.array(following[-1:]), tokens[:-1]])):
        h, guesses = network.layer.step(model.embed(token[None]), h, context, guesses, position - 1 + i)
        hiddens.append(h)
    hidden = mx.concatenate(hiddens, axis=1)
    return {
        "draft_tokens": tokens[None],
        "draft_hidden": hidden,
        "draft_logits": network.lm_head(network.norm(hidden)),
    }
