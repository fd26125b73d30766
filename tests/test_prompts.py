"""A file of prompts: what is in it reaches the template, and what cannot be used is refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_tiny import make_tokenizer

from lisa import prompts
from lisa.errors import UsageError
from lisa.tokenizer import load_tokenizer

TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}


def read(tmp_path: Path, *lines: Any) -> list[prompts.Prompt]:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return prompts.read(file)


def test_a_prompt_is_one_user_message_and_answers_are_dropped(tmp_path: Path) -> None:
    user = {"role": "user", "content": "one"}
    talk = [user, {"role": "assistant", "content": "two"}]
    assert read(tmp_path, {"prompt": "one"}, "", {"messages": talk, "kind": "chat"}) == [
        prompts.Prompt((user,)),
        prompts.Prompt((user,), kind="chat"),
    ]


def test_tools_and_thinking_reach_the_template(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    user = [{"role": "user", "content": "one"}]
    plain, thinks, not_, tooled = read(
        tmp_path,
        {"prompt": "one"},
        {"prompt": "one", "thinking": True},
        {"prompt": "one", "thinking": False},
        {"prompt": "one", "tools": [TOOL]},
    )
    assert plain.render(tokenizer) == tokenizer.render(user)
    assert thinks.render(tokenizer, thinking=False) == tokenizer.render(user, thinking=True)
    assert not_.render(tokenizer) == tokenizer.render(user, thinking=False) == plain.render(tokenizer, thinking=False)
    assert tooled.render(tokenizer) == tokenizer.render(user, tools=[TOOL])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2 is no JSON"),
        ([], "line 2 must be"),
        ({"text": "x"}, "line 2 must be"),
        ({"prompt": 5}, "line 2 must be"),
        ({"prompt": "x", "messages": []}, "line 2 must be"),
        ({"messages": ["x"]}, "line 2 must be"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2 has no message"),
        ({"prompt": "x", "thinkng": True}, "line 2: 'thinkng'"),
        ({"prompt": "x", "thinking": "yes"}, "line 2: 'thinking'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(UsageError, match="missing"):
        prompts.read(tmp_path / "missing")
