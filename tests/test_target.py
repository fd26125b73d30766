"""Target: the published numbers, taps where they are said to be, and a clear refusal of everything else."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import VOCAB, target

from bench import golden
from lisa.errors import DamagedModel, UnsupportedModel
from lisa.target import Target, model_classes

GOLDEN = Path(__file__).parent / "golden"
TARGETS = sorted(path for path in GOLDEN.glob("target_*"))
TOKENS = mx.array([3, 1, 4, 1, 5, 9, 2, 6], mx.int32)


@pytest.mark.parametrize("folder", TARGETS, ids=lambda path: path.name)
def test_hidden_states_and_logits_are_the_golden_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main([str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "target" and set(report["errors"]) == {"hidden_states", "logits"}
    assert max(report["errors"].values()) < 1e-4


def test_a_golden_number_that_is_off_is_reported_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "off"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(TARGETS[0] / name)
    vectors = dict(mx.load(str(TARGETS[0] / "vectors.safetensors")))
    vectors["1.logits"] = vectors["1.logits"] + 0.01
    mx.save_safetensors(str(folder / "vectors.safetensors"), vectors)
    assert golden.main([str(folder)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and report["errors"]["logits"] > report["tolerance"] > report["errors"]["hidden_states"]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_C2_a_tap_is_the_output_of_its_layer_in_the_order_asked_for(kind: str) -> None:
    t = target(kind)
    h = t.embed(TOKENS)[None]
    state = t.new_state()
    outputs = []
    for layer, cache in zip(t.model.layers, state.caches, strict=True):
        mask = (
            None
            if getattr(layer, "is_linear", False)
            else cache.make_mask(8, return_array=False, window_size=8 if getattr(layer, "use_sliding", False) else None)
        )
        h = layer(h, mask, cache)
        outputs.append(np.array(h[0]))
    _, features = t.forward(TOKENS, t.new_state(), taps=(2, 0))
    assert features is not None
    assert np.array_equal(np.array(features), np.concatenate([outputs[2], outputs[0]], axis=-1))


def test_C2_a_layer_that_adds_its_number_shows_in_its_tap() -> None:
    class Adds(nn.Module):
        def __init__(self, amount: float):
            super().__init__()
            self.amount = amount

        def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
            return x + self.amount

    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(8, 4)
    model.model.embed_tokens.weight = mx.zeros((8, 4))
    model.model.layers = [Adds(i + 1.0) for i in range(4)]
    model.model.norm = nn.Identity()
    t = Target(model, {"vocab_size": 8, "hidden_size": 4})
    _, features = t.forward(mx.array([1, 2]), t.new_state(), taps=(0, 2))
    assert features is not None and features.tolist() == [[1.0] * 4 + [6.0] * 4] * 2


def test_logits_are_made_only_for_the_rows_asked_for() -> None:
    t = target("dense")
    full, features = t.forward(TOKENS, t.new_state(), rows=8)
    last, _ = t.forward(TOKENS, t.new_state(), rows=2)
    none, _ = t.forward(TOKENS, t.new_state(), rows=0)
    assert features is None and full.shape == (8, VOCAB) and none.shape == (0, VOCAB)
    assert mx.array_equal(last, full[6:]) and full.dtype == mx.float32


def test_C8_padding_rows_of_the_vocabulary_get_no_logits() -> None:
    t = target("dense")
    padded = Target(t.model, t.config, vocab=VOCAB - 6)
    logits, _ = padded.forward(TOKENS, padded.new_state(), rows=8)
    full, _ = t.forward(TOKENS, t.new_state(), rows=8)
    assert padded.vocab == VOCAB - 6 and mx.array_equal(logits, full[:, : VOCAB - 6])


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_head_rows_are_the_rows_of_the_head(kind: str) -> None:
    t = target(kind)
    hidden = mx.random.normal((3, t.hidden), key=mx.random.key(0))
    rows = t.head_rows(mx.array([4, 0, 11]))
    np.testing.assert_allclose(np.array(hidden @ rows.T), np.array(t.head(hidden)[:, mx.array([4, 0, 11])]), atol=1e-5)


def save(folder: Path, config: dict[str, object], weights: dict[str, mx.array], shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    for i in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(folder / name), {n: weights[n] for n in names[i::shards]})
    return folder


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
@pytest.mark.parametrize(("bits", "shards"), [(None, 1), (None, 3), (4, 1), (8, 2)])
def test_folders_load_quantised_or_not_sharded_or_not(kind: str, bits: int | None, shards: int, tmp_path: Path) -> None:
    t = target(kind)
    weights = dict(tree_flatten(t.model.parameters()))
    config = dict(t.config)
    expected, tolerance = weights, 1e-5
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
        linear = [
            n
            for n, m in t.model.named_modules()
            if isinstance(m, (nn.Linear, nn.Embedding)) and m.weight.shape[-1] % 32 == 0
        ]
        expected = dict(weights)
        for name in linear:
            w, scales, biases = mx.quantize(weights[f"{name}.weight"], group_size=32, bits=bits)
            weights |= {f"{name}.weight": w, f"{name}.scales": scales, f"{name}.biases": biases}
            expected[f"{name}.weight"] = mx.dequantize(w, scales, biases, group_size=32, bits=bits)
        tolerance = 2e-3
    loaded = Target.load(save(tmp_path / "model", config, weights, shards))
    logits, _ = loaded.forward(TOKENS, loaded.new_state(), rows=8)
    plain = Target.load(save(tmp_path / "plain", dict(t.config), expected))
    reference, _ = plain.forward(TOKENS, plain.new_state(), rows=8)
    np.testing.assert_allclose(np.array(logits), np.array(reference), atol=tolerance)
    hidden = mx.random.normal((2, t.hidden), key=mx.random.key(0))
    np.testing.assert_allclose(
        np.array(hidden @ loaded.head_rows(mx.array([7, 9])).T), np.array(loaded.head(hidden)[:, 7:10:2]), atol=1e-3
    )


def test_half_precision_weights_compute_in_float32_on_a_cpu(tmp_path: Path) -> None:
    t = target("dense")
    weights = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(t.model.parameters())}
    folder = save(tmp_path / "model", dict(t.config), weights)
    dtypes = {value.dtype for _, value in tree_flatten(Target.load(folder).model.parameters())}
    assert dtypes == ({mx.float32} if mx.default_device() == mx.cpu else {mx.bfloat16})
    kept = Target.load(folder, dtype=mx.bfloat16)
    assert {value.dtype for _, value in tree_flatten(kept.model.parameters())} == {mx.bfloat16}


def test_a_quantised_kv_cache_can_be_asked_for() -> None:
    t = target("dense")
    config = {**t.config, "head_dim": 64}
    from mlx_lm.models import qwen3

    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    packed = Target(model, config, kv_bits=8)
    logits, _ = packed.forward(TOKENS, packed.new_state(), rows=8)
    plain = Target(model, config)
    reference, _ = plain.forward(TOKENS, plain.new_state(), rows=8)
    assert not mx.array_equal(logits, reference) and mx.abs(logits - reference).max().item() < 0.05


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"},
        {"model_type": "qwen3_5", "text_config": {"num_experts": 8}},
        {"model_type": "qwen3_moe"},
        {},
    ],
)
def test_other_families_are_refused_by_name(config: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match=str(config.get("model_type"))):
        model_classes(config)


def test_missing_or_misshapen_tensors_are_damage(tmp_path: Path) -> None:
    t = target("dense")
    weights = dict(tree_flatten(t.model.parameters()))
    fewer = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    with pytest.raises(DamagedModel, match="fewer"):
        Target.load(save(tmp_path / "fewer", dict(t.config), fewer))
    with pytest.raises(DamagedModel, match="other"):
        Target.load(save(tmp_path / "other", dict(t.config), weights | {"lm_head.weight": mx.zeros((3, 3))}))
