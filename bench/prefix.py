"""python -m bench.prefix [MODEL] [--turns 20] [--save]: what an agent's conversation costs to go on with.

A scripted conversation of that many turns, the same for every arm: a question, a tool call, its result, an answer. Each
turn asks twice, for the call and for the answer, with all that came before, and without old thinking, as clients send
it. Each arm is a server process of its own: Lisa, Lisa that keeps nothing (--cache 0), and mlx-lm's server on the same
weights and BLAS. Told are the share of prompt tokens that were read again, by the server's own usage, and the time to
the first token, by turn. The last line is one JSON document; --save appends it to bench/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.serve import THEIRS, Arm, Stream, ask, serving
from lisa import blas

CITIES = ("Velda", "Maro", "Kestel", "Luma", "Dorn", "Pesk", "Rufa", "Tilt")
WEATHER = ("sunny", "cold", "wet", "windy", "warm", "dry")
SYSTEM = "You are a helpful assistant. Use the tools you are given, and answer briefly."


def _tool(name: str, about: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": "The name of a city."}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [_tool("get_weather", "The weather of a city."), _tool("find_country", "The country of a city.")]


def conversation(turns: int) -> Iterator[list[dict[str, Any]]]:
    """What each request sends: two for each turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        city, weather = CITIES[turn % len(CITIES)], WEATHER[turn % len(WEATHER)]
        messages.append({"role": "user", "content": f"Question {turn}: what is the weather of {city}?"})
        yield list(messages)
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": json.dumps({"weather": weather})})
        yield list(messages)
        messages.append({"role": "assistant", "content": f"The weather of {city} is {weather}."})


def run(arm: Arm, turns: int, tokens: int) -> dict[str, Any]:
    """One arm's conversation: for each request its prompt tokens, those not read again, and milliseconds to the first
    token."""
    with serving(arm.command) as (port, _):
        ask(port, arm.model, [{"role": "user", "content": "Hello."}], 2)  # it pays for what is made once
        asked = [ask(port, arm.model, messages, tokens, tools=TOOLS) for messages in conversation(turns)]
    return {
        "prompt_tokens": [stream.prompt for stream in asked],
        "cached_tokens": [stream.cached for stream in asked],
        "ttft_ms": [round(1e3 * stream.first, 1) for stream in asked],
        "read_again": round(_read_again(asked), 4),
        "ttft_median_ms": round(1e3 * statistics.median(stream.first for stream in asked), 1),
        "ttft_last_ms": round(1e3 * statistics.median(stream.first for stream in asked[-4:]), 1),
    }


def _read_again(asked: list[Stream]) -> float:
    """The part of what a request repeats of the one before that is read again; the first request repeats nothing."""
    pairs = list(pairwise(asked))
    repeated = sum(before.prompt for before, _ in pairs)
    return sum(max(0, before.prompt - now.cached) for before, now in pairs) / repeated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="lisa-tiny")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    in_use = blas.use()  # before anything brings MLX in
    from lisa import measure
    from lisa.loader import load

    loaded = load(options.model, drafter="none")
    folder, name = loaded.folder, loaded.name
    del loaded
    arms = {arm: run(what, options.turns, options.tokens) for arm, what in _arms(options.model, folder, name).items()}
    report = {
        "bench": "prefix",
        "command": f"python -m bench.prefix {options.model} --turns {options.turns} --save",
        "date": time.strftime("%Y-%m-%d"),
        "model": name,
        "machine": measure.machine(),
        "blas": str(in_use),
        "commit": measure.commit(),
        "turns": options.turns,
        "arms": arms,
    }
    for arm, row in arms.items():
        print(
            f"{arm:18} read again {100 * row['read_again']:.0f} %  first token {row['ttft_median_ms']:.0f} ms, "
            f"in the last turns {row['ttft_last_ms']:.0f} ms"
        )
    if options.save:
        measure.save(report)
    print(json.dumps(report))
    return 0


def _arms(model: str, folder: Path, name: str) -> dict[str, Arm]:
    ours = [sys.executable, "-m", "lisa", "serve", "--model", model, "--port", "PORT", "--drafter", "none"]
    theirs = [sys.executable, "-c", THEIRS, "--model", str(folder), "--port", "PORT", "--log-level", "ERROR"]
    return {
        "lisa": Arm(name, ours),
        "lisa, cache off": Arm(name, [*ours, "--cache", "0"]),
        "mlx-lm": Arm("default_model", theirs),
    }


if __name__ == "__main__":
    sys.exit(main())
