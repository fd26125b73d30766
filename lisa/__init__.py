"""Lisa: local inference with parallel drafting. Names load on first use, so that MLX waits for the choice of a BLAS."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.api import Answer, Model, Reply, load
    from lisa.errors import LisaError
    from lisa.types import Done, Progress, Sampling, Stats, TokenLogprob, Tokens

__version__ = "0.1.0"

_HOME = {
    "load": "lisa.api",
    "Model": "lisa.api",
    "Reply": "lisa.api",
    "Answer": "lisa.api",
    "LisaError": "lisa.errors",
    "Sampling": "lisa.types",
    "Progress": "lisa.types",
    "Tokens": "lisa.types",
    "Done": "lisa.types",
    "Stats": "lisa.types",
    "TokenLogprob": "lisa.types",
}

__all__ = [
    "Answer",
    "Done",
    "LisaError",
    "Model",
    "Progress",
    "Reply",
    "Sampling",
    "Stats",
    "TokenLogprob",
    "Tokens",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lisa' has no attribute {name!r}")
    home = import_module(_HOME[name])
    value: object = getattr(home, name)
    globals()[name] = value  # `lisa.load` is also a submodule: the public name wins
    return value
