"""The chunked delta rule of lisa-tiny's training equals the recurrence it stands for, in outputs and gradients."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk

from bench.tiny import elementwise
from bench.tiny.delta import CHUNK, gated_delta, unit_inverse

B, T, HK, HV, DK, DV = 2, 96, 2, 4, 16, 8


def _inputs(alike: bool = False) -> tuple[mx.array, ...]:
    mx.random.seed(3)
    q, k = mx.random.normal((B, T, HK, DK)), mx.random.normal((B, T, HK, DK))
    if alike:  # the same key over and over is the worst case of the triangular system
        k = mx.broadcast_to(k[:, :1], k.shape) + 0.01 * k
    q, k = normalize_qk(q, k, inv_scale=DK**-0.5, eps=1e-6)
    v = mx.random.normal((B, T, HV, DV))
    log_g = -mx.abs(mx.random.normal((B, T, HV))) * (0.0 if alike else 0.5)
    beta = mx.sigmoid(mx.random.normal((B, T, HV)) + (5.0 if alike else 0.0))
    return q, k, v, log_g, beta, mx.random.normal((B, HV, DV, DK))


@pytest.mark.parametrize("alike", [False, True])
def test_outputs_and_state_equal_the_recurrence(alike: bool) -> None:
    q, k, v, log_g, beta, state = _inputs(alike)
    out, after = gated_delta(q, k, v, log_g, beta, state)
    expected, expected_after = mx.fast.gated_delta_update(q, k, v, mx.exp(log_g), beta, state)
    assert mx.abs(out - expected).max() < 1e-4
    assert mx.abs(after - expected_after).max() < 1e-4


def test_gradients_equal_those_of_the_loop() -> None:
    inputs = _inputs()
    weight = mx.random.normal((B, T, HV, DV))

    def chunked(*a: mx.array) -> mx.array:
        out, after = gated_delta(*a)
        return (out * weight).sum() + (after * after).sum()

    def loop(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array) -> mx.array:
        out, after = gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)
        return (out * weight).sum() + (after * after).sum()

    every = tuple(range(6))
    for mine, theirs in zip(mx.grad(chunked, every)(*inputs), mx.grad(loop, every)(*inputs), strict=True):
        assert mx.abs(mine - theirs).max() < 1e-4 * mx.maximum(mx.abs(theirs).max(), 1.0)


def test_an_empty_state_is_the_default() -> None:
    *rest, state = _inputs()
    assert mx.array_equal(gated_delta(*rest)[0], gated_delta(*rest, mx.zeros_like(state))[0])


def test_the_inverse_of_a_full_triangle_is_exact() -> None:
    ones = mx.tril(mx.ones((32, 32)), -1)
    assert mx.array_equal((mx.eye(32) + ones) @ unit_inverse(ones), mx.eye(32))


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu"])
def test_elementwise_functions_and_their_gradients(name: str) -> None:
    plain = {"exp": mx.exp, "sigmoid": mx.sigmoid, "silu": lambda x: x * mx.sigmoid(x)}[name]
    x = mx.linspace(-19.0, 5.0, 500)
    mine, theirs = getattr(elementwise, name), plain
    assert mx.allclose(mine(x), theirs(x), rtol=2e-5, atol=2e-6)
    assert mx.allclose(mx.grad(lambda a: mine(a).sum())(x), mx.grad(lambda a: theirs(a).sum())(x), rtol=1e-4, atol=1e-5)


def test_swiglu_and_its_gradients() -> None:
    gate, x = mx.linspace(-8.0, 8.0, 100), mx.linspace(3.0, -2.0, 100)
    plain = lambda g, a: (g * mx.sigmoid(g) * a).sum()  # noqa: E731
    mine = mx.grad(lambda g, a: elementwise.swiglu(g, a).sum(), (0, 1))(gate, x)
    for a, b in zip(mine, mx.grad(plain, (0, 1))(gate, x), strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_short_convolution_and_its_gradients() -> None:
    mx.random.seed(4)
    x, weight, weigh = mx.random.normal((2, 9, 5)), mx.random.normal((5, 4)), mx.random.normal((2, 9, 5))

    def plain(x: mx.array, weight: mx.array) -> mx.array:
        return (mx.conv1d(mx.pad(x, [(0, 0), (3, 0), (0, 0)]), weight[..., None], groups=5) * weigh).sum()

    def mine(x: mx.array, weight: mx.array) -> mx.array:
        return (elementwise.short_conv(x, weight, mx.ones((2, 9, 4))) * weigh).sum()

    assert mx.allclose(mine(x, weight), plain(x, weight), atol=1e-5)
    for a, b in zip(mx.grad(mine, (0, 1))(x, weight), mx.grad(plain, (0, 1))(x, weight), strict=True):
        assert mx.allclose(a, b, atol=1e-5)


def test_a_sample_in_a_packed_row_is_read_as_if_alone() -> None:
    from bench.tiny.pretrain import new_model

    model = new_model(0)
    rows = mx.random.randint(0, 1000, (2, 64))
    segments = mx.array([[0] * 21 + [1] * 43, [0] * 40 + [1] * 2 + [2] * 22], mx.int32)
    hidden = model.hidden(rows, segments)
    for row, start, end in ((0, 0, 21), (0, 21, 64), (1, 40, 42), (1, 42, 64)):
        alone = mx.pad(rows[row : row + 1, start:end], [(0, 0), (0, (start - end) % CHUNK)])
        assert mx.abs(hidden[row, start:end] - model.hidden(alone)[0, : end - start]).max() < 1e-3


def test_the_model_that_is_trained_is_the_model_that_runs() -> None:
    from mlx.utils import tree_flatten

    from bench.tiny.pretrain import TEXT_CONFIG, new_model
    from bench.tiny.trainable import arguments
    from lisa.target import Hybrid

    model = new_model(1)
    runs = Hybrid(arguments({"model_type": "qwen3_5", "text_config": TEXT_CONFIG}))
    runs.load_weights(list(tree_flatten(model.parameters())))
    tokens = mx.random.randint(0, 1000, (1, 64))
    assert mx.abs(model.logits(model.hidden(tokens)) - runs(tokens)).max() < 1e-3
