"""Which drafter runs: the best that can be had, what was asked for, or one line that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafters_tiny import write_drafter
from folders import write_model
from mlx.utils import tree_flatten

import lisa
from lisa import catalog, pairing
from lisa.errors import BadDrafter, NotCached, UsageError
from lisa.loader import load, redraft
from lisa.pace import Fixed
from lisa.pairing import Options, pair
from lisa.tokenizer import load_tokenizer

KINDS = ["dspine", "dflash", "eagle"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "tiny-target", "qwen3_5")


@pytest.fixture(scope="module")
def vocab(model: Path) -> int:
    return load_tokenizer(model).vocab


def beside(model: Path, tmp_path: Path, vocab: int, *kinds: str) -> Path:
    """The model in a folder of its own, with drafters beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    for kind in kinds:
        write_drafter(folder / "drafters" / kind, kind, vocab)
    return folder


def stats(reply: Any) -> Any:
    return reply.read().stats


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["dspine", "dflash", "eagle"], "dspine"),
        (["dflash", "eagle"], "dflash"),
        (["eagle"], "eagle"),
        ([], "ngram"),
    ],
)
def test_auto_takes_the_best_kind_beside_the_model_and_says_so(
    model: Path, tmp_path: Path, vocab: int, there: list[str], chosen: str
) -> None:
    folder = beside(model, tmp_path, vocab, *there)
    with lisa.load(str(folder)) as loaded:
        got = stats(loaded.generate([1, 2, 3, 4], max_tokens=8))
        assert got.drafter == chosen and got.why and f"drafter {chosen}" in loaded.about
        assert ("in the model's folder" in got.why) == bool(there)


def test_auto_passes_over_what_does_not_fit_and_says_so(model: Path, tmp_path: Path, vocab: int) -> None:
    folder = beside(model, tmp_path, vocab, "dspine", "eagle")
    write = folder / "drafters" / "dspine" / "config.json"
    write.write_text(json.dumps(json.loads(write.read_text()) | {"num_target_layers": 9}))
    loaded = load(str(folder))
    assert loaded.engine.drafter().source == "eagle"
    loaded = load(str(folder), drafter="none")
    assert loaded.engine.drafter().source == "none" and loaded.engine.why == "asked for"
    for config in folder.glob("drafters/*/config.json"):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_target_layers": 9}))
    loaded = load(str(folder))
    assert loaded.engine.drafter().source == "ngram" and "dspine passed over" in loaded.engine.why


def test_a_named_drafter_that_cannot_run_is_an_error(model: Path, tmp_path: Path, vocab: int) -> None:
    for name in KINDS:
        with pytest.raises(BadDrafter, match=rf"no {name} drafter is known for tiny-target"):
            load(str(model), drafter=name)
    with pytest.raises(UsageError, match="unknown drafter 'dspin'"):
        load(str(model), drafter="dspin")
    with pytest.raises(UsageError, match="8 or 4 bits, not 3"):
        load(str(model), drafter="dspine", drafter_bits=3)
    with pytest.raises(UsageError, match="in front of a learned drafter"):
        load(str(model), drafter="none+ngram")
    misfit = write_drafter(tmp_path / "misfit", "dspine", vocab, num_target_layers=9)
    with pytest.raises(BadDrafter, match=r"misfit does not fit tiny-target: its num_target_layers is 9, the target's"):
        load(str(model), drafter=str(misfit))


