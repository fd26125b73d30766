"""What the emulator found wrong with a kernel, and the line of its source that did it."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path


class Kind(Enum):
    OUT_OF_BOUNDS = "out of bounds"
    RACE = "race"
    UNINITIALISED = "uninitialised read"
    NEVER_WRITTEN = "output never written"
    DIVERGENT_SIMD = "divergent simdgroup operation"
    DIVERGENT_BARRIER = "barrier in divergent flow"
    THREADGROUP_LIMIT = "threadgroup memory over 32 KiB"
    UNDEFINED = "undefined behaviour"
    WRITE_TO_INPUT = "write to an input"
    CRASH = "crash"
    ENDLESS = "endless"
    ADDRESS_SPACE = "address space"


class Detail(Enum):
    """In the runtime's order."""

    NONE = ""
    READ = "read"
    WRITE = "write"
    ARRAY_INDEX = "index past an array's end"
    SIMD_RETURNED = "some lanes have returned"
    SIMD_ELSEWHERE = "lanes are elsewhere"
    SIMD_INACTIVE = "taken from a lane that is not there"
    SIMD_MATRIX = "a matrix needs all 32 lanes"
    BARRIER_RETURNED = "lanes have returned before it"
    BARRIER_ELSEWHERE = "lanes wait at another barrier"
    SHIFT = "shift by the width or more, or of a negative value"
    OVERFLOW = "signed overflow"
    DIVISION = "division by zero, or its result does not fit"
    MISALIGNED = "misaligned access"
    CAST = "float outside the integer's range"
    OTHER = "unreachable code reached"


@dataclass(frozen=True)
class Report:
    """One finding. `line` counts from 1 in `file`: the kernel's name is its source, "name (header)" its header.

    `offset` and `size` are in bytes from the start of `buffer`, which is an input, an output or a threadgroup variable.
    `lane` is the thread's index in its threadgroup. `other_*` is the earlier access of a race, or a
    lane that is elsewhere.
    """

    kind: Kind
    kernel: str
    detail: Detail = Detail.NONE
    file: str = ""
    line: int = 0
    text: str = ""
    lane: int | None = None
    threadgroup: tuple[int, int, int] | None = None
    buffer: str = ""
    offset: int = 0
    size: int = 0
    other_lane: int | None = None
    other_threadgroup: tuple[int, int, int] | None = None
    other_file: str = ""
    other_line: int = 0
    other_wrote: bool = False
    weak: bool = False
    """A simdgroup operation stands between the two: it orders the lanes, but not their memory."""
    message: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: {self.text}" if self.line else self.kernel
        kind = f"{self.kind.value} ({self.detail.value})" if self.detail is not Detail.NONE else self.kind.value
        who = f"lane {self.lane} of threadgroup {self.threadgroup}" if self.lane is not None else ""
        return f"{where}\n    " + ", ".join(part for part in (kind, self._what(), who, self._other()) if part)

    def _what(self) -> str:
        if self.message:
            return self.message
        if self.kind is Kind.NEVER_WRITTEN:
            return f"{self.buffer}: {self.size} bytes, the first at {self.offset}"
        if self.kind is Kind.THREADGROUP_LIMIT:
            return f"{self.buffer} brings it to {self.size} bytes"
        return f"{self.buffer} at byte {self.offset}, {self.size} bytes" if self.buffer else ""

    def _other(self) -> str:
        if self.other_lane is None:
            return ""
        if self.kind is not Kind.RACE:
            return f"without lane {self.other_lane}" + (
                f", which waits at line {self.other_line}" if self.other_line else ""
            )
        did = f"{'wrote' if self.other_wrote else 'read'} it at {self.other_file}:{self.other_line}"
        missing = "simdgroup_barrier" if self.weak else "barrier"
        return f"lane {self.other_lane} of threadgroup {self.other_threadgroup} {did} with no {missing} between"


@cache
def _lines(library: Path) -> tuple[list[int], list[tuple[str, int]]]:
    """Addresses in order, and the file and line from each on."""
    from elftools.elf.elffile import ELFFile  # so that a machine without it can say so

    found: dict[int, tuple[str, int]] = {}
    with library.open("rb") as opened:
        for unit in ELFFile(opened).get_dwarf_info().iter_CUs():
            program = unit.dwarfinfo.line_program_for_CU(unit)
            if program is None:
                continue
            names = program["file_entry"]
            for entry in program.get_entries():
                state = entry.state
                if state is not None and not state.end_sequence:
                    found[state.address] = (names[state.file - 1].name.decode(), state.line)
    addresses = sorted(found)
    return addresses, [found[address] for address in addresses]


def line_of(library: Path, address: int) -> tuple[str, int]:
    """File and line of an instruction; `address` is the one after it, from the start of the library."""
    addresses, places = _lines(library)
    index = bisect.bisect_left(addresses, address) - 1
    return places[index] if index >= 0 else ("", 0)
