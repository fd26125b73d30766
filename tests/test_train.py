"""`lisa train` on tiny random targets, from prompts to a drafter folder that the engine loads."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from folders import edit, write_model

import lisa
from lisa import cli, loader
from lisa.drafters import LEARNED
from lisa.drafters.checkpoint import read
from lisa.engine import Engine
from lisa.errors import LisaError, UsageError
from lisa.pace import Fixed
from lisa.train import Settings, Trained, networks, questions, train
from lisa.train.acceptance import draft_width, measure, walk
from lisa.train.answers import answer, loop
from lisa.train.objective import Vocabularies, _mlx_softmax, _vectorised, losses
from lisa.train.run import Training
from lisa.train.steps import Data
from lisa.train.store import Features, Store
from lisa.types import Done, Request

KINDS = ["dspine", "dflash", "eagle"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token hangs mostly on the last one, so that its text can be learned; and prompts for it."""
    folder = tmp_path_factory.mktemp("train")
    file = write_model(folder / "target", "qwen3") / "model.safetensors"
    weights: Any = mx.load(str(file))
    quiet = {k: v * 0.05 if "o_proj" in k or "down_proj" in k else v for k, v in weights.items()}
    mx.save_safetensors(str(file), quiet, {"format": "mlx"})
    lines = [json.dumps({"prompt": f"{'abcdefgh'[i % 8]}{i}"}) for i in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    return folder


def settings(home: Path, kind: str, name: str, **changes: Any) -> Settings:
    small: dict[str, Any] = {"steps": 12, "evaluate": 6, "tokens": 1600, "answer": 32, "anchors": 12, "rate": 1e-2}
    if kind != "eagle":
        small |= {"block": 5, "layers": 2}
    options = {**small, "data": home / "prompts.jsonl", "work": home / "work", "sampled": 0.0, **changes}
    return Settings(str(home / "target"), kind, home / name, **options)  # type: ignore[arg-type]


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def trained(home: Path) -> dict[str, Trained]:
    return {kind: train(settings(home, kind, f"{kind}-long", steps=90, evaluate=45), quiet) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_the_accepted_length(home: Path, trained: dict[str, Trained], kind: str) -> None:
    untrained = train(settings(home, kind, f"{kind}-short", steps=1, evaluate=1), quiet)
    assert trained[kind].accepted > untrained.accepted + 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_drafts_the_plain_text(home: Path, trained: dict[str, Trained], kind: str) -> None:
    answers = {}
    for drafter in ("none", str(trained[kind].out)):
        with lisa.load(str(home / "target"), drafter=drafter, width=4, strict=True) as model:
            answers[drafter] = model.chat([{"role": "user", "content": "a7"}], max_tokens=24).read()
    plain, drafted = answers.values()
    assert drafted.ids == plain.ids and len(plain.ids) == 24
    assert drafted.stats.drafter == kind and drafted.stats.accepted > 0
    card = (trained[kind].out / "README.md").read_text("utf-8")
    assert f"{trained[kind].accepted:.3f} tokens a round" in card and "held out by hash" in card


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_without_decoding_is_the_engines(home: Path, trained: dict[str, Trained], kind: str) -> None:
    loaded = loader.load(str(home / "target"), drafter="none")
    target = loaded.engine.target
    checkpoint = read(trained[kind].out)
    model: Any = LEARNED[kind](checkpoint, target)
    draft = networks.loaded(replace(checkpoint, taps=checkpoint.taps_on(target.layers)), target)
    features = Features(Store(home / "work", target), networks.default_taps(target.layers))
    data = Data(features, range(len(features.store.conversations)), draft.taps, np.ones(len(draft.taps) * 32, "f"))
    assert measure(draft, data, data.held).length == pytest.approx(trained[kind].accepted, abs=0.05)
    for index in [*data.held[:2], *data.train[:3]]:
        conversation = data.conversation(index)
        asked, answered = conversation.ids[: conversation.prompt], conversation.ids[conversation.prompt :]
        engine = Engine(target, model.new, lambda: Fixed(draft_width(draft)))
        request = Request(asked, max_tokens=len(answered), eos=loaded.tokenizer.eos)
        stats = next(e for e in engine.session().run(request) if isinstance(e, Done)).stats
        assert stats.completion_tokens in (len(answered), len(answered) - 1)
        assert measure(draft, data, [index]).length == stats.accepted_length


@pytest.mark.parametrize("kind", ["dspine", "eagle"])
def test_a_killed_training_goes_on_as_if_nothing_had_happened(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(settings(home, kind, f"{kind}-whole"), quiet)
    again = train(settings(home, kind, f"{kind}-again"), quiet)
    assert len(whole.losses) == 12 and whole.losses == again.losses

    step = Training._one

    def killed(self: Training, *arguments: Any) -> None:
        if self.progress.step == 9:
            raise SystemError
        step(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(SystemError):
        patched.setattr(Training, "_one", killed)
        train(settings(home, kind, f"{kind}-killed"), quiet)
    lines: list[str] = []
    resumed = train(settings(home, kind, f"{kind}-killed"), lines.append)
    assert any("going on from step 6" in line for line in lines)
    assert resumed.losses == whole.losses and resumed.accepted == whole.accepted
    assert [point[1:] for point in resumed.curve] == [point[1:] for point in whole.curve]
    one, other = (mx.load(str(t.out / "model.safetensors")) for t in (whole, resumed))
    assert one.keys() == other.keys() and all(mx.array_equal(one[k], other[k]) for k in one)


def test_ctrl_c_saves_and_the_same_command_goes_on(home: Path) -> None:
    lines: list[str] = []

    def interrupting(line: str) -> None:
        lines.append(line)
        if line.startswith("step 6"):
            os.kill(os.getpid(), signal.SIGINT)

    stopped = train(settings(home, "dspine", "stopped"), interrupting)
    assert not stopped.finished and "stopped at step 6" in lines[-1]
    done = train(settings(home, "dspine", "stopped"), lines.append)
    assert done.finished and done.curve[0] == stopped.curve[0] and done.curve[-1][1] == 12


def test_a_quantised_hybrid_target_is_trained_on(home: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hybrid", "qwen3_5")
    packed: dict[str, mx.array] = {}
    weights: Any = mx.load(str(folder / "model.safetensors"))
    for name, value in weights.items():
        stem = name.removesuffix(".weight")
        wide = value.ndim == 2 and value.shape[1] % 32 == 0 and ("embed" in name or "head" in name or "mlp" in name)
        parts = mx.quantize(value, group_size=32, bits=8) if wide else (value,)
        names = [f"{stem}.{part}" for part in ("weight", "scales", "biases")] if wide else [name]
        packed |= dict(zip(names, parts, strict=True))
    mx.save_safetensors(str(folder / "model.safetensors"), packed, {"format": "mlx"})
    edit(folder / "config.json", quantization={"group_size": 32, "bits": 8})
    asked = settings(home, "dspine", "x", steps=8, evaluate=4, tokens=800, work=tmp_path / "work")
    done = train(replace(asked, model=str(folder), out=tmp_path / "drafter"), quiet)
    assert done.losses[-1] < done.losses[0]
    texts = []
    for drafter in ("none", str(done.out)):
        with lisa.load(str(folder), drafter=drafter, width=4, strict=True) as model:
            texts.append(model.chat([{"role": "user", "content": "a7"}], max_tokens=16).read().ids)
    assert texts[0] == texts[1]


def test_the_command_trains_and_says_what_came_of_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = home / "by-command"
    options = ["--kind", "dflash", "--data", home / "prompts.jsonl", "--work", home / "work", "--out", out]
    small = ["--steps", 2, "--tokens", 1600, "--block", 4, "--layers", 1, "--taps", "2,0", "--storage", "8bit"]

    def command(*more: object) -> int:
        with pytest.raises(SystemExit) as left:
            cli.main(["train", str(home / "target"), *map(str, (*options, *more))])
        return int(left.value.code or 0)

    assert command(*small) == 0
    printed = capsys.readouterr()
    assert "by-command: 1." in printed.out and "training a dflash drafter" in printed.err
    assert read(out).taps == (2, 0) and read(out).block == 4
    for taps, why in (("2,x", "--taps are layer"), ("9", "--taps are different layers")):
        assert command("--taps", taps) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("lisa: ") and why in said


def test_another_target_is_refused(home: Path, tmp_path: Path) -> None:
    train(settings(home, "dflash", "mine", steps=1), quiet)
    other = str(write_model(tmp_path / "target", "qwen3", seed=1))
    with pytest.raises(LisaError, match="whose weights are not those of"):
        train(replace(settings(home, "dflash", "mine", steps=1), model=other), quiet)
    moved = settings(home, "dflash", "mine", steps=1, work=tmp_path / "work")
    (tmp_path / "work").mkdir()
    os.link(home / "work" / "mine.checkpoint.safetensors", tmp_path / "work" / "mine.checkpoint.safetensors")
    with pytest.raises(LisaError, match="was trained with target"):
        train(replace(moved, model=other), quiet)


def test_a_folder_that_holds_something_else_is_not_written_over(home: Path) -> None:
    with pytest.raises(UsageError, match="is not written over"):
        train(settings(home, "dflash", "target"), quiet)


def test_a_checkpoint_of_other_settings_is_refused(home: Path) -> None:
    train(settings(home, "dflash", "seeded", steps=1), quiet)
    with pytest.raises(LisaError, match="was trained with seed 0, not 1"):
        train(settings(home, "dflash", "seeded", steps=1, seed=1), quiet)


@pytest.mark.parametrize("kind", KINDS)
def test_adapting_begins_where_the_drafter_was(home: Path, trained: dict[str, Trained], kind: str) -> None:
    chosen = settings(home, kind, f"{kind}-adapted", steps=1, rate=1e-9, block=None, layers=None)
    adapted = train(replace(chosen, adapt=trained[kind].out), quiet)
    assert adapted.accepted == pytest.approx(trained[kind].accepted, abs=0.05)
    with pytest.raises(UsageError, match="give --kind"):
        other = "dflash" if kind == "dspine" else "dspine"
        train(replace(chosen, kind=other, adapt=trained[kind].out, out=home / "misnamed"), quiet)  # type: ignore[arg-type]


def test_taps_are_scaled_for_training_and_back_for_the_drafter(home: Path, trained: dict[str, Trained]) -> None:
    target = loader.load(str(home / "target"), drafter="none").engine.target
    draft = networks.loaded(read(trained["dflash"].out), target)
    raw = mx.array(draft.network.fc.weight)
    taps, scale = (
        mx.random.normal((4, raw.shape[1]), key=mx.random.key(0)),
        np.linspace(0.1, 90, raw.shape[1], dtype="f"),
    )
    before = draft.network.fuse(taps)
    networks.rescale(draft, scale)
    assert mx.allclose(draft.network.fuse(taps / mx.array(scale)), before, atol=1e-4)
    assert mx.allclose(networks.folded(draft, scale)["fc.weight"], raw, atol=1e-6)


@pytest.mark.parametrize("kind", ["dspine", "eagle"])
def test_8bit_storage_leaves_out_what_the_target_has(home: Path, tmp_path: Path, kind: str) -> None:
    target = loader.load(str(home / "target"), drafter="none").engine.target
    train(settings(home, kind, f"{kind}-packed", steps=2, storage="8bit"), quiet)
    train(settings(home, kind, f"{kind}-full", steps=2), quiet)
    models: list[Any] = [LEARNED[kind](read(home / f"{kind}-{name}"), target) for name in ("packed", "full")]
    stored = mx.load(str(home / f"{kind}-packed" / "model.safetensors")).keys()
    assert not stored & {"transfer_codes", "lm_head.weight", "lm_head.scales"}
    if kind == "dspine":
        assert mx.allclose(models[0].codes, models[1].codes, atol=1e-3)
    else:
        assert mx.allclose(models[0].network.lm_head.weight, models[1].network.lm_head.weight, atol=2e-3)
    widths = [model.network.fc.weight for model in models]
    assert mx.allclose(*widths, atol=2e-2 * mx.abs(widths[1]).max().item())


def test_packed_matrices_are_read_back(home: Path, tmp_path: Path) -> None:
    """The tiny target's matrices are too narrow to be packed, so one is packed by hand."""
    train(settings(home, "dflash", "to-pack", steps=1), quiet)
    folder, wide = home / "to-pack", mx.random.normal((32, 64), key=mx.random.key(0))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    names = ("fc.weight", "fc.scales", "fc.biases")
    weights |= dict(zip(names, mx.quantize(wide, group_size=64, bits=8), strict=True))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 8}}), "utf-8")
    assert mx.allclose(read(folder).weights["fc.weight"], wide, atol=0.02)
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"bits": 8}}), "utf-8")
    with pytest.raises(LisaError, match="packed weights that cannot be read"):
        read(folder)


