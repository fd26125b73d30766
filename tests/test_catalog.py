"""The catalogue: every file of models/ reads into a complete entry, and a mistake in one is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lisa import catalog
from lisa.types import Sampling

MODELS = Path(__file__).parent.parent / "models"
MINIMAL = """
name = "m"
title = "M"
family = "llama"
licence = "MIT"
context = 10
stop = [1]
[sampling]
temperature = 1
[memory]
kv_bytes = 4
[[weights]]
quantisation = "4bit"
bytes = 1
repo = "a/b"
"""


def test_every_file_is_an_entry_named_after_it() -> None:
    assert {entry.name for entry in catalog.entries()} == {file.stem for file in MODELS.glob("*.toml")}
    assert len(catalog.entries()) >= 6


def test_find_ignores_case_and_knows_what_it_lacks() -> None:
    entry = catalog.find("Qwen3.8-27B")
    assert entry is not None and entry.name == "qwen3.8-27b"
    assert catalog.find("qwen3.8") is None


def test_one_default_anywhere_and_one_for_metal() -> None:
    defaults = {entry.default: entry.name for entry in catalog.entries() if entry.default}
    assert defaults == {"anywhere": "smollm2-135m", "metal": "qwen3.8-27b"}


def test_values_of_the_main_target() -> None:
    entry = catalog.find("qwen3.8-27b")
    assert entry is not None
    assert entry.sampling == Sampling(temperature=1.0, top_p=0.95, top_k=20)
    assert entry.stop == (248046, 248044)
    assert entry.memory == catalog.Memory(kv_bytes=16 * 2 * 4 * 256 * 2, state_bytes=48 * 48 * 128 * 128 * 4)
    assert [w.repo for w in entry.weights] == ["mlx-community/Qwen3.8-27B-4bit", "mlx-community/Qwen3.8-27B-8bit"]
    assert entry.drafters[0].kind == "dspine" and entry.drafters[0].taps is None  # its own config names them


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_entries_are_plausible(entry: catalog.Entry) -> None:
    for weights in entry.weights:
        assert weights.bytes > 5_000_000
        assert weights.repo is None or re.fullmatch(r"[\w-]+/[\w.-]+", weights.repo)
        assert weights.folder is None or (catalog.models_folder() / weights.folder / "config.json").is_file()
        assert weights.wheel is None or re.fullmatch(r"[0-9a-f]{64}", weights.wheel.sha256)
    for drafter in entry.drafters:
        assert drafter.folder is None or (catalog.models_folder() / drafter.folder / "config.json").is_file()
        assert drafter.provenance or (drafter.taps, drafter.mask, drafter.block) == (None, None, None)


DRAFTER = '[[drafters]]\nkind = "eagle"\n'


def test_minimal_entry() -> None:
    entry = catalog.read(MINIMAL, "m.toml")
    assert entry.sampling == Sampling(temperature=1.0) and isinstance(entry.sampling.temperature, float)
    assert entry.weights == (catalog.Weights("4bit", 1, repo="a/b"),) and entry.drafters == ()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("name =", "nmae ="), "m.toml: unknown key nmae"),
        (("temperature", "temprature"), "m.toml: sampling: unknown key temprature"),
        (('licence = "MIT"\n', ""), "m.toml: missing key licence"),
        (("context = 10", 'context = "10"'), "m.toml: context: '10' is not"),
        (("context = 10", "context = true"), "m.toml: context: True is not"),
        (("stop = [1]", "stop = 1"), "m.toml: stop: 1 is not"),
        (("stop = [1]", 'default = "here"\nstop = [1]'), "m.toml: default: 'here' is not"),
        (("repo =", 'folder = "m"\nrepo ='), "m.toml: weights 4bit need one of repo, wheel and folder"),
        (('repo = "a/b"', ""), "m.toml: weights 4bit need one of repo, wheel and folder"),
        (("[[weights]]", DRAFTER + "[[weights]]"), "m.toml: the eagle drafter needs one of repo and folder"),
        (("[[weights]]", f'{DRAFTER}repo = "a/b"\nfolder = "m"\n[[weights]]'), "the eagle drafter needs one of"),
    ],
)
def test_a_mistake_is_named_with_its_file(change: tuple[str, str], complaint: str) -> None:
    broken = MINIMAL.replace(*change)
    assert broken != MINIMAL
    with pytest.raises(ValueError, match=re.escape(complaint)):
        catalog.read(broken, "m.toml")
