"""lisa-tiny's language: the same samples each time, a held-out part, checks that tell right from wrong, a template."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.tiny import checks, language, vocabulary
from bench.tiny.evaluate import held_out
from bench.tiny.language import KINDS, Sample
from lisa.errors import UsageError
from lisa.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    vocabulary.write(path, samples=500)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def some(kind: str, n: int = 40) -> list[Sample]:
    return list(islice(language.samples(5, held_out=False, shares={kind: 1.0}), n))


def test_a_seed_gives_the_same_samples() -> None:
    first, again, other = (
        [(s.prompt, s.answer) for s in islice(language.samples(seed, held_out=False), 50)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_held_out_prompts_are_never_trained_on() -> None:
    trained = list(islice(language.samples(1, held_out=False), 2000))
    kept = {s.prompt for s in islice(language.samples(1, held_out=True), 200)}
    assert not kept & {s.prompt for s in trained}
    assert not kept & {part.prompt for s in trained for part in s.parts}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_held_out_prompts_and_right_answers(kind: str) -> None:
    assert len({s.prompt for s in held_out(kind, 30)}) == 30
    assert all(s.held_out for s in held_out(kind, 30))
    for sample in some(kind):
        assert sample.kind == kind and sample.right(sample.answer), sample


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_answers_are_refused(kind: str) -> None:
    answers = {s.answer: s for s in some(kind, 60)}
    if kind != "lists":  # any list of the category will do
        texts = list(answers)
        wrong = sum(answers[text].right(other) for text, other in pairwise(texts))
        assert wrong <= len(texts) // 8  # two questions may share their answer
    for sample in answers.values():
        assert not sample.right("")
        assert not sample.right(sample.answer[: len(sample.answer) // 2])
        if kind not in ("facts", "dialogue"):  # a fact may be said in other words
            assert not sample.right(sample.answer + " 77")


def test_checks_of_values() -> None:
    key = {"word": "Velda", "not": ["Maro"]}
    assert checks.fact("It is Velda.", key)
    assert not checks.fact("It is Velda or Maro.", key) and not checks.fact("It is Veldas.", key)
    assert checks.number("3 + 4 = 7.", 7) and not checks.number("3 + 4 = 8, not 7 but 8", 7)
    listed = {"n": 2, "of": ("cat", "dog", "cow"), "not": "cow"}
    assert checks.listed("1. dog\n2. cat", listed)
    for text in ("1. dog\n2. dog", "1. dog\n2. cow", "1. dog", "1. dog\n3. cat", "dog\ncat", "1. dog\n2. cat\n3. cow"):
        assert not checks.listed(text, listed), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [3], [True, "3", 3.0]),
        ({"type": "boolean"}, [True], [1, "true"]),
        ({"type": "string", "enum": ["a"]}, ["a"], ["b", 1]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a"]], [["a", 1], "a"]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            [{"a": 1}],
            [{}, {"a": "1"}, {"a": 1, "b": 2}, []],
        ),
    ],
)
def test_values_fit_their_schema(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert all(checks.fits(value, schema) for value in good)
    assert not any(checks.fits(value, schema) for value in bad)


def test_code_is_run_only_when_it_is_harmless() -> None:
    def answer(body: str) -> str:
        return f"```python\ndef f(x):\n    {body}\n```"

    key = {"name": "f", "cases": [([2], 4)]}
    assert checks.code(answer("return x * 2"), key) and checks.code(answer("return x + x"), key)
    assert not checks.code(answer("return x * 3"), key)
    assert not checks.code(answer("return x.y"), key)
    assert not checks.code("```python\nimport os\ndef f(x):\n    return 4\n```", key)
    assert not checks.code(answer("while True:\n        x = 4"), key)
    assert not checks.code("def f(x):\n    return x * 2", key)
    assert not checks.code(answer("return ("), key)


def test_calls_are_parsed() -> None:
    text = language.written_call("get_time", {"city": "Dorn"})
    assert checks.parsed_calls(f"Yes.\n{text}\n{text}") == ([("get_time", {"city": "Dorn"})] * 2, "Yes.")
    assert checks.parsed_calls(text.replace("</function>\n", ""))[0] == []
    key = {"calls": [("get_time", {"city": "Dorn"})], "text": ""}
    assert checks.calls(text, key) and not checks.calls(text.replace("Dorn", "Maro"), key)


@pytest.mark.parametrize("effort", [None, "low", "medium"])
def test_a_conversation_goes_on_from_the_tokens_already_read(tokenizer: Tokenizer, effort: str | None) -> None:
    for sample in islice(language.samples(8, held_out=False), 60):
        options = {"tools": sample.tools or None, "thinking": effort is not None, "effort": effort}
        messages = language.conversation(sample, effort)
        read = tokenizer.render(messages, **options)
        read += tokenizer.encode(language.completion(sample, effort) + "<|im_end|>")
        said: dict[str, Any] = {"role": "assistant", "content": sample.answer}
        if sample.kind == "tool_calls" and sample.key["calls"]:
            calls = [{"function": {"name": n, "arguments": _typed(sample, a)}} for n, a in sample.key["calls"]]
            said |= {"content": "", "tool_calls": calls}
        if effort:
            said["reasoning_content"] = sample.thoughts[effort]
        later = tokenizer.render([*messages, said, {"role": "user", "content": "Hi."}], **options)
        assert later[: len(read)] == read


def _typed(sample: Sample, arguments: dict[str, str]) -> dict[str, Any]:
    return {name: int(value) if value.isdigit() else value for name, value in arguments.items()}


def test_the_template_says_what_is_asked_for(tokenizer: Tokenizer) -> None:
    def shown(**options: Any) -> str:
        ids = tokenizer.render([{"role": "user", "content": "Hi."}], **options)
        return str(tokenizer.raw.decode(ids, skip_special_tokens=False))

    assert shown(thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert shown(thinking=False).startswith("<|im_start|>user\nHi.<|im_end|>\n")
    assert shown().endswith("<|im_start|>assistant\n<think>\n") and "effort: medium" in shown()
    assert "effort: low" in shown(effort="low") and "effort: medium" in shown(effort="xhigh")
    tool = some("tool_answers", 1)[0].tools[0]
    assert f"<tools>\n{json.dumps(tool['function'])}\n</tools>" in shown(tools=[tool])
    with pytest.raises(UsageError, match="reasoning_effort"):
        shown(effort="huge")
    with pytest.raises(UsageError, match="must come first"):
        tokenizer.render([{"role": "user", "content": "Hi."}, {"role": "system", "content": "x"}])


def test_the_vocabulary_keeps_every_text_and_its_special_tokens(tokenizer: Tokenizer) -> None:
    for text in ("Tom sees the red cat.\n", "aé 漢字 👩‍🚀\t x  y", "12345", '{"a": [1, true]}'):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for token in (*vocabulary.SPECIAL, *vocabulary.MARKUP):
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.eos == {tokenizer.raw.token_to_id("<|im_end|>")}
    assert tokenizer.encode("427") == [tokenizer.encode(digit)[0] for digit in "427"]


def test_the_vocabulary_is_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    vocabulary.write(tmp_path, samples=500)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_measured_prompts_are_held_out_and_trained_ones_are_not() -> None:
    from bench.tiny import prompts

    def asked(line: dict[str, Any]) -> str:
        return json.dumps([*line["messages"], *line.get("tools", ())], sort_keys=True)

    measured, trained = list(prompts.measured()), list(prompts.trained(200))
    assert {line["kind"] for line in measured} == set(language.KINDS)
    assert {asked(line) for line in measured}.isdisjoint(asked(line) for line in trained)
    assert len({asked(line) for line in trained}) == 200 and list(prompts.trained(200)) == trained
