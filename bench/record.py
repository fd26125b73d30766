"""Results are kept one file a machine, one JSON document a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def save(report: dict[str, Any]) -> None:
    """Append a report that names its machine (lisa.measure.machine)."""
    machine = report["machine"]
    words = f"{machine['system']} {machine['cpu']} {machine['cores']} cores".lower()
    path = FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', words).strip('-')}.jsonl"
    FOLDER.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(report) + "\n")
