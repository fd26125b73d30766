"""The gated delta rule in chunks of matrix products, for training.

The recurrence S <- g S; S <- S + beta (v - S k) k^T; o = S q is one step a token. Inside a chunk of C tokens with
decays G_i = g_1 ... g_i the updates u_i solve a unit lower triangular system (the WY form of the products):
(I + A) U = beta (V - G K S^T), A_ij = beta_i (G_i / G_j) k_i . k_j for j < i. Yang et al. 2024, "Gated Delta Networks".
"""

from __future__ import annotations

import mlx.core as mx

from bench.tiny import elementwise

CHUNK = 32
_BLOCK = 8  # a Neumann product is exact enough up to this size; past it its terms outgrow float32


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """As mx.fast.gated_delta_update with log(g), differentiable; T is a multiple of CHUNK.

    q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], log_g and beta [B, T, Hv], state [B, Hv, Dv, Dk]; float32. Returns the
    outputs [B, T, Hv, Dv] and the state after them.
    """
    batch, rows, heads, dv = v.shape
    repeat = heads // k.shape[2]
    chunks = rows // CHUNK

    def split(x: mx.array) -> mx.array:  # [B, T, H, D] -> [B, H, N, C, D]
        return x.reshape(batch, chunks, CHUNK, x.shape[2], -1).transpose(0, 3, 1, 2, 4)

    q, k, v = split(q), split(k), split(v)
    products = mx.repeat(k @ k.swapaxes(-1, -2), repeat, 1)  # before the heads are repeated: they are the same
    scores = mx.repeat(q @ k.swapaxes(-1, -2), repeat, 1)
    q, k = mx.repeat(q, repeat, 1), mx.repeat(k, repeat, 1)
    beta = split(beta[..., None])
    total = mx.cumsum(split(log_g[..., None]), axis=-2)
    lower = mx.tril(mx.ones((CHUNK, CHUNK)))
    decay = elementwise.exp(mx.minimum(total - total.swapaxes(-1, -2), 0.0)) * lower
    grown, end = elementwise.exp(total), total[..., -1:, :]
    left = elementwise.exp(end - total)

    inverse = unit_inverse(products * decay * beta * (lower - mx.eye(CHUNK)))
    values = inverse @ (v * beta)
    keys = inverse @ (k * (beta * grown))
    queries, leaving, kept = q * grown, (k * left), elementwise.exp(end)

    if state is None:
        state = mx.zeros((batch, heads, dv, k.shape[-1]))
    updates, carried = [], []
    for n in range(chunks):
        turned = state.swapaxes(-1, -2)
        update = values[:, :, n] - keys[:, :, n] @ turned
        carried.append(queries[:, :, n] @ turned)
        updates.append(update)
        state = state * kept[:, :, n] + update.swapaxes(-1, -2) @ leaving[:, :, n]
    out = mx.stack(carried, 2) + (scores * decay) @ mx.stack(updates, 2)
    return out.transpose(0, 2, 3, 1, 4).reshape(batch, rows, heads, dv), state


@mx.custom_function
def unit_inverse(strict: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a multiple of 8 and a power of two."""
    n = strict.shape[-1]
    if n > _BLOCK:
        half = n // 2
        a, d = unit_inverse(strict[..., :half, :half]), unit_inverse(strict[..., half:, half:])
        corner = -(d @ (strict[..., half:, :half] @ a))
        top = mx.concatenate([a, mx.zeros_like(a)], axis=-1)
        return mx.concatenate([top, mx.concatenate([corner, d], axis=-1)], axis=-2)
    power, inverse = -strict, mx.eye(n) - strict
    for _ in range(2):  # (I - A)(I + A^2)(I + A^4); A^8 = 0
        power = power @ power
        inverse = inverse + power @ inverse
    return inverse


@unit_inverse.vjp
def _unit_inverse_vjp(strict: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    turned = inverse.swapaxes(-1, -2)
    return -mx.tril(turned @ (cotangent @ turned), -1)
