"""Benches say nothing of a speed before the text is right, and say how sure they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafters_tiny import write_drafter
from folders import write_model
from tiny import VOCAB

from bench import host
from lisa import drawing, measure
from lisa.errors import LisaError, UsageError
from lisa.loader import Loaded, load

QUICK = measure.Settings(tokens=6, pairs=9)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = write_model(tmp_path_factory.mktemp("bench") / "tiny", "qwen3_5")
    write_drafter(folder / "drafters" / "dspine", "dspine", load(str(folder)).tokenizer.vocab)
    return load(str(folder), drafter="none")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"kind": kind, "prompt": text} for kind, text in (("chat", "hello"), ("copy", "one two one two one two"))]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return tmp_path / "prompts.jsonl"


def test_a_report_has_everything_that_was_promised(loaded: Loaded, prompts: Path) -> None:
    report = measure.bench(loaded, ["dspine", "ngram"], prompts, QUICK, 1.0, lambda line: None)
    json.dumps(report)
    assert list(report["arms"]) == ["none", "dspine", "ngram"] and set(report["kinds"]) == {"chat", "copy"}
    assert report["parity"]["dspine"] == {"equal": 2, "near_ties": 0, "wrong": 0}
    arm = report["arms"]["dspine"]
    promised = {"tok_s", "accepted", "by_position", "draft_ms", "verify_ms", "host_ms", "ttft_ms", "drafter_bytes"}
    assert promised | {"drafter_kv_bytes_per_token", "peak_bytes"} <= set(arm)
    # One layer's K and V: 2 layers x 2 x 2 heads x 8 floats, in a buffer with room to grow.
    assert arm["drafter_kv_bytes_per_token"] >= 2 * 2 * 16 * 4 and arm["drafter_bytes"] > 10_000
    for name in ("dspine", "ngram"):
        low, high = report["interval"][name]
        assert low <= report["ratio"][name] <= high
    assert report["blas"] == report["machine"]["blas"]
    assert len(report["prompts_sha256"]) == 64 and report["machine"]["blas"] and report["model"] == "tiny"
    assert len(list(measure.table(report))) == 2 + 3 + 1 + 2


def test_both_rules_are_measured_after_a_parity_check_of_the_coupled_one(loaded: Loaded, prompts: Path) -> None:
    settings = replace(QUICK, temperature=1.0, rule="rejection", width=3)
    assert settings.sampling().seed == 0 and replace(settings, width=None).sampling().seed is None
    report = measure.bench(loaded, ["dspine"], prompts, settings, 1.0, lambda line: None)
    assert report["parity"]["dspine"] == {"equal": 2, "near_ties": 0, "wrong": 0}
    assert len(report["arms"]["dspine"]["by_position"]) == 3
    options = "--tokens 6 --temperature 1.0 --rule rejection --width 3"
    assert report["command"] == f"lisa bench tiny --drafters dspine {options} --save"
    with pytest.raises(UsageError, match="the rule is coupled or rejection"):
        measure.Settings(rule="greedy")  # type: ignore[arg-type]


def test_a_models_own_prompts_are_used_where_it_has_some(loaded: Loaded, prompts: Path) -> None:
    own = loaded.folder / "prompts.jsonl"
    own.write_bytes(prompts.read_bytes())
    try:
        assert measure.read_prompts(loaded, None) == measure.read_prompts(loaded, prompts)
    finally:
        own.unlink()


def test_a_wrong_text_gets_no_speed(loaded: Loaded, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(one: Loaded, name: str, width: int | None = None, say: Any = None) -> Loaded:
        return replace(one, name="broken" if name != "none" else one.name)

    text = measure._text
    monkeypatch.setattr(measure, "redraft", broken)
    monkeypatch.setattr(measure, "_text", lambda one, *rest: [5, 6, 7] if one.name == "broken" else text(one, *rest))
    said: list[str] = []
    report = measure.bench(loaded, ["ngram"], prompts, QUICK, 1.0, said.append)
    assert report["parity"]["ngram"]["wrong"] == 2 and list(report["arms"]) == ["none"] and report["ratio"] == {}
    assert any("ngram gives another text" in line for line in said)


def test_a_first_difference_counts_as_a_tie_only_where_the_target_has_one(loaded: Loaded) -> None:
    prompt = measure.Prompt("chat", (1, 2, 3))
    plain = measure._text(loaded, prompt, QUICK)
    wrong = [*plain[:3], (plain[3] + 1) % VOCAB, *plain[4:]]
    assert measure._parity(loaded, [prompt], [plain], [wrong]) == {"equal": 0, "near_ties": 0, "wrong": 1}
    assert measure._parity(loaded, [prompt], [plain], [plain[:3]]) == {"equal": 0, "near_ties": 0, "wrong": 1}


@pytest.mark.parametrize("text", ["", "{", '{"kind": "chat"}', "[1]"])
def test_an_unusable_prompt_file_is_one_line(loaded: Loaded, tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"prompts\.jsonl"):
        measure.read_prompts(loaded, file)
    with pytest.raises(UsageError, match="missing"):
        measure.read_prompts(loaded, tmp_path / "missing")


def test_the_shipped_prompts_cover_four_kinds(loaded: Loaded) -> None:
    _, prompts = measure.read_prompts(loaded, None)
    assert {prompt.kind for prompt in prompts} == {"chat", "code", "copy", "reasoning"}


def test_arms_take_turns_and_turns_are_reversed() -> None:
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    measured = measure.alternate(arms, 3)  # type: ignore[arg-type]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]  # an odd number of pairs gets one more
    assert measured == {"a": [1.0, 4.0, 5.0, 8.0], "b": [2.0, 3.0, 6.0, 7.0]}


@pytest.mark.parametrize("true", [0.9, 0.97, 1.05, 1.3, 2.7])
@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_clock_that_slows_steadily_keeps_the_sign_and_size_of_a_speed_up(true: float, slower: float) -> None:
    pairs, turns = 9, 0

    def arm(speed: float) -> float:
        nonlocal turns
        turns += 1
        return speed / (1 + (slower - 1) * turns / (2 * pairs))  # tokens a second of a machine that gets hotter

    arms = {"none": lambda: arm(10.0), "drafter": lambda: arm(10.0 * true)}
    runs = measure.alternate(arms, pairs)
    found = measure.ratio(runs["drafter"], runs["none"])
    assert abs(found.value / true - 1) < 0.03 and (found.value > 1) == (true > 1)
    assert found.low <= true * 1.03 and found.high >= true * 0.97

    turns = 0  # one arm after the other would be told the heat as a loss
    plain, drafted = [arm(10.0) for _ in range(pairs)], [arm(10.0 * true) for _ in range(pairs)]
    assert measure.ratio(drafted, plain).value < 0.9 * true


def test_every_measurement_is_watched() -> None:
    seen: list[dict[str, int]] = []
    arms = {name: lambda: 1.0 for name in "ab"}
    measure.alternate(arms, 2, watch=lambda measured: seen.append({n: len(m) for n, m in measured.items()}))
    assert seen == [{"a": 1, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]


def test_the_share_of_the_bandwidth_is_of_what_was_measured(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "read_speed", lambda: 1e9)
    found = measure._bandwidth(loaded, tok_s=1000.0)
    size = loaded.engine.target.nbytes
    assert found == {"bytes_s": 10**9, "bytes_per_token": size, "percent": round(100 * size * 1000 / 1e9, 1)}


def test_the_read_speed_is_bytes_by_the_best_time() -> None:
    ticks = iter([0.0, 2.0, 3.0, 3.5, *(float(t) for t in range(10, 40))])
    assert measure.read_speed(1 << 22, lambda: next(ticks)) == (1 << 22) / 0.5


def test_a_context_frontier_is_measured_for_every_arm(loaded: Loaded, prompts: Path) -> None:
    report = measure.bench(loaded, ["ngram"], prompts, QUICK, 1.0, lambda line: None, frontiers=(64, 256))
    assert [each["context"] for each in report["frontiers"]] == [64, 256]
    for each in report["frontiers"]:
        assert set(each["tok_s"]) == {"none", "ngram"} and min(each["tok_s"].values()) > 0
    assert sum("context 256" in line for line in measure.table(report)) == 2
    with pytest.raises(UsageError, match="a context of 510 cannot be measured here: it is at least 2 and at most 506"):
        measure.bench(loaded, [], prompts, QUICK, 1.0, lambda line: None, frontiers=(510,))


REPORT = {
    "model": "tiny",
    "machine": {"cpu": "Some CPU"},
    "arms": {
        "none": {"tok_s": 10.0, "by_position": []},
        "dspine": {"tok_s": 25.0, "by_position": [0.9, 0.7, 0.4]},
    },
    "interval": {"dspine": [2.3, 2.6]},
}


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_a_report_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing.draw(REPORT, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml") and len(data) > 5000
    assert name.endswith("png") or b"share accepted" in data or b"DejaVuSans" in data


def test_what_cannot_be_drawn_is_told_before_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        drawing.check(tmp_path / "out.txt")
    with pytest.raises(UsageError, match="no folder"):
        drawing.check(tmp_path / "nowhere" / "out.png")
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(LisaError, match=r"pip install 'lisa\[plot\]'"):
        drawing.check(tmp_path / "out.png")


def test_an_interval_holds_the_ratio_and_narrows_with_less_noise() -> None:
    steady = measure.ratio([20.0, 20.2, 19.8] * 3, [10.0, 10.1, 9.9] * 3)
    noisy = measure.ratio([20.0, 30.0, 10.0] * 3, [10.0, 10.1, 9.9] * 3)
    assert steady.low <= steady.value <= steady.high and abs(steady.value - 2.0) < 0.05
    assert noisy.high - noisy.low > 5 * (steady.high - steady.low)


def test_results_are_appended_to_the_machines_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "lisa" / "measure.py"))
    monkeypatch.chdir(tmp_path)
    report = {"machine": {"system": "Linux x86_64", "cpu": "Some(R) CPU", "cores": 2}, "n": 1}
    for n in (1, 2):
        path = measure.save(report | {"n": n})
    assert path == tmp_path / "bench" / "results" / "linux-x86-64-some-r-cpu-2-cores.jsonl"
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_round_synchronises_once(reads: list[Any]) -> None:
    assert len(host.rounds(30)) == 30 and len(reads) == 1 + 30 + 20
