"""Runs Metal kernels on the CPU and says what is wrong with them. See docs/kernels.md."""

from .codegen import ATTRIBUTES, mlx_text
from .compiler import CompileError, unavailable
from .kernel import Kernel, Reported, install, metal_kernel
from .launch import Result, Traffic
from .reports import Detail, Kind, Report

__all__ = [
    "ATTRIBUTES",
    "CompileError",
    "Detail",
    "Kernel",
    "Kind",
    "Report",
    "Reported",
    "Result",
    "Traffic",
    "install",
    "metal_kernel",
    "mlx_text",
    "unavailable",
]
