"""One run of a compiled kernel: buffers, the call into the runtime, and what came of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import compiler
from .reports import Detail, Kind, Report, line_of

Order = Literal["ascending", "descending", "random"]
Three = tuple[int, int, int]

ORDERS: tuple[Order, ...] = ("ascending", "descending", "random")
BUFFER_KINDS = ("input", "output", "constant")
MAX_LANES = 1024
NO_LANE = 2**32 - 1
THREADGROUP_BUFFER = -2
ACCESS_LIMIT = 1 << 31
"""Loads, stores and waits of one run; beyond it the kernel is taken for endless."""


class _Report(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "detail", "lane")),
        ("group", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("other_lane", "other_group", "other_wrote", "weak")),
        ("buffer", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("line", "other_line", "padding")),
        ("file", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_uint64) for name in ("offset", "size", "pc", "other_pc")),
    ]


_FLOWS = ("read", "written", "distinct_read", "distinct_written", "simdgroup_read", "atomics")


class _Traffic(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _FLOWS]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
        ("traffic", _Traffic),
    ]


_COUNTS = (
    *("lanes", "threadgroups", "barriers", "simdgroup_barriers", "simd_ops", "matrix_ops"),
    *("threadgroup_memory", "threadgroup_read", "threadgroup_written"),
)


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("buffers", "order", "seed", "check")),
        ("access_limit", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in _COUNTS),
        ("finished", ctypes.c_uint32),
        ("reports", ctypes.c_uint32),
        ("report", _Report * 64),
    ]


@dataclass(frozen=True)
class Traffic:
    """Bytes between one buffer and the lanes (check mode; zero in fast mode)."""

    size: int
    """Of the buffer."""
    read: int
    """By all lanes together."""
    written: int
    distinct_read: int
    distinct_written: int
    simdgroup_read: int
    """Distinct bytes each simdgroup read, summed: lanes that read the same bytes count once."""
    atomics: int
    """Operations, not bytes."""

    @property
    def refetch(self) -> float:
        """Times each byte was read by a lane: 1.0 where every byte is loaded once."""
        return self.read / max(self.distinct_read, 1)

    @property
    def simdgroup_refetch(self) -> float:
        """Times each byte was read by a simdgroup."""
        return self.simdgroup_read / max(self.distinct_read, 1)


@dataclass(frozen=True)
class Result:
    """What one run did. `barriers` and `simdgroup_barriers` are passed ones, `simd_ops` operations of a whole simdgroup
    (a matrix product, load or store is one), `matrix_ops` the products among them. Memory in bytes."""

    kernel: str
    finished: bool
    reports: tuple[Report, ...]
    traffic: dict[str, Traffic]
    """By name of the input or output; of scalars too."""
    lanes: int
    threadgroups: int
    barriers: int
    simdgroup_barriers: int
    simd_ops: int
    matrix_ops: int
    threadgroup_memory: int
    threadgroup_read: int
    threadgroup_written: int


@dataclass(frozen=True)
class How:
    """Arguments of a run that are not arrays."""

    grid: Three
    """In threads."""
    threadgroup: Three
    check: bool
    order: Order
    seed: int
    access_limit: int


@dataclass
class Memory:
    """One buffer of a run: `data` is what it holds before, and for an output, after."""

    name: str
    kind: Literal["input", "output", "constant"]
    data: np.ndarray[Any, Any]
    """Bytes."""
    initialised: bool = True
    address: int = field(default=0, init=False)


_LOCK = threading.Lock()
"""The runtime holds one launch at a time."""


@cache
def _runtime(path: Path) -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(path))
    loaded.emu_allocate.restype = ctypes.c_void_p
    loaded.emu_allocate.argtypes = [ctypes.c_uint64]
    loaded.emu_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    loaded.emu_launch.argtypes = [ctypes.POINTER(_Launch), ctypes.c_void_p]
    return loaded


@cache
def _library(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.emu_base.restype = ctypes.c_void_p
    return loaded


@dataclass(frozen=True)
class Program:
    """A compiled kernel and the texts its lines are counted in."""

    name: str
    library: Path
    texts: dict[str, str]

    def run(self, memory: Sequence[Memory], how: How) -> Result:
        """Runs it; outputs are read back into `memory`."""
        runtime, library = _runtime(compiler.runtime()), _library(self.library)
        with _LOCK:
            try:
                for buffer in memory:
                    buffer.address = _filled(runtime, buffer)
                launch, described = _launch(library, memory, how)
                if runtime.emu_launch(ctypes.byref(launch), library.emu_base()):
                    raise RuntimeError(f"{self.name}: too many buffers")
                for buffer in memory:
                    if buffer.kind == "output":
                        ctypes.memmove(buffer.data.ctypes.data, buffer.address, buffer.data.nbytes)
                return self._result(launch, described, memory, library.emu_base())
            finally:
                for buffer in memory:
                    if buffer.address:
                        runtime.emu_free(buffer.address, buffer.data.nbytes)

    def _result(self, launch: _Launch, described: ctypes.Array[_Buffer], memory: Sequence[Memory], base: int) -> Result:
        traffic = {
            buffer.name: Traffic(size=buffer.data.nbytes, **{name: getattr(slot.traffic, name) for name in _FLOWS})
            for slot, buffer in zip(described, memory, strict=True)
            if buffer.kind != "constant"
        }
        groups = [-(-a // b) for a, b in zip(launch.grid, launch.threadgroup, strict=True)]
        reports = [self._report(found, memory, base, groups) for found in launch.report[: launch.reports]]
        counts = {name: getattr(launch, name) for name in _COUNTS}
        return Result(self.name, bool(launch.finished), tuple(reports), traffic, **counts)

    def _report(self, found: _Report, memory: Sequence[Memory], base: int, groups: Sequence[int]) -> Report:
        kind, detail = list(Kind)[found.kind - 1], list(Detail)[found.detail]
        file, line = found.file.decode() if found.file else "", found.line
        if found.pc:
            file, line = line_of(self.library, found.pc - base)
        report = Report(
            kind=kind,
            kernel=self.name,
            detail=detail,
            file=file,
            line=line,
            text=self._text(file, line),
            lane=None if found.lane == NO_LANE else found.lane,
            threadgroup=None if found.lane == NO_LANE else tuple(found.group),
            buffer=memory[found.buffer].name if found.buffer >= 0 else (found.name or b"").decode(),
            offset=ctypes.c_int64(found.offset).value,
            size=found.size,
            other_lane=None if found.other_lane == NO_LANE else found.other_lane,
            other_line=found.other_line,
        )
        if kind is not Kind.RACE:
            return report
        other = found.other_group
        other_file, other_line = line_of(self.library, found.other_pc - base)
        return replace(
            report,
            other_threadgroup=(other % groups[0], other // groups[0] % groups[1], other // groups[0] // groups[1]),
            other_file=other_file,
            other_line=other_line,
            other_wrote=bool(found.other_wrote),
            weak=bool(found.weak),
        )

    def compile_report(self, file: str, line: int, message: str) -> Report:
        kind = Kind.UNINITIALISED if "uninitialized" in message else Kind.ADDRESS_SPACE
        return Report(kind, self.name, file=file, line=line, text=self._text(file, line), message=message)

    def _text(self, file: str, line: int) -> str:
        lines = self.texts.get(file, "").splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def _launch(library: ctypes.CDLL, memory: Sequence[Memory], how: How) -> tuple[_Launch, ctypes.Array[_Buffer]]:
    """The runtime's description of a run, and the part of it that says what became of each buffer."""
    described = (_Buffer * len(memory))()
    for slot, buffer in zip(described, memory, strict=True):
        slot.data, slot.size = buffer.address, buffer.data.nbytes
        slot.kind, slot.initialised = BUFFER_KINDS.index(buffer.kind), buffer.initialised
    arguments = (ctypes.c_void_p * len(memory))(*(buffer.address for buffer in memory))
    launch = _Launch(
        grid=how.grid,
        threadgroup=how.threadgroup,
        entry=ctypes.cast(library.emu_entry, ctypes.c_void_p),
        arguments=ctypes.addressof(arguments),
        buffer=ctypes.addressof(described),
        buffers=len(memory),
        order=ORDERS.index(how.order),
        seed=how.seed,
        check=how.check,
        access_limit=how.access_limit,
    )
    launch.arguments_owner = arguments
    return launch, described


def _filled(runtime: ctypes.CDLL, buffer: Memory) -> int:
    address = runtime.emu_allocate(buffer.data.nbytes)
    if not address:
        raise MemoryError(f"{buffer.name}: {buffer.data.nbytes} bytes")
    ctypes.memmove(address, buffer.data.ctypes.data, buffer.data.nbytes)
    return int(address)
