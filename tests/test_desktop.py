"""examples/desktop.py on a virtual screen: it streams, and Stop ends a reply."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import FakeModel, echo

FILE = Path(__file__).parent.parent / "examples" / "desktop.py"
tkinter = pytest.importorskip("tkinter", reason="this Python has no tkinter")


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    if shutil.which("Xvfb") is None:
        pytest.skip("Xvfb, the virtual screen, is not installed")
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", "900x640x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL)
    os.close(writing)
    with open(reading) as pipe:
        number = pipe.readline().strip()
    if not number:
        pytest.skip("Xvfb does not start here")
    yield f":{number}"
    server.terminate()
    server.wait()


@pytest.fixture
def window(display: str) -> Iterator[Callable[[Any], Any]]:
    spec = importlib.util.spec_from_file_location("desktop", FILE)
    assert spec and spec.loader
    desktop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(desktop)
    opened: list[Any] = []

    def window(model: Any) -> Any:
        opened.append(desktop.Window(tkinter.Tk(screenName=display), model))
        return opened[-1]

    yield window
    for each in opened:
        each.close()


def until(window: Any, happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end, window.log.get("1.0", "end")
        window.root.update()
        time.sleep(0.005)


def ask(window: Any, text: str) -> None:
    window.entry.insert(0, text)
    window.send.invoke()


def test_an_answer_streams_and_stop_ends_one(window: Any) -> None:
    with FakeModel(echo) as model:
        it = window(model)
        ask(it, "hello")
        until(it, lambda: it.reply is None)
        assert it.log.get("1.0", "end").strip() == "hello\n[user: hello]"
        assert it.status["text"] == "9 tokens, 4.0 tok/s, stop"
        ask(it, "endless")
        until(it, lambda: "more more" in it.log.get("1.0", "end"))
        assert str(it.send["state"]) == "disabled" and str(it.stop["state"]) == "normal"
        it.stop.invoke()
        until(it, lambda: it.reply is None)
        assert it.status["text"].endswith("cancelled") and str(it.stop["state"]) == "disabled"
        assert [m["role"] for m in it.messages] == ["user", "assistant", "user", "assistant"]


def test_an_error_of_a_request_is_shown_and_takes_the_message_back(window: Any) -> None:
    with FakeModel(echo) as model:
        it = window(model)
        ask(it, "too long")
        until(it, lambda: it.reply is None)
        assert "the context holds 8" in it.status["text"] and it.messages == []


def test_it_runs_on_a_real_model_and_can_be_seen(window: Any, display: str, tmp_path: Path) -> None:
    from folders import write_model

    import lisa

    with lisa.load(str(write_model(tmp_path / "tiny", "llama"))) as model:
        it = window(model)
        ask(it, "hello")
        until(it, lambda: len(it.log.get("1.0", "end").strip()) > 8)
        it.stop.invoke()
        until(it, lambda: it.reply is None)
    image = pytest.importorskip("PIL.ImageGrab", reason="no Pillow to take a picture with").grab(xdisplay=display)
    image.save(tmp_path / "desktop.png")
    assert len(image.getcolors(1 << 20)) > 5  # more than an empty screen
