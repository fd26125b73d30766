"""The C++ compiler of the emulator: where it is found, how kernels are compiled, where the results are kept."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import platformdirs

Mode = Literal["check", "fast"]

HERE = Path(__file__).parent
OLDEST_CLANG = 19
EMULATOR = "emulator"
"""The file the emulator's own lines of a translation unit are counted in."""
INSTALL = "pip install ziglang pyelftools"

FORGOTTEN_AFTER = 30 * 24 * 3600.0
"""Seconds; looked at when the emulator itself has changed."""
CPU = "-march=x86-64-v3"
LANGUAGE = (
    *("-x", "c++", "-std=c++14", "-nostdinc", "-fno-exceptions", "-fno-rtti", "-Wno-everything", CPU, "-fPIC"),
    *("-fno-strict-aliasing", "-fno-math-errno", "-ffp-contract=on", "-flax-vector-conversions=none"),
    # Each half and bfloat operation rounds, and 1.0 is a float, as on the GPU.
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-Xclang", "-cl-single-precision-constant"),
    # A report finds its line by the address a call returns to.
    "-fno-optimize-sibling-calls",
)
LIBRARY = f"-I{HERE / 'include'}"
LINES = ("-gline-tables-only", "-gdwarf-4")
UNDEFINED = "alignment,bounds,float-cast-overflow,integer-divide-by-zero,return,shift,signed-integer-overflow"
HOOKS = (
    *("instrumentation-with-call-threshold=0", "max-ins-per-bb=1000000", "opt-same-temp=0", "stack=0", "globals=0"),
    "kernel-mem-intrinsic-prefix=1",
)
"""A call of the runtime at every load and store, and nothing else of AddressSanitizer."""
MODES: dict[Mode, tuple[str, ...]] = {
    "check": (
        *("-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fno-unroll-loops", "-ftrivial-auto-var-init=pattern"),
        *(f"-fsanitize=kernel-address,{UNDEFINED}", "-fsanitize-recover=all", "-fno-sanitize-recover=return"),
        *(word for option in HOOKS for word in ("-mllvm", f"-asan-{option}")),
    ),
    "fast": ("-O2",),
}
SPACES = ("-DEMU_ADDRESS_SPACES", "-O0", "-S", "-emit-llvm", "-o", "-", "-ferror-limit=30")
"""The pass that reads the same source with address spaces as types of their own."""
WARNINGS = ("-Wuninitialized", "-Wsometimes-uninitialized", "-Wreturn-type")
SONAME = "-soname=lisa-emulator.so"
"""A kernel finds the runtime, which is loaded before it, by this name: whichever version of it."""


class CompileError(Exception):
    """The kernel is not C++14 with Metal's library; the text is the compiler's."""


@dataclass(frozen=True)
class Compiler:
    """Command lines: of kernels (only the emulator's headers), of the runtime (the C library's too), of linking."""

    version: str
    kernels: tuple[str, ...]
    runtime: tuple[str, ...]
    link: tuple[str, ...]


def unavailable() -> str:
    """Why the emulator cannot run here, with what to do; empty where it can."""
    if (sys.platform, platform.machine(), platform.libc_ver()[0]) != ("linux", "x86_64", "glibc"):
        return "the Metal emulator runs on Linux x86-64 with glibc"
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        return "the Metal emulator needs a processor with AVX2"
    if util.find_spec("elftools") is None or find() is None:
        return f"the Metal emulator needs clang {OLDEST_CLANG} or newer and pyelftools: {INSTALL}"
    return ""


@cache
def find() -> Compiler | None:
    """The clang of the ziglang package, else clang++ of the system, else None."""
    return _of_ziglang() or _of_the_system()


def _of_ziglang() -> Compiler | None:
    spec = util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = str(Path(spec.origin).parent / "zig")
    return Compiler(
        version=f"ziglang {metadata.version('ziglang')}",
        kernels=(zig, "clang", "--target=x86_64-unknown-linux-gnu"),
        runtime=(zig, "c++", "-target", "x86_64-linux-gnu", "-fno-sanitize=undefined"),
        link=(zig, "ld.lld", "-shared"),
    )


