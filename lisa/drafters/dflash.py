"""DFlash: a block drafted in one pass. Also the backbone and the session that DSpine builds on.

The fused taps of the target, `hidden_norm(fc(taps))`, are the context that every layer attends to; the block is
[anchor, mask, mask ...] and slot i predicts the token at anchor + i. Keys and values of the context are computed once,
when first needed. T counts the slots of a block (the anchor included), C the rows of context, w the tokens proposed.

A block whose layers are all causal is an exact prefix of the full one, so a narrower draft reads fewer slots. In a
bidirectional layer every slot sees the whole block: then the full block is read, as in training, and cut to w.

Source: DFlash, https://arxiv.org/abs/2602.06036, and its published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from lisa.drafters.candidates import CANDIDATES, checked, noise, nothing, perturbed, proposal, usable_width
from lisa.drafters.checkpoint import Checkpoint, Kind, TargetFacts, check_fit, refuse
from lisa.drafters.context import Context, Window
from lisa.layers import give
from lisa.metal import Kernels
from lisa.types import MAX_WIDTH, Commit, Proposal, Sampling

GROUP = 64
"""Weights that share a scale in a backbone quantised at load."""


class TargetSide(TargetFacts, Protocol):
    """The ends of the target that a drafter shares, uncopied, and the kernels that may run."""

    kernels: Kernels

    def embed(self, tokens: mx.array) -> mx.array:
        """int [...] -> [..., H]."""

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hiddens [..., H] -> float32 logits [..., vocab]."""

    def top(self, hidden: mx.array, k: int, vocab: int) -> tuple[mx.array, mx.array]:
        """Normed hiddens [R, H] -> the k best tokens below `vocab` of each row, best first: ids int32 and float32
        logits, [R, k] each."""

    def head_rows(self, ids: mx.array) -> mx.array:
        """Rows of the head, int [...] -> float32 [..., H], dequantised where they are packed."""


def linear(weights: Mapping[str, mx.array], name: str) -> Linear:
    """A layer of the size the checkpoint says; `fill` loads its values."""
    rows, columns = weights[f"{name}.weight"].shape
    return Linear(columns, rows, bias=f"{name}.bias" in weights)


def norm(weights: Mapping[str, mx.array], name: str, config: Mapping[str, Any]) -> RMSNorm:
    return RMSNorm(weights[f"{name}.weight"].shape[0], eps=config.get("rms_norm_eps") or 1e-6)


class Attention(Module):
    """Grouped-query attention over keys kept elsewhere; queries and keys are normed where it has norms.

    Inputs are [1, T, ...]; queries, keys and values [1, heads, T, D].
    """

    def __init__(self, weights: Mapping[str, mx.array], name: str, config: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(weights, f"{name}.{p}_proj") for p in "qkvo")
        self.normed = f"{name}.q_norm.weight" in weights
        if self.normed:
            self.q_norm, self.k_norm = (norm(weights, f"{name}.{p}_norm", config) for p in "qk")
            self.dims = weights[f"{name}.q_norm.weight"].shape[0]
        else:
            self.dims = config.get("head_dim") or self.o_proj.weight.shape[1] // config["num_attention_heads"]
        theta, scaling = config.get("rope_theta") or 10000.0, config.get("rope_scaling")
        self.rope = initialize_rope(self.dims, theta, False, scaling, config.get("max_position_embeddings"))

    def queries(self, x: mx.array, position: int) -> mx.array:
        q = self._heads(self.q_proj(x))
        roped: mx.array = self.rope((self.q_norm(q) if self.normed else q).swapaxes(1, 2), offset=position)
        return roped

    def keys_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        k = self._heads(self.k_proj(x))
        k = self.rope((self.k_norm(k) if self.normed else k).swapaxes(1, 2), offset=position)
        return k, self._heads(self.v_proj(x)).swapaxes(1, 2)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> mx.array:
        return self.merge(mx.fast.scaled_dot_product_attention(q, k, v, scale=self.dims**-0.5, mask=mask))

    def merge(self, heads: mx.array) -> mx.array:
        """[1, heads, T, D] -> [1, T, H]."""
        out: mx.array = self.o_proj(heads.swapaxes(1, 2).flatten(2))
        return out

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], -1, self.dims)


