"""A kernel that differs or loses on this machine is not used; the verdict is found once, by a fake clock here."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from folders import write_model
from test_layers import target
from typer.testing import CliRunner

from lisa import doctor, layers, remember, selfcheck, verdicts
from lisa.cli import app
from lisa.errors import UsageError
from lisa.metal import NONE, Kernels, rows_qmm
from lisa.selfcheck import MODULES, Trial, choose, examine, text_hash, trials
from lisa.verdicts import TOGETHER, Verdict

FAKE = Kernels(make=lambda **made: None)  # type: ignore[arg-type,return-value]


class Machine:
    """A clock that the kernels and MLX's ops move, by so many seconds a call."""

    def __init__(self, mine: float, theirs: float, wrong: float = 0.0, alone: float | None = None):
        self.now = 0.0
        self.mine, self.theirs, self.wrong = mine, theirs, wrong
        self.alone = mine if alone is None else alone

    def __call__(self) -> float:
        return self.now

    def kernel(self, x: mx.array, kernels: Kernels) -> mx.array:
        self.now += self.alone if x.shape[0] == 1 else self.mine
        return x * 2 + self.wrong

    def stock(self, x: mx.array) -> mx.array:
        self.now += self.theirs
        return x * 2

    def trial(self, name: str = "twice") -> Trial:
        module: Any = ModuleType(f"fake.{name}")
        setattr(module, name, self.kernel)
        module.reference = lambda x: x * 2
        return Trial(module, "shapes", lambda rows: [{"x": mx.ones((rows, 4))}] * 3)


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(machine: Machine) -> Verdict:
        monkeypatch.setattr(selfcheck, "stock", lambda name: machine.stock)
        return examine(machine.trial(), FAKE, machine)

    return run


def test_a_faster_kernel_is_used_and_a_slower_one_is_not(raced: Any) -> None:
    faster = raced(Machine(0.01, 0.02, alone=0.04))
    assert faster.used and faster.ratio == pytest.approx(2.0) and faster.alone == pytest.approx(0.5)
    assert "used, 2.00 times MLX's speed at 8 rows, 0.50 at one" in str(faster)
    slower = raced(Machine(0.02, 0.019))
    assert slower.right and not slower.used and "not used: 0.95 times" in str(slower)


def test_a_kernel_that_differs_is_not_used_however_fast(raced: Any) -> None:
    verdict = raced(Machine(0.001, 1.0, wrong=0.01))
    assert not verdict.used and "differs" in verdict.why
    assert not raced(Machine(0.001, 1.0, wrong=float("nan"))).used


def test_a_kernel_that_does_not_compile_is_a_verdict_with_the_compilers_first_line() -> None:
    machine = Machine(1, 1)
    trial = machine.trial()

    def broken(**arguments: Any) -> Any:
        raise RuntimeError("error: no such type 'half5'\nmore")

    trial.module.twice = broken
    assert examine(trial, FAKE, machine) == Verdict(False, why="error: no such type 'half5'")


def test_a_race_lasts_and_a_stall_in_a_long_run_counts(raced: Any) -> None:
    class Stalls(Machine):
        def kernel(self, x: mx.array, kernels: Kernels) -> mx.array:
            self.mine = 0.001 if self.now < 0.1 else 0.01
            return super().kernel(x, kernels)

    assert not raced(Stalls(0.001, 0.005, alone=0.001)).used


def test_verdicts_choose_the_kernels_and_are_found_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(verdicts, "file", lambda: tmp_path / "kernels.json")
    t = target("hybrid", NONE)
    found = {
        "rows_qmm": Verdict(True, 1.5, 0.8),
        "rows_attention": Verdict(True, 1.2, 1.1),
        "gdn_verify": Verdict(True, 0.9, 2.0),
        "inject": Verdict(False, why="differs"),
    }
    asked: list[str] = []

    def examined(trial: Trial, kernels: Kernels) -> Verdict:
        asked.append(trial.name)
        return found.get(trial.name, Verdict(False))

    monkeypatch.setattr(selfcheck, "examine", examined)
    said: list[str] = []
    exact = choose(t, FAKE, exact=True, say=said.append)
    assert exact.names == {"rows_qmm", "rows_attention"} and exact.alone is None
    assert len(asked) == len(said) == 8
    loose = choose(t, FAKE, exact=False)
    assert loose.alone == {"rows_attention"} and not loose.may_run("rows_qmm", 1) and loose.may_run("rows_qmm", 2)
    assert len(asked) == 8, "the second load asks nothing"
    assert set(verdicts.stored().values()) >= set(found.values())
    monkeypatch.setattr(verdicts, "machine", lambda: "another macOS")
    choose(t, FAKE, exact=True)
    assert len(asked) == 16 and choose(t, NONE, exact=True) is NONE
    (tmp_path / "kernels.json").write_text("{", "utf-8")
    choose(t, FAKE, exact=True)
    assert len(asked) == 24, "a damaged file is found out again"


