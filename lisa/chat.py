"""The terminal: one answer, or a conversation. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import TextIO

import typer

from lisa.api import Reply
from lisa.errors import LisaError
from lisa.types import Done, Message, Messages, Progress, Reason, Tokens

Ask = Callable[[Messages], Reply]

_COMMANDS = {"/help": "show this", "/exit": "leave, as Ctrl-D does"}
_LONG = 1000
"""Prompt tokens still to read from which on reading them takes long enough to be shown."""


def say(line: str, end: str = "\n") -> None:
    """To stderr; nowhere where there is none (print would then take stdout)."""
    typer.echo(line + end, err=True, nl=False)


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def answer(ask: Ask, messages: Messages) -> tuple[Message, Reason]:
    """Stream one reply; the message as it was delivered, and why it ended. Ctrl-C cancels it. Raises LisaError."""
    reply = ask(messages)
    screen = _Screen()
    message: Message = {"role": "assistant", "content": ""}
    done = Done("cancelled")
    with _interrupt_cancels(reply), screen:
        for event in reply:
            if isinstance(event, Progress):
                screen.progress(event)
            elif isinstance(event, Tokens):
                screen.show(event)
                message["content"] += event.text
                if event.reasoning:  # templates know it by this name
                    message["reasoning_content"] = message.get("reasoning_content", "") + event.reasoning
            else:
                done = event
    for line in (_summary(done), *done.stats.notes):
        say(line)
    return message, done.reason


def converse(ask: Ask, opening: Messages) -> None:
    """Read lines and answer them until Ctrl-D, /exit, or Ctrl-C at an empty prompt."""
    say("/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves")
    editor = _editor()
    messages = list(opening)
    while (line := _read(editor)) is not None and line.rstrip() != "/exit":
        if line.startswith("/"):
            _command(line.rstrip())
        elif text := line.strip():
            messages = _turn(ask, messages, text)


def _turn(ask: Ask, messages: list[Message], text: str) -> list[Message]:
    """The conversation after one more turn, or unchanged if the turn came to nothing."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        message, reason = answer(ask, asked)
    except LisaError as error:
        say(f"lisa: {error}")
        return messages
    if reason == "cancelled" and not message["content"]:
        return messages
    return [*asked, message]


def _command(line: str) -> None:
    if line != "/help":
        say(f"unknown command {line.split()[0]}; to send a line that begins with /, put a space in front of it")
    for name, does in _COMMANDS.items():
        say(f"  {name}  {does}")


def _editor() -> ModuleType | None:
    """Line editing for input(), which some Pythons are built without."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _read(editor: ModuleType | None) -> str | None:
    """The next line, None to leave. Ctrl-C drops a line half written."""
    while True:
        try:
            if is_terminal(sys.stdout):
                return input("> ")  # readline must know the prompt
            say("> ", end="")
            return input()
        except UnicodeDecodeError:
            say("lisa: that line is not text in this terminal's encoding")
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            say("")
            if editor is None or not editor.get_line_buffer():
                return None


@contextmanager
def _interrupt_cancels(reply: Reply) -> Iterator[None]:
    """The first Ctrl-C cancels the reply, whose last events still arrive; a second one interrupts the program."""

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        reply.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Screen:
    """Shows one reply. Thinking and progress are for a terminal only; the line they stand on is tidied behind them."""

    def __init__(self) -> None:
        self._terminal = is_terminal(sys.stderr)
        styled = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if styled else ("", "")
        self._leave: Callable[[], None] = lambda: None
        self._unfinished = False

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
        if event.reasoning and self._terminal:
            self._enter(self._end_thinking, self._dim)
            say(event.reasoning, end="")
        if event.text:
            self._enter(self._end_answer)
            print(event.text, end="", flush=True)
            self._unfinished = not event.text.endswith("\n")

    def _enter(self, leave: Callable[[], None], start: str = "") -> None:
        if self._leave != leave:
            self._leave()
            self._leave = leave
            say(start, end="")

    def _end_thinking(self) -> None:
        say(self._plain + "\n", end="")

    def _end_answer(self) -> None:
        if self._unfinished:
            print(flush=True)


def _summary(done: Done) -> str:
    """tokens, speed, acceptance, time to the first token, and what ended the reply if not the model."""
    stats = done.stats
    parts = [f"{stats.completion_tokens} tokens"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tok/s")
    if stats.rounds and stats.drafter != "none":
        parts.append(f"{stats.accepted / stats.rounds:.2f} accepted per round, {stats.drafted} drafted")
    if stats.completion_tokens:
        parts.append(f"TTFT {stats.ttft:.2f} s")
    if done.reason != "stop":
        parts.append({"length": "cut off at the token limit", "cancelled": "cancelled"}[done.reason])
    return ", ".join(parts)