# Data.


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_answers_side_by_side_are_those_decoded_alone(tmp_path: Path, kind: str) -> None:
    loaded = loader.load(str(write_model(tmp_path / kind, kind)), drafter="none")
    target = loaded.engine.target
    asked = [[5, 6, 7], [9], list(range(20, 34)), [9]]
    together = answer(target, asked, frozenset({3}), 20, [None, None, None, 7])
    alone = [answer(target, [p], frozenset({3}), 20, [s])[0] for p, s in zip(asked, [None, None, None, 7], strict=True)]
    assert together == alone and together[1] != together[3]
    session = loaded.engine.session()
    said = [t for e in session.run(Request((9,), max_tokens=20, eos=frozenset({3}))) for t in getattr(e, "ids", ())]
    assert list(together[1].tokens) == said


def test_answers_end_where_the_turn_ends_and_shrink_the_batch(tmp_path: Path) -> None:
    target = loader.load(str(write_model(tmp_path / "m", "qwen3")), drafter="none").engine.target
    asked = [[5, 6, 7], [9], [11, 12]]
    free = answer(target, asked, frozenset(), 12, [None] * 3)
    end = free[0].tokens[4]
    first = [a.tokens.index(end) if end in a.tokens else None for a in free]
    for one, whole, stop in zip(answer(target, asked, frozenset({end}), 12, [None] * 3), free, first, strict=True):
        assert one.tokens == (whole.tokens if stop is None else whole.tokens[: stop + 1])
        assert one.reason == ("length" if stop is None else "stop")


