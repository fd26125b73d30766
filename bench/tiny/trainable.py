"""lisa.target's Hybrid with the same parameters and a forward made for training on a CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP

from bench.tiny import elementwise
from bench.tiny.delta import gated_delta
from lisa.target import GatedDeltaNet, Hybrid


class ChunkedDeltaNet(GatedDeltaNet):
    """The layer from an empty state, [B, T, H] -> [B, T, H]."""

    def __call__(self, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, rows, _ = inputs.shape
        conv = elementwise.short_conv(self.in_proj_qkv(inputs), self.conv1d.weight[..., 0])
        q, k, v = self._heads(elementwise.silu(conv))
        rate = nn.softplus(self.in_proj_a(inputs) + self.dt_bias)
        beta = mx.sigmoid(self.in_proj_b(inputs))
        out, _ = gated_delta(q, k, v, -mx.exp(self.A_log) * rate, beta)
        z = self.in_proj_z(inputs).reshape(batch, rows, self.num_v_heads, self.head_v_dim)
        normed = mx.fast.rms_norm(out, self.norm.weight, self.norm.eps)
        mixed: mx.array = self.out_proj(elementwise.swiglu(z, normed).reshape(batch, rows, -1))
        return mixed


class TrainableAttention(Qwen3NextAttention):  # type: ignore[misc]
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, rows, _ = x.shape
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        queries, gate = mx.split(self.q_proj(x).reshape(batch, rows, heads, -1), 2, axis=-1)
        keys = self.k_norm(self.k_proj(x).reshape(batch, rows, groups, -1)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(batch, rows, groups, -1).transpose(0, 2, 1, 3)
        queries = self.rope(self.q_norm(queries).transpose(0, 2, 1, 3)).reshape(batch, groups, heads // groups, rows, -1)
        scores = (queries * self.scale) @ self.rope(keys)[:, :, None].swapaxes(-1, -2)
        scores = mx.where(mx.tril(mx.ones((rows, rows), mx.bool_)), scores, -1e9)
        weights = elementwise.exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
        weights = mx.where(mx.tril(mx.ones((rows, rows), mx.bool_)), weights, 0.0)
        out = (weights @ values[:, :, None]) / weights.sum(-1, keepdims=True)
        out = out.reshape(batch, heads, rows, -1).transpose(0, 2, 1, 3).reshape(batch, rows, -1)
        mixed: mx.array = self.o_proj(out * elementwise.sigmoid(gate.reshape(batch, rows, -1)))
        return mixed


class TrainableMLP(Qwen3NextMLP):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(elementwise.swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class Trainable(Hybrid):
    """Same parameter names as Hybrid. Rows are [B, T] tokens with T a multiple of the chunk."""

    def __init__(self, args: Any):
        super().__init__(args)
        text = self.language_model.args
        for layer in self.layers:
            if layer.is_linear:
                layer.linear_attn = ChunkedDeltaNet(text)
            else:
                layer.self_attn = TrainableAttention(text)
            layer.mlp = TrainableMLP(text.hidden_size, text.intermediate_size)

    def hidden(self, tokens: mx.array) -> mx.array:
        """Normed hiddens [B, T, H]."""
        h = self.language_model.model.embed_tokens(tokens)
        for layer in self.layers:
            h = layer(h)
        normed: mx.array = self.language_model.model.norm(h)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.language_model.model.embed_tokens.as_linear(hidden)
        return logits


def cross_entropy(logits: mx.array, labels: mx.array) -> mx.array:
    """Of each row: logits [N, V], labels int [N] -> [N]."""
    top = mx.stop_gradient(logits.max(-1, keepdims=True))
    total = elementwise.exp(logits - top).sum(-1)
    return mx.log(total) + top[:, 0] - mx.take_along_axis(logits, labels[:, None], -1)[:, 0]


def arguments(config: dict[str, Any]) -> Any:
    return qwen3_5.ModelArgs.from_dict(config)
