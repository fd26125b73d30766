"""The BLAS that MLX's CPU backend calls.

MLX's Linux wheel carries a reference BLAS. Intel's MKL (the `mkl` package, an extra, proprietary licence, never
bundled), loaded with global symbols before MLX is imported, takes its place and multiplies matrices about forty times
faster. In strict mode it rounds a row the same whatever rows stand beside it, which is what makes speculative text
equal plain text bit for bit on a CPU; the wheel's own BLAS has that property too. On macOS none of this applies.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lisa.errors import UsageError

Name = Literal["mkl", "wheel", "accelerate"]

STRICT_POSSIBLE = sys.platform != "darwin"

_CBWR_AVX2_STRICT = (
    0x1000A  # MKL_CBWR_AVX2 | MKL_CBWR_STRICT (oneMKL developer reference, "Conditional Numerical Reproducibility")
)


@dataclass(frozen=True)
class Blas:
    """What is in use, whether its rows are bit-equal, and one line why when it is not the fastest."""

    name: Name
    strict: bool
    why: str = ""

    def __str__(self) -> str:
        label = f"{self.name}, strict" if self.strict else self.name
        return f"{label} ({self.why})" if self.why else label


_chosen: Blas | None = None  # the process has one BLAS: symbols cannot be unloaded


def use(*, mkl: bool = True, strict: bool = False) -> Blas:
    """Choose the BLAS of this process; the first call decides. Raises UsageError when strict is asked for too late."""
    global _chosen
    if _chosen is None:
        _chosen = _choose(mkl, strict)
    if strict and not _chosen.strict:
        raise UsageError(f"strict arithmetic must be chosen before anything is computed; in use is {_chosen}")
    return _chosen


def _choose(mkl: bool, strict: bool) -> Blas:
    if sys.platform == "darwin":
        return Blas("accelerate", False)
    if not mkl:
        return Blas("wheel", True, "MKL declined")
    if "mlx.core" in sys.modules:
        return Blas("wheel", True, "mlx was imported before lisa could load MKL")
    library = _find()
    if library is None:
        return Blas("wheel", True, "MKL is not installed: pip install 'lisa[cpu]' is several times faster")
    try:
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL if not strict else ctypes.RTLD_LOCAL)
        if strict and loaded.MKL_CBWR_Set(_CBWR_AVX2_STRICT) != 0:
            return Blas("wheel", True, "this processor has no strict MKL")
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, AttributeError) as error:
        return Blas("wheel", True, f"MKL could not be loaded: {error}")
    return Blas("mkl", strict)


def _find() -> Path | None:
    for folder in (Path(sys.prefix) / "lib", *(Path(p).parent.parent for p in sys.path if p.endswith("site-packages"))):
        for library in sorted(folder.glob("libmkl_rt.so*")):
            return library
    return None