def test_a_repetition_is_cut_after_its_second_period() -> None:
    assert loop([1, 2, 3, *[7, 8, 9, 4] * 6]) == 3 + 8
    assert loop([*range(40)]) is None
    assert loop([5] * 23) is None and loop([5] * 24) == 8


def test_held_out_prompts_are_chosen_by_their_words_alone(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"question {i}"}) for i in range(200)]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("\n".join(lines), "utf-8")
    other.write_text("\n".join(reversed(lines[:150])) + "\n\n", "utf-8")
    held = {p.key for p in questions.read(one) if p.held}
    assert 4 <= len(held) <= 24
    assert {p.key for p in questions.read(other) if p.held} <= held
    assert questions.read(one)[0].held, "held-out prompts come first, so that any amount of answers has them"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"prompt": "one"}', "at least 2"),
        ("not json\n{}", "line 1 is no JSON"),
        ('{"text": "x"}\n{}', "line 1 must be"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no message to answer"),
    ],
)
def test_unusable_prompts_are_refused_by_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "p.jsonl").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=why):
        questions.read(tmp_path / "p.jsonl")


def test_prompts_are_sampled_from_the_users_turn(home: Path) -> None:
    tokenizer = loader.load(str(home / "target"), drafter="none").tokenizer
    assert tokenizer.raw.decode(questions.opening(tokenizer), skip_special_tokens=False) == "<|im_start|>user\n"
    end = sorted(tokenizer.eos)[0]
    turns = [([*tokenizer.encode(text), end], "stop") for text in ("What is it?", " What is it? ", "x")]
    turns.append((tokenizer.encode("never ended"), "length"))
    assert [p.prompt.messages[0]["content"] for p in questions.sampled(tokenizer, turns)] == ["What is it?"]


