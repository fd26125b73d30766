"""Tiny random models as folders: config, weights in MLX layout, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3, qwen3_5
from tiny import _DENSE, _HYBRID, livelier
from tokenizers import Tokenizer
from tokenizers_tiny import make_tokenizer

KINDS = {"llama": llama, "qwen3": qwen3, "qwen3_5": qwen3_5}
"""The dense ones have 3 layers, the hybrid 3 Gated DeltaNet layers and 1 of attention. Hidden size 32, context 512."""


def write_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a float32 model of that `model_type` with the vocabulary of `make_tokenizer`; returns `folder`."""
    make_tokenizer(folder)
    config = _config(kind, Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())
    mx.random.seed(seed)
    model = KINDS[kind].Model(KINDS[kind].ModelArgs.from_dict(config))
    weights = dict(tree_flatten(livelier(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes the key."""
    value = json.loads(file.read_text("utf-8")) | changes
    file.write_text(json.dumps({k: v for k, v in value.items() if v is not None}), "utf-8")


def _config(kind: str, vocab: int) -> dict[str, Any]:
    text = {**(_HYBRID if kind == "qwen3_5" else _DENSE), "model_type": kind, "vocab_size": vocab}
    if kind != "qwen3_5":
        return text
    return {"model_type": kind, "text_config": {**text, "model_type": "qwen3_5_text"}}