def test_every_kernel_has_a_trial_a_stock_way_and_a_hash_of_its_text() -> None:
    t = target("hybrid", NONE)
    found = {trial.name: trial for trial in trials(t)}
    assert set(found) == {module.__name__.rsplit(".", 1)[-1] for module in MODULES}
    for trial in found.values():
        for rows in (1, TOGETHER):
            first = trial.copies(rows)[0]
            assert selfcheck.difference(trial.run(first, NONE), trial.module.reference(**first)) == 0
        ours, theirs = trial.run(first, NONE), selfcheck.stock(trial.name)(**first)
        shapes = [[a.shape for a in (x if isinstance(x, tuple) else (x,))] for x in (ours, theirs)]
        assert shapes[0][: len(shapes[1])] == shapes[1]
    module: Any = ModuleType("changed")
    vars(module).update(vars(rows_qmm))
    assert text_hash(module) == text_hash(rows_qmm)
    module.SOURCE = replace(rows_qmm.SOURCE, body=rows_qmm.SOURCE.body + " ")
    assert text_hash(module) != text_hash(rows_qmm)


def test_what_no_kernel_computes_is_said_with_the_reason() -> None:
    t = target("hybrid", NONE)
    assert "3 x gdn_conv does not run" not in layers.uncovered(t.model, FAKE)
    assert any("rows_qmm does not run" in line for line in layers.uncovered(t.model, NONE))
    small = "4 x a packed projection: a weight of fewer than 8 groups"
    assert layers.uncovered(t.model, FAKE) == [small]
    few = replace(FAKE, names=frozenset({"rows_qmm"}))
    assert sorted(layers.uncovered(t.model, few)) == [
        "1 x rows_attention does not run",
        "2 x gdn_conv does not run",
        "2 x gdn_verify does not run",
        small,
    ]
    odd = target("qwen3", NONE, bits=3)
    assert any("3 bits, not 4 or 8" in line for line in layers.uncovered(odd.model, FAKE))


def test_kept_things_survive_damage_and_each_other(tmp_path: Any) -> None:
    file = tmp_path / "deep" / "kept.json"
    remember.save(file, "a", [1])
    remember.save(file, "b", {"c": 2})
    assert (remember.load(file, "a"), remember.load(file, "b"), remember.load(file, "d")) == ([1], {"c": 2}, None)
    file.write_text("[]", "utf-8")
    assert remember.everything(file) == {}


def test_doctor_says_of_each_kernel_whether_it_runs_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(verdicts, "file", lambda: tmp_path / "kernels.json")
    assert [f.says for f in doctor.kernels(metal=False)] == ["no Metal device: MLX's own ops run"]
    assert [f.says for f in doctor.kernels(metal=True)] == ["not checked yet: the first model that is loaded does it"]
    for name, verdict in (
        ("rows_qmm ab 4 x 8", Verdict(True, 1.5, 0.9)),
        ("inject cd 5", Verdict(False, why="differs")),
    ):
        remember.save(verdicts.file(), f"{verdicts.machine()}: {name}", asdict(verdict))
    remember.save(verdicts.file(), "another machine: rows_qmm ab 4 x 8", asdict(Verdict(True, 9, 9)))
    assert [(f.name, f.verdict, f.says) for f in doctor.kernels(metal=True)] == [
        ("rows_qmm", "ok", "used, 1.50 times MLX's speed at 8 rows, 0.90 at one (4 x 8)"),
        ("inject", "note", "not used: differs (5)"),
    ]


def test_doctor_loads_a_model_only_to_say_what_of_it_no_kernel_computes(tmp_path: Any) -> None:
    folder = write_model(tmp_path / "tiny", "qwen3")
    run = CliRunner().invoke(app, ["doctor", "--kernels", "--model", str(folder)])
    assert run.exit_code == 0 and "no kernel for" in run.stdout and "not packed" in run.stdout
    assert "no Metal device" in CliRunner().invoke(app, ["doctor", "--kernels"]).stdout
    assert isinstance(CliRunner().invoke(app, ["doctor", "--model", "x"]).exception, UsageError)
