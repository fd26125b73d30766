"""The terminal: one answer, or a conversation. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lisa.api import Reply
from lisa.editor import editor
from lisa.errors import LisaError
from lisa.screen import Screen, is_terminal, say, wrapped
from lisa.slash import Conversation, Leave, command, words
from lisa.types import Done, Message, Messages, Progress, Reason, Stats, Tokens

Ask = Callable[[Messages], Reply]


def answer(
    ask: Ask, messages: Messages, screen: Screen | None = None, context: int | None = None
) -> tuple[Message, Reason, Stats]:
    """Stream one reply; the message as it was delivered, why it ended and what it cost. Ctrl-C cancels it.

    `context` is how many tokens there is room for. Raises LisaError.
    """
    reply = ask(messages)
    screen = screen or Screen()
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
    for line in (_summary(done, context), *done.stats.notes):
        say(wrapped(line))
    return message, done.reason, done.stats


def converse(talk: Conversation, *, private: bool = False) -> None:
    """Read messages and answer them until Ctrl-D, /exit, or Ctrl-C at an empty prompt."""
    say(wrapped("/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves"))
    lines = editor(words, private=private, toggle=talk.toggle)
    while (line := lines.read()) is not None:
        try:
            _take(talk, line)
        except LisaError as error:
            say(wrapped(f"lisa: {error}"))
        except Leave:
            return


def _take(talk: Conversation, line: str) -> None:
    """A command is one line; what was pasted with several is a message whatever it begins with."""
    if not line.startswith("/") or "\n" in line.rstrip():
        if line.strip():
            _turn(talk, line.strip())
        return
    before = talk.messages
    again = command(talk, line.rstrip())
    if again is not None:
        try:
            _turn(talk, again)
        finally:
            if len(talk.messages) < len(before):  # nothing came of it
                talk.messages = before


def _turn(talk: Conversation, text: str) -> None:
    """One more turn; the conversation stays as it was if the turn comes to nothing."""
    asked = [*talk.messages, {"role": "user", "content": text}]
    markdown = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
    screen = Screen(markdown, talk.shown)
    message, reason, stats = answer(talk.ask, asked, screen, talk.model.context)
    talk.reasoning = screen.reasoning or talk.reasoning
    talk.stats.append(stats)
    if reason != "cancelled" or message["content"]:
        talk.messages = [*asked, message]


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


def _summary(done: Done, context: int | None) -> str:
    """tokens, speed, acceptance, time to the first token, context, and what ended the reply if not the model."""
    stats = done.stats
    parts = [f"{stats.completion_tokens} tokens"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tok/s")
    if stats.rounds and stats.drafter != "none":
        parts.append(f"{stats.accepted / stats.rounds:.2f} accepted per round, {stats.drafted} drafted")
    if stats.completion_tokens:
        parts.append(f"TTFT {stats.ttft:.2f} s")
    if context is not None:
        parts.append(f"context {stats.prompt_tokens + stats.completion_tokens} of {context}")
    if done.reason != "stop":
        parts.append({"length": "cut off at the token limit", "cancelled": "cancelled"}[done.reason])
    return ", ".join(parts)
