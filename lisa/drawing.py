"""A picture of a bench report: tokens a second, and what was accepted by position, for each drafter."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lisa.errors import LisaError, UsageError

FORMATS = (".png", ".svg", ".pdf")


def check(file: Path) -> None:
    """Raises LisaError where `file` cannot be drawn."""
    if file.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot draws {', '.join(FORMATS)} files, not {file.name}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot: there is no folder {file.absolute().parent}")
    if find_spec("matplotlib") is None:
        raise LisaError("--plot needs matplotlib: pip install 'lisa[plot]'")


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Write the picture of a report of lisa/measure.py. Raises LisaError as `check` does."""
    check(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    speed, acceptance = figure.subplots(1, 2)
    arms = report["arms"]
    plain = arms["none"]["tok_s"]
    spread = [report["interval"].get(name, (1.0, 1.0)) for name in arms]
    tops = [arm["tok_s"] for arm in arms.values()]
    below = [max(0.0, top - low * plain) for top, (low, _) in zip(tops, spread, strict=True)]
    above = [max(0.0, high * plain - top) for top, (_, high) in zip(tops, spread, strict=True)]
    speed.bar(list(arms), tops, yerr=[below, above], capsize=4)
    speed.set_ylabel("tokens/s, 95 % interval of the ratio to plain")
    for name, arm in arms.items():
        if arm["by_position"]:
            acceptance.plot(range(1, len(arm["by_position"]) + 1), arm["by_position"], marker="o", label=name)
    acceptance.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1))
    acceptance.xaxis.get_major_locator().set_params(integer=True)
    if acceptance.lines:
        acceptance.legend()
    figure.suptitle(f"{report['model']}, {report['machine']['cpu']}")
    figure.savefig(file, dpi=150)
