"""The kernels of lisa/metal, executed: right, clean, the same bits in any order and beside any rows, and frugal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import emulator
import mlx.core as mx
import pytest
from lab import MODULES, Lab, cases, error, label, name, reference, same_bits

from bench import kernels as bench
from lisa.metal import (
    NONE,
    Kernels,
    gdn_conv,
    gdn_verify,
    head_argmax,
    head_topk,
    inject,
    lattice,
    rows_attention,
    rows_qmm,
)

pytestmark = pytest.mark.skipif(bool(emulator.unavailable()), reason=emulator.unavailable() or "emulator")

SEEDS = (1, 2, 3)


def check(module: Any, case: Any) -> None:
    arguments = case.arguments()
    lab = Lab()
    got = lab.run(module, arguments)
    assert lab.reports == []
    for pair in zip(got, reference(module, arguments), strict=True):
        assert error(*pair) <= 1
    for seed in SEEDS:
        assert same_bits(got, Lab(seed).run(module, arguments)), f"lane order {seed} changes bits"
    assert max(result.threadgroup_memory for result in lab.results) <= 32768
    assert max(threads(call) for _, call in lab.launched) <= 512


def threads(call: dict[str, Any]) -> int:
    x, y, z = call["threadgroup"]
    return int(x * y * z)


@pytest.mark.parametrize(("module", "case"), cases(long=False), ids=label)
def test_a_kernel_computes_its_reference_without_a_report_in_any_lane_order(module: Any, case: Any) -> None:
    check(module, case)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "case"), cases(long=True), ids=label)
def test_the_full_grid_of_a_kernel(module: Any, case: Any) -> None:
    check(module, case)


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_a_kernel_is_compiled_from_the_text_MLX_itself_would_compile(module: Any) -> None:
    lab = Lab(mode="fast")
    lab.run(module, module.CASES[0].arguments())
    for made, call in lab.launched:
        inputs = call["inputs"]
        arrays = [value for value in inputs if isinstance(value, mx.array)]
        assert [id(value) for value in inputs[: len(arrays)]] == [id(value) for value in arrays]
        kernel = emulator.metal_kernel(**made)
        text = kernel.text(inputs, call["output_dtypes"], call.get("template")).metal
        rest = {key: value for key, value in call.items() if key != "inputs"}
        assert text in emulator.mlx_text(made, arrays, inputs[len(arrays) :], rest)


# ---- rows beside rows


def test_a_row_of_rows_qmm_has_the_bits_of_its_own_call() -> None:
    for bits, dtype in ((4, mx.float16), (8, mx.float32)):
        arguments = rows_qmm.example(16, 320, 21, bits, 64, dtype)
        (whole,) = Lab().run(rows_qmm, arguments)
        for k in range(1, 17):
            for rows in (slice(0, k), slice(k - 1, k)):
                (part,) = Lab().run(rows_qmm, {**arguments, "x": arguments["x"][rows]})
                assert same_bits((part,), (whole[rows],))


def test_a_row_of_rows_attention_has_the_bits_of_its_own_call_even_across_a_chunk() -> None:
    for length, dtype in ((40, mx.bfloat16), (rows_attention.CHUNK + 5, mx.float32)):
        arguments = rows_attention.example(16, length, 4, 2, 64, dtype)
        (whole,) = Lab().run(rows_attention, arguments)
        for row in range(0, 16, 1 if length < 100 else 5):
            alone = {"q": arguments["q"][:, :, row : row + 1], "length": length - 15 + row}
            (part,) = Lab().run(rows_attention, {**arguments, **alone})
            assert same_bits((part,), (whole[:, :, row : row + 1],))
        few = {"q": arguments["q"][:, :, :7], "length": length - 9}
        (part,) = Lab().run(rows_attention, {**arguments, **few})
        assert same_bits((part,), (whole[:, :, :7],))


@pytest.mark.parametrize("module", [head_topk, head_argmax], ids=name)
def test_a_row_of_a_head_has_the_bits_of_its_own_call(module: Any) -> None:
    arguments = head_topk.example(16, 128, 100, 4, 64, mx.float16, masked=True)
    if module is head_topk:
        arguments["k"] = 4
    whole = Lab().run(module, arguments)
    for k in range(1, 17):
        for rows in (slice(0, k), slice(k - 1, k)):
            part = {"x": arguments["x"][rows], "mask": arguments["mask"][rows]}
            assert same_bits(Lab().run(module, {**arguments, **part}), tuple(a[rows] for a in whole))


def test_gdn_verify_gives_rows_and_states_the_bits_of_steps_taken_one_by_one() -> None:
    arguments = gdn_verify.example(16, 3, [2], 4, 2, 32, 16, mx.float16)
    y, committed = Lab().run(gdn_verify, arguments)
    names = ("k", "v", "g", "beta")
    step, states = {**arguments}, []
    for t in range(16):
        new = {key: arguments[key][:, t : t + 1] for key in ("q", *names)}
        row, state = Lab().run(gdn_verify, {**step, **new})
        assert same_bits((row,), (y[:, t : t + 1],))
        states.append(state)
        step = {"old": tuple(new[key] for key in names), "kept": mx.array([1]), "state": state}
    assert same_bits((states[0],), (committed,))
    # A later round that keeps n of the 16 rows reaches the state n single steps reached.
    later = {**arguments, "old": tuple(arguments[key] for key in names), "state": committed}
    for n in range(1, 16):
        _, state = Lab().run(gdn_verify, {**later, "kept": mx.array([n])})
        assert same_bits((state,), (states[n],))


def test_a_settled_state_has_the_bits_of_the_one_the_next_round_commits() -> None:
    arguments, lab = gdn_verify.example(5, 8, [6], 4, 2, 32, 16, mx.float16), Lab()
    _, committed = lab.run(gdn_verify, arguments)
    pending = (arguments["old"], arguments["kept"], arguments["state"])
    assert same_bits((gdn_verify.settled(*pending, kernels=lab.kernels),), (committed,))


def test_a_first_round_replays_nothing() -> None:
    arguments = gdn_verify.example(5, 8, [6], 4, 2, 32, 16, mx.float16)
    y, committed = Lab().run(gdn_verify, {**arguments, "old": None})
    assert same_bits((committed,), (arguments["state"],))
    assert same_bits((y,), Lab().run(gdn_verify, {**arguments, "kept": mx.array([0])})[:1])


def test_gdn_conv_gives_rows_the_bits_of_steps_taken_one_by_one() -> None:
    arguments = gdn_conv.example(16, 4, [3], 2, 4, 32, 32, mx.bfloat16)
    whole = Lab().run(gdn_conv, arguments)
    step = {**arguments}
    for t in range(16):
        row = Lab().run(gdn_conv, {**step, "x": arguments["x"][:, t : t + 1]})
        assert same_bits(row[:3], tuple(a[:, t : t + 1] for a in whole[:3]))
        step = {**step, "old": row[3], "kept": mx.array([1])}
    assert same_bits((row[3],), (whole[3][:, 15:],))


def test_a_slot_of_inject_has_the_bits_it_has_in_a_shorter_block() -> None:
    arguments = inject.example(16, 96, 64, 32, mx.float16)
    (whole,) = Lab().run(inject, arguments)
    for slots in range(2, 16):
        (part,) = Lab().run(inject, {**arguments, "h": arguments["h"][:slots]})
        assert same_bits((part,), (whole[:slots],))


def test_a_shorter_lattice_is_the_beginning_of_a_longer_one() -> None:
    arguments = lattice.example(15, 16, 64, 0.5)
    whole = Lab().run(lattice, arguments)
    for slots in (1, 4, 11):
        part = {key: arguments[key][:slots] for key in ("refined", "heads", "noise")}
        assert same_bits(Lab().run(lattice, {**arguments, **part}), tuple(a[:slots] for a in whole))


# ---- traffic


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_rows_qmm_reads_weights_scales_and_biases_once_whatever_the_rows(bits: int, group: int) -> None:
    for rows in range(1, 17):
        arguments = rows_qmm.example(rows, 384, 37, bits, group, mx.float16)
        lab = Lab()
        lab.run(rows_qmm, arguments)
        for buffer in rows_qmm.ONCE:
            seen = lab.traffic(buffer)
            assert (seen.distinct_read, seen.simdgroup_read) == (seen.size, seen.size)
        assert lab.traffic("w").read == arguments["weight"].w.nbytes


def test_rows_qmm_has_no_barrier_in_its_loop_over_k() -> None:
    for k in (256, 2048):
        lab = Lab()
        lab.run(rows_qmm, rows_qmm.example(9, k, 16, 4, 64, mx.float32))
        assert lab.results[0].barriers == lab.results[0].threadgroups


def test_rows_attention_reads_keys_and_values_once_for_all_rows_and_heads_of_a_group() -> None:
    for rows in (1, 7, 16):
        arguments = rows_attention.example(rows, rows_attention.CHUNK + 30, 6, 2, 64, mx.float16)
        lab = Lab()
        lab.run(rows_attention, arguments)
        held = arguments["length"] * 2 * 64 * 2
        assert [(lab.traffic(b).read, lab.traffic(b).simdgroup_read) for b in "kv"] == [(held, held)] * 2


def test_gdn_verify_moves_the_state_twice_whatever_was_accepted() -> None:
    for kept in range(17):
        arguments = gdn_verify.example(16, 16, [kept], 2, 1, 64, 32, mx.float16)
        lab = Lab()
        lab.run(gdn_verify, arguments)
        moved = lab.traffic("state").read + lab.traffic("committed").written
        assert moved == 2 * arguments["state"].nbytes


@pytest.mark.parametrize("module", [head_topk, head_argmax], ids=name)
def test_a_head_is_read_once_and_no_row_of_logits_is_written(module: Any) -> None:
    for case in (case for case in module.CASES if not case.long):
        arguments, lab = case.arguments(), Lab()
        lab.run(module, arguments)
        used = arguments["head"][:1].w.nbytes * arguments["vocab"]
        assert (lab.traffic("w").read, lab.traffic("w").simdgroup_read) == (used, used)
        written = sum(traffic.written for result in lab.results for traffic in result.traffic.values())
        k, spans = arguments.get("k", 1), -(-arguments["vocab"] // head_topk.span(arguments["vocab"]))
        assert written == 8 * case.rows * k * (spans + 1)


@pytest.mark.parametrize("module", [inject, lattice], ids=name)
def test_the_weights_of_the_drafters_kernels_are_read_once(module: Any) -> None:
    for case in (case for case in module.CASES if not case.long):
        lab = Lab()
        lab.run(module, case.arguments())
        assert {buffer: lab.traffic(buffer).read / lab.traffic(buffer).size for buffer in module.ONCE} == dict.fromkeys(
            module.ONCE, 1.0
        )


def test_tiles_of_keys_and_values_fit_a_threadgroup_for_every_head() -> None:
    for d in (64, 96, 128, 160, 192, 256):
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            assert 2 * rows_attention.tile_keys(d, dtype) * d * dtype.size <= 32768


# ---- the bench


def test_the_bench_counts_what_a_kernel_moves() -> None:
    arguments = rows_qmm.example(3, 64, 32, 4, 32, mx.float16)
    row = bench.count(rows_qmm, "rows_qmm", 3, 4, "tiny", arguments)
    weight = arguments["weight"]
    floor = sum(a.nbytes for a in (arguments["x"], weight.w, weight.scales, weight.biases)) + 3 * 32 * 2
    assert (row["case"], row["rows"], row["bits"], row["refetch"], row["barriers"]) == ("tiny", 3, 4, 1.0, 1)
    assert row["floor_bytes"] == row["bytes"] == floor
    assert row["threadgroup_bytes"] == 64 * 4 * 4


def test_the_bench_compares_with_stock_by_the_clock_it_is_given() -> None:
    # Eight rounds of two readings for the kernel, then as many for stock, which takes twice as long here.
    ticks = iter([t for round_ in range(8) for t in (round_, round_ + 0.5)] + [t for r in range(8) for t in (r, r + 1)])
    arguments = rows_qmm.example(2, 64, 16, 4, 32, mx.float16)
    row = bench.timed(rows_qmm, "rows_qmm", arguments, Lab().kernels, 1e3, together=1, clock=lambda: float(next(ticks)))
    assert (row["ms"], row["stock_ms"], row["ratio"]) == (500.0, 1000.0, 2.0)
    assert row["percent"] == round(100 * row["floor_bytes"] / 0.5 / 1e3, 1)


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_the_bench_has_shapes_and_a_stock_way_for_every_kernel(module: Any) -> None:
    label, _, arguments = next(bench.shapes(name(module), 2, 16))
    stock = bench.stock(name(module))(**arguments)
    shapes = [a.shape for a in (stock if isinstance(stock, tuple) else (stock,))]
    wanted = [a.shape for a in reference(module, arguments)]
    assert label and shapes == wanted[: len(shapes)]


# ---- what may run


def test_without_kernels_the_reference_runs() -> None:
    for module in MODULES:
        arguments = module.CASES[0].arguments()
        returned = getattr(module, name(module))(**arguments, kernels=NONE)
        assert same_bits(returned if isinstance(returned, tuple) else (returned,), reference(module, arguments))


def test_a_kernel_that_is_not_named_does_not_run() -> None:
    lab = Lab()
    arguments = rows_qmm.CASES[0].arguments()
    rows_qmm.rows_qmm(**arguments, kernels=Kernels(lab.kernels.make, frozenset({"lattice"})))
    assert lab.results == []


def test_a_misfit_runs_the_reference_and_says_why() -> None:
    arguments, lab = rows_qmm.example(17, 64, 16, 4, 32, mx.float32), Lab()
    assert rows_qmm.fits(**arguments).reason == "17 rows, more than 16"
    got = rows_qmm.rows_qmm(**arguments, kernels=lab.kernels)
    assert lab.results == [] and same_bits((got,), reference(rows_qmm, arguments))


def test_leading_dimensions_of_activations_are_kept() -> None:
    arguments, lab = rows_qmm.example(6, 64, 16, 4, 32, mx.float32), Lab()
    flat = rows_qmm.rows_qmm(**arguments, kernels=lab.kernels)
    deep = rows_qmm.rows_qmm(**{**arguments, "x": arguments["x"].reshape(2, 3, 64)}, kernels=lab.kernels)
    assert deep.shape == (2, 3, 16) and same_bits((deep.reshape(6, 16),), (flat,))


def test_importing_the_kernels_asks_nothing_of_metal() -> None:
    # Exits with the name of whatever is asked of a Metal device while the rooms are imported.
    code = (
        "import sys, types, mlx.core as mx\n"
        "class Never(types.ModuleType):\n"
        "    def __getattr__(self, name): sys.exit(name)\n"
        "mx.metal = Never('metal')\n"
        "mx.fast.metal_kernel = lambda *a, **k: sys.exit('metal_kernel')\n"
        f"import {', '.join(module.__name__ for module in MODULES)}\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
