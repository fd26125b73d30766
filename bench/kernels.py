"""python -m bench.kernels [KERNEL ...]: what each Metal kernel moves, and on a Mac how fast.

On a Mac, at the shapes of Qwen3.8-27B: milliseconds, GB/s over the bytes that must move, the percentage of the
bandwidth measured just before, and the ratio to MLX's own ops. Calls form a chain, each waiting for the last, over
copies of the weights that together do not fit a cache.

Elsewhere, at about a sixteenth of the size, bytes are counted by the emulator and nothing is timed: `refetch` is how
often simdgroups read each byte of what should be read once, `bytes` all that simdgroups read and write (intermediate
results, and activations that a cache holds, included), `floor_bytes` what must move; threadgroup memory in bytes, and
barriers a threadgroup passes. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx

import lisa.metal
from lisa.metal import Kernels, gdn_conv, gdn_verify, head_topk, inject, lattice, rows_attention, rows_qmm
from lisa.metal.stock import stock
from lisa.selfcheck import arrays, each_array, seconds

ROWS = (1, 8, 16)
TOGETHER = 512 << 20
"""Bytes of weights that calls rotate over: more than any cache holds."""

Row = dict[str, Any]


def shapes(name: str, rows: int, small: int) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Label, bits and arguments of a kernel for `rows` rows, at a `small`-th of Qwen3.8-27B's sizes."""
    dtype, hidden, drafts = mx.float16, 5120 // small, max(rows, 2) - 1
    if name == "rows_qmm":
        for bits in (4, 8):
            n = 17408 // small
            yield f"{n} x {hidden}", bits, rows_qmm.example(rows, hidden, n, bits, 64, dtype)
    elif name == "rows_attention":
        length, heads = 8192 // small, (24, 4) if small == 1 else (6, 1)
        yield f"{length} keys", 0, rows_attention.example(rows, length, *heads, 256, dtype)
    elif name == "gdn_verify":
        heads = (48, 16) if small == 1 else (3, 1)
        for kept in (0, rows):
            yield f"kept {kept}", 0, gdn_verify.example(rows, rows, [kept], *heads, 128, 128, dtype)
    elif name == "gdn_conv":
        heads = (16, 48) if small == 1 else (1, 3)
        yield f"{sum(heads) + heads[0]} heads", 0, gdn_conv.example(rows, rows, [rows], *heads, 128, 128, dtype)
    elif name in ("head_argmax", "head_topk"):
        vocab, k = 248320 // small, {"k": 16} if name == "head_topk" else {}
        if small > 1:
            vocab //= 8
        yield f"{vocab} x {hidden}", 4, head_topk.example(rows, hidden, vocab, 4, 64, dtype) | k
    elif name == "inject" and rows > 1:
        rank, size = 1024 // small, 512 // small
        yield f"{drafts} slots", 0, inject.example(drafts + 1, hidden, rank, size, dtype)
    elif name == "lattice" and rows > 1:
        yield f"{drafts} slots", 0, lattice.example(drafts, 16, hidden, 0.0)


# ---- counted


def count(module: Any, name: str, rows: int, bits: int, label: str, arguments: Mapping[str, Any]) -> Row:
    from tests import emulator

    results: list[emulator.Result] = []

    def make(**made: Any) -> Any:
        return emulator.metal_kernel(**made, after=results.append)

    getattr(module, name)(**arguments, kernels=Kernels(make))
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    once = distinct = moved = 0
    for result in results:
        for buffer, traffic in result.traffic.items():
            read[buffer] = max(read.get(buffer, 0), traffic.distinct_read)
            written[buffer] = max(written.get(buffer, 0), traffic.distinct_written)
            moved += traffic.simdgroup_read + traffic.written
            if buffer in module.ONCE:
                once, distinct = once + traffic.simdgroup_read, distinct + traffic.distinct_read
    # What one launch writes and another reads need not leave the chip.
    floor = sum(read[buffer] + written[buffer] for buffer in read if not (read[buffer] and written[buffer]))
    return {
        "case": label,
        "rows": rows,
        "bits": bits,
        "refetch": round(once / distinct, 3),
        "bytes": moved,
        "floor_bytes": floor,
        "threadgroup_bytes": max(result.threadgroup_memory for result in results),
        "barriers": max(math.ceil(result.barriers / result.threadgroups) for result in results),
    }


# ---- timed


def nbytes(value: Any) -> int:
    return sum(array.nbytes for array in arrays(value))


def bandwidth(clock: Callable[[], float], numbers: int = 1 << 27) -> float:
    """Bytes a second, of reading and writing an array no cache holds."""
    x = mx.zeros((numbers,), mx.float32)
    mx.eval(x)
    best = math.inf
    for _ in range(5):
        began = clock()
        mx.eval(x + 1)
        best = min(best, clock() - began)
    return 2 * x.nbytes / best


def timed(
    module: Any,
    name: str,
    arguments: Mapping[str, Any],
    kernels: Kernels,
    peak: float,
    *,
    together: int = TOGETHER,
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    size = nbytes(arguments)
    copies = [each_array(arguments, lambda a: a + mx.zeros((), a.dtype)) for _ in range(min(64, -(-together // size)))]
    mx.eval(arrays(copies))
    public = getattr(module, name)
    own = seconds(lambda **a: public(**a, kernels=kernels), copies, clock)
    theirs = seconds(stock(name), copies, clock)
    must = size + nbytes(module.reference(**arguments))
    return {
        "ms": round(1e3 * own, 4),
        "stock_ms": round(1e3 * theirs, 4),
        "ratio": round(theirs / own, 3),
        "gb_s": round(must / own / 1e9, 1),
        "percent": round(100 * must / own / peak, 1),
        "floor_bytes": must,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    wanted = parser.parse_args().kernels
    kernels = lisa.metal.of_this_machine()
    on_metal = kernels.make is not None
    peak = bandwidth(time.perf_counter) if on_metal else 0.0
    if on_metal:
        print(f"measured bandwidth: {peak / 1e9:.0f} GB/s")
    else:
        print("counted by the emulator; nothing was timed: this machine has no Metal device")
    report: dict[str, list[Row]] = {}
    for found in pkgutil.iter_modules(lisa.metal.__path__):
        module = importlib.import_module(f"lisa.metal.{found.name}")
        if not hasattr(module, "CASES") or (wanted and found.name not in wanted):
            continue
        report[found.name] = []
        for rows in ROWS:
            for label, bits, arguments in shapes(found.name, rows, 1 if on_metal else 16):
                if on_metal:
                    row = {"case": label, "rows": rows, "bits": bits}
                    row |= timed(module, found.name, arguments, kernels, peak)
                else:
                    row = count(module, found.name, rows, bits, label, arguments)
                report[found.name].append(row)
                print(f"{found.name:15s}", "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(json.dumps({"timed": on_metal, "kernels": report}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
