"""Target: one forward with taps over an mlx-lm model.

The layers, their weights and their quantisation are mlx-lm's. What is ours: which rows get logits, the taps (the
residual stream after a layer, before any final norm), and Gated DeltaNet layers that record what a rollback replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3, qwen3_5
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model

from lisa import layers, sampling
from lisa.errors import DamagedModel, UnsupportedModel
from lisa.metal import NONE, Kernels, Packed, head_argmax, head_topk, rows_qmm
from lisa.state import RecurrentCache, State

FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_5_text")


class Llama(llama.Model):  # type: ignore[misc]
    """llama with Lisa's layers."""

    def __init__(self, args: Any):
        super().__init__(args)
        layers.own(self, args)


class Qwen3(qwen3.Model):  # type: ignore[misc]
    """qwen3 with Lisa's layers."""

    def __init__(self, args: Any):
        super().__init__(args)
        layers.own(self, args)


class Hybrid(qwen3_5.Model):  # type: ignore[misc]
    """qwen3_5 with Lisa's layers."""

    def __init__(self, args: Any):
        super().__init__(args)
        layers.own(self, self.language_model.args)

    def make_cache(self) -> list[Any]:
        return [RecurrentCache(2) if layer.is_linear else KVCache() for layer in self.layers]


def model_classes(config: Mapping[str, Any]) -> tuple[type, type]:
    """For mlx-lm's load_model. Raises UnsupportedModel for any family but those Lisa is tested on."""
    kind = config.get("model_type")
    text = config.get("text_config", config)
    if kind in ("qwen3_5", "qwen3_5_text") and not text.get("num_experts"):
        return Hybrid, qwen3_5.ModelArgs
    if kind == "qwen3":
        return Qwen3, qwen3.ModelArgs
    if kind == "llama":
        return Llama, llama.ModelArgs
    raise UnsupportedModel(
        f"model_type {kind!r} is not supported; Lisa runs dense models of the families llama, qwen3 and qwen3_5"
    )


