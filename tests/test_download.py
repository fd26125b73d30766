"""Downloads that are cut, resumed, changed or damaged on the way, against a loopback hub."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loopback import REPO, TOKEN, FakeHub, running, safetensors, sha256, sharded

from lisa import download, hub
from lisa.errors import DamagedModel, HubError

pytestmark = pytest.mark.usefixtures("environment")

NAME = "model-00001-of-00003.safetensors"
WHOLE = safetensors(50_000)


@pytest.fixture(autouse=True)
def one_large_file(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.files[NAME] = WHOLE
    monkeypatch.setattr(download, "_pause", lambda: None)


def fetch(fake: FakeHub, cache: Path, **options: Any) -> Path:
    return hub.resolve(REPO, endpoint=fake.endpoint, cache=cache, progress=lambda _: None, **options).path


def part(cache: Path, data: bytes = WHOLE) -> Path:
    return download.repo_folder(REPO, cache) / "blobs" / (sha256(data) + download.PART)


def half(cache: Path, data: bytes, of: bytes = WHOLE) -> Path:
    file = part(cache, of)
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    return file


def ranges(fake: FakeHub) -> list[str | None]:
    return [asked for name, asked in fake.wanted if name == NAME]


def test_a_cut_connection_goes_on_where_it_was_cut(fake: FakeHub, tmp_path: Path) -> None:
    fake.cut = 60_000
    path = fetch(fake, tmp_path)
    assert (path / NAME).read_bytes() == WHOLE
    assert ranges(fake) == [None, "bytes=60000-", "bytes=120000-", "bytes=180000-"]
    assert (path / NAME).resolve().name == sha256(WHOLE)
    assert not list(tmp_path.rglob("*incomplete")) and not list(tmp_path.rglob("*.lisa*"))


def test_the_next_run_goes_on_where_the_last_one_ended(fake: FakeHub, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    fake.cut = 60_000
    with pytest.raises(Stop):
        fetch(fake, tmp_path, bar=stop)
    assert 0 < part(tmp_path).stat().st_size <= 60_000
    fake.cut, had = None, part(tmp_path).stat().st_size
    fake.wanted.clear()
    assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE
    assert ranges(fake) == [f"bytes={had}-"]


def test_an_ignored_range_starts_again(fake: FakeHub, tmp_path: Path) -> None:
    half(tmp_path, WHOLE[:1000])
    fake.ranges = False
    assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE
    assert ranges(fake) == ["bytes=1000-"]


@pytest.mark.parametrize("rest", [b"", b"x", bytes(1000)])
def test_416_or_a_half_that_is_too_long_never_loops(rest: bytes, fake: FakeHub, tmp_path: Path) -> None:
    half(tmp_path, WHOLE + rest)
    assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE
    assert ranges(fake) == ([] if not rest else [None])


def test_416_for_a_sound_half_starts_again(fake: FakeHub, tmp_path: Path) -> None:
    half(tmp_path, WHOLE[:-10])
    fake.lie[NAME] = WHOLE[:-20]  # the server holds less than it said
    with pytest.raises(HubError, match="sends no more of " + NAME):
        fetch(fake, tmp_path)
    assert len(ranges(fake)) < 20
    fake.lie.clear()
    assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE


def test_a_wrong_half_is_noticed_and_fetched_again(fake: FakeHub, tmp_path: Path) -> None:
    half(tmp_path, b"?" * 1000)
    assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE
    assert ranges(fake) == ["bytes=1000-", None]


def test_a_file_changed_upstream_is_fetched_anew_and_its_old_half_removed(fake: FakeHub, tmp_path: Path) -> None:
    old = half(tmp_path, safetensors(70_000)[:5000], of=safetensors(70_000))
    assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE
    assert ranges(fake) == [None] and not old.exists()


def test_bytes_with_another_hash_are_refused(fake: FakeHub, tmp_path: Path) -> None:
    fake.lie[NAME] = WHOLE[:-1] + b"!"
    with pytest.raises(DamagedModel, match=f"{NAME} of {REPO} arrived damaged twice") as caught:
        fetch(fake, tmp_path)
    assert "\n" not in str(caught.value) and not part(tmp_path).exists()
    assert not (part(tmp_path).parent / sha256(WHOLE)).exists()


def test_a_file_longer_than_announced_is_refused(fake: FakeHub, tmp_path: Path) -> None:
    fake.lie[NAME] = WHOLE + b"more"
    with pytest.raises(DamagedModel, match="longer than announced"):
        fetch(fake, tmp_path)


def test_a_hub_that_never_goes_on_is_given_up(fake: FakeHub, tmp_path: Path) -> None:
    fake.cut = 0
    with pytest.raises(HubError, match="cannot reach the Hub at"):
        fetch(fake, tmp_path)
    assert len(ranges(fake)) == 5


def test_the_disk_is_checked_before_a_byte_is_fetched(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 30))
    with pytest.raises(HubError, match=r"0\.0 GB are to be downloaded and 1\.1 GB are free in .*HF_HOME"):
        fetch(fake, tmp_path / "not yet" / "there")
    assert fake.wanted == []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=(1 << 30) + 10**6))
    fetch(fake, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    download.check_disk(0, tmp_path)  # nothing to fetch needs no room


def test_the_bar_rises_to_the_bytes_of_all(fake: FakeHub, tmp_path: Path) -> None:
    fake.cut = 60_000
    seen: list[tuple[int, int]] = []
    fetch(fake, tmp_path, bar=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {sum(len(fake.files[name]) for name in sharded())}
    done = [done for done, _ in seen]
    assert done == sorted(done)
    small = sum(len(data) for name, data in fake.files.items() if name in sharded() and name.endswith(".json"))
    assert done[-1] == seen[0][1] - small  # the small files come last, without a bar


def test_a_plan_tells_what_is_missing(fake: FakeHub, tmp_path: Path) -> None:
    half(tmp_path, WHOLE[:1000])
    plan = download.plan(REPO, None, fake.endpoint, tmp_path)
    assert {file.name for file in plan.files} == set(sharded())  # no code, no pickles
    assert plan.here == 1000 and plan.missing == plan.bytes - 1000
    fetch(fake, tmp_path)
    assert download.plan(REPO, None, fake.endpoint, tmp_path).missing == 0


def test_F10_the_token_goes_to_the_hub_and_not_to_where_it_sends_us(fake: FakeHub, tmp_path: Path) -> None:
    with running() as storage:
        storage.files[NAME] = WHOLE
        fake.redirect, storage.cut = storage.endpoint, 150_000
        assert (fetch(fake, tmp_path) / NAME).read_bytes() == WHOLE
        assert [asked for name, asked in storage.wanted if name == NAME] == [None, "bytes=150000-"]
        assert storage.authorisation == {None} and f"Bearer {TOKEN}" in fake.authorisation


def test_F10_the_token_is_sent_and_never_shown(
    fake: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fake.cut = 60_000
    fetch(fake, tmp_path)
    assert f"Bearer {TOKEN}" in fake.authorisation
    said = capfd.readouterr()
    assert TOKEN not in said.out + said.err + caplog.text
    assert not any(re.search(TOKEN.encode(), file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file())
