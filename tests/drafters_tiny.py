"""Random drafters of every kind that fit the tiny targets of tests/tiny.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from tiny import VOCAB, target

from lisa.drafters import LEARNED, PLAIN
from lisa.drafters.checkpoint import Checkpoint
from lisa.drafters.composed import Composed
from lisa.types import Drafter

KINDS = ["none", "ngram", "dflash", "dspine", "eagle", "dspine+ngram", "sliding dflash"]

HIDDEN = 32
_TAPS = (0, 2)
_BLOCK = {"model_type": "qwen3", "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 512}


@functools.cache
def drafter(kind: str, on: str) -> Callable[[], Drafter]:
    """What makes a session's drafter. Random, but with layers small enough that some of its drafts are accepted."""
    if kind in PLAIN:
        return PLAIN[kind]
    if kind.endswith("+ngram"):
        return lambda: Composed(drafter(kind.removesuffix("+ngram"), on)())
    checkpoint = _checkpoint(kind)
    model: Any = LEARNED[checkpoint.kind](checkpoint, target(on), chunk=16)
    made: Callable[[], Drafter] = model.new
    return made


_DECLARED = {"dspine": "DSpineDraftModel", "dflash": "DFlashDraftModel", "eagle": "LlamaForCausalLMEagle3"}


def write_drafter(folder: Path, kind: str, vocab: int, **changes: Any) -> Path:
    """The same drafters as folders in SpecForge's layouts; `changes` to config.json, None removes a key."""
    checkpoint = _checkpoint(kind, vocab)
    folder.mkdir(parents=True)
    taps = {"target_layer_ids": list(_TAPS), "mask_token_id": 5, "block_size": 16}
    own = {"eagle_aux_hidden_state_layer_ids": list(_TAPS)} if kind == "eagle" else taps
    config = {**checkpoint.config, "architectures": [_DECLARED[kind]], "vocab_size": vocab, **own, **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    weights = dict(checkpoint.weights)
    if kind == "eagle":
        weights = {name.replace("layer.", "midlayer."): value for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _checkpoint(kind: str, vocab: int = VOCAB) -> Checkpoint:
    if kind == "eagle":
        return Checkpoint("tiny-eagle", "eagle", _BLOCK, _eagle(vocab), _TAPS)
    weights = _backbone(layers=2)
    if kind == "dspine":
        weights |= _injection(2, vocab)
    config = dict(_BLOCK)
    if kind.startswith("sliding"):
        config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
    return Checkpoint(f"tiny-{kind}", "dspine" if kind == "dspine" else "dflash", config, weights, _TAPS, 47, 16)


def _random(*shape: int) -> mx.array:
    key = mx.random.key(hash(shape) % 1000)
    return mx.random.normal(shape, key=key) / shape[-1] ** 0.5


def _layer(name: str, read: int) -> dict[str, mx.array]:
    shapes = {"q_proj": (32, read), "k_proj": (16, read), "v_proj": (16, read), "o_proj": (HIDDEN, 32)}
    weights = {f"{name}.self_attn.{part}.weight": _random(*shape) for part, shape in shapes.items()}
    mlp = {"gate_proj": (48, HIDDEN), "up_proj": (48, HIDDEN), "down_proj": (HIDDEN, 48)}
    weights |= {f"{name}.mlp.{part}.weight": _random(*shape) for part, shape in mlp.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return weights | {f"{name}.{norm}.weight": mx.ones((HIDDEN,)) for norm in norms}


def _backbone(layers: int) -> dict[str, mx.array]:
    weights = {"fc.weight": _random(HIDDEN, len(_TAPS) * HIDDEN)}
    weights |= {f"{norm}.weight": mx.ones((HIDDEN,)) for norm in ("hidden_norm", "norm")}
    for i in range(layers):
        weights |= _layer(f"layers.{i}", HIDDEN)
        weights |= {f"layers.{i}.self_attn.{norm}.weight": mx.ones((8,)) for norm in ("q_norm", "k_norm")}
    return weights


def _injection(layers: int, vocab: int, rank: int = 12, message: int = 6) -> dict[str, mx.array]:
    weights = {f"injection.{gate}.weight": _random(message, rank) for gate in ("receiver_gate", "predecessor_gate")}
    weights |= {"injection.message.weight": _random(message, rank), "injection.bias": mx.zeros((message,))}
    for i in range(layers):
        weights |= {f"injection.readouts.{i}.weight": _random(rank, HIDDEN)}
        weights |= {f"injection.writes.{i}.weight": _random(HIDDEN, message)}
    codes = _random(vocab, rank)
    return weights | {"transfer_codes": codes / mx.linalg.norm(codes, axis=-1, keepdims=True)}


def _eagle(vocab: int) -> dict[str, mx.array]:
    """A reduced vocabulary: every second token."""
    known = mx.arange(0, vocab - 1, 2)
    weights = {"fc.weight": _random(HIDDEN, len(_TAPS) * HIDDEN), "lm_head.weight": _random(vocab // 2, HIDDEN)}
    weights |= {"norm.weight": mx.ones((HIDDEN,)), "layer.hidden_norm.weight": mx.ones((HIDDEN,))}
    return weights | _layer("layer", 2 * HIDDEN) | {"d2t": known - mx.arange(vocab // 2)}
