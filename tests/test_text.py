"""Tokens into text: whole characters, thinking apart, stop strings; and the tokenizer and template in front of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers_tiny import make_metaspace_tokenizer, make_spaced_tokenizer, make_tokenizer

from lisa.errors import DamagedModel, LisaError, NoTemplate, UnsupportedModel, UsageError
from lisa.text import Detokeniser, ReasoningSplit, StopStrings, TextReader, stop_strings
from lisa.tokenizer import _BYTE_OF, MAX_TEMPLATE, Tokenizer, load_tokenizer

settings.register_profile("quick", max_examples=100, deadline=None, database=None)
settings.load_profile("quick")

MIXED = "naïve é 😀 👩\u200d🚀 e\u0301 한국어\n  x"
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(MIXED.split(" ")), max_size=8).map(" ".join))
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("spaced")
    make_spaced_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("metaspace")
    make_metaspace_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path)
    return tmp_path


def cut(whole: str | bytes, draw: st.DataObject) -> list:
    """`whole` in pieces, some of them empty."""
    at = sorted(draw.draw(st.lists(st.integers(0, len(whole)), max_size=len(whole)), label="cuts"))
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


def scripted(pieces: list[bytes]) -> Detokeniser:
    """Token i is spelled pieces[i]."""
    return Detokeniser(lambda token, first: pieces[token])


def read(reader: TextReader, ids: list[int]) -> tuple[str, str]:
    """Everything said, a token a block, as far as the first stop string."""
    answer = reasoning = ""
    for token in ids:
        stopped = reader.push(token)
        more = reader.take()
        answer, reasoning = answer + more[0], reasoning + more[1]
        if stopped:
            break
    more = reader.finish()
    return answer + more[0], reasoning + more[1]


# --- characters ---


@given(TEXTS, st.data())
def test_E1_any_cut_of_a_text_joins_to_the_text_without_replacement_marks(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    pieces = cut(raw, data)
    detokeniser = scripted(pieces)
    shown = [detokeniser.push(i) for i in range(len(pieces))]
    assert "".join(shown) == text
    assert detokeniser.finish() == ""
    for i in range(len(pieces)):
        whole = b"".join(pieces[: i + 1]).decode("utf-8", "ignore")
        assert "".join(shown[: i + 1]) == whole, "a whole character was held back or a part of one shown"


def test_E1_an_output_that_ends_inside_a_character_shows_a_mark_only_at_the_end() -> None:
    raw = "x😀".encode()[:-1]
    detokeniser = scripted([bytes([b]) for b in raw])
    assert [detokeniser.push(i) for i in range(len(raw))] == ["x", "", "", ""]
    assert detokeniser.finish() == "\ufffd"
    assert detokeniser.finish() == ""


@given(st.data())
def test_E1_any_tokens_of_a_byte_level_model_join_to_the_full_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab + 3), max_size=40))
    answer, reasoning = read(tokenizer.reader(reasoning=False), ids)
    assert reasoning == ""
    assert answer == tokenizer.decode(ids)
    assert answer == tokenizer.raw.decode(ids, skip_special_tokens=True)


@given(TEXTS)
def test_E1_a_byte_level_model_reads_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert read(tokenizer.reader(reasoning=False), tokenizer.encode(text)) == (text, "")


@pytest.mark.parametrize("kind", ["spaced", "metaspace"])
@given(texts=st.lists(st.one_of(TEXTS, st.sampled_from(["hello world", " the", "  ", "<think>"])), max_size=4))
def test_E1_a_spaced_model_joins_to_the_full_decode(
    kind: str, request: pytest.FixtureRequest, texts: list[str]
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = [i for text in texts for i in [*tokenizer.encode(text), min(tokenizer.eos)]]
    answer, _ = read(tokenizer.reader(reasoning=False), ids)
    assert answer == tokenizer.raw.decode(ids, skip_special_tokens=True)
    assert ("\ufffd" in answer) == any("\ufffd" in text for text in texts if kind == "spaced")


@pytest.mark.parametrize(
    "first", ["<0x20>", "<0x41>", "<0xC3> <0xA9>", "\u2581\u2581", "\u2581", "<|im_end|> \u2581the"]
)
def test_E1_a_spaced_model_may_begin_with_any_token(spaced: Tokenizer, first: str) -> None:
    ids = [spaced.raw.token_to_id(written) for written in first.split(" ")] + spaced.encode("hello the é")
    assert read(spaced.reader(reasoning=False), ids)[0] == spaced.raw.decode(ids, skip_special_tokens=True)


def test_E1_an_added_token_outside_the_byte_alphabet_is_spelled_as_written(folder: Path) -> None:
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_tokens(["né oui"])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert read(tokenizer.reader(), tokenizer.encode("a né oui")) == ("a né oui", "")


@given(st.data())
def test_E1_a_spaced_model_survives_bytes_that_are_no_character(spaced: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, spaced.vocab + 3), max_size=40))
    read(spaced.reader(reasoning=False), ids)


def test_control_tokens_never_show_and_markup_does(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<tool_call>b</tool_call><|im_end|><|endoftext|>c")
    assert len(ids) == 8
    assert read(tokenizer.reader(), ids) == ("a<tool_call>b</tool_call>c", "")
    assert tokenizer.decode(ids) == "a<tool_call>b</tool_call>c"


def test_markup_shows_even_where_a_model_declares_it_special(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = True
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<think>a</think>b<tool_call>c<|im_start|>")
    assert read(tokenizer.reader(), ids) == ("b<tool_call>c", "a")


def test_the_byte_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert _BYTE_OF.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    assert all(decoders.ByteLevel().decode([c]) == chr(b) for c, b in _BYTE_OF.items() if b < 128)


@pytest.mark.parametrize("piece", ["\n", "\xff", "a", "<", " word"])
@pytest.mark.parametrize("prompt", ["", "<think>"])
def test_a_long_output_takes_linear_time_and_little_is_held(piece: str, prompt: str) -> None:
    spelled = piece.encode("latin-1")
    stops = StopStrings(("a" * 40 + "b", "\n" * 40 + "b"))
    reader = TextReader(Detokeniser(lambda token, first: spelled), ReasoningSplit(prompt), stops)
    start, shown = time.process_time(), 0
    for token in range(20_000):
        reader.push(token)
        shown += sum(map(len, reader.take()))
        lost = 20_000 if prompt and piece == "\n" else 0  # white space after a tag belongs to nobody
        assert shown + lost + 65 >= (token + 1) * len(piece)
    reader.finish()
    assert time.process_time() - start < 3


# --- stop strings ---


def stop_oracle(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Reads the text one character more at a time."""
    for end in range(len(text) + 1):
        if hits := [len(s) for s in stops if text[:end].endswith(s)]:
            return text[: end - max(hits)], True
    return text, False


STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.text("abc<", max_size=25), STOPS, st.data())
def test_E3_stop_strings_equal_a_brute_force_reading(text: str, stops: tuple[str, ...], data: st.DataObject) -> None:
    expected, found = stop_oracle(text, stops)
    filter_, shown, seen, stopped = StopStrings(stops), "", "", False
    for piece in cut(text, data):
        seen += piece
        out, stopped = filter_.push(piece)
        shown += out
        assert expected.startswith(shown), "part of a stop string leaked"
        assert stopped == stop_oracle(seen, stops)[1], "noticed at another token than the one that completes it"
        if stopped:
            break
    assert stopped == found
    assert shown + filter_.finish() == expected


@pytest.mark.parametrize(
    ("stop", "parsed"),
    [(None, ()), ([], ()), ((), ()), ("x", ("x",)), (["x", "yz"], ("x", "yz")), ("STOP", ("STOP",))],
)
def test_E3_stop_as_string_list_or_null(stop: object, parsed: tuple[str, ...]) -> None:
    assert stop_strings(stop) == parsed


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], ["a", None], 0, False, {"a": 1}])
def test_E3_an_empty_stop_string_or_no_string_is_refused(stop: object, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="stop must be"):
        tokenizer.reader(stop=stop)


def test_E3_a_near_miss_is_delivered_and_held_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    reader = tokenizer.reader(stop=["STOPPED"])
    assert [reader.push(i) for i in tokenizer.encode("aSTOP")] == [False, False]
    assert reader.take() == ("a", "")
    assert [reader.push(i) for i in tokenizer.encode("xSTOP")] == [False, False]
    assert reader.take() == ("STOPx", "")
    assert reader.finish() == ("STOP", "")


@pytest.mark.parametrize("tokens", [["hello"], ["h", "e", "l", "l", "o"], ["he", "llo world"]])
def test_E3_a_stop_string_inside_or_across_tokens(tokenizer: Tokenizer, tokens: list[str]) -> None:
    ids = [i for text in tokens for i in tokenizer.encode(text)]
    reader = tokenizer.reader(stop="ell")
    pushed = [reader.push(i) for i in ids]
    first = pushed.index(True)
    assert pushed == [False] * first + [True] * (len(ids) - first)
    assert tokenizer.decode(ids[: first + 1]).find("ell") == 1 and "ell" not in tokenizer.decode(ids[:first])
    assert reader.take() == ("h", "")
    assert reader.finish() == ("", "")


