"""The commands about models and the machine: pull, list, show, rm, doctor. cli.py puts them into `lisa`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lisa import bandwidth, catalog, doctor, download, fit, hub, store
from lisa.errors import LisaError, NotCached, UsageError
from lisa.memory import cpu, gigabytes, machine
from lisa.screen import is_terminal, say


def names() -> list[str]:
    return [entry.name for entry in catalog.entries()]


Model = Annotated[str, typer.Argument(help="Catalogue name, folder or Hub id.", autocompletion=names)]
Quantisation = Annotated[str | None, typer.Option(help="One of those `lisa models` lists.")]
Offline = Annotated[bool, typer.Option("--offline", help="Open no connection.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def pull(
    model: Model,
    drafter: Annotated[str, typer.Option(help="auto, none, a kind or a Hub id.")] = "auto",
    quantisation: Quantisation = None,
    offline: Offline = False,
    yes: Yes = False,
) -> None:
    """Download a model and its drafter. A cut download goes on where it stopped."""
    if not fetch(model, drafter, quantisation, offline, agrees_or_refuses(yes)):
        raise typer.Exit(1)
    say(f"{model} is here")


def agrees_or_refuses(yes: bool) -> Callable[[str], bool]:
    """Asks in a terminal; elsewhere nobody can agree, which is a UsageError."""

    def agrees(question: str) -> bool:
        if yes:
            return True
        if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
            raise UsageError(f"{question} Nobody can be asked here: lisa pull --yes downloads it")
        return confirmed(question)

    return agrees


def confirmed(question: str) -> bool:
    """A y/n question on stderr; typer.confirm would put a space on stdout."""
    say(f"{question} [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def fetch(model: str, drafter: str, quantisation: str | None, offline: bool, agrees: Callable[[str], bool]) -> bool:
    """`store.pull` with a bar in a terminal. Ctrl-C leaves with 130."""
    try:
        with _bar() as bar:
            return store.pull(
                model,
                drafter=drafter,
                quantisation=quantisation,
                offline=offline,
                machine=machine(),
                agrees=agrees,
                say=say,
                bar=bar,
            )
    except KeyboardInterrupt:
        say(f"interrupted; lisa pull {model} goes on from here")
        raise typer.Exit(130) from None


@contextmanager
def _bar() -> Iterator[download.Bar | None]:
    """A bar with rate and time left, where somebody can see it."""
    if not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[int, TaskID] = {}

    def bar(done: int, total: int) -> None:
        if total not in tasks:
            progress.start()
            tasks[total] = progress.add_task("", total=total, completed=done)
        progress.update(tasks[total], completed=done)

    try:
        yield bar
    finally:
        if tasks:
            progress.stop()


def list_models() -> None:
    """List the models and drafters on this machine. Opens no connection."""
    found = list(store.rows())
    for row in found:
        state = "" if row.state == "whole" else f"  {row.state}: lisa pull {row.name}"
        print(f"{row.name:<42} {gigabytes(row.bytes):>9}  {row.what}{state}")
    if not found:
        say("nothing is here yet; lisa models lists what can be had, lisa pull fetches it")


def show(
    model: Model,
    quantisation: Quantisation = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens the memory is told for.")] = fit.CONTEXT,
    check: Annotated[
        bool, typer.Option("--check", help="Read every file, and compare the hashes that are known.")
    ] = False,
) -> None:
    """Describe a model: structure, drafters, licence, size, memory, and the speed it can reach here."""
    facts = _facts(model, quantisation, context)
    if check:
        facts["check"] = _check(model, quantisation)
    for name, value in facts.items():
        for i, line in enumerate(value if isinstance(value, list) else [value]):
            print(f"{name if i == 0 else '':<12}{line}")


def _facts(model: str, quantisation: str | None, context: int) -> dict[str, str | list[str]]:
    entry, has = catalog.find(model), machine()
    weights = catalog.choose(entry, quantisation) if entry else None
    folder = _folder(model, entry, weights)
    config = hub.read_json(folder / "config.json") if folder else None
    facts: dict[str, str | list[str]] = {"model": f"{entry.title} ({entry.family})" if entry else model}
    if config:
        facts["structure"] = store.structure(config)
    if entry:
        facts["licence"] = entry.licence
        facts["context"] = f"{entry.context} tokens"
        facts["comes as"] = [f"{w.quantisation}, {gigabytes(w.bytes)}{_from(w)}" for w in entry.weights]
        facts["drafters"] = [_drafter(drafter) for drafter in entry.drafters] or ["none known; ngram needs none"]
    facts["here"] = f"yes, {folder}" if folder else f"no: lisa pull {model}"
    if folder and config:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        need = fit.of_config(config, size, has)
    elif entry and weights:
        need = fit.of_entry(entry, weights, has)
    else:
        return facts
    first = entry.drafters[0].bytes if entry and entry.drafters else None
    room = fit.room(has)
    verdict = _verdict(need, room, context, entry.context if entry else None)
    memory = [need.words(context), f"{room.name} here is {gigabytes(room.bytes)}: {verdict}"]
    facts["memory"] = memory + ([f"its drafter takes {gigabytes(first)} more"] if first else [])
    facts["ceiling"] = _ceiling(need, context)
    return facts


def _verdict(need: fit.Need, room: fit.Room, context: int, most: int | None) -> str:
    longest = need.longest(room)
    if need.fits(room, context):
        return "fits" if longest is None or (most and longest >= most) else f"fits, up to {longest} tokens"
    return f"does not fit; {longest} tokens would" if longest else "does not fit"


def _ceiling(need: fit.Need, context: int) -> str:
    speed = bandwidth.known(cpu(), hub.cache_folder())
    if speed is None:
        return "unknown: lisa bench measures this machine's bandwidth"
    most = bandwidth.ceiling(speed.bytes, need.weights, need.state, need.kv, context)
    return f"{most:.1f} tokens/s of plain decoding at {context} tokens ({speed}); a drafter can pass it"


def _from(weights: catalog.Weights) -> str:
    return f" from {weights.repo or (weights.wheel.requirement if weights.wheel else 'Lisa itself')}"


def _drafter(drafter: catalog.Drafter) -> str:
    size = f", {gigabytes(drafter.bytes)}" if drafter.bytes else ""
    return f"{drafter.kind}{size} from {drafter.repo or 'Lisa itself'}"


def _folder(model: str, entry: catalog.Entry | None, weights: catalog.Weights | None) -> Path | None:
    """Where the model is on this machine. Raises DamagedModel, UnknownModel."""
    try:
        if entry is None or weights is None:
            return hub.resolve(model, offline=True, known=names()).path
        if weights.wheel is not None:
            made = hub.cache_folder().glob(hub.converted_name(entry.name, "*", weights.wheel.sha256))
            return next(made, None)
        place = weights.repo or str(catalog.models_folder() / str(weights.folder))
        return hub.resolve(place, offline=True).path
    except NotCached:
        return None


def _check(model: str, quantisation: str | None) -> str:
    entry = catalog.find(model)
    folder = _folder(model, entry, catalog.choose(entry, quantisation) if entry else None)
    if folder is None:
        raise NotCached(f"{model} is not on this machine: lisa pull {model}")
    hub.check_folder(folder)
    hashed = store.hashed(folder)
    if wrong := [name for name, right in hashed.items() if not right]:
        raise LisaError(f"damaged: {', '.join(wrong)}; lisa rm {model}, then lisa pull {model}")
    return f"whole; {len(hashed)} files have their sha256" if hashed else "whole; no sha256 is known for its files"


def rm(model: Model, yes: Yes = False) -> None:
    """Remove a model and, for a catalogue name, its drafters from this machine."""
    paths = store.removable(model)
    for path in paths:
        say(f"  {path}")
    if not yes:
        if not is_terminal(sys.stdin):
            raise UsageError("nobody can be asked here: lisa rm --yes removes it")
        if not confirmed(f"Remove this, {gigabytes(store.size(paths))}?"):
            raise typer.Exit(1)
    freed = store.size(paths)
    store.remove(paths)
    say(f"removed {gigabytes(freed)}")


def check_machine(
    kernels: Annotated[bool, typer.Option("--kernels", help="Only Lisa's kernels: which run, and why not.")] = False,
    model: Annotated[str | None, typer.Option(help="With --kernels: load it, and say what none computes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False,
) -> None:
    """Check Python, MLX, memory, caches, downloads and versions. Loads no model; leaves with 1 on a problem."""
    if model is not None and not kernels:
        raise UsageError("--model goes with --kernels: lisa doctor --kernels --model NAME")
    found = []
    for finding in _kernels(model) if kernels else doctor.findings():
        found.append(finding)
        if not as_json:
            mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.verdict]
            mend = f"\n{'':25}-> {finding.mend}" if finding.mend else ""
            print(f"{mark} {finding.name:<16} {finding.says}{mend}", flush=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    if any(finding.verdict == "problem" for finding in found):
        raise typer.Exit(1)


def _kernels(model: str | None) -> Iterator[doctor.Finding]:
    if model is not None:
        from lisa import api

        with api.load(model, drafter="none", say=say) as loaded:
            uncovered = loaded.uncovered()
        yield from (doctor.Finding(loaded.name, "note", f"no kernel for {line}") for line in uncovered)
    yield from doctor.kernels(machine().metal)
