"""python -m bench.ablate DSPINE OUT: the same drafter with its writes zeroed, so that slots no longer hear one another.

`lisa bench MODEL --drafters dspine,OUT` then says what the injection is worth.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from lisa import blas

blas.use()

import mlx.core as mx  # noqa: E402


def ablate(folder: Path, out: Path) -> int:
    """The number of tensors zeroed; packed ones become zero with their scales and biases."""
    shutil.copytree(folder, out)
    zeroed = 0
    for file in out.glob("*.safetensors"):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        writes = [name for name in tensors if name.startswith("injection.writes.")]
        tensors |= {name: mx.zeros_like(tensors[name]) for name in writes}
        mx.eval(tensors)
        file.unlink()
        mx.save_safetensors(str(file), tensors, {"format": "mlx"})
        zeroed += len(writes)
    return zeroed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dspine", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    print(f"{ablate(given.dspine, given.out)} tensors zeroed in {given.out}")


if __name__ == "__main__":
    main()
