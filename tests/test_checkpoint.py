"""Every drafter folder layout becomes the same plain values, and what cannot run is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench.golden_drafters import GREEDY, block_vectors, commit, ends
from bench.golden_vectors import cases, error
from lisa.drafters.checkpoint import Checkpoint, check_fit, kind_of, read
from lisa.drafters.dflash import DFlash
from lisa.drafters.dspine import DSpine
from lisa.errors import BadDrafter, DamagedModel, LisaError

GOLDEN = Path(__file__).parent / "golden"


def config(kind: str = "dspine_a") -> dict[str, Any]:
    return json.loads((GOLDEN / kind / "config.json").read_text())


def tensors(kind: str = "dspine_a") -> dict[str, mx.array]:
    return mx.load(str(GOLDEN / kind / "model.safetensors"))


def folder(at: Path, cfg: dict[str, Any] | None = None, weights: dict[str, mx.array] | None = None) -> Path:
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps(config() if cfg is None else cfg))
    mx.save_safetensors(str(at / "model.safetensors"), tensors() if weights is None else weights)
    return at


def reference_layout(at: Path, nested: bool) -> Path:
    """model.safetensors + transfer.safetensors, and a block_size that is not the real one."""
    weights = tensors()
    codes = weights.pop("transfer_codes")
    weights.pop("transfer_ready")
    cfg = {**config(), "block_size": 4}
    cfg.pop("architectures")
    folder(at, {"config": cfg, "format": 1} if nested else cfg, weights)
    mx.save_safetensors(str(at / "transfer.safetensors"), {"codes": codes})
    return at


def golden_error(checkpoint: Checkpoint, width: int = 7) -> float:
    """Of the drafter's first 8 slots against the golden numbers."""
    given = cases(GOLDEN / "dspine_a")[2]
    m = DSpine(checkpoint, ends(GOLDEN / "dspine_a", checkpoint), scoring="pairs", dtype=mx.float32)
    drafter = m.new()
    drafter.observe(commit(37, given["target_hidden"][0]))
    drafter.propose(1, width, GREEDY, 37)
    block = mx.array([int(given["anchor"][0])] + [m.mask] * 7)
    return error(m.forward(block, drafter.contexts, 37).final, given["final_hidden"])


def one_line(error: BaseException) -> str:
    assert isinstance(error, LisaError)
    text = str(error)
    assert "\n" not in text
    return text


# ---- layouts ----


def test_the_specforge_layout() -> None:
    c = read(GOLDEN / "dspine_a")
    assert (c.kind, c.name, c.taps, c.mask, c.block, c.vocab) == ("dspine", "dspine_a", (1, 3, 6), 159, 8, 160)
    assert c.provenance == dict.fromkeys(
        ("target_layer_ids", "mask_token_id", "block_size", "rope_theta"), "config.json"
    )
    assert "transfer_ready" not in c.weights and golden_error(c) <= 2e-4


@pytest.mark.parametrize("nested", [False, True])
def test_the_reference_layout(tmp_path: Path, nested: bool) -> None:
    at = reference_layout(tmp_path / "spine", nested)
    c = read(at)
    assert kind_of(at) == c.kind == "dspine"
    assert (c.taps, c.mask, c.vocab) == ((1, 3, 6), 159, 160)
    assert c.block == 16 and c.provenance["block_size"] == "DSpine reference layout"
    assert read(at, {"block_size": 8}).block == 8
    assert golden_error(c) <= 2e-4


@pytest.mark.parametrize("prefix", ["", "model."])
def test_sharded_weights(tmp_path: Path, prefix: str) -> None:
    weights = {prefix + k: v for k, v in tensors().items()}
    at = folder(tmp_path / "sharded")
    (at / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, keys in shards.items():
        mx.save_safetensors(str(at / file), {k: weights[k] for k in keys})
    index = {"weight_map": {k: file for file, keys in shards.items() for k in keys}}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))
    assert golden_error(read(at)) <= 2e-4
    (at / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedModel, match=r"sharded lacks model-00002-of-00002\.safetensors") as caught:
        read(at)
    one_line(caught.value)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-4), (mx.float16, 0.02), (mx.bfloat16, 0.15)])
def test_any_float_dtype_is_read(tmp_path: Path, dtype: mx.Dtype, tolerance: float) -> None:
    cast = {k: v.astype(dtype) if v.dtype == mx.float32 else v for k, v in tensors().items()}
    c = read(folder(tmp_path / "cast", weights=cast))
    assert golden_error(c) <= tolerance


def test_shapes_decide_sizes(tmp_path: Path) -> None:
    """A config whose sizes are wrong or missing changes nothing."""
    cfg = config()
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size"):
        cfg[key] = 7
    cfg["dspine_config"] = {"transfer_dim": 24, "message_dim": 12, "top_k": 6}
    cfg.pop("num_hidden_layers")
    assert golden_error(read(folder(tmp_path / "odd", cfg))) <= 2e-4


