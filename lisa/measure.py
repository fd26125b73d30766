"""What `lisa bench` runs: drafters compared on one target, in one process, after a parity check.

Arms take turns, so that whatever slows the machine slows all of them; speeds are medians over the pairs, and a ratio
comes with a bootstrap interval. Plain decoding runs in its fastest mode. A drafter whose text is wrong gets no speed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx

from lisa import blas
from lisa.engine import Session
from lisa.errors import UsageError
from lisa.loader import Loaded, load, redraft
from lisa.memory import cpu
from lisa.prompts import read as read_file
from lisa.types import Commit, Done, Request, Rule, Sampling, Stats, Tokens

Say = Callable[[str], None]

Watch = Callable[[Mapping[str, Sequence[Any]]], None]
"""Told what each arm has measured so far, after every measurement."""

PLAIN = "none"
NEAR = 1e-2
"""A first difference where the target's two best logits are closer than this is a near tie, not a wrong token: a fast
BLAS rounds a row differently by the number of rows beside it."""


@dataclass(frozen=True)
class Prompt:
    kind: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """`tokens` to generate a prompt; `pairs` of measurements an arm. `width` None is paced.

    Under the rejection `rule` the text is another at every width, so parity is checked under the coupled one, and a
    paced run is given no seed.
    """

    tokens: int = 32
    pairs: int = 9
    temperature: float = 0.0
    seed: int = 0
    rule: Rule = "coupled"
    width: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise UsageError(f"the rule is coupled or rejection, not {self.rule!r}")

    def sampling(self) -> Sampling:
        seed = None if self.rule == "rejection" and self.width is None else self.seed
        return Sampling(temperature=self.temperature, seed=seed, rule=self.rule)


@dataclass(frozen=True)
class Ratio:
    """How much faster one arm is than another, and the 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Run:
    """One arm over all prompts: decoded tokens, seconds of decoding, and the stats of each prompt."""

    kinds: tuple[str, ...]
    stats: tuple[Stats, ...]

    def speed(self, kind: str | None = None) -> float:
        """Tokens/s after each prompt's first token."""
        chosen = [s for k, s in zip(self.kinds, self.stats, strict=True) if kind in (None, k)]
        return sum(s.completion_tokens - 1 for s in chosen) / sum(s.decode for s in chosen)


