"""python -m bench.blas [--save]: plain decoding of SmolLM2-135M under each BLAS a CPU can use.

One process a BLAS (a process cannot change its own), three runs each in turn, medians of tokens/s. The last line is one
JSON document; --save appends it to bench/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

MODES = {"wheel": "mkl=False", "mkl": "", "mkl strict": "strict=True"}
TOKENS = 48

ONE = """
import sys
from lisa import blas
print(blas.use({arguments}), file=sys.stderr)
from bench.plain import CHAT, _ours, _speed
from lisa.loader import load
loaded = load("smollm2-135m", drafter="none")
list(zip(range(4), _ours(loaded, CHAT, {tokens})))
print(_speed(_ours(loaded, CHAT, {tokens})))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    from lisa import measure

    arms = {name: lambda arguments=arguments: _run(arguments) for name, arguments in MODES.items()}
    measured = measure.alternate(arms, 3)
    report = {
        "bench": "blas",
        "command": "python -m bench.blas --save",
        "date": time.strftime("%Y-%m-%d"),
        "model": "smollm2-135m",
        "machine": measure.machine() | {"blas": "each in turn"},
        "commit": measure.commit(),
        "tokens": TOKENS,
        "tok_s": {name: round(statistics.median(values), 2) for name, values in measured.items()},
        "ratio": {name: asdict(measure.ratio(measured[name], measured["wheel"])) for name in ("mkl", "mkl strict")},
    }
    if options.save:
        measure.save(report)
    print(json.dumps(report))
    return 0


def _run(arguments: str) -> float:
    code = ONE.format(arguments=arguments, tokens=TOKENS)
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
