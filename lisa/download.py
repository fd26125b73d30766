"""A repository's weight files into the Hub's cache, so that a cut download goes on where it stopped.

huggingface_hub keeps nothing of a file it could not finish. The large files are therefore fetched here, one after the
other, into the places of its cache; it then finds them there and does the rest.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lisa.errors import DamagedModel, HubError

Bar = Callable[[int, int], None]
"""Called with the bytes that are here and the bytes of all."""

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # never *.py, never pickles
NOT_FILES = ("*/*", "consolidated*")  # a second copy of the weights in some repositories
PART = ".lisa.incomplete"  # the Hub's own tools know *.incomplete as something unfinished
_ATTEMPTS = 5  # without a byte of progress
_BLOCK = 1 << 20
_RESERVE = 1 << 30  # bytes of disk to leave free


@dataclass(frozen=True)
class File:
    """`blob` is its name in the cache: the sha256 of a `large` file, the git id of another."""

    name: str
    bytes: int
    blob: str
    large: bool


@dataclass(frozen=True)
class Plan:
    """What a repository holds that Lisa needs, at one commit. `folder` is the repository's in the cache."""

    repo: str
    commit: str
    files: tuple[File, ...]
    folder: Path
    endpoint: str | None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def here(self) -> int:
        """Bytes that need not be fetched, halves of files included."""
        return sum(self._here(file) for file in self.files)

    @property
    def missing(self) -> int:
        return self.bytes - self.here

    def _here(self, file: File) -> int:
        if (self.folder / "blobs" / file.blob).is_file():
            return file.bytes
        part = self.part(file)
        return min(part.stat().st_size, file.bytes) if part.is_file() else 0

    def part(self, file: File) -> Path:
        return self.folder / "blobs" / (file.blob + PART)


def repo_folder(repo: str, cache: Path | None) -> Path:
    """Where the Hub's cache keeps a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name: str = repo_folder_name(repo_id=repo, repo_type="model")
    return (cache or Path(constants.HF_HUB_CACHE)) / name


def plan(repo: str, revision: str | None, endpoint: str | None, cache: Path | None) -> Plan:
    """Ask the Hub what there is: one request. Raises what huggingface_hub raises."""
    from huggingface_hub import HfApi, constants

    endpoint = endpoint or constants.ENDPOINT
    info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or ():
        if any(fnmatch(each.rfilename, form) for form in FILES) and not _left_out(each.rfilename):
            sha256 = each.lfs.sha256 if each.lfs else None
            files.append(File(each.rfilename, each.size or 0, str(sha256 or each.blob_id), sha256 is not None))
    return Plan(repo, str(info.sha), tuple(files), repo_folder(repo, cache), endpoint)


def _left_out(name: str) -> bool:
    return any(fnmatch(name, form) for form in NOT_FILES)


def check_disk(missing: int, folder: Path) -> None:
    """Raises HubError where `missing` bytes and a reserve do not fit the disk of `folder`, which need not exist yet."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if missing and missing + _RESERVE > free:
        raise HubError(
            f"{missing / 1e9:.1f} GB are to be downloaded and {free / 1e9:.1f} GB are free in {place} (1 GB is left "
            "alone): free space (lisa list, lisa rm), or move the cache with HF_HOME"
        )


def fetch(plan: Plan, bar: Bar | None = None) -> None:
    """Fetch the large files that are missing, going on with halves of them, and check each one's sha256.

    Raises HubError (disk), DamagedModel (another sha256, twice), or what the Hub's client raises.
    """
    check_disk(plan.missing, plan.folder)
    blobs = plan.folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    _forget_older(plan, blobs)
    for file in plan.files:
        if file.large and not (blobs / file.blob).is_file():
            _fetch(plan, file, bar)


def _forget_older(plan: Plan, blobs: Path) -> None:
    """Halves of files that the repository has replaced since."""
    wanted = {plan.part(file) for file in plan.files}
    for part in set(blobs.glob("*" + PART)) - wanted:
        part.unlink(missing_ok=True)


def _fetch(plan: Plan, file: File, bar: Bar | None) -> None:
    from huggingface_hub.utils import WeakFileLock

    target, part = plan.folder / "blobs" / file.blob, plan.part(file)
    with WeakFileLock(part.with_suffix(".lock")):
        for _ in range(2):  # a half kept from before may be wrong: once more from the beginning
            if target.is_file():  # another process was first
                return
            _complete(plan, file, part, bar)
            if sha256(part) == file.blob:
                part.replace(target)
                part.with_suffix(".lock").unlink(missing_ok=True)
                return
            part.unlink()
    raise DamagedModel(f"{file.name} of {plan.repo} arrived damaged twice (another sha256): try again later")


def _complete(plan: Plan, file: File, part: Path, bar: Bar | None) -> None:
    """Append to `part` until it is whole, however often the connection is cut."""
    tries, most = 0, _size(part)
    while _size(part) != file.bytes:
        error: Exception | None = None
        try:
            _receive(plan, file, part, bar)
        except Exception as raised:
            if not _transient(raised):
                raise
            error = raised
        tries = 0 if _size(part) > most else tries + 1
        most = max(most, _size(part))
        if tries == _ATTEMPTS:
            raise error or HubError(f"the Hub sends no more of {file.name} of {plan.repo}: try again later")
        if error is not None:
            _pause()


def _receive(plan: Plan, file: File, part: Path, bar: Bar | None) -> None:
    """One request for what is missing. The server may ignore the range, or say that there is no such range."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    have = _size(part)
    if have > file.bytes:
        part.unlink()
        have = 0
    url = hf_hub_url(plan.repo, file.name, revision=plan.commit, endpoint=plan.endpoint)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with get_session().stream("GET", url, headers=headers) as response:
        if response.status_code == 416 and have:
            part.unlink(missing_ok=True)
            return
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        start = _start(response)
        with part.open("r+b" if have else "wb") as sink:
            sink.truncate(min(start, have))
            sink.seek(0, 2)
            if sink.tell() != start:
                return  # an answer that begins past what is here is of no use
            others = plan.here - have
            for block in response.iter_bytes():  # as they come: a cut must lose none
                sink.write(block)
                if sink.tell() > file.bytes:  # not the file that was announced
                    sink.truncate(0)
                    raise DamagedModel(f"{file.name} of {plan.repo} is longer than announced: try again later")
                if bar is not None:
                    bar(others + sink.tell(), plan.bytes)


def _start(response: Any) -> int:
    """Where the answer begins in the file; at 0 where the range was ignored."""
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else 0


def _transient(error: Exception) -> bool:
    """Cut, slow or refused connections, told by name: the Hub's client changed its HTTP library between versions."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "Timeout"})


def _pause() -> None:
    time.sleep(1)


def _size(file: Path) -> int:
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
