"""head_argmax: the most likely token of M = 1..16 rows over a packed head, without ever writing a row of logits.

The greedy verify and the greedy plain step need nothing else of the head. It is head_topk's source with K = 1; see
there for how, and why row-invariant. Among equal logits the smaller id wins, as in mx.argmax.
"""

from __future__ import annotations

import mlx.core as mx

from lisa.metal import FLOATS, Case, Fit, Kernels, Packed, dtype_name, head_topk

SOURCE, MERGE, ONCE = head_topk.SOURCE, head_topk.MERGE, head_topk.ONCE


def reference(x: mx.array, head: Packed, *, vocab: int, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """The same in float32 throughout."""
    ids, values = head_topk.reference(x, head, k=1, vocab=vocab, mask=mask)
    return ids[:, 0], values[:, 0]


def fits(x: mx.array, head: Packed, *, vocab: int, mask: mx.array | None = None) -> Fit:
    return head_topk.fits(x, head, k=1, vocab=vocab, mask=mask)


def head_argmax(
    x: mx.array, head: Packed, *, vocab: int, mask: mx.array | None = None, kernels: Kernels
) -> tuple[mx.array, mx.array]:
    """Arguments as head_topk's. Returns ids int32 [M] and their logits float32 [M]; -1 and -inf where none is
    allowed."""
    if not (kernels.may_run("head_argmax") and fits(x, head, vocab=vocab, mask=mask)):
        return reference(x, head, vocab=vocab, mask=mask)
    ids, values = head_topk.best_of(x, head, 1, vocab, mask, kernels)
    return ids[:, 0], values[:, 0]


def _case(
    rows: int, vocab: int, bits: int, dtype: mx.Dtype, masked: bool = False, pad: int = 0, long: bool = False
) -> Case:
    name = f"M{rows} H128 V{vocab} {bits}bit{' masked' * masked} {dtype_name(dtype)}"
    return Case(name, rows, lambda: head_topk.example(rows, 128, vocab, bits, 64, dtype, masked, pad), bits, long)


CASES = (
    _case(1, 300, 4, mx.float32, pad=20),
    _case(16, 270, 4, mx.float16, masked=True),
    _case(13, 300, 8, mx.bfloat16),
    *(_case(rows, 600, bits, dtype, long=True) for rows in range(1, 17) for bits in (4, 8) for dtype in FLOATS),
)
