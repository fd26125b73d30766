"""Which drafter runs with a target, and why.

Asked for by name, kind or place, a drafter runs or the load fails. `auto` takes the best kind that can be had and says
what it passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lisa import catalog, hub
from lisa.drafters import LEARNED, PLAIN
from lisa.drafters.checkpoint import kind_of, read
from lisa.drafters.composed import Composed
from lisa.errors import BadDrafter, LisaError, UsageError
from lisa.target import Target
from lisa.types import Drafter

Say = Callable[[str], None]

LOOKUP = "+ngram"


@dataclass(frozen=True)
class Pairing:
    """`kind` with "+ngram" where prompt lookup stands in front; `why` it was chosen; `new` makes a session's drafter.

    `bytes` of weights are in the learned drafter's `folder`. `words` are lines for the user: where values came from,
    and warnings.
    """

    kind: str
    why: str
    new: Callable[[], Drafter]
    bytes: int = 0
    words: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True)
class Options:
    """How learned drafters are loaded. `config` is a JSON file of fields that win over the checkpoint's own."""

    bits: int | None = None
    config: Path | None = None
    chunk: int = 512
    offline: bool = False


@dataclass(frozen=True)
class _Source:
    """A drafter that could be had: a folder, or a repository to fetch."""

    kind: str
    place: str
    why: str
    overrides: Mapping[str, Any]
    provenance: str


def pair(
    asked: str, target: Target, folder: Path, entry: catalog.Entry | None, options: Options, say: Say | None = None
) -> Pairing:
    """The drafter for `target`, whose files are in `folder`.

    `asked`: auto, none, ngram, dspine, dflash, eagle, a folder or a Hub id; any of the learned ones with "+ngram".
    Raises BadDrafter, UsageError, or what hub.resolve raises.
    """
    if options.bits not in (None, 4, 8):
        raise UsageError(f"a drafter can be packed to 8 or 4 bits, not {options.bits}")
    name, lookup = asked.removesuffix(LOOKUP), asked.endswith(LOOKUP)
    if lookup and name in (*PLAIN, ""):
        raise UsageError(f"{asked!r}: prompt lookup goes in front of a learned drafter; ngram alone is --drafter ngram")
    chosen = _named(name, target, folder, entry, options, say)
    if not lookup or chosen.kind in PLAIN:
        return chosen
    return replace(chosen, kind=chosen.kind + LOOKUP, new=lambda: Composed(chosen.new()))


def place(asked: str, folder: Path, entry: catalog.Entry | None) -> tuple[Path | None, int]:
    """Where the learned drafter that `pair` tries first is on this machine, and the bytes the catalogue announces.

    A folder that is not there yet for one still to be fetched; None where no learned drafter is asked for.
    """
    name = asked.removesuffix(LOOKUP)
    if name in PLAIN:
        return None, 0
    sources = [*_beside(folder), *_catalogued(entry)]
    kinds = LEARNED if name == "auto" else [name]
    places = [source.place for kind in kinds for source in sources if source.kind == kind]
    if not places and name in ("auto", *LEARNED):
        return None, 0
    first = places[0] if places else name
    announced = next((d.bytes for d in (entry.drafters if entry else ()) if d.repo == first), None)
    try:
        return hub.resolve(first, offline=True).path, announced or 0
    except LisaError:  # `pair` says what is wrong with it
        return Path(first), announced or 0


def drafter_kind(folder: Path) -> str | None:
    """The kind of drafter a folder declares itself to be, None for anything else."""
    try:
        return kind_of(folder)
    except BadDrafter:
        return None


