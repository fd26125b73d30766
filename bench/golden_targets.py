"""Compares targets with hidden states and logits that an independent implementation computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from bench.golden_vectors import cases, error
from lisa.target import Target

CHUNKS = (0, 1, 2, 3, 7)
"""Prompt tokens a forward; 0 is the whole prompt at once."""


def check(folder: Path) -> dict[str, float]:
    """The largest error of every vector over all cases and all ways of reading: whole, in chunks, token by token."""
    target = Target.load(folder)
    errors: dict[str, float] = {}
    for given in cases(folder):
        tokens = given["input_ids"][0]
        for forwards in (*(_chunks(tokens, size) for size in CHUNKS), _rounds(tokens)):
            hidden, logits = _read(target, tokens, forwards)
            for name, value in (("hidden_states", hidden), ("logits", logits)):
                errors[name] = max(errors.get(name, 0.0), error(value, given[name]))
    return errors


def _chunks(tokens: mx.array, size: int) -> Iterator[tuple[mx.array, bool]]:
    for start in range(0, len(tokens), size or len(tokens)):
        yield tokens[start : start + (size or len(tokens))], False


def _rounds(tokens: mx.array) -> Iterator[tuple[mx.array, bool]]:
    """One token a round, each opened and committed as decoding does."""
    for i in range(len(tokens)):
        yield tokens[i : i + 1], True


def _read(target: Target, tokens: mx.array, forwards: Iterator[tuple[mx.array, bool]]) -> tuple[mx.array, mx.array]:
    """(hidden states [layers + 1, 1, T, H] with the last one normed, logits [1, T, V])."""
    state, rows, logits = target.new_state(), [], []
    for piece, round in forwards:
        if round:
            state.open(len(piece))
        out, features = target.forward(piece, state, range(target.layers), rows=len(piece))
        if round:
            state.commit(len(piece))
        assert features is not None
        rows.append(features.reshape(len(piece), target.layers, target.hidden))
        logits.append(out)
    layers = mx.concatenate(rows).swapaxes(0, 1)
    hidden = mx.concatenate([target.embed(tokens)[None], layers[:-1], target.norm(layers[-1:])])
    return hidden[:, None], mx.concatenate(logits)[None]