def test_only_the_drafters_own_files_are_read() -> None:
    assert (GOLDEN / "dflash_a" / "vectors.safetensors").exists()
    assert not any(key[0].isdigit() for key in read(GOLDEN / "dflash_a").weights)


def test_rope_parameters_may_be_nested(tmp_path: Path) -> None:
    cfg = config()
    cfg["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.pop("rope_theta")}
    assert golden_error(read(folder(tmp_path / "a", cfg))) <= 2e-4
    cfg["rope_parameters"]["rope_theta"] = 500.0
    assert golden_error(read(folder(tmp_path / "b", cfg))) > 2e-3
    cfg.pop("rope_parameters")
    c = read(folder(tmp_path / "c", cfg))
    assert c.provenance["rope_theta"] == "default 10000" and golden_error(c) <= 2e-4


# ---- kinds ----


@pytest.mark.parametrize(("at", "kind"), [("dspine_a", "dspine"), ("dflash_a", "dflash"), ("eagle3_a", "eagle")])
def test_F11_the_kind_is_what_the_folder_declares(tmp_path: Path, at: str, kind: str) -> None:
    assert kind_of(GOLDEN / at) == read(GOLDEN / at).kind == kind
    # The same from its own fields when it names no architecture, or another family's.
    cfg = config(at)
    cfg.pop("architectures")
    assert cfg["model_type"] in ("qwen3", "llama")
    assert kind_of(folder(tmp_path / "bare", cfg)) == kind
    assert kind_of(folder(tmp_path / "other", {**cfg, "architectures": ["SomethingNew"]})) == kind


def test_F11_an_unknown_kind_is_named(tmp_path: Path) -> None:
    for cfg, name in [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "Qwen3ForCausalLM"),
        ({"model_type": "mystery"}, "mystery"),
        ({"speculators_model_type": "mlp"}, "mlp"),
        ({}, "no architecture"),
    ]:
        with pytest.raises(BadDrafter, match=name) as caught:
            read(folder(tmp_path / "folder", cfg))
        assert "DSpine, DFlash or EAGLE-3" in one_line(caught.value)


@pytest.mark.parametrize(
    "architecture", ["DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel", "DominoDraftModel"]
)
def test_relatives_are_told_apart(tmp_path: Path, architecture: str) -> None:
    cfg = {**config("dflash_a"), "architectures": [architecture]}
    with pytest.raises(BadDrafter, match=f"{architecture}.*not supported yet") as caught:
        read(folder(tmp_path / "relative", cfg))
    one_line(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_mode", "mla"),
        ("projector_type", "dspark"),
        ("shift_label", True),
        ("input_embedding_scale", 8.0),
    ],
)
def test_what_lisa_does_not_compute_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    cfg = config()
    cfg["dflash_config"][key] = value
    with pytest.raises(BadDrafter, match=f"{key} {value!r}") as caught:
        read(folder(tmp_path / "option", cfg))
    one_line(caught.value)


def test_tensors_decide_too(tmp_path: Path) -> None:
    weights = tensors("dflash_a")
    target = ends(GOLDEN / "dflash_a", read(GOLDEN / "dflash_a"))
    extra = {**weights, "markov_head.weight": mx.zeros((2, 2))}
    with pytest.raises(BadDrafter, match=r"unexpected tensor markov_head\.weight \(1 in all\)") as caught:
        DFlash(read(folder(tmp_path / "extra", config("dflash_a"), extra)), target)
    one_line(caught.value)
    fewer = {k: v for k, v in weights.items() if k != "layers.1.mlp.down_proj.weight"}
    with pytest.raises(BadDrafter, match=r"lacks the tensor layers\.1\.mlp\.down_proj\.weight"):
        DFlash(read(folder(tmp_path / "fewer", config("dflash_a"), fewer)), target)
    with pytest.raises(BadDrafter, match=r"transfer_codes"):
        read(folder(tmp_path / "codeless", config(), weights))


# ---- taps ----


def test_C1_missing_taps_or_mask_are_refused_by_name(tmp_path: Path) -> None:
    for key in ("target_layer_ids", "mask_token_id"):
        for missing in (None, "absent"):
            cfg = config("dflash_a")
            if missing is None:
                cfg["dflash_config"][key] = None
            else:
                cfg["dflash_config"].pop(key)
            with pytest.raises(BadDrafter, match=f"nameless does not say its {key}.*--drafter-config") as caught:
                read(folder(tmp_path / "nameless", cfg, tensors("dflash_a")))
            one_line(caught.value)