def test_E3_stop_strings_do_not_apply_to_thinking(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a STOP b</think>\n\nc STOP d")
    assert read(tokenizer.reader(stop="STOP"), ids) == ("c ", "a STOP b")


def test_E3_a_stop_string_over_an_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀y")
    assert read(tokenizer.reader(stop="😀"), ids) == ("x", "")
    assert read(tokenizer.reader(stop="\ufffd"), ids[:-2]) == ("x", "")


# --- thinking ---


def split_oracle(prompt: str, text: str) -> tuple[str, str]:
    """Reads the whole text at once."""
    tail = prompt.rstrip()
    thinking, tagged, reasoning = tail.endswith("<think>"), tail.endswith(("<think>", "</think>")), ""
    while True:
        if tag := re.match(r"\s*(</?think>)", text):
            thinking, tagged, text = tag[1] == "<think>", True, text[tag.end() :]
            continue
        text = text.lstrip() if tagged else text
        if not thinking:
            return text, reasoning
        piece, closer, text = text.partition("</think>")
        reasoning += piece
        if not closer:
            return "", reasoning
        thinking = False


FRAGMENTS = ["<think>", "</think>", "<th", "</", "think>", "<", "a", "b c", " ", "\n\n", "é"]
PROMPTS = st.sampled_from(["", "x", "<think>", "<think>\n", "<think>\n\n</think>\n\n", "a <think> b"])


@given(PROMPTS, st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.data())
def test_thinking_is_split_alike_however_the_text_is_cut(prompt: str, text: str, data: st.DataObject) -> None:
    split, answer, reasoning = ReasoningSplit(prompt), "", ""
    expected = split_oracle(prompt, text)
    for piece in cut(text, data):
        more = split.push(piece)
        answer, reasoning = answer + more[0], reasoning + more[1]
        assert expected[0].startswith(answer) and expected[1].startswith(reasoning)
    more = split.finish()
    assert (answer + more[0], reasoning + more[1]) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "answer", "reasoning"),
    [
        ("", "<think>\nwhy\n</think>\n\nyes", "yes", "why\n"),
        ("<think>\n", "why\n</think>\n\nyes", "yes", "why\n"),
        ("<think>\n", "<think>\nwhy</think>yes", "yes", "why"),
        ("", "<think>\n\n</think>\n\nyes", "yes", ""),
        ("<think>\n\n</think>\n\n", "yes", "yes", ""),
        ("<think>\n\n</think>\n\n", "\n</think>\nyes", "yes", ""),
        ("", "<think>a</think> <think>b</think> yes", "yes", "ab"),
        ("", "\n yes", "\n yes", ""),
        ("", "the tag <think> opens, </think> closes", "the tag <think> opens, </think> closes", ""),
        ("<think>", "a </thinking> b", "", "a </thinking> b"),
        ("", "", "", ""),
    ],
)
def test_thinking_examples(prompt: str, text: str, answer: str, reasoning: str) -> None:
    split = ReasoningSplit(prompt)
    pieces = [split.push(letter) for letter in text] + [split.finish()]
    assert ("".join(a for a, _ in pieces), "".join(r for _, r in pieces)) == (answer, reasoning)


def test_thinking_and_answer_are_streamed_not_held(tokenizer: Tokenizer) -> None:
    split = ReasoningSplit("<think>\n")
    assert split.push("so <") == ("", "so ")
    assert split.push("b") == ("", "<b")
    assert split.push("</think>\n") == ("", "")
    assert split.push("yes <") == ("yes <", "")
    blank = ReasoningSplit("")
    assert "".join(blank.push("\n")[0] for _ in range(65)) == "\n" * 65


