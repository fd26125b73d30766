"""Strict arithmetic for every test: equality of texts, logits and states is asked for in bits."""

from lisa import blas

BLAS = blas.use(strict=blas.STRICT_POSSIBLE)


def pytest_report_header() -> str:
    return f"BLAS: {BLAS}"