def test_a_torn_line_is_dropped_and_features_fit_the_budget(home: Path, tmp_path: Path) -> None:
    target = loader.load(str(home / "target"), drafter="none").engine.target
    written = (home / "work" / "conversations.jsonl").read_text("utf-8").splitlines(keepends=True)[:4]
    (tmp_path / "conversations.jsonl").write_text("".join(written) + '{"ids": [1, 2', "utf-8")
    store = Store(tmp_path, target)
    assert len(store.conversations) == 4
    assert len(Store(tmp_path, target).conversations) == 4, "what was dropped is gone from the file too"
    features, row = Features(store, (0, 2)), 2 * 3 * 32
    lines: list[str] = []
    room = (sum(len(c.ids) for c in store.conversations[:2]) * row + 10) / 1e9
    assert features.read_all(room, lines.append) == [0, 1] and "--budget" in lines[-1]
    taps, last = features.of(1, (2,))
    ids = store.conversations[1].ids
    _, true = target.forward(mx.array(ids), target.new_state(), (2,))
    assert np.array_equal(taps, np.array(true.astype(mx.float16))) and np.array_equal(taps, last)


# Objective.


def test_numpys_softmax_is_mlxs_with_its_gradient() -> None:
    x, y = (mx.random.normal((5, 9), key=mx.random.key(i)) * 4 for i in (1, 2))

    def through(softmax: Any) -> Any:
        def value(x: mx.array) -> mx.array:
            p, total = softmax(x * 2)
            return (p * y).sum() + (total * y[:, 0]).sum()

        return mx.value_and_grad(value)(x)

    for a, b in zip(through(_vectorised), through(_mlx_softmax), strict=True):
        assert mx.allclose(a, b, atol=1e-5)


