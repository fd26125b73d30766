"""The pages of docs/ that are made from the code are the code's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from lisa import cli

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
INTRODUCTION = """# Commands

What `lisa COMMAND --help` prints. Made by `python -m tests.test_docs` and checked by the tests.
`lisa --install-completion` teaches your shell to complete commands, options and the catalogue's names.
"""


def page() -> str:
    root: Any = typer.main.get_command(cli.app)
    top = root.context_class(root, info_name="lisa")
    parts = [INTRODUCTION, _section("lisa", root, None)]
    parts += [_section(f"lisa {name}", each, top) for name, each in root.commands.items()]
    return "\n".join(parts)


def _section(name: str, command: Any, parent: Any) -> str:
    context = command.context_class(command, info_name=name.split()[-1], parent=parent, terminal_width=100)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {name}\n\n```\n{text}\n```\n"


def test_the_page_of_commands_shows_the_real_help() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tests.test_docs"


def test_every_help_is_short_and_every_option_is_explained() -> None:
    root: Any = typer.main.get_command(cli.app)
    for name, command in root.commands.items():
        assert command.help and len(command.help.splitlines()[0]) <= 110, name
        for option in command.params:
            if option.param_type_name == "option":
                assert option.help or option.name in ("seed", "temperature"), f"{name} {option.name}"


@pytest.mark.parametrize(
    ("typed", "completed"), [("sh", "show"), ("show qwen3.8", "qwen3.8-27b"), ("chat --model smol", "smollm2-135m")]
)
def test_the_shell_completes(typed: str, completed: str) -> None:
    words = f"lisa {typed}".split()
    env = {"_LISA_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    code = "from lisa.cli import main; main()"
    env = os.environ | env | {"PYTHONPATH": str(PAGE.parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [completed], done.stderr


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