def test_E5_thinking_cut_by_the_cap_is_all_reasoning(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.render(USER, thinking=True)
    for text in ("hello the world", "hello </thi", "<", ""):
        assert read(tokenizer.reader(prompt=prompt, stop="hello"), tokenizer.encode(text)) == ("", text)


def test_E5_with_thinking_off_all_is_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello the world")
    for prompt in (tokenizer.render(USER, thinking=False), tokenizer.render(USER), "<think>\n\n</think>\n\n", []):
        assert read(tokenizer.reader(prompt=prompt), ids) == ("hello the world", "")


def test_E5_a_prompt_given_as_text_opens_thinking_too(tokenizer: Tokenizer) -> None:
    assert read(tokenizer.reader(prompt="x<think>\n"), tokenizer.encode("a</think>b")) == ("b", "a")


def test_a_raw_completion_is_verbatim(tokenizer: Tokenizer) -> None:
    text = " \n<think>a</think>\n\nb"
    assert read(tokenizer.reader(reasoning=False, prompt="<think>"), tokenizer.encode(text)) == (text, "")


@given(st.data())
def test_blocks_of_any_size_read_alike(tokenizer: Tokenizer, data: st.DataObject) -> None:
    words = st.sampled_from(["<think>", "</think>", "hello", " world", "STO", "P", "\n\n", "é", "😀", "<|im_start|>"])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    prompt, stops = data.draw(PROMPTS), data.draw(st.sampled_from([None, "STOP", ["P", "hello world"]]))
    shown = text.replace("<|im_start|>", "")
    answer, reasoning = split_oracle(prompt, shown)
    expected = stop_oracle(answer, stop_strings(stops))[0], reasoning
    reader, said, ids = tokenizer.reader(prompt=prompt, stop=stops), ["", ""], tokenizer.encode(text)
    for block in cut(ids, data):
        if any([reader.push(i) for i in block]):
            break
        said = [a + b for a, b in zip(said, reader.take(), strict=True)]
    assert tuple(a + b for a, b in zip(said, reader.finish(), strict=True)) == expected


# --- tokenizer and template ---


def test_vocab_counts_up_to_the_last_added_token(tokenizer: Tokenizer) -> None:
    last = tokenizer.encode("</tool_call>")
    assert tokenizer.vocab == last[0] + 1 and tokenizer.raw.id_to_token(tokenizer.vocab) is None


def test_eos_is_the_union_of_what_the_files_say(folder: Path) -> None:
    own = load_tokenizer(folder).eos
    assert own == {load_tokenizer(folder).raw.token_to_id("<|im_end|>")}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9, "text_config": {"eos_token_id": [10]}}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos == own | {7, 8, 9, 10}
    assert tokenizer.decode([7, 8, 9, 10, *own]) == ""
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": None}))
    assert load_tokenizer(folder).eos == own | {7, 8}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_F6_a_template_in_any_of_its_places_works(folder: Path, place: str) -> None:
    expected = load_tokenizer(folder).render(USER)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config["chat_template"]
    if place != "tokenizer_config.json":
        del config["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / place).write_text(template if place.endswith("jinja") else json.dumps({"chat_template": template}))
    rendered = load_tokenizer(folder).render(USER)
    assert (
        rendered
        == expected
        == load_tokenizer(folder).encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    )


def test_F6_without_a_template_chat_fails_clearly_and_completion_works(metaspace: Tokenizer) -> None:
    with pytest.raises(NoTemplate, match="no chat template"):
        metaspace.render(USER)
    assert metaspace.decode(metaspace.encode("hello world")) == "hello world"


def damage(folder: Path, name: str, content: str | None) -> str:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(DamagedModel) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


def test_F6_a_missing_tokenizer_file_is_named(folder: Path) -> None:
    assert str(folder / "tokenizer.json") in damage(folder, "tokenizer.json", None)


FILES = ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.json"]


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name in FILES for content in ("", "{", "<html>", "[]", "\x00")]
    + [("tokenizer.json", "{}"), ("tokenizer.json", '{"model": 3}')],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: str) -> None:
    if name == "chat_template.json":
        (folder / "tokenizer_config.json").write_text("{}")
    assert str(folder / name) in damage(folder, name, content)


@pytest.mark.parametrize("template", ["x" * (MAX_TEMPLATE + 1), 3])
def test_what_cannot_be_a_template_is_refused(folder: Path, template: object) -> None:
    assert "template" in damage(folder, "tokenizer_config.json", json.dumps({"chat_template": template}))


