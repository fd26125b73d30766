"""python -m bench.tiny.evaluate [FOLDER] [--prompts 30]: how often lisa-tiny is right on held-out prompts, at T=0.

Everything goes through `lisa.load`. A line a kind, then one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import lisa
from bench.tiny import checks, language

SEED = 2_000_003
MODES = (None, "low", "medium")


def held_out(kind: str, n: int) -> list[language.Sample]:
    """The first `n` different held-out prompts of a kind; the same ones each time."""
    found: dict[str, language.Sample] = {}
    for sample in language.samples(SEED, held_out=True, shares={kind: 1.0}):
        found.setdefault(sample.prompt, sample)
        if len(found) == n:
            break
    return list(found.values())


def ask(model: Any, sample: language.Sample, effort: str | None) -> Any:
    """The model's greedy answer."""
    messages = language.conversation(sample, effort)
    return model.chat(
        messages,
        sampling=lisa.Sampling(temperature=0.0),
        max_tokens=256,
        tools=sample.tools or None,
        thinking=effort is not None,
        effort=effort,
    ).read()


def judge(sample: language.Sample, effort: str | None, answer: Any) -> dict[str, bool]:
    """What is asked of an answer: ended by itself, right, thought if asked to; calls and JSON that parse."""
    verdict = {
        "right": answer.reason == "stop" and sample.right(answer.text),
        "thinks as asked": bool(answer.reasoning.strip()) == (effort is not None),
        "ends": answer.reason == "stop",
    }
    last = sample.parts[-1] if sample.parts else sample
    if last.kind == "json":
        verdict["fits the schema"] = _fits(answer.text, last.key["schema"])
    if last.kind == "tool_calls":
        verdict["calls as needed"] = bool(checks.parsed_calls(answer.text)[0]) == bool(last.key["calls"])
    return verdict


def _fits(text: str, schema: Any) -> bool:
    try:
        return checks.fits(json.loads(text), schema)
    except ValueError:
        return False


def evaluate(model: Any, kinds: Sequence[str], n: int, wrong: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, rates): each over `n` prompts, which take turns at no thinking, low and medium effort.

    `wrong` mistakes a kind are shown on standard error.
    """
    for kind in kinds:
        asked: Counter[str] = Counter()
        passed: Counter[str] = Counter()
        left = wrong
        for i, sample in enumerate(held_out(kind, n)):
            effort = MODES[i % len(MODES)]
            answer = ask(model, sample, effort)
            verdict = judge(sample, effort, answer)
            for name, good in (*verdict.items(), (f"right, {effort or 'no thinking'}", verdict["right"])):
                asked[name] += 1
                passed[name] += good
            if not verdict["right"] and left:
                left -= 1
                shown = sample.messages[-1]["content"], effort, answer.reasoning, answer.text, sample.answer
                print(kind, *map(repr, shown), sep="\n  ", file=sys.stderr)
        yield kind, {"prompts": n, **{name: round(passed[name] / asked[name], 3) for name in asked}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="lisa-tiny")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--wrong", type=int, default=0, help="mistakes of each kind to show")
    given = parser.parse_args()
    kinds: dict[str, dict[str, Any]] = {}
    with lisa.load(given.folder, drafter="none") as model:
        for kind, rates in evaluate(model, tuple(language.KINDS), given.prompts, given.wrong):
            print(f"{kind:14} {rates['right']:.3f}", flush=True)
            kinds[kind] = rates
    print(json.dumps({"model": given.folder, "right": _mean(kinds, "right"), "kinds": kinds}))


def _mean(kinds: dict[str, dict[str, Any]], name: str) -> float:
    rates = [rates[name] for rates in kinds.values() if name in rates]
    return round(sum(rates) / len(rates), 3)


if __name__ == "__main__":
    main()