class Layer(Module):
    """A decoder layer: a block [1, T, H] that starts at `position` attends to a context and to itself."""

    def __init__(self, weights: Mapping[str, mx.array], name: str, config: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.input_layernorm = norm(weights, f"{name}.input_layernorm", config)
        self.self_attn = Attention(weights, f"{name}.self_attn", config)
        self.post_attention_layernorm = norm(weights, f"{name}.post_attention_layernorm", config)
        inner, hidden = weights[f"{name}.mlp.up_proj.weight"].shape
        self.mlp = MLP(hidden, inner)

    def __call__(self, h: mx.array, context: Context | Window, position: int, mask: mx.array | str | None) -> mx.array:
        x = self.input_layernorm(h)
        keys, values = context.beside(*self.self_attn.keys_values(x, position))
        h = h + self.self_attn.attend(self.self_attn.queries(x, position), keys, values, mask)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Backbone(Module):
    """The network of a DFlash checkpoint, under the checkpoint's own tensor names."""

    def __init__(self, weights: Mapping[str, mx.array], config: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.fc = linear(weights, "fc")
        self.hidden_norm = norm(weights, "hidden_norm", config)
        self.norm = norm(weights, "norm", config)
        depth = 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("layers."))
        self.layers = [Layer(weights, f"layers.{i}", config) for i in range(depth)]

    def fuse(self, features: mx.array) -> mx.array:
        """Taps [n, taps*H] -> what the context's keys and values are made of, [n, H]."""
        fused: mx.array = self.hidden_norm(self.fc(features))
        return fused


class Trace(NamedTuple):
    """A forward over a block: `final` [1, T, H] after the last norm; `pre` the last layer's output before, and `layers`
    every layer's output after, what a subclass does between layers."""

    final: mx.array
    pre: mx.array
    layers: list[mx.array]


class DFlash:
    """A loaded drafter: immutable, shared by all sessions; `new()` makes the drafter of one session.

    `dtype` None computes in the target's dtype. `bits` 4 or 8 packs the backbone's matrices, `fc` included, in groups
    of 64; norms and all that DSpine adds stay. A session queues the features of at most `chunk` tokens before it
    projects them. `warning` is what check_fit had to say. Raises BadDrafter for a misfit.
    """

    kind: Kind = "dflash"
    apart: tuple[str, ...] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetSide,
        *,
        dtype: mx.Dtype | None = None,
        bits: int | None = None,
        chunk: int = 512,
    ):
        self.warning = check_fit(checkpoint, target)
        assert checkpoint.taps is not None and checkpoint.mask is not None and checkpoint.block is not None
        self.checkpoint = replace(checkpoint, weights={})  # or the file's values would stay beside the converted ones
        self.target, self.chunk = target, chunk
        self.taps, self.mask, self.block = checkpoint.taps, checkpoint.mask, checkpoint.block
        self.width = min(self.block - 1, MAX_WIDTH)
        self.limit: int | None = checkpoint.config.get("max_position_embeddings")
        self.dtype = dtype or target.embed(mx.zeros((1,), mx.int32)).dtype
        self.network: Any = fill(self.build, checkpoint, self.dtype, bits, self.apart)
        give(self.network, target.kernels)
        self.windows = _windows(checkpoint, len(self.network.layers))
        self.causal = self._causal()

    def build(self, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> Module:
        return Backbone(weights, config)

    def new(self) -> BlockDrafter:
        return BlockDrafter(self)

    def _causal(self) -> list[bool]:
        """Which layers are causal inside the block: all or none where declared, else the sliding ones."""
        declared = self.checkpoint.config.get("is_causal")
        return [window is not None if declared is None else bool(declared) for window in self.windows]

    def forward(self, tokens: mx.array, contexts: Sequence[Context | Window], position: int) -> Trace:
        """Read a block of tokens int32 [T], the first at `position`."""
        h = self.target.embed(tokens)[None].astype(self.dtype)
        pre, outputs = h, []
        for i, (layer, context) in enumerate(zip(self.network.layers, contexts, strict=True)):
            pre = layer(h, context, position, _mask(self.causal[i], self.windows[i], position, tokens.shape[0]))
            h = self.after_layer(pre, i, tokens)
            outputs.append(h)
        return Trace(self.network.norm(h), pre, outputs)

    def after_layer(self, h: mx.array, layer: int, tokens: mx.array) -> mx.array:
        return h

    def draft(
        self, contexts: Sequence[Context | Window], last: int, width: int, sampling: Sampling, position: int
    ) -> Proposal:
        slots = width + 1 if all(self.causal) else self.block
        tokens = mx.array([last] + [self.mask] * (slots - 1), mx.int32)
        return self.choose(self.forward(tokens, contexts, position), last, width, sampling, position)

    def choose(self, trace: Trace, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        ids, logits = self.target.top(trace.final[0, 1 : width + 1], CANDIDATES, self.target.vocab)
        columns = mx.argmax(perturbed(logits, noise(ids, sampling, position), sampling), axis=-1)
        return proposal(self.kind, ids, logits, columns, sampling)


class BlockDrafter:
    """The drafter of one session: a context for each layer, and the features that are not projected yet."""

    def __init__(self, model: DFlash):
        self.model = model
        self.source: str = model.kind
        self.taps, self.width, self.limit = model.taps, model.width, model.limit
        self.contexts: list[Context | Window] = [Context() if w is None else Window(w) for w in model.windows]
        self.queue: tuple[mx.array, ...] = ()

    @property
    def length(self) -> int:
        return self._projected + sum(rows.shape[0] for rows in self.queue)

    @property
    def _projected(self) -> int:
        return self.contexts[0].length

    def observe(self, commit: Commit) -> None:
        self.queue = (*self.queue, checked(commit, self.length))
        if self.length - self._projected > self.model.chunk:
            self._project()
            # Started, not waited for: left lazy, the projection would keep the features of the whole prompt alive.
            mx.async_eval([context.arrays for context in self.contexts])  # type: ignore[no-untyped-call]

    def _project(self) -> None:
        if self.queue:
            network, position = self.model.network, self._projected
            fused = network.fuse(mx.concatenate(list(self.queue)).astype(self.model.dtype))[None]
            for layer, context in zip(network.layers, self.contexts, strict=True):
                context.append(*layer.self_attn.keys_values(fused, position))
            self.queue = ()

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        width = usable_width(self, width, position)
        if width <= 0:
            return nothing(self.source)
        self._project()
        return self.model.draft(self.contexts, last, width, sampling, position)

    def rewind(self, length: int) -> int:
        length = min(length, self.length)
        if length < self._projected:
            length = min(context.reach(length) for context in self.contexts)
            for context in self.contexts:
                context.rewind(length)
        queued = length - self._projected
        self.queue = (mx.concatenate(list(self.queue))[:queued],) if queued > 0 else ()
        return length

    def snapshot(self) -> object:
        return [context.save() for context in self.contexts], self.queue

    def restore(self, snapshot: Any) -> None:
        saved, self.queue = snapshot
        for context, part in zip(self.contexts, saved, strict=True):
            context.load(part)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for held in (self.queue, *(c.arrays for c in self.contexts)) for a in held)


def _windows(checkpoint: Checkpoint, depth: int) -> list[int | None]:
    """The window of each sliding layer, None for a full one."""
    kinds = checkpoint.config.get("layer_types") or ["full_attention"] * depth
    window = checkpoint.config.get("sliding_window")
    known = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if len(kinds) != depth or not set(kinds) <= known:
        why = f"has layer_types {kinds} and sliding_window {window}, which does not describe its {depth} layers"
        refuse(checkpoint.name, why, "correct it with --drafter-config")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _mask(causal: bool, window: int | None, position: int, slots: int) -> mx.array | str | None:
    """Which of [context ; block] each slot sees; as short a name as MLX has for it, or bool [T, C + T]."""
    if window is None or position + slots <= window:
        return "causal" if causal else None
    at = mx.arange(position, position + slots)[:, None]
    keys = mx.arange(max(0, position - (window - 1)), position + slots)
    return (keys > at - window) & (keys <= at) if causal else keys > at - window


def fill(build: Any, checkpoint: Checkpoint, dtype: mx.Dtype, bits: int | None, apart: Sequence[str] = ()) -> Module:
    """Build a network from a checkpoint's shapes and load its values in `dtype`, matrices packed to `bits`.

    Tensors named in `apart` are not the network's. Raises BadDrafter when a tensor is missing, left over or misshapen.
    """
    weights = {key: value for key, value in checkpoint.weights.items() if key not in apart}
    try:
        network: Module = build(weights, checkpoint.config)
    except KeyError as error:
        refuse(checkpoint.name, f"lacks {error.args[0]}")
    shapes = {key: value.shape for key, value in tree_flatten(network.parameters())}  # type: ignore[no-untyped-call]
    wrong = sorted(key for key in {*shapes, *weights} if key not in weights or shapes.get(key) != weights[key].shape)
    if wrong:
        what = "has an unexpected" if wrong[0] in weights else "lacks the"
        refuse(checkpoint.name, f"{what} tensor {wrong[0]} ({len(wrong)} in all), so it is of a kind Lisa does not run")
    network.load_weights(list(weights.items()))
    network.set_dtype(dtype)
    if bits is not None:
        quantize(network, GROUP, bits, class_predicate=_packable)
    mx.eval(network.parameters())  # type: ignore[no-untyped-call]
    return network


def _packable(path: str, module: Module) -> bool:
    return isinstance(module, Linear) and not path.startswith("injection") and module.weight.shape[-1] % GROUP == 0
