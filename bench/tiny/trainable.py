"""lisa.target's Hybrid with the same parameters and a forward made for training on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP

from bench.tiny import elementwise
from bench.tiny.delta import gated_delta
from lisa.layers import GatedDeltaNet
from lisa.target import Hybrid


class Packed(NamedTuple):
    """Rows of several samples: where one starts [B, T, 1], which earlier tokens a token's attention sees
    [B, 1, 1, T, T], and which of its convolution's taps are in its sample [B, T, 4]."""

    starts: mx.array
    sees: mx.array
    taps: mx.array


def packed(segments: mx.array, taps: int) -> Packed:
    """segments: the number of the sample in its row, int [B, T]."""
    rows = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None]) & mx.tril(mx.ones((rows, rows), mx.bool_))
    padded = mx.pad(segments, [(0, 0), (taps - 1, 0)], constant_values=-1)
    near = mx.stack([padded[:, i : i + rows] == segments for i in range(taps)], axis=-1)
    return Packed(~near[..., taps - 2 : taps - 1], same[:, None, None], near.astype(mx.float32))


class ChunkedDeltaNet(GatedDeltaNet):
    """The layer from an empty state, [B, T, H] -> [B, T, H], where every sample in a row starts from one."""

    def __call__(self, inputs: mx.array, mask: Packed | None = None, cache: Any = None) -> mx.array:
        batch, rows, _ = inputs.shape
        valid = mx.ones((batch, rows, self.conv_kernel_size)) if mask is None else mask.taps
        conv = elementwise.short_conv(self.in_proj_qkv(inputs), self.conv1d.weight[..., 0], valid)
        q, k, v = self._heads(elementwise.silu(conv))
        rate = nn.softplus(self.in_proj_a(inputs) + self.dt_bias)
        beta = mx.sigmoid(self.in_proj_b(inputs))
        log_g = -mx.exp(self.A_log) * rate
        if mask is not None:
            log_g = mx.where(mask.starts, -100.0, log_g)
        out, _ = gated_delta(q, k, v, log_g, beta)
        z = self.in_proj_z(inputs).reshape(batch, rows, self.num_v_heads, self.head_v_dim)
        normed = mx.fast.rms_norm(out, self.norm.weight, self.norm.eps)
        mixed: mx.array = self.out_proj(elementwise.swiglu(z, normed).reshape(batch, rows, -1))
        return mixed


class TrainableAttention(Qwen3NextAttention):  # type: ignore[misc]
    def __call__(self, x: mx.array, mask: Packed | None = None, cache: Any = None) -> mx.array:
        batch, rows, _ = x.shape
        sees = mx.tril(mx.ones((rows, rows), mx.bool_)) if mask is None else mask.sees
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        queries, gate = mx.split(self.q_proj(x).reshape(batch, rows, heads, -1), 2, axis=-1)
        keys = self.k_norm(self.k_proj(x).reshape(batch, rows, groups, -1)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(batch, rows, groups, -1).transpose(0, 2, 1, 3)
        queries = self.rope(self.q_norm(queries).transpose(0, 2, 1, 3)).reshape(
            batch, groups, heads // groups, rows, -1
        )
        scores = (queries * self.scale) @ self.rope(keys)[:, :, None].swapaxes(-1, -2)
        scores = mx.where(sees, scores, -1e9)
        weights = elementwise.exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
        weights = mx.where(sees, weights, 0.0)
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

    def hidden(self, tokens: mx.array, segments: mx.array | None = None) -> mx.array:
        """Normed hiddens [B, T, H] of int tokens [B, T]; `segments` int [B, T] where a row holds several samples."""
        h = self.language_model.model.embed_tokens(tokens)
        mask = None if segments is None else packed(segments, self.language_model.args.linear_conv_kernel_dim)
        for layer in self.layers:
            h = layer(h, mask)
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