def test_C1_unusual_taps_are_used_as_written(tmp_path: Path) -> None:
    cfg = config()
    cfg["dflash_config"]["target_layer_ids"] = [7, 0, 4]
    c = read(folder(tmp_path / "odd", cfg))
    assert c.taps == (7, 0, 4)
    m = DSpine(c, ends(GOLDEN / "dspine_a", c), scoring="pairs")
    assert m.taps == m.new().taps == (7, 0, 4)


def test_taps_and_mask_may_stand_at_the_top_level(tmp_path: Path) -> None:
    cfg = config("dflash_a")
    cfg |= cfg.pop("dflash_config")
    c = read(folder(tmp_path / "flat", cfg, tensors("dflash_a")))
    assert (c.kind, c.taps, c.mask) == ("dflash", (1, 3, 6), 159)
    cfg["dflash_config"] = {"mask_token_id": None}  # an empty field says nothing
    assert read(folder(tmp_path / "flat", cfg, tensors("dflash_a"))).mask == 159


@pytest.mark.parametrize("taps", [[1, -1, 6], [1, 3, 9], [3, 3, 6], [], [1, 3.5, 6], "1,3,6", [True, 3, 6]])
def test_C2_impossible_taps_are_refused(tmp_path: Path, taps: Any) -> None:
    cfg = config()
    cfg["dflash_config"]["target_layer_ids"] = taps
    with pytest.raises(BadDrafter, match="target_layer_ids") as caught:
        read(folder(tmp_path / "bad", cfg))
    one_line(caught.value)


def test_C2_a_tap_past_the_target_is_refused_when_the_drafter_does_not_know_its_depth(tmp_path: Path) -> None:
    cfg = config()
    cfg.pop("num_target_layers")
    cfg["dflash_config"]["target_layer_ids"] = [1, 3, 9]
    c = read(folder(tmp_path / "deep", cfg))
    with pytest.raises(BadDrafter, match=r"target_layer_ids is \[1, 3, 9\], the target's layers are 0 to 8"):
        check_fit(c, facts())


def test_values_from_outside_win_and_say_where_they_came_from(tmp_path: Path) -> None:
    cfg = config("dflash_a")
    cfg["dflash_config"].pop("mask_token_id")
    at = folder(tmp_path / "part", cfg, tensors("dflash_a"))
    c = read(at, {"mask_token_id": 150}, "catalogue")
    assert c.mask == 150
    assert c.provenance["mask_token_id"] == "catalogue" and c.provenance["target_layer_ids"] == "config.json"
    c = read(at, {"dflash_config": {"mask_token_id": 151, "target_layer_ids": [0, 1, 2]}}, "--drafter-config")
    assert (c.mask, c.taps) == (151, (0, 1, 2))
    assert c.provenance["target_layer_ids"] == "--drafter-config"


@pytest.mark.parametrize(
    ("key", "value"), [("mask_token_id", "159"), ("mask_token_id", -1), ("block_size", 1), ("block_size", None)]
)
def test_impossible_numbers_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    cfg = config()
    cfg["dflash_config"].pop("mask_token_id")
    cfg |= {"mask_token_id": 159, key: value}
    with pytest.raises(BadDrafter, match=key) as caught:
        read(folder(tmp_path / "number", cfg))
    one_line(caught.value)


# ---- damage ----


@pytest.mark.parametrize(
    "damage", ["no config", "not json", "a list", "no weights", "empty", "cut header", "cut data", "a page"]
)
def test_F4_damaged_files_are_one_line(tmp_path: Path, damage: str) -> None:
    at = tmp_path / "damaged"
    shutil.copytree(GOLDEN / "dspine_a", at)
    weights = at / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "no config":
            (at / "config.json").unlink()
        case "not json":
            (at / "config.json").write_text("{")
        case "a list":
            (at / "config.json").write_text("[1]")
        case "no weights":
            weights.unlink()
        case "empty":
            weights.write_bytes(b"")
        case "cut header":
            weights.write_bytes(whole[:100])
        case "cut data":
            weights.write_bytes(whole[:-1000])
        case "a page":
            weights.write_text("<!doctype html><html>not found</html>")
    with pytest.raises(DamagedModel, match="incomplete") as caught:
        read(at)
    assert "damaged" in one_line(caught.value)


# ---- fit ----


@dataclass(frozen=True)
class Facts:
    name: str = "owner/Golden-Target-4bit"
    hidden: int = 64
    layers: int = 9
    vocab: int = 160
    rows: int = 160


def facts(**changes: Any) -> Facts:
    return replace(Facts(), **changes)


@pytest.mark.parametrize("kind", ["dspine_a", "dflash_a", "eagle3_a"])
def test_a_drafter_fits_the_target_it_was_made_for(kind: str) -> None:
    assert check_fit(read(GOLDEN / kind), facts()) is None


