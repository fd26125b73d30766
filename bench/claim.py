"""python -m bench.claim: the runs that settle Lisa's claim, on a Mac with Metal.

Qwen3-8B and Qwen3.8-27B at 4 bits: DSpine, and EAGLE-3 where one is published, against plain decoding, after
contexts of about 1k, 8k and 32k tokens. Each report is appended to bench/results. Downloads what is missing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from lisa import blas
from lisa.memory import machine

PAIRS = {"qwen3-8b": ("dspine", "eagle"), "qwen3.8-27b": ("dspine",)}
CONTEXTS = (0, 1_000, 8_000, 32_000)
"""Tokens of text in front of each prompt; 0 is the prompts as they are."""

FILLER = "The river turns twice before it meets the sea, and each turn has a name that the fishermen keep. "
_TOKENS_EACH = 20


def main() -> int:
    if not machine().metal:
        print("this bench needs a Mac with Apple silicon", file=sys.stderr)
        return 2
    blas.use()
    from lisa import measure

    lines = [json.loads(line) for line in (Path(measure.__file__).parent / "prompts.jsonl").read_text().splitlines()]
    for model, drafters in PAIRS.items():
        for context in CONTEXTS:
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
                for line in lines:
                    text = FILLER * (context // _TOKENS_EACH) + line["prompt"]
                    file.write(json.dumps({"kind": line["kind"], "prompt": text}) + "\n")
                file.flush()
                settings = measure.Settings(tokens=128)
                report = measure.run(model, drafters, Path(file.name), settings, say=print)
            report |= {"model": f"{model}, {context // 1000}k of context", "command": "python -m bench.claim"}
            print(*measure.table(report), sep="\n")
            measure.save(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
