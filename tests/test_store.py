"""The life of a model: pulled with its drafter, listed, described, checked, removed."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import REPO, TOKEN, FakeHub, safetensors, sha256, sharded
from terminal import CTRL_C, Typist

from lisa import bandwidth, catalog, cli, download, fit, hub, manage, store
from lisa.errors import DoesNotFit, HubError, NotCached, UnknownModel, UsageError
from lisa.memory import Machine

pytestmark = pytest.mark.usefixtures("environment")

DRAFTER = "owner/drafter"
GB = 10**9


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "lisa")


def never(question: str) -> bool:
    raise AssertionError("nobody should be asked")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, fake: FakeHub) -> catalog.Entry:
    """A catalogue entry whose target and drafter the fake hub holds."""
    fake.repos[DRAFTER] = {
        "config.json": b'{"architectures": ["DSpineDraftModel"]}',
        "model.safetensors": safetensors(9),
    }
    real = catalog.find("qwen3-8b")
    assert real
    weights = (catalog.Weights("4bit", 1000, REPO), catalog.Weights("8bit", 2000, "owner/eight"))
    entry = replace(real, name="tiny", weights=weights, drafters=(catalog.Drafter("dspine", DRAFTER, bytes=500),))
    monkeypatch.setattr(catalog, "entries", lambda: (entry,))
    return entry


@pytest.fixture
def pull(fake: FakeHub, tmp_path: Path) -> Callable[..., bool]:
    def pull(model: str, **options: Any) -> bool:
        known = {"machine": Machine(False, 64 * GB), "agrees": never, "say": lambda line: None}
        return store.pull(model, **{**known, "endpoint": fake.endpoint, "cache": tmp_path, **options})

    return pull


def test_target_and_drafter_come_together(tiny: catalog.Entry, pull: Any, tmp_path: Path, fake: FakeHub) -> None:
    assert pull("tiny")
    for repo, files in ((REPO, sharded()), (DRAFTER, fake.repos[DRAFTER])):
        path = hub.resolve(repo, offline=True, cache=tmp_path).path
        assert {file.name for file in path.iterdir()} == set(files)
    assert not any(path.endswith((".py", ".bin")) for path in fake.asked)


def test_a_second_pull_opens_no_connection(tiny: catalog.Entry, pull: Any, request: pytest.FixtureRequest) -> None:
    pull("tiny")
    request.getfixturevalue("no_network")
    assert pull("tiny") and pull("tiny", offline=True)


def test_F1_offline_opens_no_connection_and_names_the_command(pull: Any, tiny: Any, no_network: None) -> None:
    with pytest.raises(NotCached, match=f"{REPO} is not here and this run is offline; once online: lisa pull tiny"):
        pull("tiny", offline=True)


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_F1_the_hubs_variable_is_offline_too(
    value: str, pull: Any, tiny: Any, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(NotCached, match="lisa pull tiny"):
        pull("tiny")


@pytest.mark.parametrize(("drafter", "there"), [("none", False), ("ngram", False), ("dspine", True), (DRAFTER, True)])
def test_the_drafter_can_be_chosen(drafter: str, there: bool, tiny: Any, pull: Any, tmp_path: Path) -> None:
    assert pull("tiny", drafter=drafter)
    assert download.repo_folder(DRAFTER, tmp_path).exists() == there


def test_a_drafter_nobody_named_is_not_fetched_where_there_is_no_room_for_it(
    tiny: catalog.Entry, pull: Any, tmp_path: Path
) -> None:
    alone = fit.of_entry(tiny, tiny.weights[0], Machine(False, GB))
    machine = Machine(False, int(alone.at(fit.CONTEXT) / 0.9) + 100)  # room for the target and 90 bytes of 500
    said: list[str] = []
    assert pull("tiny", machine=machine, say=said.append)
    assert not download.repo_folder(DRAFTER, tmp_path).exists() and "no room for both" in said[0]


def test_a_drafter_nobody_named_may_be_missing(tiny: Any, pull: Any, fake: FakeHub, tmp_path: Path) -> None:
    del fake.repos[DRAFTER]
    said: list[str] = []
    assert pull("tiny", say=said.append)
    assert said[0].startswith(f"the drafter is left out: {DRAFTER} does not exist")
    with pytest.raises(HubError, match=f"{DRAFTER} does not exist"):
        pull("tiny", drafter="dspine")


def test_above_ten_gibibytes_somebody_is_asked_once_for_both(
    tiny: Any, pull: Any, fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "ASK_ABOVE", 100)
    asked: list[str] = []
    assert not pull("tiny", agrees=lambda question: bool(asked.append(question)))
    assert len(asked) == 1 and REPO in asked[0] and DRAFTER in asked[0] and "Download 0.0 GB?" in asked[0]
    assert fake.wanted == [] and not list(tmp_path.rglob("*.safetensors"))
    assert pull("tiny", agrees=lambda question: True)
    assert store.ASK_ABOVE == 100 and pull("tiny", agrees=never)  # nothing left to ask about


def test_the_limit_is_ten_gibibytes() -> None:
    assert store.ASK_ABOVE == 10 * 1024**3


def test_what_does_not_fit_is_told_before_a_byte_is_fetched(tiny: Any, pull: Any, fake: FakeHub) -> None:
    with pytest.raises(DoesNotFit, match="tiny needs"):
        pull("tiny", machine=Machine(False, 1000))
    with pytest.raises(DoesNotFit, match=f"{REPO} needs"):
        pull(REPO, machine=Machine(False, 100))
    assert fake.wanted == []


def test_a_folder_needs_nothing(pull: Any, tmp_path: Path, no_network: None) -> None:
    assert pull(str(tmp_path)) and store.parts(str(tmp_path)) == []


def test_an_unknown_name_is_told_before_the_hub_is_asked(pull: Any, no_network: None) -> None:
    with pytest.raises(UnknownModel, match="unknown model 'smolm2'"):
        pull("smolm2")
    with pytest.raises(UsageError, match="not in the catalogue"):
        pull(REPO, quantisation="4bit")
    with pytest.raises(UsageError, match="not as '3bit'"):
        pull("smollm2-135m", quantisation="3bit")


# list, show, rm


def test_rows_tell_whole_from_half_and_damaged(tiny: Any, pull: Any, fake: FakeHub, tmp_path: Path) -> None:
    pull("tiny")
    (tmp_path / "models--someone--whisper" / "snapshots" / "x").mkdir(parents=True)
    states = {row.name: (row.what, row.state) for row in store.rows(tmp_path)}
    assert states == {REPO: ("tiny 4bit", "whole"), DRAFTER: ("dspine drafter of tiny", "whole")}
    path = hub.resolve(REPO, offline=True, cache=tmp_path).path
    (path / "model-00002-of-00003.safetensors").resolve().unlink()
    drafter = hub.resolve(DRAFTER, offline=True, cache=tmp_path).path
    blob = (drafter / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    states = {row.name: (row.what, row.state) for row in store.rows(tmp_path)}
    assert states[REPO][1] == "incomplete" and states[DRAFTER][1] == "damaged"


def test_a_half_fetched_stranger_is_listed(pull: Any, fake: FakeHub, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(REPO, bar=stop)
    (row,) = store.rows(tmp_path)
    assert (row.name, row.what, row.state) == (REPO, "half fetched", "incomplete") and row.bytes > 0


def test_a_flipped_bit_is_found_by_its_hash(pull: Any, tmp_path: Path) -> None:
    pull(REPO)
    path = hub.resolve(REPO, offline=True, cache=tmp_path).path
    names = [name for name in sharded() if name.endswith("tensors")]
    assert store.hashed(path) == dict.fromkeys(names, True)
    blob = (path / "model-00002-of-00003.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    hub.check_folder(path)  # its structure is sound
    assert [name for name, right in store.hashed(path).items() if not right] == ["model-00002-of-00003.safetensors"]


def test_remove_takes_all_of_a_name_and_nothing_else(tiny: Any, pull: Any, fake: FakeHub, tmp_path: Path) -> None:
    fake.repos["owner/other"] = dict(fake.files)
    pull("owner/other")
    pull("tiny")
    paths = store.removable("tiny", tmp_path)
    assert paths == [download.repo_folder(repo, tmp_path) for repo in (REPO, DRAFTER)]
    assert store.size(paths) > sum(len(data) for name, data in sharded().items() if name.endswith("tensors"))
    store.remove(paths)
    assert [row.name for row in store.rows(tmp_path) if "owner" in row.name] == ["owner/other"]
    with pytest.raises(UnknownModel, match="nothing of tiny is on this machine"):
        store.removable("tiny", tmp_path)


def test_a_folder_of_the_users_own_is_never_removed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder of your own"):
        store.removable(str(tmp_path))


def test_the_embedded_models_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path)
    entry = catalog.find("smollm2-135m")
    assert entry and entry.weights[0].wheel
    made = tmp_path / hub.converted_name("smollm2-135m", "float32", entry.weights[0].wheel.sha256)
    made.mkdir()
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    (tmp_path / "pace.json").write_text("{}")
    store.remove(store.removable("smollm2-135m", tmp_path / "hub"))
    assert os.listdir(tmp_path) == ["pace.json"]


def test_what_a_machine_reads_bounds_plain_decoding(tmp_path: Path) -> None:
    assert bandwidth.known("Apple M4 Pro", tmp_path) == bandwidth.Bandwidth(273e9, "as Apple publishes it")
    assert bandwidth.known("Intel(R) Xeon(R)", tmp_path) is None and bandwidth.known("Apple M99", tmp_path) is None
    bandwidth.keep("Apple M4 Pro", 250e9, tmp_path)
    bandwidth.keep("Intel(R) Xeon(R)", 20e9, tmp_path)
    assert bandwidth.known("Apple M4 Pro", tmp_path) == bandwidth.Bandwidth(250e9, "measured by lisa bench")
    # M4 Pro, Qwen3.8-27B at 4 bits: 14.41 GB of weights and 0.30 GB of state, read and written.
    assert bandwidth.ceiling(273e9, 14_410_000_000, 150_994_944, 65536, 0) == pytest.approx(18.6, abs=0.05)


# The commands


@pytest.fixture
def lisa(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command: what it leaves with, stdout, stderr."""
    from huggingface_hub import constants

    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "ENDPOINT", fake.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))

    def lisa(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(args)
        return int(left.value.code or 0), *capfd.readouterr()

    return lisa


def test_the_commands_from_pull_to_rm(lisa: Any, fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, out, err = lisa("pull", REPO)
    assert (code, out) == (0, "") and err.endswith(f"{REPO} is here\n"), err
    assert TOKEN not in err and f"Bearer {TOKEN}" in fake.authorisation
    before = fake.connections
    code, out, err = lisa("list")
    assert code == 0 and REPO in out and "a llama model" in out and err == ""
    code, out, err = lisa("show", REPO, "--check")
    assert code == 0 and "whole; 3 files have their sha256" in out and "memory" in out
    code, out, err = lisa("rm", REPO)
    assert code == 2 and "lisa rm --yes" in err
    code, out, err = lisa("rm", REPO, "--yes")
    assert code == 0 and "removed 0.0 GB" in err
    assert lisa("list")[1] == "" and fake.connections == before


def test_a_pull_shows_a_bar_and_ctrl_c_keeps_what_has_come(fake: FakeHub, tmp_path: Path) -> None:
    name, data = "model-00001-of-00003.safetensors", safetensors(500_000)
    fake.files[name] = data
    fake.cut, fake.hold = 1_500_000, threading.Event()
    env = {"HF_ENDPOINT": fake.endpoint, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    me = Typist("from lisa.cli import main; main()", "pull", REPO, home=tmp_path, **env)
    me.wait(f"downloading {REPO}")
    me.wait_shown("MB")
    part = download.repo_folder(REPO, tmp_path / "hf" / "hub") / "blobs" / (sha256(data) + download.PART)
    me.wait_shown("1.5/2.0 MB")
    me.type(CTRL_C)
    me.wait(f"interrupted; lisa pull {REPO} goes on from here")
    assert me.leave() == 130 and part.stat().st_size == 1_500_000
    fake.hold.set()
    fake.cut, fake.hold = None, None
    fake.wanted.clear()
    me = Typist("from lisa.cli import main; main()", "pull", REPO, home=tmp_path, **env)
    me.wait(f"{REPO} is here")
    assert me.leave() == 0 and (name, "bytes=1500000-") in fake.wanted and not part.exists()


def test_F10_a_gated_pull_is_one_line_and_leaves_with_1(lisa: Any, fake: FakeHub) -> None:
    fake.answer = (403, {"X-Error-Code": "GatedRepo"})
    code, out, err = lisa("pull", REPO)
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "accept its licence at" in err and TOKEN not in err


@pytest.mark.parametrize("name", ["qwen3.8-27b", "smollm2-135m"])
def test_show_describes_what_is_not_here_without_a_connection(name: str, lisa: Any, no_network: None) -> None:
    code, out, err = lisa("show", name, "--context", "8000")
    assert (code, err) == (0, "") and f"no: lisa pull {name}" in out and "8000 tokens of context" in out
    assert all(word in out for word in ("licence", "drafters", "memory", "ceiling"))


def test_nobody_can_agree_outside_a_terminal() -> None:
    with pytest.raises(UsageError, match=r"Download 16\.1 GB\? Nobody can be asked here: lisa pull --yes"):
        manage.agrees_or_refuses(False)("Download 16.1 GB?")
    assert manage.agrees_or_refuses(True)("Download?")
