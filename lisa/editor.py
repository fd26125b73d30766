"""The line a user types in a conversation: editing, history across runs, completion, paste of many lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import platformdirs

from lisa.screen import colours, is_terminal, say

if TYPE_CHECKING:  # a tenth of a second that a single answer does not need
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

Words = Callable[[str], Sequence[str]]
"""Completions of a line that begins with a slash: of its last word."""


class Editor(Protocol):
    def read(self) -> str | None:
        """The next message, which may have several lines; None to leave."""


def editor(words: Words, *, private: bool = False, toggle: Callable[[], None] = lambda: None) -> Editor:
    """The full editor in a terminal, bare lines elsewhere. `private` neither reads nor writes the history.

    `toggle` is called by Ctrl-T.
    """
    if is_terminal(sys.stdin) and (is_terminal(sys.stdout) or is_terminal(sys.stderr)):
        return _Terminal(words, private, toggle)
    return _Lines()


def history_file() -> Path:
    return Path(platformdirs.user_state_dir("lisa")) / "history"


class _Lines:
    """No terminal to draw in."""

    def read(self) -> str | None:
        while True:
            say("> ", end="")
            try:
                return input()
            except UnicodeDecodeError:
                say("lisa: that line is not text in this terminal's encoding")
            except (EOFError, KeyboardInterrupt):
                say("")
                return None


class _Terminal:
    """Enter sends, Alt-Enter or Ctrl-J begins a new line, Ctrl-C drops what is written, or leaves where nothing is."""

    def __init__(self, words: Words, private: bool, toggle: Callable[[], None]):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import ColorDepth, create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        shown = sys.stdout if is_terminal(sys.stdout) else sys.stderr
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            history=_history(private),
            completer=_completer(words),
            complete_style=CompleteStyle.READLINE_LIKE,  # a menu would keep eight lines of the screen free for itself
            key_bindings=_keys(toggle),
            output=create_output(stdout=shown),
            color_depth=None if colours(shown) else ColorDepth.DEPTH_1_BIT,
            enable_open_in_editor=True,
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt()
        except (EOFError, KeyboardInterrupt):
            return None


def _history(private: bool) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if private:
        return InMemoryHistory()
    file = history_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        return FileHistory(str(file))
    return InMemoryHistory()


def _completer(words: Words) -> Completer:
    from prompt_toolkit import completion

    class Commands(completion.Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            line = document.text_before_cursor
            if line.startswith("/") and "\n" not in line:
                yield from _completions(line, words(line), completion.Completion)

    return Commands()


def _completions(line: str, words: Sequence[str], make: Callable[..., Completion]) -> Iterator[Completion]:
    last = line.rsplit(" ", 1)[-1]
    for word in words:
        if word.startswith(last):
            yield make(word, start_position=-len(last))


def _keys(toggle: Callable[[], None]) -> KeyBindings:
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def drop_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add("c-d")
    def leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.delete()
        else:
            event.app.exit(exception=EOFError)

    @keys.add("c-t")
    def fold(event: KeyPressEvent) -> None:
        run_in_terminal(toggle)

    return keys
