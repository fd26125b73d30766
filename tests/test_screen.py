"""Streaming Markdown on a terminal: the same screen however the text was cut, nothing flickers, nothing is lost."""

from __future__ import annotations

import io
import os
import random
import re

import pyte
import pytest

from lisa import screen
from lisa.screen import Markdown, Painter, harmless
from lisa.types import Tokens

TEXT = """# Rivers of Europe

The **Rhine** rises in the *Alps* and flows to the sea; `Elbe` and [Oder](http://example.org) flow north, each far.

1. first, a long item that does not fit one line of a narrow terminal
2. second
   - inner one
   - inner two

> quoted words that go on and on until they wrap around the edge

```python
def river(name: str) -> str:
    return f"the river {name} is longer than this line"
```

| name | length |
|---|---|
| Rhine | 1233 km |
| Elbe | 1094 km |

Last words 猫猫猫, with wide letters 猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫.
"""


class Display(io.StringIO):
    """Writes go to a terminal emulator; `frames` keeps what was visible after each."""

    def __init__(self, rows: int, columns: int, watched: bool = False):
        self.watched = watched
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self.screen.set_mode(pyte.modes.LNM)  # the terminal driver turns a line end into return and line feed
        self.stream = pyte.Stream(self.screen)
        self.frames: list[list[str]] = []
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        self.stream.feed(text)
        if self.watched:
            self.frames.append(self.lines())
        return len(text)

    def lines(self) -> list[str]:
        gone = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top]
        return gone + [line.rstrip() for line in self.screen.display]

    def text(self) -> list[str]:
        lines = self.lines()
        while lines and not lines[-1]:
            lines.pop()
        return lines


def shown(text: str, rows: int, columns: int, seed: int | None) -> Display:
    display = Display(rows, columns)
    markdown = Markdown(display, lambda: os.terminal_size((columns, rows)))
    pieces = [text]
    if seed is not None:
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, len(text)), 60))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for piece in pieces:
        markdown.push(piece)
    markdown.finish()
    return display


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_the_screen_does_not_depend_on_where_the_text_was_cut(columns: int) -> None:
    whole = shown(TEXT, 100, columns, None).text()
    assert whole[0].strip() == "Rivers of Europe" and not any("**" in line or "```" in line for line in whole)
    for seed in range(2):
        assert shown(TEXT, 100, columns, seed).text() == whole
    assert max(map(len, whole)) < columns


def test_where_the_screen_is_lower_than_the_answer_nothing_is_lost_or_doubled() -> None:
    whole = shown(TEXT, 100, 40, None).text()
    assert shown(TEXT, 8, 40, 1).text() == whole


def test_what_is_finished_never_leaves_the_screen_again() -> None:
    display = Display(30, 40, watched=True)
    markdown = Markdown(display, lambda: os.terminal_size((40, 30)))
    for piece in re.findall(r"(?s).{1,3}", "first paragraph\n\nsecond **bold** paragraph\n\n- one\n- two\n"):
        markdown.push(piece)
    seen = False
    for frame in display.frames:
        there = frame[0] == "first paragraph"
        assert there or not seen
        seen = seen or there
    assert seen


def test_plain_text_is_appended_without_erasing() -> None:
    display = Display(30, 40)
    markdown = Markdown(display, lambda: os.terminal_size((40, 30)))
    for word in ("The ", "Rhine ", "flows ", "to ", "the ", "sea"):
        markdown.push(word)
    assert display.text() == ["The Rhine flows to the sea"] and not any("\x1b[J" in text for text in display.written)


def test_only_lines_that_changed_are_drawn_again() -> None:
    written: list[str] = []
    painter = Painter(written.append, lambda: 24)
    painter.draw(["a", "b", "c"])
    painter.draw(["a", "b", "d", "e"])
    painter.draw(["a", "x", "d", "e"])
    painter.draw(["a", "x", "d", "e"])
    painter.finish()
    assert written == ["a\nb\nc", "\r\x1b[Jd\ne", "\r\x1b[2A\x1b[Jx\nd\ne", "", "\n"]


def test_lines_above_the_screen_are_left_alone() -> None:
    written: list[str] = []
    painter = Painter(written.append, lambda: 4)
    painter.draw([str(i) for i in range(10)])
    painter.draw(["changed", *(str(i) for i in range(1, 10)), "10"])
    assert written[1].startswith("\r\x1b[2A\x1b[J7\n8\n9\n10")


@pytest.mark.parametrize("text", ["some words that will wrap when narrow ", "```\ncode that goes on and on\n"])
def test_a_resize_in_an_answer_loses_no_word(text: str) -> None:
    size = [os.terminal_size((60, 20))]
    display = Display(20, 60)
    markdown = Markdown(display, lambda: size[0])
    markdown.push(text)
    markdown.push("before ")
    size[0] = os.terminal_size((30, 20))
    display.screen.resize(20, 30)
    markdown.push("after ")
    markdown.push("words\n")
    markdown.finish()
    joined = " ".join(" ".join(display.text()).split())
    assert joined.count("after") == 1 and "after words" in joined


def test_control_characters_of_a_model_never_reach_the_terminal() -> None:
    assert harmless("a\x1b]0;title\x07b\x9b31mc\r\n\td\x08") == "a]0;titleb31mc\n\td"


@pytest.mark.parametrize("columns", [20, 41, 80])
@pytest.mark.parametrize("thought", ["plain words of thought ", "猫", "a猫b ", "é"])
def test_a_folded_thought_never_takes_more_than_its_line(
    thought: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Display(10, columns)
    size = os.terminal_size((columns, 10))
    monkeypatch.setattr(screen.shutil, "get_terminal_size", lambda *_: size)
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    monkeypatch.setattr(screen, "say", lambda text, end="\n": display.write(text + end))
    shown = screen.Screen(thinking="fold")
    for i in range(60):
        shown.show(Tokens((i,), reasoning=thought))
        assert len([line for line in display.lines() if line]) == 1