def run(
    model: str,
    drafters: Sequence[str],
    file: Path | None,
    settings: Settings,
    *,
    quantisation: str | None = None,
    offline: bool = False,
    say: Say,
    frontiers: Sequence[int] = (),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Load `model` and bench it, at each context length of `frontiers` too. Raises LisaError."""
    began = time.perf_counter()
    loaded = load(model, drafter=PLAIN, quantisation=quantisation, offline=offline, say=say)
    return bench(loaded, drafters, file, settings, time.perf_counter() - began, say, frontiers=frontiers, watch=watch)


def save(report: Mapping[str, Any]) -> Path:
    """Append a report to bench/results/<machine>.jsonl of the checkout, or of the current folder outside one."""
    checkout = Path(__file__).parent.parent
    folder = (checkout if (checkout / "bench" / "LOG.md").is_file() else Path.cwd()) / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    described = report["machine"]
    words = f"{described['system']} {described['cpu']} {described['cores']} cores".lower()
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', words).strip('-')}.jsonl"
    with path.open("a", encoding="utf-8") as results:
        results.write(json.dumps(report) + "\n")
    return path


def bench(
    loaded: Loaded,
    drafters: Sequence[str],
    file: Path | None,
    settings: Settings,
    load_s: float,
    say: Say,
    *,
    frontiers: Sequence[int] = (),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Compare `drafters` with plain decoding on `loaded`'s target. Raises UsageError for an unusable prompt file.

    The report: {model, machine, commit, prompts_sha256, settings, parity, load_s, arms, ratio, interval, kinds,
    bandwidth, frontiers}.
    """
    _check_frontiers(loaded, frontiers, settings)
    digest, prompts = read_prompts(loaded, file)
    arms = {PLAIN: redraft(loaded, PLAIN, say=say)}
    arms |= {name: redraft(loaded, name, width=settings.width, say=say) for name in drafters if name != PLAIN}
    coupled = replace(settings, rule="coupled")
    texts = {name: [_text(arm, prompt, coupled) for prompt in prompts] for name, arm in arms.items()}
    parity = {name: _parity(loaded, prompts, texts[PLAIN], texts[name]) for name in arms if name != PLAIN}
    sound = [name for name in arms if name == PLAIN or not parity[name]["wrong"]]
    for name in arms.keys() - set(sound):
        say(f"{name} gives another text than plain decoding: its speed is not reported")

    def turn(name: str) -> Run:
        return _run(arms[name], prompts, settings)

    runs = alternate({name: lambda name=name: turn(name) for name in sound}, settings.pairs, say, watch)  # type: ignore[misc]
    speeds = {name: [run.speed() for run in measured] for name, measured in runs.items()}
    ratios = {name: ratio(speeds[name], speeds[PLAIN]) for name in sound if name != PLAIN}
    described = {name: _arm(arms[name], runs[name], prompts) for name in sound}
    return {
        "bench": "drafters",
        "command": _command(loaded.name, drafters, settings),
        "date": time.strftime("%Y-%m-%d"),
        "model": loaded.name,
        "machine": machine(),
        "blas": str(blas.use()),
        "commit": commit(),
        "prompts_sha256": digest,
        "settings": vars(settings),
        "parity": parity,
        "load_s": round(load_s, 3),
        "arms": described,
        "ratio": {name: round(r.value, 4) for name, r in ratios.items()},
        "interval": {name: [round(r.low, 4), round(r.high, 4)] for name, r in ratios.items()},
        "kinds": {kind: _kind(kind, runs) for kind in dict.fromkeys(p.kind for p in prompts)},
        "bandwidth": _bandwidth(loaded, described[PLAIN]["tok_s"]),
        "frontiers": [_frontier({name: arms[name] for name in sound}, prompts, n, settings, say) for n in frontiers],
    }


def read_speed(size: int = 1 << 28, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second this machine reads in a product of a matrix of `size` bytes with a vector, which is what a decode
    step is made of. The best of several: what the memory can do."""
    kind = mx.float32 if mx.default_device() == mx.cpu else mx.float16
    rows = size // 4096 // kind.size
    matrix, vector = mx.ones((rows, 4096), kind), mx.ones((1, 4096), kind)
    mx.eval(matrix, vector)
    times = []
    for _ in range(8):
        began = clock()
        mx.eval(vector @ matrix.T)
        times.append(clock() - began)
    return matrix.nbytes / min(times)


def _bandwidth(loaded: Loaded, tok_s: float) -> dict[str, Any]:
    """What plain decoding reads a token, as a share of what the machine can read. Context is left out: it is short."""
    measured = read_speed()
    read = loaded.engine.target.nbytes
    return {
        "bytes_s": round(measured),
        "bytes_per_token": read,
        "percent": round(100 * tok_s * read / measured, 1),
    }


def _check_frontiers(loaded: Loaded, frontiers: Sequence[int], settings: Settings) -> None:
    context = loaded.engine.target.context
    for length in frontiers:
        if length < 2 or (context is not None and length + settings.tokens > context):
            most = "" if context is None else f" and at most {context - settings.tokens} with {settings.tokens} tokens"
            raise UsageError(f"a context of {length} cannot be measured here: it is at least 2{most}")


def _frontier(
    arms: Mapping[str, Loaded], prompts: Sequence[Prompt], length: int, settings: Settings, say: Say
) -> dict[str, Any]:
    """Each arm behind `length` tokens of context: the prompts one after the other, over and over."""
    say(f"context of {length} tokens")
    text = [token for prompt in prompts for token in prompt.tokens]
    prompt = Prompt("frontier", tuple((text * (length // len(text) + 1))[:length]))
    runs = alternate({n: lambda n=n: _run(arms[n], [prompt], settings) for n in arms}, 3)  # type: ignore[misc]
    answered = {n: [run for run in r if run.stats] for n, r in runs.items()}
    if not all(answered.values()):
        say(f"the model has nothing to say behind {length} tokens")
        return {"context": length, "tok_s": {}, "ttft_s": {}}
    return {
        "context": length,
        "tok_s": {n: round(statistics.median(run.speed() for run in r), 3) for n, r in answered.items()},
        "ttft_s": {n: round(statistics.median(run.stats[0].ttft for run in r), 3) for n, r in answered.items()},
    }


def _command(model: str, drafters: Sequence[str], settings: Settings) -> str:
    chosen = [f"--{field.name} {getattr(settings, field.name)}" for field in fields(settings)]
    usual = [f"--{field.name} {field.default}" for field in fields(settings)]
    options = [option for option, default in zip(chosen, usual, strict=True) if option != default]
    return " ".join(["lisa bench", model, "--drafters", ",".join(drafters), *options, "--save"])


def read_prompts(loaded: Loaded, file: Path | None) -> tuple[str, list[Prompt]]:
    """(sha256 of the file, its prompts rendered for the model), of lisa/prompts.py's format.

    Without a file it is the model's own prompts.jsonl where it has one, or the one that comes with Lisa.
    """
    own = loaded.folder / "prompts.jsonl"
    source = file or (own if own.is_file() else files("lisa") / "prompts.jsonl")
    found = read_file(source)
    if not found:
        raise UsageError(f"{source} holds no prompts")
    rendered = [Prompt(each.kind, tuple(each.render(loaded.tokenizer))) for each in found]
    return hashlib.sha256(source.read_bytes()).hexdigest(), rendered


def _generate(session: Session, loaded: Loaded, prompt: Prompt, settings: Settings) -> tuple[list[int], Stats]:
    reader = loaded.tokenizer.reader(prompt=prompt.tokens)
    request = Request(prompt.tokens, settings.sampling(), settings.tokens, loaded.tokenizer.eos, reader=reader)
    ids: list[int] = []
    stats = Stats()
    for event in session.run(request):
        if isinstance(event, Tokens):
            ids += event.ids
        elif isinstance(event, Done):
            stats = event.stats
    return ids, stats


def _text(loaded: Loaded, prompt: Prompt, settings: Settings) -> list[int]:
    return _generate(loaded.engine.session(), loaded, prompt, settings)[0]


def _run(loaded: Loaded, prompts: Sequence[Prompt], settings: Settings) -> Run:
    """Every prompt from a cold session, as a first question is."""
    stats = [_generate(loaded.engine.session(), loaded, prompt, settings)[1] for prompt in prompts]
    used = [(p.kind, s) for p, s in zip(prompts, stats, strict=True) if s.completion_tokens > 1]
    return Run(tuple(kind for kind, _ in used), tuple(s for _, s in used))


def _parity(
    loaded: Loaded, prompts: Sequence[Prompt], plain: Sequence[list[int]], other: Sequence[list[int]]
) -> dict[str, int]:
    """How many texts are equal, part at a near tie of the target, or are wrong."""
    counts = {"equal": 0, "near_ties": 0, "wrong": 0}
    for prompt, a, b in zip(prompts, plain, other, strict=True):
        if a == b:
            counts["equal"] += 1
        else:
            counts["near_ties" if _near(loaded, prompt, a, b) else "wrong"] += 1
    return counts


def _near(loaded: Loaded, prompt: Prompt, a: list[int], b: list[int]) -> bool:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    target = loaded.engine.target
    logits, _ = target.forward(mx.array([*prompt.tokens, *a[:at]], mx.int32), target.new_state())
    best = mx.sort(logits[0])[-2:]
    return bool((best[1] - best[0] < NEAR).item())


def _arm(loaded: Loaded, runs: Sequence[Run], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What one drafter did, pooled over all its runs."""
    stats = [s for run in runs for s in run.stats]
    rounds, accepted = sum(s.rounds for s in stats), sum(s.accepted for s in stats)
    proposed_at = _pooled([s.proposed_at for s in stats])
    accepted_at = _pooled([s.accepted_at for s in stats])
    drafted_rounds = proposed_at[0] if proposed_at else 0
    width = round(sum(proposed_at) / drafted_rounds) if drafted_rounds else 0
    mx.reset_peak_memory()
    draft_s, verify_s, per_token = _parts(loaded, prompts[0], width)
    round_s = sum(s.decode for s in stats) / max(1, rounds)
    return {
        "tok_s": round(statistics.median(run.speed() for run in runs), 3),
        "accepted": round((accepted + rounds) / max(1, rounds), 3),
        "by_position": [round(a / p, 3) for a, p in zip(accepted_at, proposed_at, strict=True)],
        "width": width,
        "round_ms": round(1e3 * round_s, 3),
        "draft_ms": round(1e3 * draft_s, 3),
        "verify_ms": round(1e3 * verify_s, 3),
        "host_ms": round(1e3 * max(0.0, round_s - draft_s - verify_s), 3),
        "ttft_ms": round(1e3 * statistics.median(s.ttft for s in stats), 2),
        "drafter_bytes": loaded.drafter_bytes,
        "drafter_kv_bytes_per_token": per_token,
        "peak_bytes": int(mx.get_peak_memory()),
    }


def _pooled(rows: Sequence[tuple[int, ...]]) -> list[int]:
    width = max((len(row) for row in rows), default=0)
    return [sum(row[i] for row in rows if i < len(row)) for i in range(width)]


def _parts(loaded: Loaded, prompt: Prompt, width: int) -> tuple[float, float, int]:
    """Seconds of one draft and of one verify forward at `width`, apart from one another, and the drafter's bytes a
    token of context. The rest of a round is the host's."""
    session = loaded.engine.session()
    target, drafter, state = loaded.engine.target, session.drafter, session.state
    tokens = mx.array(prompt.tokens, mx.int32)
    _, features = target.forward(tokens[:-1], state, drafter.taps, rows=0)
    mx.eval(state.arrays(), [] if features is None else features)
    last = prompt.tokens[-1]
    drafter.observe(Commit(prompt.tokens[:-1], features, last, 0))

    def draft() -> None:
        mx.eval(drafter.propose(last, width, Sampling(seed=0), state.length).tokens)

    def verify() -> None:
        rows = width + 1
        state.open(rows)
        logits, _ = target.forward(mx.array([last] * rows, mx.int32), state, drafter.taps, rows)
        mx.eval(mx.argmax(logits, axis=-1))
        state.commit(0)

    draft_s = _seconds(draft) if width else 0.0
    return draft_s, _seconds(verify), round(drafter.nbytes / max(1, drafter.length))


def _seconds(work: Callable[[], None]) -> float:
    """Median of 7, after two that compile."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _kind(kind: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    speeds = {name: [run.speed(kind) for run in measured] for name, measured in runs.items()}
    ratios = {name: ratio(values, speeds[PLAIN]) for name, values in speeds.items() if name != PLAIN}
    return {
        "tok_s": {name: round(statistics.median(values), 3) for name, values in speeds.items()},
        "ratio": {name: round(r.value, 4) for name, r in ratios.items()},
        "interval": {name: [round(r.low, 4), round(r.high, 4)] for name, r in ratios.items()},
    }


def alternate(
    arms: Mapping[str, Callable[[], Any]], pairs: int, say: Say | None = None, watch: Watch | None = None
) -> dict[str, list[Any]]:
    """Each arm's measurements; the arms take turns, and every second round runs them in reverse.

    An odd number of pairs gets one more: then the medians of all arms lie at the same place of the run, and a machine
    that slows down steadily slows them alike.
    """
    measured: dict[str, list[Any]] = {name: [] for name in arms}
    pairs += pairs % 2
    for i in range(pairs):
        if say is not None:
            say(f"pair {i + 1} of {pairs}")
        for name in list(arms)[:: 1 if i % 2 == 0 else -1]:
            measured[name].append(arms[name]())
            if watch is not None:
                watch(measured)
    return measured


def ratio(a: Sequence[float], b: Sequence[float], draws: int = 2000) -> Ratio:
    """Median of a over median of b; pairs are resampled together, since they ran side by side."""
    rng = random.Random(0)
    n = len(a)
    values = []
    for _ in range(draws):
        picked = [rng.randrange(n) for _ in range(n)]
        values.append(statistics.median(a[i] for i in picked) / statistics.median(b[i] for i in picked))
    values.sort()
    middle = statistics.median(a) / statistics.median(b)
    return Ratio(middle, values[int(0.025 * draws)], values[int(0.975 * draws) - 1])


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for people."""
    yield f"{report['model']}, {report['machine']['cpu']}, BLAS {report['machine']['blas']}"
    names = f"{'accepted':>9}{'draft':>8}{'verify':>8}{'TTFT':>8}"
    yield f"{'drafter':16}{'tok/s':>8}{'ratio':>8}  {'95 % interval':17}{names}"
    for name, arm in report["arms"].items():
        interval = report["interval"].get(name)
        sure = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
        yield (
            f"{name:16}{arm['tok_s']:8.2f}{report['ratio'].get(name, 1.0):8.3f}  {sure:17}{arm['accepted']:9.2f}"
            f"{arm['draft_ms']:6.1f}ms{arm['verify_ms']:6.1f}ms{arm['ttft_ms']:6.0f}ms"
        )
    if width := report.get("bandwidth"):
        read = f"{width['bytes_per_token'] / 1e9:.2f} GB a token, {width['percent']:.0f} % of the"
        yield f"plain decoding reads {read} {width['bytes_s'] / 1e9:.1f} GB/s measured here"
    for frontier in report.get("frontiers", ()):
        for name, speed in frontier["tok_s"].items():
            ttft = frontier["ttft_s"][name]
            yield f"  context {frontier['context']:<7} {name:16}{speed:8.2f} tok/s, TTFT {ttft:.2f} s"
    for kind, values in report["kinds"].items():
        ratios = ", ".join(f"{name} {value:.3f}" for name, value in values["ratio"].items())
        yield f"  {kind:12} {ratios}"


def machine() -> dict[str, Any]:
    """What a result depends on besides the code."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": "Metal" if mx.default_device() == mx.gpu else "CPU",
        "blas": str(blas.use()),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "transformers")},
    }


def commit() -> str:
    """The checkout's commit, "-dirty" when it has changes, "" outside a checkout."""
    folder = Path(__file__).parent.parent
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""