@pytest.mark.parametrize(
    ("kind", "other", "field"),
    [
        ("dspine_a", {"hidden": 80}, "hidden_size"),
        ("dspine_a", {"layers": 12}, "num_target_layers"),
        ("dspine_a", {"layers": 6}, "num_target_layers"),
        ("dspine_a", {"vocab": 96, "rows": 96}, "vocab_size"),
        ("dspine_a", {"vocab": 256, "rows": 256}, "vocab_size"),
        ("dflash_a", {"hidden": 32}, "hidden_size"),
        ("dflash_a", {"vocab": 96, "rows": 96}, "vocab_size"),
        ("eagle3_a", {"hidden": 80}, "hidden_size"),
        ("eagle3_a", {"vocab": 300, "rows": 300}, "vocab_size"),
        ("eagle3_a", {"layers": 4}, "target_layer_ids"),
    ],
)
def test_C3_a_misfit_is_refused_naming_both_and_the_field(kind: str, other: dict[str, Any], field: str) -> None:
    target = facts(name="wrong-target", **other)
    c = read(GOLDEN / kind)
    with pytest.raises(BadDrafter, match=f"drafter {kind} does not fit wrong-target: its .*{field}") as caught:
        check_fit(c, target)
    one_line(caught.value)
    assert caught.value.exit_code != 0


def test_C3_a_misfit_is_refused_before_anything_is_loaded() -> None:
    c = read(GOLDEN / "dspine_a")

    class Unused:
        name, hidden, layers, vocab, rows = "wrong-target", 80, 9, 160, 160

    with pytest.raises(BadDrafter, match="hidden_size"):
        DSpine(c, Unused())


@pytest.mark.parametrize(("vocab", "rows"), [(150, 160), (160, 160), (159, 160), (140, 200)])
def test_C8_padding_on_either_side_still_fits(vocab: int, rows: int) -> None:
    assert check_fit(read(GOLDEN / "dspine_a"), facts(vocab=vocab, rows=rows)) is None


def test_C8_a_mask_among_the_padding_still_fits() -> None:
    """Qwen3's mask token is the first padded row."""
    assert check_fit(read(GOLDEN / "dspine_a"), facts(vocab=159, rows=160)) is None
    with pytest.raises(BadDrafter, match="mask_token_id is 170"):
        check_fit(read(GOLDEN / "dspine_a", {"mask_token_id": 170}), facts())


@pytest.mark.parametrize("where", ["config", "verifier", "card", "card list", "outside"])
def test_C3_another_base_model_that_fits_is_one_warning(tmp_path: Path, where: str) -> None:
    cfg, extra = config(), {}
    base = "owner/Golden-Instruct"
    if where == "config":
        cfg["base_model"] = base
    elif where == "verifier":
        cfg["speculators_config"] = {"verifier": {"name_or_path": base}}
    elif where == "outside":
        extra = {"base_model": base}
    at = folder(tmp_path / "spine", cfg)
    if where.startswith("card"):
        line = f"base_model: {base}" if where == "card" else f"base_model:\n- {base}"
        (at / "README.md").write_text(f"---\nlicense: mit\n{line}\n---\nbase_model: none\n")
    c = read(at, extra)
    assert c.base == base
    warning = check_fit(c, facts())
    assert warning is not None and "\n" not in warning
    for part in ("spine", base, "owner/Golden-Target-4bit", "lisa train --adapt"):
        assert part in warning
    assert check_fit(c, facts(name="mlx-community/golden-instruct-8bit")) is None
    assert DSpine(c, ends(GOLDEN / "dspine_a", c), scoring="pairs").warning is not None


def test_two_conversions_of_one_model_are_one_model() -> None:
    c = replace(read(GOLDEN / "dspine_a"), base="Qwen/Qwen3-8B")
    for name in (
        "mlx-community/Qwen3-8B-4bit",
        "Qwen3-8B-MLX-8bit",
        "qwen3-8b",
        "/models/Qwen3-8B-bf16/",
        "Qwen/Qwen3-8B-FP8",
    ):
        assert check_fit(c, facts(name=name)) is None
    for name in ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B-Base"):
        assert check_fit(c, facts(name=name)) is not None


def test_block_vectors_are_those_of_the_layout_that_was_read(tmp_path: Path) -> None:
    """The reference layout drafts the golden tokens."""
    c = read(reference_layout(tmp_path / "spine", True), {"block_size": 8})
    m = DSpine(c, ends(GOLDEN / "dspine_a", c), scoring="pairs")
    for given in cases(GOLDEN / "dspine_a"):
        assert block_vectors(m, given)["selected"].tolist() == given["selected"].tolist()
