"""Trains a drafter on a target's own answers (docs/training.md). Importing this brings no MLX in.

prompts -> answers of the target -> its features on disk -> a network -> a drafter folder with a card.
"""

from __future__ import annotations

from collections.abc import Callable

from lisa import blas
from lisa.api import import_mlx
from lisa.train.settings import Settings, Trained

__all__ = ["Settings", "Trained", "train"]


def train(settings: Settings, say: Callable[[str], None]) -> Trained:
    """Train until the time is used up or Ctrl-C; the same call goes on where it stopped. `say` takes progress lines.

    Raises LisaError.
    """
    blas.use()
    import_mlx()
    from lisa.train.run import run

    return run(settings, say)