def _of_the_system() -> Compiler | None:
    for name in ("clang++", *(f"clang++-{n}" for n in range(40, OLDEST_CLANG - 1, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        printed = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"clang version (\d+)", printed)
        if found and int(found[1]) >= OLDEST_CLANG:
            return Compiler(printed.splitlines()[0], (path,), (path,), (path, "-shared", "-nostdlib"))
    return None


def folder() -> Path:
    """Where compiled kernels are kept; it may be deleted at any time."""
    path = Path(platformdirs.user_cache_dir("lisa")) / "emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


@cache
def runtime() -> Path:
    """The machine every kernel runs on, as a shared object."""
    compiler = _found()
    own = (HERE / "runtime.cpp").read_text()

    def build(target: Path) -> None:
        _forget_the_old()
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            unit = Path(scratch) / "runtime.o"
            flags = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-w")
            caches = {f"ZIG_{kind}_CACHE_DIR": str(folder() / "zig") for kind in ("GLOBAL", "LOCAL")}
            _run([*compiler.runtime, *flags, "-c", str(HERE / "runtime.cpp"), "-o", str(unit)], env=os.environ | caches)
            named = SONAME if "ld.lld" in compiler.link else f"-Wl,{SONAME}"
            _run([*compiler.link, named, str(unit), "-o", str(target)])

    return _kept(f"runtime-{_key(compiler.version, _library(), own)}.so", build)


def kernel(source: str, mode: Mode) -> Path:
    """A kernel's translation unit as a shared object that runs on `runtime()`.

    Raises:
        CompileError: the text is not accepted.
    """
    compiler, machine = _found(), runtime()
    flags = (*LANGUAGE, *MODES[mode], *LINES)

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            unit = Path(scratch) / "kernel.o"
            _run([*compiler.kernels, *flags, LIBRARY, "-c", "-", "-o", str(unit)], source)
            _run([*compiler.link, str(unit), str(machine), "-o", str(target)])

    return _kept(f"{mode}-{_key(compiler.version, _library(), *flags, source)}.so", build)


def space_errors(source: str) -> list[tuple[str, int, str]]:
    """What the address-space pass says: file as in #line, line, message. Uninitialised variables count."""
    compiler = _found()
    flags = (*LANGUAGE, *LINES, *SPACES, *WARNINGS)

    def build(target: Path) -> None:
        done = subprocess.run([*compiler.kernels, *flags, LIBRARY, "-"], input=source, capture_output=True, text=True)
        target.write_text(json.dumps(_errors(done.stderr) + _casts(done.stdout)))

    reader = Path(__file__).read_text()
    path = _kept(f"spaces-{_key(compiler.version, _library(), reader, *flags, source)}.json", build)
    return [(file, line, text) for file, line, text in json.loads(path.read_text())]


COPIES = re.compile(r"no matching (constructor for init|conversion for functional-style cast)|no viable overloaded '='")
"""Clang has no copy of a struct from one address space to another; Metal has."""


def _errors(printed: str) -> list[tuple[str, int, str]]:
    """Errors and warnings. One inside the library takes the kernel's line that asked for it, from its notes."""
    found: list[tuple[str, int, str]] = []
    for file, line, kind, text in re.findall(r"^(\S[^:\n]*):(\d+):\d+: (\w+): (.*)$", printed, re.MULTILINE):
        if kind in ("error", "warning"):
            found.append((file, int(line), text))
        elif found and "requested here" in text and _in_library(found[-1][0]) and not _in_library(file):
            found[-1] = (file, int(line), found[-1][2])
    return [error for error in found if not COPIES.match(error[2])]


def _casts(code: str) -> list[tuple[str, int, str]]:
    """Casts from one address space to another, which C++ allows: instructions of LLVM with a line of their own."""
    notes = dict(re.findall(r"^(!\d+) = (.*)$", code, re.MULTILINE))
    names = {"": "thread", "1": "device", "2": "constant", "3": "threadgroup"}
    cast = re.compile(r"addrspacecast ptr(?: addrspace\((\d)\))? .* to ptr(?: addrspace\((\d)\))?, !dbg (!\d+)")
    found = []
    for source, target, place in dict.fromkeys(cast.findall(code)):
        line, scope = re.findall(r"line: (\d+).*scope: (!\d+)", notes[place])[0]
        file = re.findall(r'filename: "(.*?)"', notes[re.findall(r"file: (!\d+)", notes[scope])[0]])[0]
        if file != EMULATOR:
            found.append((file, int(line), f"cast from {names[source]} to {names[target]}"))
    return found


def _in_library(file: str) -> bool:
    return file.startswith(str(HERE / "include"))


def _found() -> Compiler:
    compiler = find()
    if compiler is None:
        raise RuntimeError(unavailable())
    return compiler


@cache
def _library() -> str:
    """The text of Metal's library as the emulator has it."""
    return "".join(path.read_text() for path in sorted((HERE / "include").rglob("*")) if path.is_file())


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _kept(name: str, build: Callable[[Path], None]) -> Path:
    """The file of this name, built where it is missing. Two processes may build it at once: the rename is atomic."""
    path = folder() / name
    if not path.exists():
        handle, scratch = tempfile.mkstemp(dir=folder(), suffix=f".{name}")
        os.close(handle)
        try:
            build(Path(scratch))
            os.chmod(scratch, 0o755)
            os.replace(scratch, path)
        finally:
            Path(scratch).unlink(missing_ok=True)
    return path


def _forget_the_old() -> None:
    for path in folder().glob("*.*"):
        if path.is_file() and time.time() - path.stat().st_mtime > FORGOTTEN_AFTER:
            path.unlink(missing_ok=True)


def _run(command: list[str], text: str = "", env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env)
    if done.returncode:
        raise CompileError(done.stderr.strip())
