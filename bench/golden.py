"""python -m bench.golden FOLDER...: compares Lisa with golden numbers of targets and drafters.

Prints one JSON line a folder with the largest error of each vector, and exits 1 when one is past tolerance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lisa import blas


def main(folders: list[str]) -> int:
    if not folders:
        print("usage: python -m bench.golden FOLDER...", file=sys.stderr)
        return 2
    blas.use(strict=blas.STRICT_POSSIBLE)
    passed = True
    for folder in folders:
        report = check(Path(folder))
        print(json.dumps(report))
        passed = passed and report["passed"] is True
    return 0 if passed else 1


def check(folder: Path) -> dict[str, object]:
    """{folder, kind, tolerance, errors: {vector: largest error}, passed}."""
    from bench import golden_drafters, golden_targets
    from bench.golden_vectors import TOLERANCE, cases

    target = any("input_ids" in given for given in cases(folder))
    kind, errors = ("target", golden_targets.check(folder)) if target else ("drafter", golden_drafters.check(folder))
    passed = all(value <= TOLERANCE for value in errors.values())
    return {"folder": folder.name, "kind": kind, "tolerance": TOLERANCE, "errors": errors, "passed": passed}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