@pytest.mark.parametrize("kind", KINDS)
def test_F11_the_kind_is_found_the_same_way_by_every_entry(model: Path, tmp_path: Path, vocab: int, kind: str) -> None:
    folder = write_drafter(tmp_path / "drafter", kind, vocab)
    with lisa.load(str(model), drafter=str(folder)) as loaded:
        assert stats(loaded.generate([1, 2, 3], max_tokens=4)).drafter == kind
    command = [sys.executable, "-m", "lisa", "chat", "hello", "--model", str(model), "--drafter", str(folder)]
    ran = subprocess.run([*command, "--max-tokens", "4"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and f"drafter {kind}" in ran.stderr


def test_F11_a_drafter_folder_is_no_model_and_an_unknown_kind_is_named(model: Path, tmp_path: Path, vocab: int) -> None:
    folder = write_drafter(tmp_path / "drafter", "dspine", vocab)
    with pytest.raises(lisa.LisaError, match="--drafter"):
        load(str(folder))
    odd = write_drafter(tmp_path / "odd", "dspine", vocab, architectures=["MysteryDraftModel"])
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("DSpine", "Mystery"))
    with pytest.raises(BadDrafter, match="MysteryDraftModel"):
        load(str(model), drafter=str(odd))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 9000}, "vocab_size"),
        ({"num_target_layers": 5}, "num_target_layers"),
        ({"target_layer_ids": [0, 7]}, "7"),
    ],
)
def test_C3_a_misfit_is_refused_before_any_token(
    model: Path, tmp_path: Path, vocab: int, change: dict[str, Any], named: str
) -> None:
    folder = write_drafter(tmp_path / "wrong", "dflash", vocab, **change)
    with pytest.raises(BadDrafter, match=named) as refused:
        lisa.load(str(model), drafter=str(folder))
    assert "wrong" in str(refused.value) and "\n" not in str(refused.value)
    command = [sys.executable, "-m", "lisa", "chat", "hello", "--model", str(model), "--drafter", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and ran.stdout == "" and "Traceback" not in ran.stderr and named in ran.stderr


def test_C3_another_base_model_that_fits_runs_with_one_warning(model: Path, tmp_path: Path, vocab: int) -> None:
    folder = write_drafter(tmp_path / "other", "dspine", vocab, base_model="owner/Other-1B")
    said: list[str] = []
    loaded = load(str(model), drafter=str(folder), say=said.append)
    warnings = [line for line in said if "owner/Other-1B" in line]
    assert len(warnings) == 1 and "lisa train --adapt" in warnings[0] and loaded.engine.drafter().source == "dspine"


def test_C1_what_the_folder_lacks_may_come_from_a_file_and_its_source_is_said(
    model: Path, tmp_path: Path, vocab: int
) -> None:
    folder = write_drafter(tmp_path / "bare", "dspine", vocab, target_layer_ids=None)
    with pytest.raises(BadDrafter, match="target_layer_ids"):
        load(str(model), drafter=str(folder))
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"target_layer_ids": [2, 0]}))
    said: list[str] = []
    loaded = load(str(model), drafter=str(folder), drafter_config=given, say=said.append)
    assert loaded.engine.drafter().taps == (2, 0)
    assert any("target_layer_ids from" in line and "given.json" in line for line in said)
    for text in ("[1]", "{", None):
        given.unlink() if text is None else given.write_text(text)
        with pytest.raises(UsageError, match=r"given\.json"):
            load(str(model), drafter=str(folder), drafter_config=given)
    with pytest.raises(UsageError, match="drafter-bits"):
        load(str(model), drafter="ngram", drafter_bits=8)


