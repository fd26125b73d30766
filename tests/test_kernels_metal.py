"""The kernels on a real Metal device: what the emulator cannot prove. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from lab import MODULES, cases, error, label, name, reference, same_bits

from lisa.metal import head_topk, of_this_machine, rows_attention, rows_qmm

pytestmark = pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Mac with a Metal device")


def run(module: Any, arguments: Any) -> tuple[mx.array, ...]:
    returned = getattr(module, name(module))(**arguments, kernels=of_this_machine())
    return returned if isinstance(returned, tuple) else (returned,)


@pytest.mark.parametrize(("module", "case"), cases(long=False), ids=label)
def test_a_kernel_computes_its_reference_on_the_device(module: Any, case: Any) -> None:
    arguments = case.arguments()
    for pair in zip(run(module, arguments), reference(module, arguments), strict=True):
        assert error(*pair) <= 1


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_a_kernel_gives_the_same_bits_twice(module: Any) -> None:
    for case in (case for case in module.CASES if not case.long):
        arguments = case.arguments()
        assert same_bits(run(module, arguments), run(module, arguments))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_bits_of_its_own_call_on_the_device(bits: int) -> None:
    arguments = rows_qmm.example(16, 2048, 517, bits, 64, mx.float16)
    (whole,) = run(rows_qmm, arguments)
    head = head_topk.example(16, 512, 3000, bits, 64, mx.float16) | {"k": 16}
    best = run(head_topk, head)
    asked = rows_attention.example(16, 1300, 12, 2, 128, mx.float16)
    (seen,) = run(rows_attention, asked)
    for k in range(1, 17):
        rows = slice(k - 1, k)
        assert same_bits(run(rows_qmm, {**arguments, "x": arguments["x"][rows]}), (whole[rows],))
        assert same_bits(run(rows_qmm, {**arguments, "x": arguments["x"][:k]}), (whole[:k],))
        assert same_bits(run(head_topk, {**head, "x": head["x"][rows]}), tuple(a[rows] for a in best))
        alone = {"q": asked["q"][:, :, rows], "length": asked["length"] - 16 + k}
        assert same_bits(run(rows_attention, {**asked, **alone}), (seen[:, :, rows],))
