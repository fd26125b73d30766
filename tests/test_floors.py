"""The floors of the house: imports point down only (docs/how-it-works.md has the same table)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "lisa"

FLOORS = {
    "types": "",
    "errors": "",
    "metal": "",
    "blas": "errors",
    "memory": "errors types",
    "tools": "text types",
    "download": "errors types",
    "hub": "download errors types",
    "catalog": "errors types",
    "fit": "catalog errors memory",
    "text": "errors types",
    "tokenizer": "errors text types",
    "grammar": "tools types",
    "constrain": "errors text tokenizer types",
    "sampling": "metal types",
    "state": "errors metal types",
    "verify": "sampling types",
    "costs": "types",
    "acceptance": "types",
    "pace": "acceptance costs types",
    "remember": "",
    "verdicts": "hub memory remember",
    "selfcheck": "layers metal remember target verdicts",
    "layers": "metal state",
    "target": "errors layers metal sampling state types",
    "drafters": "drafters errors layers metal sampling state types",
    "engine": "errors pace sampling state target types verify",
    "bandwidth": "remember",
    "drawing": "errors",
    "store": "catalog download errors fit hub memory",
    "doctor": "bandwidth blas download fit hub memory store verdicts",
    "manage": "api bandwidth catalog doctor download errors fit hub memory screen store",
    "worker": "errors types",
    "convert": "catalog errors types",
    "pairing": "catalog drafters errors hub target types",
    "loader": "blas catalog convert engine errors fit hub memory metal pace pairing remember selfcheck target "
    "tokenizer types",
    "prefix": "engine",
    "api": "blas constrain errors grammar layers loader memory prefix text tokenizer tools types worker engine",
    "server": "api errors text tools types",
    "prompts": "errors tokenizer types",
    "measure": "blas engine errors loader memory prompts types",
    "screen": "types",
    "editor": "screen",
    "slash": "api catalog errors screen types",
    "chat": "api editor errors screen slash types",
    "train": "api blas drafters errors loader measure prompts sampling target tokenizer types",
    "cli": "api bandwidth blas measure server train catalog chat drawing errors fit hub manage memory screen slash "
    "types",
    "__init__": "api errors types",
    "__main__": "cli",
}

WITHOUT_MLX = [
    *("types", "errors", "blas", "memory", "hub", "catalog", "text", "tokenizer", "worker", "chat", "cli", "tools"),
    *("bandwidth", "constrain", "doctor", "remember", "verdicts", "download", "fit", "grammar", "manage", "store"),
    *("screen", "editor", "slash", "drawing", "prefix"),
    "__init__",
]


def rooms() -> Iterator[tuple[str, Path]]:
    for path in sorted(HOUSE.rglob("*.py")):
        if path.stat().st_size:
            inside = path.relative_to(HOUSE)
            yield inside.parts[0].removesuffix(".py"), path


def imports(path: Path) -> set[str]:
    """Dotted names of everything imported anywhere in a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def inner(names: set[str]) -> set[str]:
    """Rooms of the house among dotted names: "lisa.x" and "from lisa import x"."""
    known = {name for name, _ in rooms()}
    parts = (name.split(".") for name in names if name.startswith("lisa."))
    return {part[1] for part in parts if part[1] in known}


@pytest.mark.parametrize(("room", "path"), list(rooms()), ids=lambda value: str(value).removeprefix(str(HOUSE)))
def test_imports_point_down_only(room: str, path: Path) -> None:
    assert room in FLOORS, f"{room} has no floor: give it one here and in docs/how-it-works.md"
    allowed = set(FLOORS[room].split()) | ({room} if path.parent != HOUSE else set())
    assert inner(imports(path)) - {room} <= allowed


@pytest.mark.parametrize("room", WITHOUT_MLX)
def test_rooms_of_the_front_never_name_mlx(room: str) -> None:
    names = imports(HOUSE / f"{room}.py")
    assert not [name for name in names if name.split(".")[0] in ("mlx", "mlx_lm")]


def test_the_table_has_no_cycle() -> None:
    below: dict[str, set[str]] = {room: set(floor.split()) - {room} for room, floor in FLOORS.items()}
    while below:
        ground = [room for room, floor in below.items() if not floor & below.keys()]
        assert ground, f"cycle among {sorted(below)}"
        for room in ground:
            del below[room]


@pytest.mark.parametrize(
    "module", ["lisa", "lisa.api", "lisa.cli", "lisa.text", "lisa.hub", "lisa.worker", "lisa.server.run"]
)
def test_importing_the_front_loads_neither_mlx_nor_a_blas(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'numpy')])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


TESTS = Path(__file__).parent
OUTSIDE = ("npm", "npx")
"""Programs that open connections to other machines."""


@pytest.mark.parametrize("path", sorted(TESTS.glob("test_*.py")), ids=lambda path: path.name)
def test_no_test_for_every_change_depends_on_the_run_or_on_other_machines(path: Path) -> None:
    """Hashes of strings differ from run to run; what needs a registry is marked slow."""
    tree = ast.parse(path.read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "hash"]
    found = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    marks = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)}
    assert "pytestmark = pytest.mark.slow" in marks or not found & set(OUTSIDE)
