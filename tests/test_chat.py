"""The conversation, driven through a pseudo-terminal: every command and key, narrow, wide, resized, interrupted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from terminal import ALT_ENTER, CTRL_C, CTRL_D, CTRL_T, ENTER, PASTE, PASTED, TAB, UP, Typist
from test_cli import STATS, FakeModel, echo

from lisa import api, cli, editor, manage, slash
from lisa.errors import Cancelled, DamagedModel, LisaError, UsageError
from lisa.slash import Conversation
from lisa.types import Done, Event, Messages, Stats, Tokens

MAIN = "import test_chat; test_chat.main()"
ANSWER = "# Rivers\n\nThe **Rhine**, the `Elbe` and\n\n1. one\n2. two\n\n```python\nprint('hello')\n```\n"


def script(messages: Messages) -> Iterator[Event]:
    last = messages[-1]["content"]
    if last == "markdown":
        for piece in re.findall(r"(?s).{1,5}", ANSWER):
            yield Tokens((1,), piece)
        yield Done("stop", Stats(completion_tokens=9, prompt_tokens=20, ttft=0.25, decode=2.0))
    elif last == "wonder":
        yield from _wonder()
    elif last == "hostile":
        yield from _hostile()
    else:
        yield from echo(messages)


def _wonder() -> Iterator[Event]:
    try:
        while True:
            yield Tokens((1,), reasoning="hmm ")
            time.sleep(0.01)
    except Cancelled:
        yield Done("cancelled", STATS)


def _hostile() -> Iterator[Event]:
    yield Tokens((1,), reasoning="\x1b]0;title\x07wicked ")
    yield Tokens((1,), "\x1b[2J\x1b[Hgone\x9b1A\n")
    yield Done("stop", STATS)


def load(name: str, **options: Any) -> FakeModel:
    if name == "bad":
        raise DamagedModel("bad is damaged")
    if name == "slow":
        print("loading", flush=True)
        time.sleep(600)
    model = FakeModel(script)
    model.name, model.about, model.context = name, f"{name}, loaded", 4096  # type: ignore[assignment]
    return model


def main() -> None:
    """What the subprocesses run: the real command over the fake model."""
    api.load = load  # type: ignore[assignment]
    manage.fetch = lambda *_: True
    cli.main()


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Callable[..., Typist]]:
    begun: list[Typist] = []

    def typist(*args: str, wait: bool = True, **options: Any) -> Typist:
        someone = Typist(MAIN, "chat", "-m", "some", *args, home=tmp_path, **options)
        begun.append(someone)
        if wait:
            someone.wait("Ctrl-D")
            someone.ready()
        return someone

    yield typist
    for someone in begun:
        someone.kill()


def test_a_conversation_in_a_terminal(typist: Any) -> None:
    me = typist()
    me.say("one")
    me.wait("[user: one]")
    me.wait("9 tokens, 4.0 tok/s, 1.50 accepted per round, 12 drafted, TTFT 0.25 s, context 9")
    me.wait("\r\nof 4096\r\n")  # broken between words
    me.ready()
    me.say("  two")
    me.wait_shown("[user: one][assistant: [user: one]][user: two]")
    me.ready()
    me.say("too long")  # an error costs its own turn only
    me.wait("lisa: the prompt has 9 tokens and the context holds 8; shorten the conversation")
    me.ready()
    me.say("/nonsense x")
    me.wait("unknown command /nonsense: /help lists them")
    me.ready()
    me.say(" /three")  # a space in front makes it a message
    me.wait("[user: /three]")
    me.ready()
    me.type("a" + ALT_ENTER + "b" + ENTER)  # two lines, one message
    me.wait("[user: a")
    me.wait("b]")
    me.ready()
    me.type(PASTE + "/exit\n  /usr/bin/env\n" + PASTED)  # looks like a command and is a message
    me.type(ENTER)
    me.wait("[user: /exit")
    me.wait("/usr/bin/env]")
    me.ready()
    me.type("/he" + TAB)
    me.wait_shown("> /help")
    me.type(ENTER)
    me.wait("leave, as Ctrl-D does")
    me.ready()
    me.type("/s" + TAB)
    me.wait("/system")
    me.wait("/stats")
    me.type(CTRL_C)
    me.type("half" + CTRL_C)  # drops the line
    me.type("/exit" + ENTER)
    assert me.leave() == 0


def test_every_command(typist: Any, tmp_path: Path) -> None:
    me = typist()

    def expect(line: str, *texts: str) -> None:
        me.say(line)
        for text in texts:
            me.wait(text)
        me.ready()

    expect("/help", *(each.form for each in slash.COMMANDS), "Ctrl-T folds thinking")
    expect("/stats", "no answer yet")
    expect("/undo", "lisa: nothing has been said yet")
    expect("/system Be brief.")
    expect("/system", "Be brief.")
    expect("one", "[system: Be brief.][user: one]")
    expect("/retry", "[system: Be brief.][user: one]")
    expect("/stats", "2 answers, 18 tokens, 4.5 tok/s", "drafter ngram", "8 rounds, 1.50 accepted per round")
    expect("/sampling temperature=0.5 seed=7", "temperature=0.5 top_k=20", "seed=7")
    expect("/sampling top_p=2", "lisa: top_p must be above 0 and at most 1, not 2.0")
    expect("/sampling heat=2", "lisa: no sampling option 'heat'")
    expect("/sampling reset", "temperature=0.6")
    expect("/thinking", "thinking is as the model likes, and it is shown")
    expect("/thinking off")
    expect("/thinking", "thinking is off")
    expect("/thinking maybe", "lisa: /thinking is one of")
    expect("/drafter dspine", "fake, drafter dspine")
    expect("/drafter oracle", "lisa: unknown drafter 'oracle'")
    expect("/drafter", "fake, drafter dspine")
    expect("/save", "lisa: name a file")
    expect(f"/save {tmp_path}/talk.json", "saved to ")
    expect("/clear")
    expect("two", "[system: Be brief.][user: two]")
    expect(f"/load {tmp_path}/talk.json", "3 messages from ")
    expect("three", "[system: Be brief.][user: one][assistant: ")
    expect("/undo", "taken back: three")
    expect("/model other", "other, loaded")
    expect("/model bad", "lisa: bad is damaged", "going back to other", "other, loaded")
    expect("four", "[user: one][assistant: ")
    expect("/system clear")
    expect("/system", "there is no system message")
    me.say("/exit")
    assert me.leave() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]


def test_ctrl_c_in_thinking_in_an_answer_and_at_the_prompt(typist: Any) -> None:
    me = typist()
    me.say("wonder")
    me.wait("hmm hmm ")
    me.type(CTRL_C)
    me.wait("cancelled")
    me.ready()
    me.say("endless")
    me.wait_shown("more more")
    me.type(CTRL_C)
    me.wait("cancelled")
    me.ready()
    me.say("next")  # what was only thought is no turn; what was delivered stays
    me.wait_shown("[user: next]")
    shown = " ".join(" ".join(me.lines()).split())
    assert re.search(r"\[user: endless\]\[assistant: more more (more ?)*\]\[user: next\]", shown)
    assert "[user: wonder]" not in shown
    me.ready()
    me.type(CTRL_C)
    assert me.leave() == 0


def test_ctrl_c_while_loading_leaves_with_130(tmp_path: Path) -> None:
    me = Typist(MAIN, "chat", "-m", "slow", home=tmp_path)
    me.wait("loading")
    me.type(CTRL_C)
    me.wait("interrupted")
    assert me.leave() == 130 and "Traceback" not in me.raw


def test_ctrl_d_leaves(typist: Any) -> None:
    me = typist()
    me.type(CTRL_D)
    assert me.leave() == 0


@pytest.mark.parametrize("columns", [24, 80])
def test_markdown_narrow_and_wide_and_resized(typist: Any, columns: int) -> None:
    me = typist(rows=12, columns=columns)
    me.say("markdown")
    me.wait("TTFT")
    me.ready()
    text = "\n".join(me.lines())
    assert "Rivers" in text and "**" not in text and "```" not in text and "print('hello')" in text
    assert " 1 one" in text and " 2 two" in text and "`" not in text
    assert "context 29 of" in " ".join(text.split())
    assert all(len(line) <= columns for line in me.lines())
    me.say("endless")
    me.wait("more more")
    me.resize(12, columns // 2)
    for _ in range(20):
        me.wait("more")
    me.type(CTRL_C)
    me.wait("cancelled")
    me.ready()
    me.say("/exit")
    assert me.leave() == 0 and "Traceback" not in me.raw


def test_thinking_is_dimmed_folded_and_shown_again(typist: Any) -> None:
    me = typist()
    me.say("think")
    assert "\x1b[2mhmm, so\x1b[0m\r\n" in me.wait("TTFT")
    me.ready()
    me.type(CTRL_T)
    me.wait("thinking is folded")
    me.ready()
    me.say("think")
    me.wait("TTFT")
    assert "thought 2 words; /thinking last shows them" in me.lines() and "thinking: hmm, so" not in me.lines()
    me.ready()
    me.say("/thinking last")
    me.wait("hmm, so")


@pytest.mark.parametrize("shown", ["show", "fold"])
def test_a_model_cannot_steer_the_terminal(shown: str, typist: Any) -> None:
    me = typist()
    me.say(f"/thinking {shown}")
    me.ready()
    me.say("hostile")
    me.wait("TTFT")
    me.ready()
    me.say("/thinking last")
    me.wait("wicked")
    assert not [code for code in ("\x07", "\x9b", "\x1b]0", "\x1b[2J") if code in me.raw]
    assert "[2J[Hgone1A" in me.lines()


def test_no_color_sends_no_colour(typist: Any) -> None:
    me = typist(NO_COLOR="1")
    me.say("think")
    me.wait("TTFT")
    me.ready()
    me.say("markdown")
    me.wait("TTFT")
    codes = {code for run in re.findall(r"\x1b\[([\d;]*)m", me.raw) for code in run.split(";")}
    assert not {code for code in codes if re.fullmatch(r"[349]\d|10\d|2", code)}, codes


def test_history_reaches_the_next_run_unless_it_is_private(typist: Any, tmp_path: Path) -> None:
    for args, text in (((), "remember me"), (("--private",), "forget me")):
        me = typist(*args)
        me.say(text)
        me.wait("TTFT")
        me.ready()
        me.type(CTRL_D)
        assert me.leave() == 0
    me = typist()
    me.type(UP + ENTER)
    me.wait("[user: remember me]")
    me.ready()
    me.type(CTRL_D)
    me.leave()
    history = tmp_path / "state" / "lisa" / "history"
    assert "forget me" not in history.read_text() and history.stat().st_mode & 0o077 == 0


# Without a terminal


@pytest.fixture
def talk() -> Iterator[Conversation]:
    model = FakeModel(script)
    yield Conversation(model, model.name, load, model.sampling)  # type: ignore[arg-type]
    model.close()


def test_a_model_that_cannot_be_had_leaves_the_one_before(
    talk: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.spec = "~/models/some"  # what it was loaded by, not what it is called
    slash.command(talk, "/model bad")
    assert talk.model.name == "~/models/some" and "going back to ~/models/some" in capsys.readouterr().err
    slash.command(talk, "/model other")
    assert talk.spec == talk.model.name == "other"
    talk.model.close()


def test_going_back_to_a_model_keeps_its_sampling_and_another_brings_its_own(talk: Conversation) -> None:
    chosen = replace(talk.sampling, temperature=0.25, seed=9)
    talk.sampling = chosen
    slash.command(talk, "/model bad")
    assert talk.sampling == chosen
    slash.command(talk, "/model other")
    assert talk.sampling == talk.model.sampling != chosen
    talk.model.close()


def test_taking_back_works_whatever_was_said(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "\n", "\n\nlate", "one\ntwo"):
        talk.messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        slash.command(talk, "/undo")
        assert talk.messages == [] and "taken back: " in capsys.readouterr().err


def test_a_retry_that_fails_takes_nothing_away(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    from lisa import chat

    chat._take(talk, "one")
    before = list(talk.messages)
    monkeypatch.setattr(talk.model, "chat", lambda *_, **__: (_ for _ in ()).throw(UsageError("no")))
    with pytest.raises(UsageError):
        chat._take(talk, "/retry")
    assert talk.messages == before and [m["role"] for m in before] == ["user", "assistant"]


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": [{"role": "robot", "content": "x"}]}', '{"messages": [1]}'])
def test_a_file_that_is_no_conversation_is_one_line(text: str, talk: Conversation, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="no conversation that /save has written"):
        slash.command(talk, f"/load {tmp_path}/x.json")
    with pytest.raises(UsageError, match="cannot be read"):
        slash.command(talk, f"/load {tmp_path}/nowhere.json")


def test_save_overwrites_only_its_own_file(talk: Conversation, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        slash.command(talk, f"/save {tmp_path}/mine.txt")
    slash.command(talk, f"/save {tmp_path}/a.json")
    slash.command(talk, "/save")
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize("line", ["/Help", "/helpme", "/", "/usr/bin/env", "/ exit"])
def test_commands_match_exactly(line: str, talk: Conversation) -> None:
    with pytest.raises(LisaError, match=r"unknown command .*put a space in front"):
        slash.command(talk, line)


def test_the_chart_has_a_bar_for_each_position() -> None:
    stats = [Stats(proposed_at=(10, 10), accepted_at=(10, 5)), Stats(proposed_at=(10,), accepted_at=(5,))]
    first, second = slash.chart(stats, width=20)
    assert re.fullmatch(r"   1 .{15} {5}  75% of 20", first) and re.fullmatch(r"   2 .{10} {10}  50% of 10", second)
    assert slash.chart([Stats()]) == []


def test_completion_knows_commands_and_what_follows_them() -> None:
    assert set(slash.words("/")) == {each.name for each in slash.COMMANDS}
    assert "smollm2-135m" in slash.words("/model ") and "dspine" in slash.words("/drafter d")
    assert slash.words("/save x") == []
    made = [c for c in editor._completions("/thinking f", slash.words("/thinking f"), lambda word, **_: word)]
    assert made == ["fold"]
