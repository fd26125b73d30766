"""What `lisa doctor` says: whether this machine can run Lisa well, and the command that mends what is wrong.

Loads no model and opens no connection. MLX is asked in a process of its own, which may hang or die without harm.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from lisa import bandwidth, blas, download, fit, hub, store, verdicts
from lisa.memory import Machine, cpu, gigabytes, machine

Verdict = Literal["ok", "note", "problem"]

TESTED = {"mlx": "0.32.4", "mlx-lm": "0.32.2", "transformers": "5.24.0", "huggingface-hub": "2.4.0"}
"""Versions Lisa was tested with; pyproject.toml says the same."""

PYTHON = (3, 10)
_SECONDS = 12  # for MLX to say what it sees
_DISK = 20 * 10**9  # bytes free below which a large model will not go down

_PROBE = """
import json, mlx.core as mx
gpu = mx.default_device() == mx.gpu
info = dict(mx.device_info())
mx.eval(mx.ones((4, 4)) @ mx.ones((4, 4)))
print(json.dumps({"gpu": gpu, "info": {k: v for k, v in info.items() if isinstance(v, (int, str))}}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `mend` is the command or step that helps, "" where nothing is wrong."""

    name: str
    verdict: Verdict
    says: str
    mend: str = ""


def findings(cache: Path | None = None) -> Iterator[Finding]:
    """Everything looked at, in the order things depend on one another. Under 20 seconds."""
    has = machine()
    seen = probe()
    yield _python()
    yield _mlx(seen)
    yield _metal(has, seen)
    yield _memory(has, seen)
    yield _bandwidth()
    if not has.metal:
        yield _blas()
    yield from kernels(has.metal)
    yield _cache_folder("Lisa's cache", hub.cache_folder())
    yield _cache_folder("the Hub's cache", download.repo_folder("x/y", cache).parent)
    yield from _models(cache)
    yield _token()
    yield from _versions()


def kernels(metal: bool) -> Iterator[Finding]:
    """Which of Lisa's Metal kernels run on this machine, and why not where not."""
    if not metal:
        yield Finding("kernels", "note", "no Metal device: MLX's own ops run")
        return
    stored = verdicts.stored()
    if not stored:
        yield Finding("kernels", "note", "not checked yet: the first model that is loaded does it")
    for what, verdict in stored.items():
        name, _, shapes = what.split(" ", 2)
        yield Finding(name, "ok" if verdict.used else "note", f"{verdict} ({shapes})")


def probe(run: Callable[..., Any] = subprocess.run) -> dict[str, Any]:
    """What MLX says of the device; {"error": line} where it cannot."""
    try:
        done = run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_SECONDS} seconds"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"it ended with signal or code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < PYTHON:
        return Finding("Python", "problem", f"{version} is too old", "install Python 3.10 or newer")
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Finding("Python", "problem", "it is built for Intel", "install an arm64 Python: uv python install")
    return Finding("Python", "ok", f"{version} at {sys.executable}")


def _mlx(seen: dict[str, Any]) -> Finding:
    if error := seen.get("error"):
        return Finding("MLX", "problem", f"it cannot run: {error}", "pip install --force-reinstall mlx")
    return Finding("MLX", "ok", f"{_version('mlx')}, computes on {'Metal' if seen['gpu'] else 'the CPU'}")


def _metal(has: Machine, seen: dict[str, Any]) -> Finding:
    if not has.metal:
        return Finding("Metal", "note", "not on this machine: models run on the CPU")
    if "error" in seen or not seen["gpu"]:
        return Finding("Metal", "problem", "MLX does not use it", "pip install --force-reinstall mlx")
    return Finding("Metal", "ok", str(seen["info"].get("device_name", "there")))


def _memory(has: Machine, seen: dict[str, Any]) -> Finding:
    recommended = seen.get("info", {}).get("max_recommended_working_set_size")
    room = fit.room(has, recommended)
    says = f"{gigabytes(has.memory)}, of which {gigabytes(room.bytes)} for models ({room.name})"
    return Finding("memory", "ok", says)


def _bandwidth() -> Finding:
    known = bandwidth.known(cpu(), hub.cache_folder())
    if known is None:
        return Finding("bandwidth", "note", "not measured yet", "lisa bench smollm2-135m")
    return Finding("bandwidth", "ok", str(known))


def _blas() -> Finding:
    chosen = blas.use()
    slow = chosen.name == "wheel" and platform.machine() == "x86_64"
    return Finding("BLAS", "note" if slow else "ok", str(chosen), "pip install 'lisa[cpu]'" if slow else "")


def _cache_folder(name: str, folder: Path) -> Finding:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    says = f"{folder}, {gigabytes(free)} free"
    if not os.access(place, os.W_OK):
        return Finding(name, "problem", f"{says}, not writable", f"chown -R $USER '{place}'")
    if free < _DISK:
        return Finding(name, "note", f"{says}: too little for a large model", "lisa list, then lisa rm NAME")
    return Finding(name, "ok", says)


def _models(cache: Path | None) -> Iterator[Finding]:
    rows = list(store.rows(cache))
    for row in rows:
        if row.state == "incomplete":
            says = f"{row.name} is half here, {gigabytes(row.bytes)}"
            yield Finding("download", "note", says, f"lisa pull {row.name} goes on, lisa rm {row.name} gives up")
        elif row.state == "damaged":
            mend = f"lisa rm {row.name}, then lisa pull {row.name}"
            yield Finding("download", "problem", f"{row.name} is damaged", mend)
    yield Finding(
        "models", "ok", f"{sum(row.state == 'whole' and row.folder.is_dir() for row in rows)} on this machine"
    )


def _token() -> Finding:
    from huggingface_hub import constants

    # Not get_token(), which may open a connection to renew one.
    known = bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file()
    says = "logged in to the Hub" if known else "not logged in to the Hub; only gated models need it"
    return Finding("account", "ok", says)


def _versions() -> Iterator[Finding]:
    for name, tested in TESTED.items():
        found = _version(name)
        if found is None:
            yield Finding(name, "problem", "not installed", f"pip install {name}=={tested}")
        elif found.split(".")[:2] != tested.split(".")[:2]:
            yield Finding(
                name, "note", f"{found}, tested is {tested}", f"pip install {name}=={tested} if it misbehaves"
            )
        else:
            yield Finding(name, "ok", f"{found}, tested is {tested}")


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None
