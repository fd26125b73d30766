"""python -m bench.tiny.prompts FILE [--train N]: prompts of lisa-tiny's language, for `lisa bench` and `lisa train`.

Held-out ones of every kind, a few each; or with --train N prompts that are not held out, in the language's own shares.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.tiny import language
from bench.tiny.evaluate import MODES, held_out

EACH = 4
SEED = 3_000_017


def line(sample: language.Sample, effort: str | None) -> dict[str, Any]:
    messages = language.conversation(sample, effort)
    options: dict[str, Any] = {"kind": sample.kind, "messages": messages, "thinking": effort is not None}
    options |= {"effort": effort} if effort else {}
    return options | ({"tools": list(sample.tools)} if sample.tools else {})


def measured() -> Iterator[dict[str, Any]]:
    """EACH held-out prompts of every kind, at no thinking, low and medium effort in turn."""
    for kind in language.KINDS:
        for i, sample in enumerate(held_out(kind, EACH)):
            yield line(sample, MODES[i % len(MODES)])


def trained(n: int) -> Iterator[dict[str, Any]]:
    """`n` different prompts that are not held out."""
    rng = random.Random(SEED)
    seen: set[str] = set()
    for sample in language.samples(SEED, held_out=False):
        if sample.prompt not in seen:
            seen.add(sample.prompt)
            yield line(sample, rng.choice((None, None, "low", "medium")))
        if len(seen) == n:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--train", type=int, default=0)
    given = parser.parse_args()
    lines = trained(given.train) if given.train else measured()
    given.file.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")


if __name__ == "__main__":
    main()
