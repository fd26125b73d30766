"""How a reply is shown: the answer on stdout, thinking and progress on stderr.

In a conversation the answer is Markdown. Only what changed is drawn again, finished blocks never are, and nothing above
the top of the screen is touched, so that it neither flickers nor breaks where the terminal is narrow.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Literal, TextIO

import typer

from lisa.types import Progress, Tokens

Thinking = Literal["show", "fold"]

_LONG = 1000
"""Prompt tokens still to read from which on reading them takes long enough to be shown."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a model writes must not steer the terminal


def say(line: str, end: str = "\n") -> None:
    """To stderr; nowhere where there is none (print would then take stdout)."""
    typer.echo(line + end, err=True, nl=False)


def wrapped(line: str) -> str:
    """Broken between words where stderr is a terminal."""
    return textwrap.fill(line, max(8, shutil.get_terminal_size().columns)) if is_terminal(sys.stderr) else line


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def colours(stream: TextIO | None) -> bool:
    """Whether escape codes for looks may go to `stream` (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Painter:
    """Draws lines where the cursor is and, asked again, draws what differs. The cursor rests behind the last line."""

    def __init__(self, write: Callable[[str], object], rows: Callable[[], int]):
        self._write = write
        self._rows = rows
        self._drawn: list[str] = []

    def draw(self, lines: list[str]) -> None:
        drawn = self._drawn
        same = next(
            (i for i, (a, b) in enumerate(zip(drawn, lines, strict=False)) if a != b), min(len(drawn), len(lines))
        )
        last = len(drawn) - 1
        if same < last or len(lines) < len(drawn) or (same == last and not lines[same].startswith(drawn[same])):
            # Lines that have left the screen cannot be reached; they stay as they are.
            first = max(same, last - (self._rows() - 2), 0)
            up = f"\x1b[{last - first}A" if last > first else ""
            self._write("\r" + up + "\x1b[J" + "\n".join(lines[first:]))
        elif drawn and len(lines) >= len(drawn):
            self._write("\n".join([lines[last][len(drawn[last]) :], *lines[len(drawn) :]]))
        else:
            self._write("\n".join(lines))
        self._drawn = lines

    def finish(self) -> None:
        """Leave what is drawn as it is and go to the next line."""
        if self._drawn:
            self._write("\n")
        self._drawn = []


class Markdown:
    """An answer that is still being written, as Markdown. Whole blocks are drawn once; the one being written, anew."""

    def __init__(self, out: TextIO, size: Callable[[], os.terminal_size] = shutil.get_terminal_size):
        from markdown_it import MarkdownIt
        from rich.console import Console

        self._size = size
        self._parser = MarkdownIt().enable("table")
        self._console = Console(file=out, force_terminal=True, highlight=False)
        self._painter = Painter(lambda text: (out.write(text), out.flush()), lambda: self._size().lines)
        self._columns = size().columns
        self._text = ""  # of the block being written
        self._first = True

    def push(self, text: str) -> None:
        if (columns := self._size().columns) != self._columns:
            self._resized(columns)
        self._text += text
        starts = self._starts()
        if len(starts) > 1:
            lines = self._text.splitlines(keepends=True)
            self._draw("".join(lines[: starts[-1]]))
            self._end()
            self._text = "".join(lines[starts[-1] :])
        if self._text.strip():
            self._draw(self._text)

    def _starts(self) -> list[int]:
        """Lines on which the blocks begin, as far as they are known."""
        tokens = self._parser.parse(self._text)
        return [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]

    def _draw(self, text: str) -> None:
        self._painter.draw(([] if self._first else [""]) + self._rendered(text))

    def _rendered(self, text: str) -> list[str]:
        from rich.markdown import Markdown as Rendered

        # One column less: a line that fills the last one leaves the cursor where terminals disagree.
        with self._console.capture() as capture:
            self._console.print(Rendered(text, hyperlinks=False), width=max(8, self._columns - 1))
        lines = [line.rstrip(" ") for line in capture.get().split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            lines.pop(0)
        return lines or [""]

    def _end(self) -> None:
        self._painter.finish()
        self._first = False

    def _resized(self, columns: int) -> None:
        """The terminal has moved what was drawn: leave that alone and go on below it, in the same code block if any."""
        self._columns = columns
        if self._text.strip():
            self._end()
            self._first = True  # no blank line inside a block
            fence = re.match(r"\s*(```|~~~).*\n", self._text)
            self._text = fence[0] if fence else ""

    def finish(self) -> None:
        self._painter.finish()


class Screen:
    """Shows one reply. Thinking and progress are for a terminal only; the line they stand on is tidied behind them.

    `reasoning` holds what was thought.
    """

    def __init__(self, markdown: bool = False, thinking: Thinking = "show"):
        self._terminal = is_terminal(sys.stderr)
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if colours(sys.stderr) else ("", "")
        self._markdown = Markdown(sys.stdout) if markdown else None
        self._thinking = thinking
        self._fold = Painter(lambda text: say(text, end=""), lambda: shutil.get_terminal_size().lines)
        self._leave: Callable[[], None] = lambda: None
        self._unfinished = False
        self._begun = False
        self.reasoning = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._leave()

    def progress(self, event: Progress) -> None:
        if self._terminal and event.total - event.done >= _LONG:
            line = f"reading the prompt: {event.done} of {event.total} tokens"
            say("\r" + line, end="")
            self._leave = lambda: say("\r" + " " * len(line) + "\r", end="")

    def show(self, event: Tokens) -> None:
        if event.reasoning:
            self.reasoning += event.reasoning
            if self._terminal:
                self._think(harmless(event.reasoning))
        if event.text:
            self._enter(self._end_answer)
            self._answer(event.text)

    def _answer(self, text: str) -> None:
        if self._markdown is not None:
            # White space before the first word would be an empty block.
            text = harmless(text) if self._begun else harmless(text).lstrip()
            self._begun = self._begun or bool(text)
            self._markdown.push(text)
            return
        print(harmless(text) if is_terminal(sys.stdout) else text, end="", flush=True)
        self._unfinished = not text.endswith("\n")

    def _think(self, text: str) -> None:
        if self._thinking == "show":
            self._enter(self._end_thinking, self._dim)
            say(text, end="")
            return
        from rich.cells import cell_len

        self._enter(self._end_fold)
        width = shutil.get_terminal_size().columns - 14
        shown = " ".join(harmless(self.reasoning[-4 * max(1, width) :]).split())[-width:] if width > 0 else ""
        while shown and cell_len(shown) > width:  # Chinese and the like take two cells a character
            shown = shown[1:]
        self._fold.draw([f"{self._dim}thinking: {shown}{self._plain}"])

    def _enter(self, leave: Callable[[], None], start: str = "") -> None:
        if self._leave != leave:
            self._leave()
            self._leave = leave
            say(start, end="")

    def _end_thinking(self) -> None:
        say(self._plain + "\n", end="")

    def _end_fold(self) -> None:
        words = f"thought {len(self.reasoning.split())} words; /thinking last shows them"
        self._fold.draw([self._dim + words[: max(1, shutil.get_terminal_size().columns - 1)] + self._plain])
        self._fold.finish()

    def _end_answer(self) -> None:
        if self._markdown is not None:
            self._markdown.finish()
        elif self._unfinished:
            print(flush=True)


def harmless(text: str) -> str:
    """For a terminal: without control characters, save for line ends and tabs."""
    return _CONTROL.sub("", text)
