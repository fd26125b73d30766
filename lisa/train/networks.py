"""The networks that are trained: new ones of a size that fits the target, or those of a drafter folder.

They are the very modules that draft (lisa/drafters). Tensors are float32 while they are trained. Taps are divided by
their root mean square first; `fc` learns on those and is folded back when a drafter is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from lisa.drafters import LEARNED
from lisa.drafters.checkpoint import Checkpoint, check_fit, read
from lisa.errors import UsageError
from lisa.target import Target
from lisa.train.settings import Settings

LAYERS = 2
BLOCK = {"dspine": 6, "dflash": 6}


@dataclass
class Draft:
    """A drafter in training. `model` is the loaded drafter whose `network` is trained.

    `ids` int32 [Vd] are the target's ids of an EAGLE-3's own vocabulary, `tied` when its head is those rows of the
    target's; `codes` [V, r] are DSpine's; `apart` are tensors of a drafter's file beside the network's.
    """

    checkpoint: Checkpoint
    model: Any
    taps: tuple[int, ...]
    apart: Mapping[str, mx.array]
    ids: Any = None
    tied: bool = False
    codes: mx.array | None = None

    @property
    def kind(self) -> str:
        return self.checkpoint.kind

    @property
    def block(self) -> int:
        assert self.checkpoint.block is not None
        return self.checkpoint.block

    @property
    def network(self) -> Any:
        return self.model.network


def default_taps(layers: int) -> tuple[int, ...]:
    """Five layers from the second to the third last, evenly apart; fewer where there are fewer."""
    return tuple(sorted({round(x) for x in np.linspace(min(1, layers - 1), max(layers - 3, 0), 5)}))


def stored_taps(settings: Settings, target: Target) -> tuple[int, ...]:
    """What is kept on disk: every kind's defaults, so that several trainings share it, or what was asked for."""
    chosen = settings.adapt is not None or settings.taps is not None
    return taps_of(settings, target) if chosen else default_taps(target.layers)


