"""python -m bench.serve [MODEL] [--clients 1,2,4,8] [--save]: what a client sees under load, beside mlx-lm's server.

Each arm is a server process of its own: Lisa without a drafter, with one at a fixed width, and with the width left to
the pacer; and mlx-lm's server on the same weights and the same BLAS, which batches the rows of its requests into one
forward where Lisa takes turns. Clients start together, stream one answer each, and the arms take turns within a repeat.
Reported as it is: medians over the repeats of the time to the first token, the gap between tokens, the tokens/s of all
clients together, and the memory the process holds. The last line is one JSON document; --save appends it to
bench/results.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lisa import blas

PROMPTS = [
    "Explain in a few sentences how rain forms.",
    "Repeat this exactly: one two three, one two three, one two three, one two three.",
    "Name seven rivers and the sea each flows into.",
    "Write a Python function that reverses a list, and say how it works.",
    "Why is the sky blue in the day and red in the evening?",
    "Copy this list and sort it: pear, apple, fig, plum, apple, cherry, date, lime.",
    "Summarise: The cat sat on the mat. The dog sat on the log. The cat and the dog are friends.",
    "Give me a recipe for pancakes.",
]
THEIRS = "from lisa import blas; blas.use(); from mlx_lm.server import main; main()"


@dataclass(frozen=True)
class Arm:
    """A server: its name of the model, and its command, in which PORT stands for the port."""

    model: str
    command: list[str]


@dataclass
class Stream:
    """One client's answer: when it asked, when each piece came, and the tokens the server counted: of the answer, of
    the prompt, and those of the prompt that were not read again."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt: int = 0
    cached: int = 0

    @property
    def first(self) -> float:
        return self.pieces[0] - self.asked

    @property
    def gap(self) -> float:
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--width", type=int, default=3, help="of the arm with a fixed width")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    in_use = blas.use()  # before anything brings MLX in
    from lisa import measure
    from lisa.loader import load

    loaded = load(options.model, drafter="none")
    folder, name = loaded.folder, loaded.name
    del loaded
    clients = [int(n) for n in options.clients.split(",")]
    arms = _arms(options, folder, name)
    report = {
        "bench": "serve",
        "command": f"python -m bench.serve {options.model} --clients {options.clients} --save",
        "date": time.strftime("%Y-%m-%d"),
        "model": name,
        "machine": measure.machine(),
        "blas": str(in_use),
        "commit": measure.commit(),
        "tokens": options.tokens,
        "repeats": options.repeats,
        "load": run(arms, clients, options.tokens, options.repeats),
    }
    for arm, by_clients in report["load"].items():  # type: ignore[attr-defined]
        for n, row in by_clients.items():
            print(
                f"{arm:22} {n:>2} clients  first token {row['first']:.2f} s  gap {1000 * row['gap']:.0f} ms  "
                f"{row['tokens_per_second']:.1f} tok/s together  {row['memory'] / 1e9:.2f} GB"
            )
    if options.save:
        measure.save(report)
    print(json.dumps(report))
    return 0


def _arms(options: argparse.Namespace, folder: Path, name: str) -> dict[str, Arm]:
    """The servers by what they are called in the report."""
    ours = [sys.executable, "-m", "lisa", "serve", "--model", options.model, "--port", "PORT", "--max-concurrent", "8"]
    drafted = [*ours, "--drafter", options.drafter]
    theirs = [sys.executable, "-c", THEIRS, "--model", str(folder), "--port", "PORT", "--log-level", "ERROR"]
    return {
        "lisa, no drafter": Arm(name, [*ours, "--drafter", "none"]),
        f"lisa, width {options.width}": Arm(name, [*drafted, "--width", str(options.width)]),
        "lisa, paced": Arm(name, drafted),
        "mlx-lm": Arm("default_model", theirs),
    }


def run(arms: dict[str, Arm], clients: list[int], tokens: int, repeats: int) -> dict[str, dict[int, Any]]:
    """Medians for each arm and number of clients."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {arm: {n: [] for n in clients} for arm in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            with serving(arm.command) as (port, process):
                ask(port, arm.model, said("Hello."), 4)  # the first request pays for what is made once
                for n in clients:
                    found[name][n].append(measured(load(port, arm.model, n, tokens)) | {"memory": memory(process.pid)})
    return {
        arm: {n: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for n, rows in by.items()}
        for arm, by in found.items()
    }


def measured(streams: list[Stream]) -> dict[str, float]:
    seconds = max(s.pieces[-1] for s in streams) - min(s.asked for s in streams)
    return {
        "first": statistics.median(s.first for s in streams),
        "gap": statistics.median(s.gap for s in streams),
        "tokens_per_second": sum(s.tokens for s in streams) / seconds,
    }


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(port) if word == "PORT" else word for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    threading.Thread(target=lambda: process.stderr and process.stderr.read(), daemon=True).start()
    try:
        _wait(port, process)
        yield port, process
    finally:
        process.terminate()
        process.wait(60)


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"a server ended before it answered: exit code {process.returncode}")


def load(port: int, model: str, clients: int, tokens: int) -> list[Stream]:
    """That many clients at once, each with a prompt of its own."""
    streams: list[Stream] = []
    ready = threading.Barrier(clients)

    def client(i: int) -> None:
        ready.wait()
        # A number in front: no server has read the prompt before.
        streams.append(ask(port, model, said(f"{clients}.{i}: {PROMPTS[i % len(PROMPTS)]}"), tokens))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(streams) < clients:
        raise SystemExit("a client failed")
    return streams


def said(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def ask(port: int, model: str, messages: list[dict[str, Any]], tokens: int, tools: Any = None) -> Stream:
    """The streamed answer of chat completions."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"tools": tools} if tools else {}),
    }
    stream = Stream(time.perf_counter())
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        delta = chunk["choices"][0].get("delta", {}) if chunk.get("choices") else {}
        if any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")):
            stream.pieces.append(time.perf_counter())
        if usage := chunk.get("usage"):
            stream.tokens, stream.prompt = usage["completion_tokens"], usage["prompt_tokens"]
            stream.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return stream


def memory(process: int) -> int:
    """Resident bytes; on a Mac what Metal holds is not all in this number."""
    said = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=True)
    return 1024 * int(said.stdout)


if __name__ == "__main__":
    sys.exit(main())