def test_losses_are_the_written_formulas() -> None:
    logits, other = (mx.random.normal((4, 7), key=mx.random.key(i)) for i in (1, 2))
    p, q, labels = mx.softmax(other, axis=-1), mx.softmax(logits, axis=-1), mx.array([0, 3, 6, 1])
    hard = -mx.log(mx.take_along_axis(q, labels[:, None], axis=-1)[:, 0])
    published, _ = losses("published", logits, p, labels)
    mixed, ce = losses("mixed", logits, p, labels)
    assert mx.allclose(ce, hard, atol=1e-5)
    assert mx.allclose(published, 0.1 * hard + 0.9 * mx.abs(q - p).sum(-1), atol=1e-5)
    assert mx.allclose(mixed, 0.5 * hard - 0.5 * (p * mx.log(q)).sum(-1), atol=1e-5)


def test_a_sampled_vocabulary_holds_every_label_and_stands_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lisa.train.objective._CORE", 12)
    monkeypatch.setattr("lisa.train.objective._OTHERS", 6)
    from tiny import VOCAB, target

    counts = np.arange(VOCAB)[::-1]
    step = Vocabularies(target("dense"), counts, sampled=True).step(np.array([40, 3, 40]), np.random.default_rng(0))
    assert set(range(12)) | {40} <= set(np.nonzero(step.index >= 0)[0].tolist())
    hidden = mx.random.normal((3, 32), key=mx.random.key(0))
    full = target("dense").head(hidden)
    columns = step.index[40]
    assert mx.allclose(step.logits(hidden)[:, columns.item()], full[:, 40], atol=1e-4)
    rest = [int(i) for i in np.nonzero(step.index >= 12)[0] if i != 40]
    raised = step.logits(hidden)[:, mx.array(step.index[rest])] - full[:, mx.array(rest)]
    assert mx.allclose(raised, mx.log(mx.array((VOCAB - 12) / len(rest))), atol=1e-4)


def test_rounds_of_an_answer() -> None:
    assert walk([2, 0, 0, 5, 0, 0], 4) == [2, 2]
    assert walk([2, 0, 0, 5, 0, 0], 1) == [1, 0, 1, 0]
    assert walk([], 4) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"minutes": 0}, "minutes"), ({"block": 17}, "block"), ({"kind": "dspark"}, "kind"), ({"sampled": 2}, "sampled")],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Settings(**{"model": "m", "kind": "dspine", "out": Path("x"), **changes})
