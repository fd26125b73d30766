"""Layers of a target as Lisa runs them: mlx-lm's own, with its kernels where those may run and fit.

A layer reads up to 16 rows with Lisa's kernels, which give each row the same bits however many stand beside it, and any
more with MLX's ops. Weights and their names are mlx-lm's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_map_with_path
from mlx_lm.models import llama, qwen3, qwen3_5, qwen3_next
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from lisa.metal import NONE, Kernels, Packed
from lisa.metal.gdn_conv import TAPS, gdn_conv
from lisa.metal.gdn_verify import gdn_verify, settled
from lisa.metal.rows_attention import fits as attention_fits
from lisa.metal.rows_attention import rows_attention
from lisa.metal.rows_qmm import fits as qmm_fits
from lisa.metal.rows_qmm import rows_qmm
from lisa.state import RecurrentCache


def recurrence(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over T rows: q, k [1, T, Hk, Dk], v [1, T, Hv, Dv], g, beta [1, T, Hv], state
    [1, Hv, Dv, Dk] float32 -> (out [1, T, Hv, Dv], state). Row by row, so that no row depends on how many there are.
    """
    if mx.default_device() == mx.gpu:
        out, after = mx.fast.gated_delta_update(q, k, v, g, beta, state)
        return out, after
    # MLX's op is scalar on a CPU; small matrix products take half of its time.
    repeats = v.shape[2] // k.shape[2]
    q, k = (mx.repeat(x, repeats, axis=2) for x in (q, k))
    columns = (q[..., None], k[..., None], v[..., None], g[..., None, None], beta[..., None, None])
    state, outs = state[:, None], []
    for qt, kt, vt, gt, bt in zip(*(mx.split(x, v.shape[1], axis=1) for x in columns), strict=True):
        out, state = _step(qt, kt, vt, gt, bt, state)
        outs.append(out)
    return mx.concatenate(outs, axis=1)[..., 0].astype(q.dtype), state[:, 0]


@mx.compile
def _step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    state = state * g
    state = state + ((v - state @ k) * beta) @ k.swapaxes(-1, -2)
    return state @ q, state


class PackedLinear(QuantizedLinear):
    """A quantised projection: up to 16 rows through rows_qmm."""

    def __init__(self, stock: QuantizedLinear, kernels: Kernels):
        _take_over(self, stock, kernels)

    def __call__(self, x: mx.array) -> mx.array:
        weight = packed(self)
        if not (self.kernels.may_run("rows_qmm", _rows(x)) and qmm_fits(x, weight)):
            stock: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return stock
        y = rows_qmm(x, weight, kernels=self.kernels)
        return y + self["bias"] if "bias" in self else y


class PackedEmbedding(QuantizedEmbedding):
    """A quantised embedding, whose rows are also the head of a tied model."""

    def __init__(self, stock: QuantizedEmbedding, kernels: Kernels):
        _take_over(self, stock, kernels)

    def as_linear(self, x: mx.array) -> mx.array:
        weight = packed(self)
        if not (self.kernels.may_run("rows_qmm", _rows(x)) and qmm_fits(x, weight)):
            stock: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
            return stock
        return rows_qmm(x, weight, kernels=self.kernels)


def _take_over(module: Any, stock: Any, kernels: Kernels) -> None:
    Module.__init__(module)  # type: ignore[no-untyped-call]
    dict.update(module, stock)
    vars(module).update(vars(stock))
    module.kernels = kernels


def packed(module: Any) -> Packed:
    """The weight of a quantised module."""
    biases = module.get("biases")
    return Packed(module["weight"], module["scales"], biases, module.group_size, module.bits, module.mode)


def _rows(x: mx.array) -> int:
    return x.size // x.shape[-1]


