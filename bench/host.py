"""python -m bench.host [--save]: what a round costs beside the model, from propose to emit.

A scripted target (what a forward makes is there already: the best token of each row) and a scripted drafter,
vocabulary 50,000, 16 rows, T=0. What is left is the loop: draft, state, verdict, the one synchronisation, ledger,
events. The argmax of the rows is a part of the target's forward (on Metal of the head's kernel) and is measured apart.
So is building the graph of a real model's forward. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from lisa import blas

VOCAB = 50_000
WIDTH = 15
ROUNDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    in_use = blas.use()
    from lisa import measure

    report = {
        "bench": "host",
        "command": "python -m bench.host --save",
        "date": time.strftime("%Y-%m-%d"),
        "machine": measure.machine(),
        "blas": str(in_use),
        "commit": measure.commit(),
        "vocab": VOCAB,
        "rows": WIDTH + 1,
        "round_ms": round(1e3 * statistics.median(rounds(ROUNDS)), 3),
        "argmax_ms": round(1e3 * argmax(), 3),
        "graph_ms": {str(rows): round(1e3 * graph(rows), 3) for rows in (1, WIDTH + 1)},
    }
    if options.save:
        measure.save(report)
    print(json.dumps(report))
    return 0


def rounds(count: int) -> list[float]:
    """Seconds of each round that delivers 16 tokens."""
    import mlx.core as mx

    from lisa.engine import Engine
    from lisa.pace import Fixed
    from lisa.state import State
    from lisa.types import Commit, Proposal, Request, Sampling, Tokens

    class Target:
        """Says token 7 at every row."""

        vocab, context, layers, hidden, name = VOCAB, None, 1, 1, "scripted"

        def __init__(self) -> None:
            self.best = mx.full((WIDTH + 1,), 7, mx.int32)
            mx.eval(self.best)

        def new_state(self) -> State:
            return State([])

        def forward(
            self, tokens: mx.array, state: State, taps: Sequence[int] = (), rows: int = 1, best: bool = False
        ) -> Any:
            assert best  # T=0 asks for no logits
            state.advance(tokens.shape[0])
            return self.best[:rows], None

    class Drafter:
        """Proposes token 7 fifteen times, which is always right."""

        source, taps, width, limit, length, nbytes = "scripted", (), WIDTH, None, 0, 0

        def observe(self, commit: Commit) -> None:
            self.length += len(commit.tokens)

        def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
            return Proposal(mx.full((width,), 7, mx.int32), width, self.source)

        def rewind(self, length: int) -> int:
            return min(length, self.length)

    engine: Any = Engine(Target(), Drafter, lambda: Fixed(WIDTH))  # type: ignore[arg-type]
    request = Request((1,), max_tokens=1 + (WIDTH + 1) * (count + 20))
    times, began = [], time.perf_counter()
    for event in engine.session().run(request):
        if isinstance(event, Tokens):
            if len(event.ids) == WIDTH + 1:
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
    return times[20:]


def argmax() -> float:
    """Seconds MLX takes for the argmax of a round's rows."""
    import mlx.core as mx

    logits = mx.random.normal((WIDTH + 1, VOCAB))
    mx.eval(logits)
    times = []
    for _ in range(100):
        began = time.perf_counter()
        mx.eval(mx.argmax(logits, axis=-1))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def graph(rows: int) -> float:
    """Seconds to build, not to run, SmolLM2's forward over that many rows."""
    import mlx.core as mx

    from lisa.loader import load

    target = load("smollm2-135m", drafter="none").engine.target
    times = []
    for _ in range(20):
        state = target.new_state()
        target.forward(mx.array([1, 2, 3], mx.int32), state, rows=0)
        mx.eval(state.arrays())
        state.open(rows)
        began = time.perf_counter()
        target.forward(mx.array([1] * rows, mx.int32), state, (1, 15, 28), rows)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
