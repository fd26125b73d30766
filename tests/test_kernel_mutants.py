"""Each kernel broken on purpose, in the ways kernels break, and each break noticed by what test_kernels.py looks at."""

from __future__ import annotations

from typing import Any

import emulator
import pytest
from lab import MODULES, Edit, Lab, error, name, reference, same_bits

pytestmark = pytest.mark.skipif(bool(emulator.unavailable()), reason=emulator.unavailable() or "emulator")

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def edits(source: str, *changes: tuple[str, str] | tuple[str, str, int]) -> list[Edit]:
    return [Edit(source, *change) for change in changes]


MUTANTS: dict[str, list[Edit]] = {
    "rows_qmm": edits(
        "rows_qmm",
        (BARRIER, ""),
        ("n0 + n < N", "n0 + n <= N"),
        ("n < N && k < K", "n <= N && k < K"),
        ("m < M && k < K ?", "k < K ?"),
        ("m < M && k < K ?", "m < M ?"),
        ("k / GROUP", "k / 32 / (GROUP / 32) + 1"),
        ("acc.tile[i][j], a, b[j], acc.tile[i][j]", "acc.tile[i][j], b[j], a, acc.tile[i][j]"),
        ("packed & (MASK << (BITS * v))", "packed & MASK"),
        ("scale, now[i].bias", "scale, 0.0f"),
        ("float(1u << (BITS * v))", "1.0f"),
        ("(step + stride) * 128", "(step + 1) * 128"),
        ("s < SPLIT", "s < SPLIT - 1"),
        ("(const device uint4*)", ""),
        (
            "const device uint4* from = (const device uint4*)",
            "const threadgroup uint4* from = (const threadgroup uint4*)",
        ),
        ("acc.clear();", ""),
        ("8 * NT + 8 * i + tile_row(lane)", "8 * NT + 8 * i + tile_column(lane)"),
    ),
    "rows_attention": [
        *edits(
            "rows_attention_merge",
            ("c < CHUNKS", "c < CHUNKS - 1", 1),
            ("row % G) * M + row / G", "row / G) * M + row % G"),
            ("value / sum", "value"),
            ("exp2(maximum[at] - highest)", "1.0f"),
        ),
        *edits(
            "rows_attention",
            (BARRIER, ""),
            (BARRIER, "", 1),
            ("values[n] = key < end ?", "values[n] = true ?"),
            ("column + e < sees", "column + e <= sees"),
            ("min(uint(length) - M + i + 1, end)", "uint(length) - M + i + 1"),
            ("uint(length) - M + i + 1", "uint(length)"),
            ("simd_shuffle_xor(best, 8)", "simd_shuffle_xor(best, 4)"),
            ("simd_shuffle_xor(added, 1)", "added"),
            ("out[2 * d + p], a, b, out", "out[2 * d + p], b, a, out"),
            ("fma(sum, shrink, added)", "sum + added"),
            ("elements(out[2 * d + p]) * shrink", "elements(out[2 * d + p])"),
            ("* scale * LOG2E", "* scale"),
            ("begin = chunk * CHUNK", "begin = chunk * CHUNK + 1"),
            ("head * G + mine % G", "mine % G * HEADS + head"),
            ("if (real) {", "{"),
            (
                "float4(elements(out[2 * d]), elements(out[2 * d + 1]))",
                "float4(elements(out[2 * d + 1]), elements(out[2 * d]))",
            ),
        ),
    ],
    "gdn_verify": edits(
        "gdn_verify",
        (BARRIER, ""),
        ("replayed * DK + i", "P * DK + i"),
        ("t < replayed", "t <= replayed"),
        ("t < replayed", "t < P"),
        ("head / (HV / HK)", "head % HK"),
        ("simd_shuffle_xor(remembered, 2)", "simd_shuffle_xor(remembered, 4)"),
        ("y += simd_shuffle_xor(y, 1)", "y += 0.0f"),
        ("(v - remembered) * beta", "(v - remembered)"),
        ("s[i][j] *= g;", ""),
        ("keys + (replayed + t) * DK", "keys + t * DK"),
        ("queries[ROOM * DK]", "queries[DK]"),
        ("base + 4 * i] = mine.s[i]", "base + i] = mine.s[i]"),
        ("old_v[at * DV + row]", "old_v[at * DV]"),
        ("(batch * P + t) * HV", "(batch * R + t) * HV"),
    ),
    "gdn_conv": edits(
        "gdn_conv",
        ("begin + t", "t"),
        ("begin + t", "begin + t + 1"),
        ("t < 3", "t < 2"),
        ("window[i][t] = window[i][t + 1]", "window[i][t] = window[i][t]"),
        ("head < HK) scale", "head <= HK) scale"),
        ("row + 3) * C", "row + 2) * C"),
        ("simd_sum(squares)", "squares"),
        ("head - HK) * DK", "head) * DK"),
        ("exp(-sum)", "exp(sum)"),
        ("w[c * 4 + t]", "w[t * 4 + c]"),
        ("sum = fma(window[i][t], taps[i][t], sum)", "sum = fma(window[i][t], taps[i][3 - t], sum)"),
    ),
    "head_topk": [
        *edits(
            "head_topk_merge",
            ("id_a < id_b", "id_a > id_b"),
            ("i < SPANS * TOP", "i + 32 < SPANS * TOP"),
            ("real ? ids[at]", "real ? i + lane"),
            ("span < SPANS", "true"),
            ("(i + lane) % TOP", "lane % TOP"),
        ),
        *edits(
            "head_topk",
            (BARRIER, ""),
            (BARRIER, "", 1),
            ("id < N", "id <= N"),
            ("id % 32) & 1", "id % 31) & 1"),
            ("m % MASK_ROWS", "0"),
            ("lane == 0 || ", ""),
            ("simd_broadcast(value, K - 1)", "simd_broadcast(value, 0)"),
            ("tile < 8", "tile < 7"),
            ("simdgroup + 8 * j", "simdgroup * MT + j", 1),
            ("lane < 8 * NT && id < N", "id < N"),
            ("m < M && lane < TOP", "lane < TOP"),
            ("acc.clear();", ""),
        ),
    ],
    "head_argmax": [
        *edits(
            "head_topk_merge",
            ("best.offer(real ? values[at]", "best.offer(real ? values[0]"),
            ("m * TOP + lane] = int", "lane] = int"),
        ),
        *edits(
            "head_topk",
            (BARRIER, ""),
            ("begin += 64 * NT", "begin += 128 * NT"),
            ("begin + tile * 8 * NT", "tile * 8 * NT"),
            ("id_a < id_b", "id_a > id_b"),
            ("allowed ? id", "true ? id"),
            ("offered == top ? offered_id", "offered != top ? offered_id"),
            ("logits[tile][m * 8 * NT + lane]", "logits[tile][lane * MT * 8 + m]"),
        ),
    ],
    "inject": [
        *edits(
            "inject_read",
            (BARRIER, ""),
            ("{h + H, H}", "{h, H}"),
            ("n0 >= N", "n0 > N"),
            ("simd_sum(squares)", "squares"),
            ("m < M ? x.at", "m <= M ? x.at"),
        ),
        *edits(
            "inject_message",
            (BARRIER, ""),
            (BARRIER, "", 1),
            ("m == 0 ? code", "m == 1 ? code"),
            ("features.at(m - 1, k)", "features.at(m, k)"),
            ("part < 3; ++part) {", "part < 2; ++part) {"),
            ("part == 0", "part != 0"),
            ("exp(-(sums[0]", "exp((sums[0]"),
        ),
        *edits(
            "inject_write",
            (BARRIER, ""),
            ("if (m == 0) out", "if (m == 1) out"),
            ("out[(m + 1) * H", "out[m * H"),
            ("fma(scale, sum", "fma(1.0f, sum"),
        ),
    ],
    "lattice": [
        *edits(
            "lattice_scores",
            (BARRIER, ""),
            ("refined + slot", "refined + 0 * slot"),
            ("k < K && j < K", "k <= K && j < K"),
            ("candidates, hiddens", "hiddens, candidates"),
            ("s < SPLIT", "s <= SPLIT"),
            ("n < N ? w.at", "n <= N ? w.at"),
            ("step * 32 + 4 * row", "step * 32 + 4 * column"),
        ),
        *edits(
            "lattice_walk",
            (BARRIER, ""),
            ("slot * K + chosen", "slot * K"),
            ("score / temperature + noise", "score + noise"),
            ("value == best ? lane : 32u", "value == best ? 0u : lane"),
            ("DRAWN && lane < K", "DRAWN"),
            ("scores[slot * K + lane] = score", "scores[slot * K + lane] = value"),
        ),
    ],
}


