"""`lisa serve` as a process, and the examples of docs/server.md as they stand there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from folders import write_model
from serving import XML_TEMPLATE, running, scripted

from bench import report
from bench import serve as bench

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "server.md"
COMMAND = [sys.executable, "-m", "lisa", "serve", "--port", "0", "--offline"]
WAIT = 120


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "LISA_API_KEY"} | more


class Process:
    """A running `lisa serve`; `url` once it says so."""

    def __init__(self, *arguments: str):
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
        )
        self.lines: list[str] = []
        self.said = threading.Event()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "serving" in line:
                self.said.set()
        self.said.set()

    @property
    def url(self) -> str:
        assert self.said.wait(WAIT)
        return re.findall(r"http://\S+", "".join(self.lines))[0]

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        code = self.process.wait(WAIT)
        self.reader.join(WAIT)
        return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3_5")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_answers_and_ends_in_order(folder: Path, number: int) -> None:
    served = Process("--model", str(folder))
    try:
        url = served.url
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
        # Once before: a SIGINT in the first use of a model, when MLX compiles, was seen to be lost on a busy machine.
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT).status_code == 200
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=WAIT) as got:
            lines = got.iter_lines()
            next(lines)
            assert served.end(number) == 0
            rest = "\n".join(lines)
        assert "shutting_down" in rest or "[DONE]" in rest
    finally:
        served.process.kill()
    text = "".join(served.lines)
    assert "tiny" in text and "drafter" in text and text.endswith("stopped\n") and "Traceback" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("busy", ["threading.Event().wait()", "[mx.eval(ones @ ones) for _ in iter(int, 1)]"])
def test_a_signal_while_the_model_is_loaded_ends_the_process_in_order_and_at_once(number: int, busy: str) -> None:
    code = f"""
import threading, mlx.core as mx
from lisa.server.desk import Settings
from lisa.server.run import bind, serve, url
from lisa.worker import Worker

def endless():
    ones = mx.ones((64, 64))
    print(url(listening), flush=True)
    {busy}

listening = bind("127.0.0.1", 0, None)
serve(listening, lambda: Worker().call(endless), Settings(), print)
"""
    loading = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert loading.stdout is not None
        url = loading.stdout.readline().strip()
        assert httpx.get(f"{url}/health", timeout=WAIT).json() == {"status": "loading"}
        loading.send_signal(number)
        said, errors = loading.communicate(timeout=WAIT)
    finally:
        loading.kill()
    assert (loading.returncode, said, errors) == (0, "stopped\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--port", "TAKEN"], "--port"),
    ],
)
def test_what_cannot_be_served_fails_before_a_model_is_looked_for(arguments: list[str], named: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = [port if a == "TAKEN" else a for a in arguments]
        done = subprocess.run(
            [*COMMAND, "--model", "/no/such/model", *options],
            capture_output=True, text=True, timeout=WAIT, cwd=ROOT, env=environment(),
        )  # fmt: skip
    assert done.returncode == 2 and named in done.stderr and "/no/such/model" not in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_own_line() -> None:
    done = subprocess.run(
        [*COMMAND, "--model", "/no/such/model"], capture_output=True, text=True, timeout=WAIT, cwd=ROOT,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 1 and "/no/such/model" in done.stderr and "Traceback" not in done.stderr


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from lisa.cli import main; main(['serve'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, cwd=ROOT)
    assert done.returncode == 2 and 'pip install "lisa[serve]"' in done.stderr and done.stderr.count("\n") == 1


def examples() -> list[tuple[str, str]]:
    return re.findall(r"```(bash|python)\n(.*?)```", DOCS.read_text("utf-8"), re.S)


def script(conversation: str) -> str:
    user = conversation.rsplit("user\n", 1)[-1]
    if "<tool_response>" in user:
        said = "It is " + user.split("<tool_response>\n")[1].split("\n")[0] + "."
    elif "weather" in user:
        said = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    elif "person" in user:
        said = '{"name": "Ada", "age": 36}'
    else:
        said = "Paris, the Seine and the sky."
    return ("Hm.\n</think>\n\n" if conversation.endswith("<think>\n") else "") + said


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = scripted(tmp_path_factory.mktemp("model"), script, template=XML_TEMPLATE, name="qwen3.8-27b", right=3)
    with running(model) as address:
        yield address


def test_the_bench_counts_what_its_clients_get(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    streams = bench.load(port, "qwen3.8-27b", 3, 9)
    assert [s.tokens for s in streams] == [9] * 3 and all(s.first > 0 and s.gap >= 0 for s in streams)
    row = bench.measured(streams)
    assert row["tokens_per_second"] > 0
    load = {"arm": {3: row | {"memory": bench.memory(os.getpid())}}}
    assert any("| arm | 3 |" in line for line in report.SECTIONS["serve"]({"load": load}))


SHOWN = ["Paris", "Seine", "Hm.\nParis", "name='Ada' age=36", "It is sunny in Oslo.", "Paris"]


@pytest.mark.parametrize("number", range(6))
def test_the_examples_of_the_docs_do_what_they_say(url: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    language, code = examples()[number]
    if language == "bash" and shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    code = code.replace("http://127.0.0.1:8080", url)
    if language == "python":
        exec(compile(code, DOCS.name, "exec"), {"__name__": "__main__"})
        text = capsys.readouterr().out
    else:
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=WAIT, check=True)
        text = done.stdout
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if "{" in line]
        choices = [c["choices"][0] for c in chunks if c["choices"]]
        text = "".join((c.get("message") or c.get("delta")).get("content") or "" for c in choices)
    assert SHOWN[number] in text


def test_no_example_is_left_out() -> None:
    assert len(examples()) == len(SHOWN)


def test_every_option_of_the_command_and_every_route_is_in_the_docs() -> None:
    text = DOCS.read_text("utf-8")
    for word in ("--host", "--port", "--api-key-file", "--max-concurrent", "--max-queue", "--allow-host", "--timeout",
                 "--allow-origin", "--context", "--chunk", "--model"):  # fmt: skip
        assert word in text, word
