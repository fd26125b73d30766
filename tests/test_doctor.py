"""What `lisa doctor` finds: each problem comes with what mends it, no model is loaded, no connection opened."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loopback import REPO, TOKEN, FakeHub

from lisa import cli, doctor, hub, loader
from lisa.memory import Machine

pytestmark = pytest.mark.usefixtures("environment")

SEEN = {"gpu": False, "info": {"device_name": "cpu"}}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLX has answered, and the caches are empty."""
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "probe", lambda: SEEN)
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "lisa")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))


def found(name: str) -> doctor.Finding:
    return next(finding for finding in doctor.findings() if finding.name == name)


def test_it_loads_no_model_opens_no_connection_and_shows_no_token(
    monkeypatch: pytest.MonkeyPatch, no_network: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "load", None)
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", "--json"])
    out = capsys.readouterr().out
    report = json.loads(out)
    names = {finding["name"] for finding in report}
    assert {"Python", "MLX", "Metal", "memory", "kernels", "models", "account", "mlx"} <= names
    assert all(set(finding) == {"name", "verdict", "says", "mend"} for finding in report)
    assert bool(left.value.code) == any(finding["verdict"] == "problem" for finding in report)
    assert TOKEN not in out and "logged in" in out


def test_every_problem_comes_with_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: {"error": "libmlx.so: cannot open shared object file"})
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    problems = [finding for finding in doctor.findings() if finding.verdict == "problem"]
    assert {finding.name for finding in problems} == {"MLX", *doctor.TESTED}
    assert all(finding.mend for finding in problems)
    assert "cannot open shared object file" in found("MLX").says


def test_a_problem_leaves_with_1_and_is_printed_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: {"error": "gone"})
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor"])
    assert left.value.code == 1
    assert re.search(
        r"PROBLEM MLX +it cannot run: gone\n +-> pip install --force-reinstall mlx\n", capsys.readouterr().out
    )


def test_F8_a_probe_that_aborts_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_PROBE", "import os; os.abort()")
    assert doctor.probe() == {"error": "it ended with signal or code -6"}
    monkeypatch.setattr(doctor, "_PROBE", "raise ImportError('no libmlx')")
    assert doctor.probe() == {"error": "ImportError: no libmlx"}

    def hang(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    assert doctor.probe(run=hang) == {"error": "it did not answer within 12 seconds"}


def test_the_real_probe_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen = doctor.probe()
    assert isinstance(seen["gpu"], bool) and seen["info"]


def test_a_half_finished_download_is_found(fake: FakeHub, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path / "hf", progress=lambda _: None, bar=stop)
    finding = found("download")
    assert f"{REPO} is half here" in finding.says and f"lisa pull {REPO} goes on" in finding.mend


def test_damage_is_a_problem(fake: FakeHub, tmp_path: Path) -> None:
    path = hub.resolve(REPO, endpoint=fake.endpoint, cache=tmp_path / "hf", progress=lambda _: None).path
    blob = (path / "model-00001-of-00003.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert [row for row in doctor.findings() if row.name == "download"] == [
        doctor.Finding("download", "problem", f"{REPO} is damaged", f"lisa rm {REPO}, then lisa pull {REPO}")
    ]


def test_a_mac_without_metal_in_mlx_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "machine", lambda: Machine(True, 64 << 30))
    assert found("Metal").verdict == "problem"
    info = {"device_name": "Apple M4 Max", "max_recommended_working_set_size": 50 << 30}
    monkeypatch.setattr(doctor, "probe", lambda: {"gpu": True, "info": info})
    assert found("Metal") == doctor.Finding("Metal", "ok", "Apple M4 Max")
    assert "53.7 GB for models (Metal's recommended working set)" in found("memory").says
    assert not [finding for finding in doctor.findings() if finding.name == "BLAS"]


def test_a_full_or_closed_cache_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=10**9))
    assert found("Lisa's cache").verdict == "note" and "1.0 GB free" in found("Lisa's cache").says
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: False)
    assert found("the Hub's cache").verdict == "problem"


def test_an_untested_version_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: {"mlx": "0.40.0", "mlx-lm": "0.32.9"}.get(name, "1.0"))
    assert found("mlx") == doctor.Finding(
        "mlx", "note", "0.40.0, tested is 0.32.4", "pip install mlx==0.32.4 if it misbehaves"
    )
    assert found("mlx-lm").verdict == "ok"


def test_the_tested_versions_are_those_of_pyproject() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("# Tested:"))
    assert dict(re.findall(r"([\w-]+) (\d[\d.]*\d)", line)) == doctor.TESTED
    assert sys.version_info >= doctor.PYTHON