def taps_of(settings: Settings, target: Target) -> tuple[int, ...]:
    """The taps a drafter reads. EAGLE-3 makes do with three. Raises UsageError."""
    if settings.adapt is not None:
        return read(settings.adapt).taps_on(target.layers)
    if settings.taps is not None:
        bad = [tap for tap in settings.taps if not 0 <= tap < target.layers]
        if bad or len(set(settings.taps)) < len(settings.taps):
            raise UsageError(f"--taps are different layers from 0 to {target.layers - 1} of {target.name}")
        return settings.taps
    five = default_taps(target.layers)
    return five if settings.kind != "eagle" else tuple(dict.fromkeys((five[0], five[len(five) // 2], five[-1])))


def new(settings: Settings, target: Target, mask: int, vocabulary: Any) -> Draft:
    """An untrained drafter. `mask` is a token id that texts do not hold; `vocabulary` int [Vd] an EAGLE-3's tokens."""
    taps = taps_of(settings, target)
    rng = np.random.default_rng([settings.seed, 1])
    shape = _Shape(target)
    depth = 1 if settings.kind == "eagle" else settings.layers or LAYERS
    weights = {"fc.weight": _matrix(rng, target.hidden, len(taps) * target.hidden)}
    # A full-sized last norm makes the first logits as sharp as a trained model's, and the first losses huge.
    weights["norm.weight"] = 0.5 * target.model.model.norm.weight.astype(mx.float32)
    if settings.kind == "eagle":
        weights |= _layer(rng, shape, "layer", 2 * target.hidden, normed=False)
        weights["layer.hidden_norm.weight"] = mx.ones((target.hidden,))
        weights["lm_head.weight"] = target.head_rows(mx.array(vocabulary))
        weights["d2t"] = mx.array(vocabulary - np.arange(len(vocabulary)), mx.int32)
        config = {**shape.config, "eagle_aux_hidden_state_layer_ids": list(taps), "vocab_size": target.vocab}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(vocabulary)}
        checkpoint = Checkpoint(settings.out.name, "eagle", config, weights, taps, None, None, target.name)
        return replace(loaded(checkpoint, target), tied=True)
    weights["hidden_norm.weight"] = mx.ones((target.hidden,))
    for i in range(depth):
        weights |= _layer(rng, shape, f"layers.{i}", target.hidden, normed=True)
    block = settings.block or BLOCK[settings.kind]
    config = {**shape.config, "num_hidden_layers": depth, "block_size": block, "vocab_size": target.vocab}
    config["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": list(taps)}
    config["architectures"] = ["DSpineDraftModel" if settings.kind == "dspine" else "DFlashDraftModel"]
    if settings.kind == "dspine":
        rank = min(settings.rank or _rank(target.hidden), target.hidden)
        weights |= _injection(rng, target, depth, rank)
        config["dspine_config"] = {"top_k": 16, "transfer_dim": rank, "message_dim": max(rank // 2, 1)}
    return loaded(Checkpoint(settings.out.name, settings.kind, config, weights, taps, mask, block, target.name), target)


def adapted(settings: Settings, target: Target) -> Draft:
    """The drafter of a folder, to be trained further. Raises BadDrafter, UsageError."""
    assert settings.adapt is not None
    checkpoint = read(settings.adapt)
    if checkpoint.kind != settings.kind:
        raise UsageError(f"{settings.adapt} is a {checkpoint.kind} drafter: give --kind {checkpoint.kind}")
    if checkpoint.config.get("norm_output") or checkpoint.config.get("norm_before_residual"):
        raise UsageError(f"{settings.adapt} is of an EAGLE-3 variant that cannot be adapted yet: train a new drafter")
    check_fit(checkpoint, target)
    return loaded(replace(checkpoint, taps=checkpoint.taps_on(target.layers)), target)


def loaded(checkpoint: Checkpoint, target: Target) -> Draft:
    """The drafter's own modules, filled in float32."""
    options: dict[str, Any] = {"scoring": "pairs"} if checkpoint.kind == "dspine" else {}
    model = LEARNED[checkpoint.kind](checkpoint, target, dtype=mx.float32, **options)
    assert checkpoint.taps is not None
    apart = {key: value for key, value in checkpoint.weights.items() if key == "d2t" or key.startswith("transfer_")}
    draft = Draft(replace(checkpoint, weights={}), model, checkpoint.taps, apart)
    if checkpoint.kind == "dspine":
        draft.codes = model.codes.astype(mx.float32)
    if checkpoint.kind == "eagle":
        draft.ids = np.array(model.ids)
        for name in {"lm_head", "embed_tokens"} & set(model.network):
            model.network[name].freeze()
    return draft


def rescale(draft: Draft, scale: Any) -> None:
    """From raw taps to taps divided by `scale` [taps*H]: the network computes the same."""
    draft.network.fc.weight = draft.network.fc.weight * mx.array(scale)[None]


def folded(draft: Draft, scale: Any) -> dict[str, mx.array]:
    """The network's tensors as they read raw taps: the inverse of `rescale`."""
    weights = dict(tree_flatten(draft.network.parameters()))
    return {**weights, "fc.weight": weights["fc.weight"] / mx.array(scale)[None]}


class _Shape:
    """Sizes of a drafter's layers: those of the target's own attention and MLP."""

    def __init__(self, target: Target):
        config = target.config
        self.hidden = target.hidden
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.dims = int(config.get("head_dim") or self.hidden // self.heads)
        self.inner = int(config["intermediate_size"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        self.config = {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dims,
            "num_target_layers": target.layers,
            "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
            "rope_theta": config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            "max_position_embeddings": target.context,
            "base_model": target.name,
        }


def _matrix(rng: Any, rows: int, columns: int, gain: float = 1.0) -> mx.array:
    return mx.array((rng.standard_normal((rows, columns)) * gain / math.sqrt(columns)).astype(np.float32))


def _layer(rng: Any, shape: _Shape, name: str, read: int, normed: bool) -> dict[str, mx.array]:
    q, kv = shape.heads * shape.dims, shape.kv_heads * shape.dims
    weights = {
        f"{name}.self_attn.q_proj.weight": _matrix(rng, q, read),
        f"{name}.self_attn.k_proj.weight": _matrix(rng, kv, read),
        f"{name}.self_attn.v_proj.weight": _matrix(rng, kv, read),
        f"{name}.self_attn.o_proj.weight": _matrix(rng, shape.hidden, q, 0.5),
        f"{name}.mlp.gate_proj.weight": _matrix(rng, shape.inner, shape.hidden),
        f"{name}.mlp.up_proj.weight": _matrix(rng, shape.inner, shape.hidden),
        f"{name}.mlp.down_proj.weight": _matrix(rng, shape.hidden, shape.inner, 0.5),
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = mx.ones((shape.hidden,))
    if normed:
        weights |= {f"{name}.self_attn.{norm}.weight": mx.ones((shape.dims,)) for norm in ("q_norm", "k_norm")}
    return weights


def _rank(hidden: int) -> int:
    """A fifth of the hidden size to the next power of two: 1024 for 5120, as published."""
    return int(2 ** round(math.log2(max(hidden / 5, 2))))


def _injection(rng: Any, target: Target, depth: int, rank: int) -> dict[str, mx.array]:
    """Writes and the predecessor's gate start at 0, so that an untrained DSpine is a causal DFlash."""
    message = max(rank // 2, 1)
    mean, basis = basis_of(target, rank)
    weights = {
        "injection.message.weight": _matrix(rng, message, rank),
        "injection.receiver_gate.weight": _matrix(rng, message, rank),
        "injection.predecessor_gate.weight": mx.zeros((message, rank)),
        "injection.bias": mx.zeros((message,)),
        "transfer_mean": mean,
        "transfer_basis": basis,
    }
    directions = basis / mx.linalg.norm(basis, axis=0, keepdims=True)
    for i in range(depth):
        weights[f"injection.readouts.{i}.weight"] = mx.contiguous(directions.T)
        weights[f"injection.writes.{i}.weight"] = mx.zeros((target.hidden, message))
    return weights


def basis_of(target: Target, rank: int, chunk: int = 16384) -> tuple[mx.array, mx.array]:
    """Of the head's unit rows: their mean [H], and the `rank` strongest directions over their spreads, [H, rank]."""
    total, squares = np.zeros(target.hidden), np.zeros((target.hidden, target.hidden))
    for start in range(0, target.vocab, chunk):
        rows = target.head_rows(mx.arange(start, min(start + chunk, target.vocab)))
        unit = rows / mx.maximum(mx.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
        total += np.array(unit.sum(axis=0))
        squares += np.array(unit.T @ unit)
    mean = total / target.vocab
    values, directions = np.linalg.eigh(squares - target.vocab * np.outer(mean, mean))
    strongest = np.maximum(values[-rank:], 1e-6 * values[-1])
    basis = directions[:, -rank:] / np.sqrt(strongest)
    return mx.array(mean.astype(np.float32)), mx.array(basis.astype(np.float32))
