"""Drafters, one file each. They hear of committed tokens and propose the next ones; none knows the engine.

`PLAIN` need no weights. `LEARNED` are loaded from a checkpoint, the best kind first; their `new()` makes the drafter of
one session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lisa.drafters.dflash import DFlash
from lisa.drafters.dspine import DSpine
from lisa.drafters.eagle import Eagle
from lisa.drafters.ngram import Ngram
from lisa.drafters.none import Nothing
from lisa.types import Drafter

PLAIN: dict[str, Callable[[], Drafter]] = {"none": Nothing, "ngram": Ngram}
LEARNED: dict[str, Callable[..., Any]] = {"dspine": DSpine, "dflash": DFlash, "eagle": Eagle}