class Attention(Module):
    """What the families' attention layers share: up to 16 rows over a plain KV cache through rows_attention.

    Mixed in before the stock class, whose parameters it uses: optional norms of query and key heads, and the gate of
    qwen3_5, which its query projection makes beside the queries.
    """

    kernels = NONE

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> mx.array:
        if not (type(cache) is KVCache and self.kernels.may_run("rows_attention", _rows(x))):
            stock: mx.array = super().__call__(x, mask, cache)
            return stock
        batch, rows, _ = x.shape
        q, gate = self._queries(x)
        k, v = (project(x).reshape(batch, rows, -1, q.shape[-1]) for project in (self.k_proj, self.v_proj))
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(0, 2, 1, 3) for heads in (q, k, v))
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        seen = cache.update_and_fetch(k, v)
        if attention_fits(q, cache.keys, cache.values, cache.offset, scale=self.scale):
            out = rows_attention(q, cache.keys, cache.values, cache.offset, scale=self.scale, kernels=self.kernels)
        else:
            out = mx.fast.scaled_dot_product_attention(q, *seen, scale=self.scale, mask=mask)
        out = out.transpose(0, 2, 1, 3).reshape(batch, rows, -1)
        projected: mx.array = self.o_proj(out if gate is None else out * mx.sigmoid(gate))
        return projected

    def _queries(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """[B, T, heads, D], and the gate [B, T, heads * D] of a family that has one."""
        batch, rows, _ = x.shape
        gated = isinstance(self, qwen3_next.Qwen3NextAttention)
        heads = self.num_attention_heads if gated else self.n_heads
        projected = self.q_proj(x).reshape(batch, rows, heads, -1)
        if not gated:
            return projected, None
        q, gate = mx.split(projected, 2, axis=-1)
        return q, gate.reshape(batch, rows, -1)


class LlamaAttention(Attention, llama.Attention):  # type: ignore[misc]
    pass


class Qwen3Attention(Attention, qwen3.Attention):  # type: ignore[misc]
    pass


class GatedAttention(Attention, qwen3_next.Qwen3NextAttention):  # type: ignore[misc]
    pass


class GatedDeltaNet(qwen3_5.GatedDeltaNet):  # type: ignore[misc]
    """mlx-lm's layer, leaving in its cache what `State.commit` needs to keep only some of the rows.

    Rows are [1, T, H]; the cache holds the conv window [1, kernel-1, channels] and the state [1, Hv, Dv, Dk] float32.
    With kernels the commit is pending: the cache holds window and state from before the last rows, those rows, and how
    many of them hold, and the next call replays these on its way (docs/kernels.md, gdn_verify).
    """

    kernels = NONE

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: RecurrentCache | None = None) -> mx.array:
        batch, rows, _ = inputs.shape
        window, state = (cache[0], cache[1]) if cache is not None else (None, None)
        if window is None:
            window = mx.zeros((batch, self.conv_kernel_size - 1, self.conv_dim), inputs.dtype)
        if state is None:
            state = mx.zeros((batch, self.num_v_heads, self.head_v_dim, self.head_k_dim), mx.float32)
        if cache is not None and self._fused(rows):
            return self._pending(inputs, window, state, cache)
        if cache is not None and cache.pending is not None:
            window, state = self._settled(window, state, cache)
        conv_input = mx.concatenate([window, self.in_proj_qkv(inputs)], axis=1)
        q, k, v = self._heads(nn.silu(self.conv1d(conv_input)))  # type: ignore[attr-defined]
        g = compute_g(self.A_log, self.in_proj_a(inputs), self.dt_bias)
        beta = mx.sigmoid(self.in_proj_b(inputs))
        out, after = recurrence(q, k, v, g, beta, state)
        if cache is not None:
            cache[0], cache[1] = self._window_after(conv_input, rows), after
            if cache.recording:
                cache.replay = partial(self._replay, conv_input, (q, k, v, g, beta), state)
        return self._mixed(out, inputs)

    def _mixed(self, out: mx.array, inputs: mx.array) -> mx.array:
        batch, rows, _ = inputs.shape
        z = self.in_proj_z(inputs).reshape(batch, rows, self.num_v_heads, self.head_v_dim)
        mixed: mx.array = self.out_proj(self.norm(out, z).reshape(batch, rows, -1))
        return mixed

    def _fused(self, rows: int) -> bool:
        """Both kernels or neither: what one leaves pending only the other takes up."""
        names = ("gdn_conv", "gdn_verify")
        sizes = self.head_k_dim % 32 == 0 and self.head_v_dim % 32 == 0 and self.conv_kernel_size == TAPS
        return sizes and all(self.kernels.may_run(name, rows) for name in names)

    def _pending(self, inputs: mx.array, window: mx.array, state: mx.array, cache: RecurrentCache) -> mx.array:
        kept = mx.array([cache.kept], mx.int32)
        q, k, v, entered = gdn_conv(
            window,
            kept,
            self.in_proj_qkv(inputs),
            self.conv1d.weight,
            key_heads=self.num_k_heads,
            dk=self.head_k_dim,
            dv=self.head_v_dim,
            kernels=self.kernels,
        )
        g = compute_g(self.A_log, self.in_proj_a(inputs), self.dt_bias)
        beta = mx.sigmoid(self.in_proj_b(inputs))
        out, committed = gdn_verify(q, k, v, g, beta, cache.pending, kept, state, kernels=self.kernels)
        cache[0], cache[1], cache.pending, cache.kept = entered, committed, (k, v, g, beta), inputs.shape[1]
        return self._mixed(out, inputs)

    def _settled(self, window: mx.array, state: mx.array, cache: RecurrentCache) -> tuple[mx.array, mx.array]:
        """Window and state after the rows that hold, by the kernel that would have replayed them."""
        assert cache.pending is not None
        state = settled(cache.pending, mx.array([cache.kept], mx.int32), state, kernels=self.kernels)
        window = mx.contiguous(window[:, cache.kept : cache.kept + TAPS - 1])
        cache.pending, cache.kept = None, 0
        return window, state

    def _heads(self, conv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        batch, rows, _ = conv.shape
        q, k, v = mx.split(conv, [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = (x.reshape(batch, rows, self.num_k_heads, self.head_k_dim) for x in (q, k))
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        return q, k, v.reshape(batch, rows, self.num_v_heads, self.head_v_dim)

    def _window_after(self, conv_input: mx.array, rows: int) -> mx.array:
        return mx.contiguous(conv_input[:, rows : rows + self.conv_kernel_size - 1, :])

    def _replay(self, conv_input: mx.array, steps: tuple[mx.array, ...], state: mx.array, n: int) -> list[mx.array]:
        q, k, v, g, beta = (x[:, :n] for x in steps)
        _, after = recurrence(q, k, v, g, beta, state)
        return [self._window_after(conv_input, n), after]


ATTENTION: dict[type, type] = {
    llama.Attention: LlamaAttention,
    qwen3.Attention: Qwen3Attention,
    qwen3_next.Qwen3NextAttention: GatedAttention,
}


def own(model: Any, args: Any) -> None:
    """Put Lisa's layers in the places of mlx-lm's, before weights are loaded."""
    for layer in model.layers:
        if getattr(layer, "is_linear", False):
            layer.linear_attn = GatedDeltaNet(args)
        else:
            layer.self_attn = ATTENTION[type(layer.self_attn)](args)


def give(model: Any, kernels: Kernels) -> None:
    """Let the layers of a loaded model run `kernels`."""

    def replaced(path: str, module: Any) -> Any:
        if isinstance(module, QuantizedLinear):
            return PackedLinear(module, kernels)
        if isinstance(module, QuantizedEmbedding):
            return PackedEmbedding(module, kernels)
        return module

    leaves = tree_map_with_path(replaced, model.leaf_modules(), is_leaf=Module.is_module)
    model.update_modules(leaves)
    for module in model.modules():
        if isinstance(module, (Attention, GatedDeltaNet)):
            module.kernels = kernels


def found(model: Any, kind: type) -> list[Any]:
    """The model's modules of a kind."""
    return [module for module in model.modules() if isinstance(module, kind)]


def heads_of(attention: Any) -> tuple[int, int, int]:
    """Query heads, KV heads, and numbers in each."""
    d = int(attention.scale**-2 + 0.5)
    if isinstance(attention, qwen3_next.Qwen3NextAttention):
        return attention.num_attention_heads, attention.num_key_value_heads, d
    return attention.n_heads, attention.n_kv_heads, d


def uncovered(model: Any, kernels: Kernels) -> list[str]:
    """What of a model no kernel computes, and why: a line a reason, with how many modules it holds for."""
    reasons: dict[str, int] = {}
    for module in model.modules():
        for reason in _reasons(module, kernels):
            reasons[reason] = reasons.get(reason, 0) + 1
    return [f"{count} x {reason}" for reason, count in reasons.items()]


def _reasons(module: Any, kernels: Kernels) -> list[str]:
    if isinstance(module, Linear) and not isinstance(module, QuantizedLinear):
        return ["a projection that is not packed: MLX's matmul, whose rows may depend on how many there are"]
    if isinstance(module, (PackedLinear, PackedEmbedding)):
        weight = packed(module)
        k = weight.scales.shape[1] * weight.group_size
        fit = qmm_fits(mx.zeros((2, k), weight.scales.dtype), weight)
        names = ["rows_qmm"] if fit else []
        why = [] if fit else [f"a packed projection: {fit.reason}"]
    elif isinstance(module, Attention):
        names, why = ["rows_attention"], []
    elif isinstance(module, GatedDeltaNet):
        names, why = ["gdn_conv", "gdn_verify"], []
    else:
        return []
    return why + [f"{name} does not run" for name in names if not kernels.may_run(name)]
