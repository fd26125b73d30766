"""Small things kept between runs: JSON files in the user's cache, a value a key."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def load(path: Path, key: str) -> object:
    """What was saved under `key`, None where there is nothing or the file is damaged."""
    return everything(path).get(key)


def save(path: Path, key: str, data: Any) -> None:
    """Keep `data` under `key`, whole or not at all. Raises OSError where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({**everything(path), key: data}, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def everything(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