def _named(
    name: str, target: Target, folder: Path, entry: catalog.Entry | None, options: Options, say: Say | None
) -> Pairing:
    sources = [*_beside(folder), *_catalogued(entry)]
    if name == "auto":
        return _best(sources, target, options, say)
    if name in PLAIN:
        _no_options(name, options)
        return Pairing(name, "asked for", PLAIN[name])
    if name in LEARNED:
        fitting = [source for source in sources if source.kind == name]
        if not fitting:
            raise BadDrafter(f"no {name} drafter is known for {target.name}; give --drafter its folder or Hub id")
        return _load(fitting[0], target, options, say)
    if "/" not in name and not Path(name).exists():
        known = ", ".join(("auto", *PLAIN, *LEARNED))
        raise UsageError(f"unknown drafter {name!r}: it is one of {known}, a folder or a Hub id")
    return _load(_Source("", name, "asked for", {}, ""), target, options, say)


def _no_options(name: str, options: Options) -> None:
    given = [f"--drafter-{field}" for field in ("bits", "config") if getattr(options, field) is not None]
    if given:
        raise UsageError(f"{' and '.join(given)} mean nothing to the drafter {name}: leave them out")


def _beside(folder: Path) -> Iterator[_Source]:
    """Drafters in the model's own folder, as drafters/NAME/config.json."""
    for config in sorted(folder.glob("drafters/*/config.json")):
        yield _Source(kind_of(config.parent), str(config.parent), "in the model's folder", {}, "")


def _catalogued(entry: catalog.Entry | None) -> Iterator[_Source]:
    for drafter in entry.drafters if entry else ():
        given = {"target_layer_ids": drafter.taps, "mask_token_id": drafter.mask, "block_size": drafter.block}
        overrides = {
            key: list(value) if isinstance(value, tuple) else value for key, value in given.items() if value is not None
        }
        why = f"the catalogue's for {entry.name}" if entry else ""
        place = drafter.repo or str(catalog.models_folder() / str(drafter.folder))
        yield _Source(drafter.kind, place, why, overrides, f"catalogue: {drafter.provenance}")


def _best(sources: list[_Source], target: Target, options: Options, say: Say | None) -> Pairing:
    passed_over: list[str] = []
    for kind in LEARNED:
        for source in sources:
            if source.kind != kind:
                continue
            try:
                return _load(source, target, options, say)
            except LisaError as error:
                passed_over.append(f"{kind} passed over: {error}")
    _no_options("ngram", options)
    why = "; ".join(passed_over) or f"no trained drafter is known for {target.name}"
    return Pairing("ngram", why, PLAIN["ngram"])


def _load(source: _Source, target: Target, options: Options, say: Say | None) -> Pairing:
    resolved = hub.resolve(source.place, offline=options.offline, progress=say)
    overrides, provenance = dict(source.overrides), source.provenance
    if options.config is not None:
        overrides |= _fields(options.config)
        provenance = f"{provenance}, {options.config}" if source.overrides else str(options.config)
    checkpoint = read(resolved.path, overrides, provenance, resolved.name)
    model = LEARNED[checkpoint.kind](checkpoint, target, bits=options.bits, chunk=options.chunk)
    origins = ", ".join(f"{field} from {origin}" for field, origin in checkpoint.provenance.items())
    words = [f"drafter {checkpoint.name} ({checkpoint.kind}): {origins}"]
    words += _bounds(checkpoint.name, model, target)
    if model.warning:
        words.append(model.warning)
    size = sum(file.stat().st_size for file in resolved.path.glob("*.safetensors"))
    return Pairing(checkpoint.kind, source.why, model.new, size, tuple(words), resolved.path)


def _bounds(name: str, model: Any, target: Target) -> Iterator[str]:
    if model.limit is not None and (target.context is None or model.limit < target.context):
        yield f"drafter {name} drafts up to position {model.limit}; past it decoding goes on plainly"
    windows = [window for window in getattr(model, "windows", ()) if window is not None]
    if windows:
        yield f"drafter {name} looks back {max(windows)} tokens in {len(windows)} of its layers"


def _fields(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--drafter-config {file} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"--drafter-config {file} must hold a JSON object")
    return fields