class Target:
    """A loaded model. One timeline's context lives in a State, never here.

    `vocab` is the number of usable token ids: logits of padding rows past it are cut off. `layers` counts decoder
    layers, `hidden` is H, `context` the longest sequence the model was made for (None when the config does not say).
    """

    def __init__(
        self,
        model: Module,
        config: Mapping[str, Any],
        *,
        name: str = "",
        vocab: int | None = None,
        kv_bits: int | None = None,
        kernels: Kernels = NONE,
    ):
        self.model = model
        self.name = name
        self.config: Mapping[str, Any] = config.get("text_config", config)
        self._body = model.model
        self._layers = list(self._body.layers)
        self._kinds = [_kind(layer) for layer in self._layers]
        self._window = self.config.get("sliding_window")
        owner = getattr(model, "language_model", model)
        self._tied = "lm_head" not in owner
        self._kv_bits = kv_bits
        self.rows = int(self.config["vocab_size"])
        self.vocab = min(vocab or self.rows, self.rows)
        self.layers = len(self._layers)
        self.hidden = int(self.config["hidden_size"])
        self.context: int | None = self.config.get("max_position_embeddings")
        self.use(kernels)

    def use(self, kernels: Kernels) -> None:
        """Let layers, head and drafters run `kernels`, and no others."""
        layers.give(self.model, kernels)
        owner = getattr(self.model, "language_model", self.model)
        self._head = self._body.embed_tokens if self._tied else owner["lm_head"]
        self.kernels = kernels

    @property
    def packed_head(self) -> Packed | None:
        return layers.packed(self._head) if "scales" in self._head else None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: mx.Dtype | None = None,
        name: str = "",
        vocab: int | None = None,
        kv_bits: int | None = None,
        kernels: Kernels = NONE,
    ) -> Target:
        """Read a model folder in mlx-lm's layout, quantised or not, sharded or not.

        `dtype` converts what is not packed; None keeps it, except that a CPU computes in float32, its only fast format.
        `kernels` are those its layers may run.
        Raises UnsupportedModel for another family, DamagedModel when tensors are missing or misshapen.
        """
        try:
            model, config = load_model(folder, lazy=True, get_model_classes=model_classes)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise DamagedModel(
                f"{folder} does not hold a complete model: {_first_line(error)}; fetch it again"
            ) from error
        if dtype is None and mx.default_device() == mx.cpu:
            dtype = mx.float32
        if dtype is not None:
            model.set_dtype(dtype)
        mx.eval(model.parameters())
        return cls(model, config, name=name or folder.name, vocab=vocab, kv_bits=kv_bits, kernels=kernels)

    def new_state(self) -> State:
        """An empty context. Raises UnsupportedModel when a layer's cache has no exact way back."""
        caches = self.model.make_cache() if hasattr(self.model, "make_cache") else [KVCache() for _ in self._layers]
        if self._kv_bits is not None:
            caches = [QuantizedKVCache(bits=self._kv_bits) if type(c) is KVCache else c for c in caches]
        return State(caches)

    def forward(
        self, tokens: mx.array, state: State, taps: Sequence[int] = (), rows: int = 1, best: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """Read `tokens` int32 [T] after what `state` holds.

        Returns float32 logits [rows, vocab] of the last `rows` rows, or with `best` the id of the largest of each,
        int32 [rows]; and the taps [T, len(taps) * H] in the order asked for (None without taps). Lazy.
        """
        h = self.embed(tokens)[None]
        masks = {kind: self._mask(kind, h, state) for kind in set(self._kinds)}
        outputs: dict[int, mx.array] = {}
        for i, (layer, kind, cache) in enumerate(zip(self._layers, self._kinds, state.caches, strict=True)):
            h = layer(h, masks[kind], cache)
            if i in taps:
                outputs[i] = h[0]
        state.advance(tokens.shape[0])
        features = mx.concatenate([outputs[i] for i in taps], axis=-1) if taps else None
        normed = self.norm(h[0, h.shape[1] - rows :])
        return self.best(normed) if best else self.head(normed), features

    def _mask(self, kind: str, h: mx.array, state: State) -> Any:
        if kind == "recurrent":
            return None
        cache = state.caches[self._kinds.index(kind)]
        return create_attention_mask(h, cache, window_size=self._window if kind == "sliding" else None)

    def embed(self, tokens: mx.array) -> mx.array:
        """int [...] -> [..., H]."""
        embedded: mx.array = self._body.embed_tokens(tokens)
        return embedded

    def norm(self, hidden: mx.array) -> mx.array:
        """The final norm, [..., H] -> [..., H]."""
        normed: mx.array = self._body.norm(hidden)
        return normed

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hiddens [..., H] -> float32 logits [..., vocab].

        The kernel leaves them unrounded, as `best` compares them: a greedy text must not depend on who asks for logits.
        """
        head = self.packed_head if self.kernels.may_run("rows_qmm", hidden.size // self.hidden) else None
        wide = hidden.astype(mx.float32)
        if head is not None and rows_qmm.fits(wide, head):
            return rows_qmm.rows_qmm(wide, head, kernels=self.kernels)[..., : self.vocab]
        logits: mx.array = self._head.as_linear(hidden) if self._tied else self._head(hidden)
        return logits[..., : self.vocab].astype(mx.float32)

    def best(self, hidden: mx.array) -> mx.array:
        """Normed hiddens [R, H] -> the id of the largest logit of each row, the lowest among equals, int32 [R].

        Where head_argmax runs, no logits are written.
        """
        head = self.packed_head if self.kernels.may_run("head_argmax", hidden.shape[0]) else None
        if head is not None and head_argmax.fits(hidden, head, vocab=self.vocab):
            return head_argmax.head_argmax(hidden, head, vocab=self.vocab, kernels=self.kernels)[0]
        return mx.argmax(self.head(hidden), axis=-1).astype(mx.int32)

    def top(self, hidden: mx.array, k: int, vocab: int) -> tuple[mx.array, mx.array]:
        """Normed hiddens [R, H] -> the k best tokens below `vocab` of each row, best first: ids int32 and float32
        logits, [R, k] each."""
        head = self.packed_head if self.kernels.may_run("head_topk", hidden.shape[0]) else None
        if head is not None and head_topk.fits(hidden, head, k=k, vocab=vocab):
            return head_topk.head_topk(hidden, head, k=k, vocab=vocab, kernels=self.kernels)
        return sampling.top(self.head(hidden)[:, :vocab], k)

    def head_rows(self, ids: mx.array) -> mx.array:
        """Rows of the head, int [...] -> float32 [..., H], dequantised where they are packed."""
        module = self._head
        if "scales" not in module:
            rows: mx.array = module["weight"][ids].astype(mx.float32)
            return rows
        biases = module.get("biases")
        return mx.dequantize(
            module["weight"][ids],
            module["scales"][ids],
            None if biases is None else biases[ids],
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        ).astype(mx.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        parameters = self.model.parameters()  # type: ignore[no-untyped-call]
        return sum(value.nbytes for _, value in tree_flatten(parameters))


def _kind(layer: Module) -> str:
    if getattr(layer, "is_linear", False):
        return "recurrent"
    return "sliding" if getattr(layer, "use_sliding", False) else "full"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