@pytest.mark.parametrize(("decoder", "name"), [(decoders.WordPiece(), "WordPiece"), (None, "none")])
def test_a_decoder_that_cannot_be_streamed_is_refused_at_load(folder: Path, decoder: object, name: str) -> None:
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.decoder = decoder
    raw.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match=name):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "content",
    ["hello", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]],
)
def test_text_parts_render_as_the_plain_string(tokenizer: Tokenizer, content: object) -> None:
    assert tokenizer.render([{"role": "user", "content": content}]) == tokenizer.render(USER)


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": []}, {"content": ""}])
def test_null_content_renders_as_an_empty_string(tokenizer: Tokenizer, message: dict) -> None:
    rendered = tokenizer.render([{"role": "assistant", **message}])
    assert rendered == tokenizer.encode("<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": ["hello"]}, "'str'"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "'text'"),
        ({"role": "user", "content": 3}, "content must be"),
        ({"content": "hello"}, "role"),
        ("hello", "role"),
    ],
)
def test_a_message_of_another_kind_is_refused_by_name(tokenizer: Tokenizer, message: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tokenizer.render([message])


def test_an_error_raised_by_the_template_is_one_short_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="a system message must come first") as caught:
        tokenizer.render([*USER, {"role": "system", "content": "x"}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('a\nb ' * 9999) }}", UsageError),
        ("{{ 1 + 'a' }}", UsageError),
        ("{{ messages.__class__.__base__.__subclasses__() }}", UsageError),
        ("{{ messages.append(1) }}", UsageError),
        ("{% for m in messages %}", DamagedModel),
    ],
)
def test_a_template_can_fail_in_any_way(folder: Path, template: str, error: type[LisaError]) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(error) as caught:
        load_tokenizer(folder).render(USER)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_no_message_at_all_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError):
        tokenizer.render([])


def test_thinking_effort_tools_and_extra_reach_the_template(tokenizer: Tokenizer) -> None:
    plain = "<|im_start|>user\nhello<|im_end|>\n"
    ask = "<|im_start|>assistant\n"
    tools = [{"type": "function", "function": {"name": "f"}}]
    for options, expected in (
        ({"thinking": True}, plain + ask + "<think>\n"),
        ({"thinking": False}, plain + ask + "<think>\n\n</think>\n\n"),
        ({"effort": "low"}, plain + "[effort low]" + ask),
        ({"tools": tools}, plain + "[tool f]" + ask),
        ({"tools": []}, plain + ask),
        ({"extra": {"enable_thinking": True, "reasoning_effort": "x"}}, plain + "[effort x]" + ask + "<think>\n"),
    ):
        assert tokenizer.render(USER, **options) == tokenizer.encode(expected)


def test_an_empty_list_of_tools_is_none(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'none' if tools is none else 'some' }}")
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode(tokenizer.render(USER, tools=t)) for t in (None, [], [{"a": 1}])] == [
        "none",
        "none",
        "some",
    ]


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "enable_thinking"])
def test_extra_cannot_replace_what_the_renderer_sets(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        tokenizer.render(USER, thinking=True, extra={name: "x"})


def test_arguments_of_earlier_tool_calls_reach_the_template_as_an_object(tokenizer: Tokenizer) -> None:
    def history(arguments: object) -> list[dict]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    wire = history('{"a": 1}')
    assert tokenizer.render(wire) == tokenizer.render(history({"a": 1}))
    assert "<tool_call>f a=1</tool_call>" in tokenizer.decode(tokenizer.render(wire))
    assert wire == history('{"a": 1}'), "the caller's messages were changed"
    with pytest.raises(UsageError):
        tokenizer.render(history("[" * 100_000))


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for ask in (lambda: tokenizer.encode("a\ud800"), lambda: tokenizer.render([{"role": "user", "content": "\udfff"}])):
        with pytest.raises(UsageError, match="surrogate"):
            ask()


def test_a_truncation_baked_into_the_file_is_ignored(folder: Path) -> None:
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=9)
    raw.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("abcdef")) == 6


def test_several_threads_may_use_one_tokenizer(tokenizer: Tokenizer) -> None:
    def work(i: int) -> tuple:
        messages = [{"role": "user", "content": MIXED * (i % 3 + 1)}]
        ids = tokenizer.render(messages)
        return ids, read(tokenizer.reader(), ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(60))) == [work(i) for i in range(60)]


def test_loading_needs_no_mlx_no_network_and_says_nothing(folder: Path) -> None:
    script = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import lisa.text, lisa.tokenizer\n"
        "early = {'mlx', 'mlx_lm', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "from pathlib import Path\n"
        f"ids = lisa.tokenizer.load_tokenizer(Path({str(folder)!r})).render([{{'role': 'user', 'content': 'x'}}])\n"
        "late = {'mlx', 'mlx_lm', 'torch'} & set(sys.modules)\n"
        "print(sorted(early), sorted(late), len(ids) > 5)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, env=environment)
    assert (run.stdout, run.stderr) == ("[] [] True\n", "")
