"""Runs the kernels of lisa/metal on the emulator, and judges what comes back."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import emulator
import mlx.core as mx

import lisa.metal
from lisa.metal import Case, Kernels

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
"""Of the largest value."""

MODULES = [
    module
    for module in (
        importlib.import_module(f"lisa.metal.{found.name}") for found in pkgutil.iter_modules(lisa.metal.__path__)
    )
    if hasattr(module, "CASES")
]


def name(module: Any) -> str:
    return str(module.__name__.rsplit(".", 1)[-1])


def cases(long: bool) -> list[Any]:
    """(module, case) of every kernel."""
    return [(module, case) for module in MODULES for case in module.CASES if case.long == long]


def label(value: Any) -> str:
    return value.name if isinstance(value, Case) else name(value)


@dataclass(frozen=True)
class Edit:
    """A text of a kernel replaced by another; `nth` where it stands more than once."""

    source: str
    old: str
    new: str
    nth: int = 0

    def __call__(self, text: str) -> str:
        parts = text.split(self.old)
        assert len(parts) > self.nth + 1, f"{self.source} has no {self.old!r} to break"
        return self.old.join(parts[: self.nth + 1]) + self.new + self.old.join(parts[self.nth + 1 :])


@dataclass
class Lab:
    """Emulated kernels, in check mode unless told otherwise, and what their launches did and were asked for."""

    seed: int = 0
    mode: str = "check"
    edit: Edit | None = None
    results: list[emulator.Result] = field(default_factory=list)
    launched: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    @property
    def kernels(self) -> Kernels:
        return Kernels(self._make)

    def _make(self, **made: Any) -> Any:
        if self.edit is not None and self.edit.source == made["name"]:
            part = "source" if self.edit.old in made["source"] else "header"
            made[part] = self.edit(made[part])
        kernel = emulator.metal_kernel(**made, mode=self.mode, seed=self.seed, after=self.results.append)

        def launch(**call: Any) -> list[mx.array]:
            self.launched.append((made, call))
            return kernel(**call)

        return launch

    def run(self, module: Any, arguments: Mapping[str, Any]) -> tuple[mx.array, ...]:
        """What the public function returns; every launch of it was emulated."""
        before = len(self.results)
        returned = getattr(module, name(module))(**arguments, kernels=self.kernels)
        assert len(self.results) > before, "the kernel did not take this, the reference ran"
        return returned if isinstance(returned, tuple) else (returned,)

    @property
    def reports(self) -> list[str]:
        return [str(report) for result in self.results for report in result.reports]

    def traffic(self, buffer: str) -> emulator.Traffic:
        (found,) = (result.traffic[buffer] for result in self.results if buffer in result.traffic)
        return found


def reference(module: Any, arguments: Mapping[str, Any]) -> tuple[mx.array, ...]:
    returned = module.reference(**arguments)
    return returned if isinstance(returned, tuple) else (returned,)


def error(got: mx.array, wanted: mx.array) -> float:
    """The largest difference over the largest value, as a part of what the dtype is allowed; infinities must agree."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    tolerance = TOLERANCE.get(got.dtype, 1e-9)
    got, wanted = (a.astype(mx.float32) for a in (got, wanted))
    known = mx.abs(wanted) < mx.inf
    if not mx.array_equal(mx.where(known, 0, got), mx.where(known, 0, wanted)):
        return float("inf")
    got, wanted = (mx.where(known, a, 0) for a in (got, wanted))
    worst = mx.abs(got - wanted).max() / mx.maximum(mx.abs(wanted).max(), 1e-30)
    return float(worst.item()) / tolerance if mx.isfinite(worst) else float("inf")


def same_bits(a: tuple[mx.array, ...], b: tuple[mx.array, ...]) -> bool:
    return all(mx.array_equal(x.view(mx.uint8), y.view(mx.uint8)) for x, y in zip(a, b, strict=True))