@pytest.mark.parametrize("where", ["repo", "folder"])
def test_the_catalogue_supplies_taps_with_their_provenance(
    model: Path, tmp_path: Path, vocab: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_drafter(tmp_path / "shipped", "dspine", vocab, target_layer_ids=None, mask_token_id=None)
    monkeypatch.setattr(catalog, "models_folder", lambda: tmp_path)
    place: dict[str, Any] = {"repo": str(folder)} if where == "repo" else {"folder": "shipped"}
    known = catalog.Drafter("dspine", **place, taps=(1, 3), mask=7, block=8, provenance="its authors' README")
    entry = catalog.find("smollm2-135m")
    assert entry is not None
    target = load(str(model)).engine.target
    paired = pair("auto", target, model, replace(entry, drafters=(known,)), Options())
    made = paired.new()
    assert paired.kind == "dspine" and made.taps == (1, 3) and made.width == 7
    assert "catalogue: its authors' README" in paired.words[0] and "catalogue" in paired.why


def test_auto_offline_without_the_drafter_falls_back_and_asked_for_it_fails(model: Path) -> None:
    entry = catalog.find("qwen3-8b")
    assert entry is not None
    target = load(str(model)).engine.target
    paired = pair("auto", target, model, entry, Options(offline=True))
    assert paired.kind == "ngram" and "dspine passed over" in paired.why and "offline" in paired.why
    with pytest.raises(NotCached):
        pair("dspine", target, model, entry, Options(offline=True))


@pytest.mark.parametrize("kind", KINDS)
def test_lookup_composes_with_every_kind(model: Path, tmp_path: Path, vocab: int, kind: str) -> None:
    folder = write_drafter(tmp_path / "drafter", kind, vocab)
    loaded = load(str(model), drafter=f"{folder}+ngram")
    made = loaded.engine.drafter()
    assert made.source == f"{kind}+ngram"
    with lisa.load(str(model), drafter=f"{folder}+ngram") as composed, lisa.load(str(model), drafter="none") as plain:
        prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        assert composed.generate(prompt, max_tokens=30).read().ids == plain.generate(prompt, max_tokens=30).read().ids


@pytest.mark.parametrize("kind", ["dspine", "dflash"])
def test_D4_the_target_is_held_once_and_shared(model: Path, tmp_path: Path, vocab: int, kind: str) -> None:
    folder = write_drafter(tmp_path / "drafter", kind, vocab)
    mx.clear_cache()
    before = mx.get_active_memory()
    loaded = load(str(model), drafter=str(folder))
    made: Any = loaded.engine.drafter()
    grown = mx.get_active_memory() - before
    target = loaded.engine.target.nbytes
    parts = [made.model.network, made.model.refinement] if kind == "dspine" else [made.model.network]
    own = sum(a.nbytes for part in parts for _, a in tree_flatten(part.parameters()))
    own += made.model.codes.nbytes if kind == "dspine" else 0
    assert grown <= target + own + 50_000 and made.model.target is loaded.engine.target


@pytest.mark.parametrize("bits", [4, 8])
def test_a_drafter_can_be_packed_at_load(model: Path, tmp_path: Path, vocab: int, bits: int) -> None:
    folder = write_drafter(tmp_path / "drafter", "dspine", vocab)
    texts = []
    for options in ({"drafter": str(folder), "drafter_bits": bits}, {"drafter": "none"}):
        with lisa.load(str(model), **options) as loaded:  # type: ignore[arg-type]
            texts.append(loaded.generate([1, 2, 3], max_tokens=9).read().ids)
    assert texts[0] == texts[1]


def test_F1_offline_holds_for_a_later_drafter_too(model: Path, environment: None, no_network: None) -> None:
    loaded = load(str(model), drafter="none", offline=True)
    with pytest.raises(NotCached, match="offline"):
        redraft(loaded, "somebody/drafter")


@pytest.mark.parametrize("between", ["none", "ngram", "auto"])
def test_what_was_asked_of_drafters_at_load_holds_for_later_ones(
    model: Path, tmp_path: Path, vocab: int, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fields = write_drafter(tmp_path / "drafter", "dspine", vocab), tmp_path / "fields.json"
    fields.write_text('{"block_size": 4}')
    asked: list[Options] = []

    def noted(name: str, target: Any, folder: Path, entry: Any, options: Options, say: Any = None) -> Any:
        asked.append(options)
        return pair(name, target, folder, entry, options, say)

    monkeypatch.setattr(pairing, "pair", noted)
    loaded = load(
        str(model), drafter=str(folder), drafter_bits=4, drafter_config=fields, width=2, chunk=32, offline=True
    )
    plain = redraft(loaded, between)
    assert plain.drafter in ("none", "ngram")
    later = redraft(plain, str(folder))
    assert asked[0] == asked[-1] == Options(4, fields, 32, True)
    assert later.engine.chunk == 32 and later.engine.pacer() == Fixed(2)
    assert later.engine.drafter().width == 3, "three slots behind the anchor"
    assert redraft(plain, str(folder), width=1).engine.pacer() == Fixed(1)
