"""The layout of a golden folder (tests/golden/README.md): config.json, model.safetensors, vectors.safetensors."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

TOLERANCE = 2e-4
"""Of the largest absolute reference value, or of 1 where that is smaller."""


def cases(folder: Path) -> list[dict[str, mx.array]]:
    """The vectors of each case, by name."""
    vectors = mx.load(str(folder / "vectors.safetensors"))
    numbers = sorted({key.split(".")[0] for key in vectors if "." in key})
    return [{k.split(".", 1)[1]: v for k, v in vectors.items() if k.startswith(f"{n}.")} for n in numbers]


def error(ours: mx.array, reference: mx.array) -> float:
    """Largest difference over max(1, largest reference); for integers, how many differ."""
    if ours.shape != reference.shape:
        return float("inf")
    if not mx.issubdtype(reference.dtype, mx.floating):
        return float((ours != reference).sum())
    largest = float(mx.abs(ours - reference).max() / mx.maximum(1.0, mx.abs(reference).max()))
    return largest if largest == largest else float("inf")
