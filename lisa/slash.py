"""The slash commands of a conversation, and the conversation they act on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from lisa import catalog
from lisa.api import Reply, check_options
from lisa.errors import LisaError, UsageError
from lisa.screen import Thinking, harmless, say, wrapped
from lisa.types import Message, Messages, Sampling, Stats

KINDS = ("auto", "none", "ngram", "dspine", "dflash", "eagle")


class Talker(Protocol):
    """What a conversation asks of api.Model."""

    name: str
    about: str
    context: int | None
    sampling: Sampling

    def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Any = None,
        thinking: bool | None = None,
    ) -> Reply: ...

    def redraft(self, drafter: str, *, say: Callable[[str], None] | None = None) -> None: ...

    def close(self) -> None: ...


class Leave(Exception):
    """The user wants to go."""


@dataclass
class Conversation:
    """What was said and how the next answer is made.

    `spec` is what `model` was loaded by; `load` gives another one, and `model` is closed before.
    """

    model: Talker
    spec: str
    load: Callable[[str], Talker]
    sampling: Sampling
    messages: list[Message] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] | None = None
    thinking: bool | None = None
    shown: Thinking = "show"
    reasoning: str = ""
    stats: list[Stats] = field(default_factory=list)
    file: Path | None = None

    def ask(self, messages: Messages) -> Reply:
        return self.model.chat(
            messages,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            thinking=self.thinking,
        )

    def toggle(self) -> None:
        """Fold thinking or show it."""
        self.shown = "show" if self.shown == "fold" else "fold"
        say("thinking is " + ("folded" if self.shown == "fold" else "shown"))


@dataclass(frozen=True)
class Command:
    """`run` takes the conversation and what stands behind the name; a text it returns is asked again."""

    form: str
    does: str
    run: Callable[[Conversation, str], str | None]

    @property
    def name(self) -> str:
        return self.form.split()[0]


def command(talk: Conversation, line: str) -> str | None:
    """Carry out a line that begins with a slash. Returns a message to be asked now, if any. Raises LisaError, Leave."""
    name, _, rest = line.partition(" ")
    found = next((each for each in COMMANDS if each.name == name), None)
    if found is None:
        raise UsageError(f"unknown command {name}: /help lists them; to send it as it is, put a space in front")
    return found.run(talk, rest.strip())


def words(line: str) -> list[str]:
    """What may stand where the line ends, for completion."""
    name, space, _ = line.partition(" ")
    if not space:
        return [each.name for each in COMMANDS]
    return {
        "/thinking": ["on", "off", "show", "fold", "last"],
        "/drafter": list(KINDS),
        "/model": [entry.name for entry in catalog.entries()],
        "/sampling": ["reset", *(f"{f.name}=" for f in fields(Sampling) if f.name not in ("logit_bias", "rule"))],
        "/system": ["clear"],
    }.get(name, [])


def _help(talk: Conversation, rest: str) -> None:
    for each in COMMANDS:
        say(f"  {each.form:<27} {each.does}")
    say("  Enter sends, Alt-Enter begins a new line, Tab completes, Ctrl-T folds thinking")
    say("  Ctrl-C stops a reply and leaves at an empty prompt, Ctrl-D leaves")


def _system(talk: Conversation, rest: str) -> None:
    others = [message for message in talk.messages if message["role"] != "system"]
    if rest:
        first: list[Message] = [] if rest == "clear" else [{"role": "system", "content": rest}]
        talk.messages = [*first, *others]
    elif len(others) == len(talk.messages):
        say("there is no system message; /system TEXT sets one")
    else:
        say(talk.messages[0]["content"])


def _thinking(talk: Conversation, rest: str) -> None:
    if rest in ("show", "fold"):
        talk.shown = "show" if rest == "show" else "fold"
    elif rest == "last":
        say(harmless(talk.reasoning) or "nothing was thought yet")
    elif rest in ("on", "off"):
        talk.thinking = rest == "on"
    elif rest:
        raise UsageError(f"/thinking is one of on, off, show, fold and last, not {rest!r}")
    else:
        switch = {None: "as the model likes", True: "on", False: "off"}[talk.thinking]
        say(f"thinking is {switch}, and it is {'shown' if talk.shown == 'show' else 'folded'}")


def _sampling(talk: Conversation, rest: str) -> None:
    if rest == "reset":
        talk.sampling = talk.model.sampling
    elif rest:
        sampling = replace(talk.sampling, **dict(_setting(word) for word in rest.split()))
        check_options(sampling)
        talk.sampling = sampling
    told = [f for f in fields(Sampling) if f.name not in ("logit_bias", "rule")]
    say(" ".join(f"{f.name}={getattr(talk.sampling, f.name)}" for f in told))


def _setting(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    whole = ("top_k", "seed")
    known = [f.name for f in fields(Sampling) if f.name not in ("logit_bias", "rule")]
    if name not in known:
        raise UsageError(f"no sampling option {name!r}: it is one of {', '.join(known)}, as in temperature=0.7")
    try:
        return name, None if (name, value) == ("seed", "none") else (int if name in whole else float)(value)
    except ValueError:
        raise UsageError(f"{name} is a number, as in {name}={1 if name in whole else 0.7}, not {value!r}") from None


def _drafter(talk: Conversation, rest: str) -> None:
    if rest:
        try:
            talk.model.redraft(rest, say=say)
        except KeyboardInterrupt:
            say("interrupted; the drafter stays")
    say(wrapped(talk.model.about))


def _model(talk: Conversation, rest: str) -> None:
    if rest:
        talk.model.close()  # two large models do not fit
        try:
            talk.model, talk.spec = talk.load(rest), rest
            talk.sampling = talk.model.sampling
        except (LisaError, KeyboardInterrupt) as error:
            say(f"lisa: {error}" if isinstance(error, LisaError) else "interrupted")
            say(f"going back to {talk.spec}")
            talk.model = talk.load(talk.spec)
    say(wrapped(talk.model.about))


def _stats(talk: Conversation, rest: str) -> None:
    if not talk.stats:
        say("no answer yet")
        return
    last = talk.stats[-1]
    rounds, accepted = sum(s.rounds for s in talk.stats), sum(s.accepted for s in talk.stats)
    tokens, seconds = sum(s.completion_tokens for s in talk.stats), sum(s.decode for s in talk.stats)
    say(f"{len(talk.stats)} answers, {tokens} tokens, {tokens / seconds if seconds else 0:.1f} tok/s")
    say(f"drafter {last.drafter}{f', {last.why}' if last.why else ''}")
    if rounds:
        say(f"{rounds} rounds, {accepted / rounds:.2f} accepted per round")
    for line in chart(talk.stats):
        say(line)


def chart(stats: list[Stats], width: int = 30) -> list[str]:
    """How often the drafted token at each place of a draft was accepted, where it was drafted."""
    places = max((len(s.proposed_at) for s in stats), default=0)
    bar = "█" if "utf" in (getattr(sys.stderr, "encoding", None) or "").lower() else "#"
    lines = []
    for place in range(places):
        proposed = sum(s.proposed_at[place] for s in stats if place < len(s.proposed_at))
        accepted = sum(s.accepted_at[place] for s in stats if place < len(s.accepted_at))
        share = accepted / proposed if proposed else 0.0
        lines.append(f"  {place + 1:>2} {bar * round(width * share):<{width}} {share:4.0%} of {proposed}")
    return lines


def _retry(talk: Conversation, rest: str) -> str:
    text = _last(talk)
    _undo_silently(talk)
    if talk.sampling.seed is not None:
        say("the seed is fixed, so the answer will be the same: /sampling seed=none")
    return text


def _undo(talk: Conversation, rest: str) -> None:
    text = _last(talk)
    _undo_silently(talk)
    say(f"taken back: {text.strip().partition(chr(10))[0][:60]}")


def _last(talk: Conversation) -> str:
    asked = [message["content"] for message in talk.messages if message["role"] == "user"]
    if not asked:
        raise UsageError("nothing has been said yet")
    return str(asked[-1])


def _undo_silently(talk: Conversation) -> None:
    last = max(i for i, message in enumerate(talk.messages) if message["role"] == "user")
    talk.messages = talk.messages[:last]


def _save(talk: Conversation, rest: str) -> None:
    file = _file(talk, rest)
    if file.exists() and file != talk.file:
        raise UsageError(f"{file} exists already: choose another name")
    content = {"model": talk.model.name, "messages": talk.messages}
    try:
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    talk.file = file
    say(f"saved to {file}")


def _load(talk: Conversation, rest: str) -> None:
    file = _file(talk, rest)
    try:
        messages = json.loads(file.read_text("utf-8"))["messages"]
        good = all(m["role"] in ("system", "user", "assistant") and isinstance(m["content"], str) for m in messages)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise UsageError(f"{file} is no conversation that /save has written")
    talk.messages, talk.file = messages, file
    say(f"{len(messages)} messages from {file}")


def _file(talk: Conversation, rest: str) -> Path:
    if not rest and talk.file is None:
        raise UsageError("name a file, as in /save talk.json")
    return Path(rest).expanduser() if rest else talk.file or Path()


def _clear(talk: Conversation, rest: str) -> None:
    talk.messages = [message for message in talk.messages if message["role"] == "system"]
    talk.file = None


def _exit(talk: Conversation, rest: str) -> None:
    raise Leave


COMMANDS = (
    Command("/help", "show this", _help),
    Command("/system [TEXT|clear]", "set the system message, or show it", _system),
    Command("/thinking [on|off|show|fold|last]", "switch thinking, or how it is shown", _thinking),
    Command("/sampling [NAME=VALUE|reset]", "set how tokens are chosen, or show it", _sampling),
    Command("/drafter [NAME]", "take another drafter, or show it", _drafter),
    Command("/model [NAME]", "take another model, or show it", _model),
    Command("/stats", "speed, and what was accepted by position", _stats),
    Command("/retry", "answer the last message again", _retry),
    Command("/undo", "take the last message and its answer back", _undo),
    Command("/save [FILE]", "write the conversation to a file", _save),
    Command("/load [FILE]", "go on with a saved conversation", _load),
    Command("/clear", "begin anew; the system message stays", _clear),
    Command("/exit", "leave, as Ctrl-D does", _exit),
)
