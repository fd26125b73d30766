"""python -m bench.plain [--pairs N] [--save]: is plain decoding as fast as it can be, and does lookup pay?

SmolLM2-135M on this machine, fast BLAS. Arms in one process over the same weights: mlx-lm's stream_generate, Lisa
without a drafter, and Lisa with prompt lookup on a prompt whose answer copies it. Parity first: a speed of another text
means nothing. The last line is one JSON document; --save appends it to bench/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lisa import blas

CHAT = "Explain in a few sentences how rain forms."
COPY = (
    "Repeat the following text exactly, word for word:\n\nThe quick brown fox jumps over the lazy dog. "
    "The five boxing wizards jump quickly. Pack my box with five dozen liquor jugs. "
    "How vexingly quick daft zebras jump."
)
TOKENS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    in_use = blas.use()  # before anything brings MLX in
    from lisa import measure
    from lisa.loader import load

    loaded = {name: load("smollm2-135m", drafter=name) for name in ("none", "ngram")}
    arms, texts = _arms(loaded)
    for pair in (("mlx-lm", "none"), ("none copy", "ngram copy")):
        if texts[pair[0]] != texts[pair[1]]:
            print(f"no parity between {pair[0]} and {pair[1]}: no speed is reported", file=sys.stderr)
            return 1
    measured = measure.alternate(arms, options.pairs)
    report = {
        "bench": "plain",
        "command": "python -m bench.plain --save",
        "date": time.strftime("%Y-%m-%d"),
        "model": "smollm2-135m",
        "machine": measure.machine(),
        "blas": str(in_use),
        "commit": measure.commit(),
        "pairs": options.pairs,
        "tokens": TOKENS,
        "tok_s": {name: round(statistics.median(values), 2) for name, values in measured.items()},
        "ratio": {
            "plain to mlx-lm": asdict(measure.ratio(measured["none"], measured["mlx-lm"])),
            "ngram to plain, copying": asdict(measure.ratio(measured["ngram copy"], measured["none copy"])),
        },
    }
    for name, value in report["tok_s"].items():  # type: ignore[attr-defined]
        print(f"{name:12} {value:8.2f} tok/s")
    if options.save:
        measure.save(report)
    print(json.dumps(report))
    return 0


def _arms(loaded: dict[str, Any]) -> tuple[dict[str, Callable[[], float]], dict[str, list[int]]]:
    """Each arm returns tokens/s of one run; the texts are those of a first run of each."""
    runs: dict[str, Callable[[], Iterator[int]]] = {
        "mlx-lm": lambda: _theirs(loaded["none"], CHAT),
        "none": lambda: _ours(loaded["none"], CHAT),
        "none copy": lambda: _ours(loaded["none"], COPY),
        "ngram copy": lambda: _ours(loaded["ngram"], COPY),
    }
    texts = {name: list(run()) for name, run in runs.items()}
    return {name: lambda run=run: _speed(run()) for name, run in runs.items()}, texts  # type: ignore[misc]


def _speed(tokens: Iterator[int]) -> float:
    """Tokens/s after the first one, which prefill pays for."""
    next(tokens)
    began = time.perf_counter()
    count = sum(1 for _ in tokens)
    return count / (time.perf_counter() - began)


def _ours(loaded: Any, prompt: str, count: int = TOKENS) -> Iterator[int]:
    from lisa.types import Request, Tokens

    tokens = tuple(loaded.tokenizer.render([{"role": "user", "content": prompt}]))
    request = Request(tokens, max_tokens=count, reader=loaded.tokenizer.reader(prompt=tokens))
    for event in loaded.engine.session().run(request):
        if isinstance(event, Tokens):
            yield from event.ids


def _theirs(loaded: Any, prompt: str) -> Iterator[int]:
    from mlx_lm import stream_generate
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokens = loaded.tokenizer.render([{"role": "user", "content": prompt}])
    # Ids that never come: both sides run to the same length.
    wrapper = TokenizerWrapper(loaded.tokenizer.fast)
    wrapper._eos_token_ids = set()
    for response in stream_generate(loaded.engine.target.model, wrapper, tokens, max_tokens=TOKENS):
        yield response.token


if __name__ == "__main__":
    sys.exit(main())