def noticed(module: Any, edit: Edit) -> bool:
    """Whether any small case fails: it does not compile, something is reported, a value or the order of lanes shows."""
    for case in (case for case in module.CASES if not case.long):
        arguments, lab = case.arguments(), Lab(1, edit=edit)
        try:
            got = lab.run(module, arguments)
        except emulator.CompileError:
            return True
        wrong = any(error(*pair) > 1 for pair in zip(got, reference(module, arguments), strict=True))
        if lab.reports or wrong or not same_bits(got, Lab(2, edit=edit).run(module, arguments)):
            return True
    return False


def test_every_kernel_has_its_mutants() -> None:
    assert {name(module) for module in MODULES} == MUTANTS.keys()
    assert min(map(len, MUTANTS.values())) >= 6


QUICK = 10
"""Mutants of a kernel that are tried on every change; `make test-long` tries all."""


@pytest.mark.parametrize(
    ("module", "edit"),
    [
        pytest.param(module, edit, marks=[pytest.mark.slow] if i >= QUICK else [])
        for module in MODULES
        for i, edit in enumerate(MUTANTS[name(module)])
    ],
    ids=lambda value: f"{value.old} -> {value.new or 'nothing'}" if isinstance(value, Edit) else name(value),
)
def test_a_broken_kernel_is_noticed(module: Any, edit: Edit) -> None:
    assert noticed(module, edit)
