"""The `lisa` command: what stands on stdout, what on stderr, and what it leaves with."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lisa import api, catalog, cli, hub, manage
from lisa.chat import answer
from lisa.errors import Cancelled, ContextFull, DamagedModel, NotCached, UsageError
from lisa.memory import Machine
from lisa.slash import KINDS
from lisa.types import Done, Event, Messages, Progress, Sampling, Stats, Tokens
from lisa.worker import Worker

TESTS = Path(__file__).parent
COMMAND = "from lisa.cli import main; main()"
FAKE = "import test_cli; test_cli.fake_main()"
STATS = Stats(completion_tokens=9, rounds=4, drafted=12, accepted=6, ttft=0.25, decode=2.0, drafter="ngram")


class FakeTokenizer:
    def render(self, messages: Messages, thinking: bool | None = None) -> list[int]:
        return [int(bool(thinking))]

    def reader(self, stop: list[str] | None) -> None:
        if stop and "" in stop:
            raise UsageError("stop must not be empty")


class FakeModel:
    """Runs `script` on a real worker, so that cancelling is the real thing. `asked` keeps what chat was given."""

    name, about, context = "fake", "fake, loaded", None
    sampling = Sampling(temperature=0.6, top_p=0.95, top_k=20)
    tokenizer = FakeTokenizer()

    def __init__(self, script: Callable[[Messages], Iterator[Event]]):
        self.script = script
        self.worker = Worker()
        self.asked: list[tuple[Messages, dict[str, Any]]] = []
        self.loaded: tuple[str, dict[str, Any]] | None = None

    def load(self, name: str, **options: Any) -> FakeModel:
        self.loaded = name, options
        return self

    def chat(self, messages: Messages, **options: Any) -> api.Reply:
        self.asked.append((messages, options))
        return api.Reply(self.worker.stream(lambda: self.script(messages)))  # type: ignore[arg-type, return-value]

    def redraft(self, drafter: str, say: Any = None) -> None:
        if drafter not in KINDS:
            raise UsageError(f"unknown drafter {drafter!r}")
        self.about = f"fake, drafter {drafter}"

    def close(self) -> None:
        self.worker.close()

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def echo(messages: Messages) -> Iterator[Event]:
    """Answers with the conversation it was shown; some words make it misbehave."""
    last = messages[-1]["content"]
    if last == "too long":
        raise ContextFull("the prompt has 9 tokens and the context holds 8; shorten the conversation")
    if last == "bug":
        raise ZeroDivisionError
    yield Progress(0, 2000)
    if last == "think":
        yield Tokens((1,), reasoning="hmm, ")
        yield Tokens((2,), reasoning="so")
    if last in ("stuck", "endless"):
        yield from endless("more " if last == "endless" else "")
        return
    yield Progress(2000, 2000)
    for message in messages:
        yield Tokens((3,), f"[{message['role']}: {message['content']}]")
    yield Done("stop", STATS)


def endless(text: str) -> Iterator[Event]:
    try:
        while True:
            yield Tokens((1,), text)
            time.sleep(0.01)
    except Cancelled:
        yield Done("cancelled", STATS)


def fake_main() -> None:
    """What the subprocesses run: the real command over the fake model."""
    api.load = FakeModel(echo).load  # type: ignore[assignment]
    manage.fetch = lambda *_: True
    cli.main()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Run:
    """Calls the command in this process: `code`, `out`, `err` of the latest call, `model` it ran on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.patch = monkeypatch
        self.fetched: list[tuple[Any, ...]] = []
        self.model: FakeModel

    def __call__(self, *args: str, stdin: str | io.StringIO = "", err: io.StringIO | None = None) -> int:
        streams = io.StringIO(stdin) if isinstance(stdin, str) else stdin, io.StringIO(), err or io.StringIO()
        with self.patch.context() as patch:
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, stream)
            with pytest.raises(SystemExit) as left:
                cli.main(args)
        self.out, self.err = streams[1].getvalue(), streams[2].getvalue()
        return int(left.value.code or 0)

    def fake(self, *args: str, script: Callable[[Messages], Iterator[Event]] = echo, **streams: Any) -> int:
        self.model = FakeModel(script)
        self.patch.setattr(api, "load", self.model.load)
        self.fetched = []
        self.patch.setattr(manage, "fetch", lambda *args: self.fetched.append(args[:4]) or True)
        return self(*args, **streams)

    def complaint(self) -> str:
        """The one line an error is told in."""
        assert self.out == "" and "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("lisa: ")]
        assert self.err.endswith(line + "\n")
        return line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Run(monkeypatch)


def python(code: str, *args: str, path: Path = TESTS, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(TESTS.parent)])}
    command = [sys.executable, "-c", code, *args]
    options = {"stdin": subprocess.DEVNULL} | options
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, **options)


# Without MLX (F8)

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx", "mlx_lm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(params=["absent", "broken"])
def without_mlx(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    before = ABSENT
    if request.param == "broken":
        before = ""
        (tmp_path / "mlx").mkdir()
        (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    return lambda code, *args: python(before + code, *args, path=tmp_path)


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["chat", "--help"], ["models"], ["list"], ["show", "qwen3-8b"]], ids=" ".join
)
def test_F8_what_needs_no_model_works_without_mlx(without_mlx: Any, args: list[str]) -> None:
    done = without_mlx(COMMAND, *args)
    empty = "nothing is here yet; lisa models lists what can be had, lisa pull fetches it\n"
    said = (empty,) if args == ["list"] and not done.stdout else ("",)
    assert done.returncode == 0 and done.stderr in said and (done.stdout or args == ["list"])


def test_F8_the_doctor_says_that_mlx_is_missing(without_mlx: Any) -> None:
    done = without_mlx(COMMAND, "doctor", "--json")
    assert "Traceback" not in done.stderr and '"name": "MLX"' in done.stdout


def test_F8_import_works_without_mlx(without_mlx: Any) -> None:
    done = without_mlx("import lisa; print(lisa.__version__)")
    assert (done.returncode, done.stderr) == (0, "") and re.fullmatch(r"[\d.]+\n", done.stdout)


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "--model", "smollm2-135m", "--offline", "hello"],
        ["bench", "smollm2-135m", "--offline"],
        ["train", "smollm2-135m", "--offline"],
    ],
    ids=lambda args: args[0],
)
def test_F8_what_needs_a_model_says_in_one_line_that_mlx_is_missing(without_mlx: Any, args: list[str]) -> None:
    done = without_mlx(COMMAND, *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"lisa: MLX cannot be loaded \(.+\); reinstall it: .+\n", done.stderr)


def test_the_command_starts_without_heavy_libraries() -> None:
    heavy = "'mlx', 'mlx_lm', 'numpy', 'rich', 'prompt_toolkit', 'transformers', 'tokenizers', 'huggingface_hub'"
    done = python(f"import sys, lisa.cli; print([m for m in ({heavy}) if m in sys.modules])")
    assert done.stdout == "[]\n"


# Errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from folders import write_model

    return write_model(tmp_path_factory.mktemp("models") / "a model", "llama")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder to damage."""
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


def damaged(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def shard_missing(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")


def other_family(copy: Path) -> None:
    from folders import edit

    edit(copy / "config.json", model_type="mamba")


def no_template(copy: Path) -> None:
    from folders import edit

    edit(copy / "tokenizer_config.json", chat_template=None)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damaged, "F4 damaged or incomplete"),
        (shard_missing, "F2 lacks model-00002-of-00002.safetensors"),
        (other_family, "F11 model_type 'mamba' is not supported"),
        (no_template, "F6 has no chat template"),
    ],
)
def test_a_model_that_cannot_chat_is_one_line(run: Run, copy: Path, harm: Callable[[Path], None], words: str) -> None:
    harm(copy)
    assert run("chat", "--model", str(copy), "hello") == 1
    assert words.split(" ", 1)[1] in run.complaint()


def test_no_template_is_told_before_a_conversation_begins(run: Run, copy: Path) -> None:
    no_template(copy)
    assert run("chat", "--model", str(copy), stdin=Terminal("hello\n")) == 1
    assert "has no chat template" in run.complaint()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--model", "smolm2"], 1, "unknown model 'smolm2'"),
        (["--model", "./nowhere"], 1, "no such folder"),
        (["--model", "nobody/nothing", "--offline"], 1, "this run is offline"),
        (["--drafter", "oracle"], 2, "unknown drafter"),
        (["--drafter", "none", "--width", "3"], 2, "--width needs a drafter"),
        (["--model", "smollm2-135m", "--quantisation", "3bit"], 2, "not as '3bit'"),
        (["--model", str(TESTS), "--quantisation", "4bit"], 2, "not in the catalogue"),
    ],
)
def test_each_mistake_is_one_line_and_its_exit_code(run: Run, args: list[str], code: int, words: str) -> None:
    assert run("chat", *args, "hello") == code
    assert words in run.complaint()


@pytest.mark.parametrize(
    "option", [["--width", "16"], ["--top-p", "2"], ["--max-tokens", "0"], ["--nonsense"], ["--seed", "x"]]
)
def test_options_out_of_range_are_usage_mistakes_before_anything_is_loaded(run: Run, option: list[str]) -> None:
    assert run.fake("chat", *option, "hello") == 2
    assert run.model.loaded is None and option[0] in run.err and run.out == ""


@pytest.mark.parametrize("stdin", ["", " \n\n"])
@pytest.mark.parametrize("prompt", [[], [""], ["  "]])
def test_nothing_to_answer_is_a_usage_error(run: Run, prompt: list[str], stdin: str) -> None:
    assert run.fake("chat", *prompt, stdin=stdin) == 2
    assert "nothing to answer" in run.complaint() and run.model.loaded is None


def test_piped_bytes_that_are_no_text_are_a_usage_error() -> None:
    command = [sys.executable, "-c", COMMAND, "chat"]
    env = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=60, env=env)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr == b"lisa: what is piped in is not utf-8 text\n"


def test_an_error_of_the_request_is_one_line(run: Run) -> None:
    assert run.fake("chat", "too long") == ContextFull.exit_code == 2
    assert "the context holds 8" in run.complaint()


def test_a_bug_stays_a_traceback(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run.fake("chat", "bug")
    done = python(FAKE, "chat", "bug")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ZeroDivisionError")
    assert "locals" not in done.stderr and "\u2502" not in done.stderr


def test_a_table_grows_while_a_bench_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured:
        def __init__(self, speed: float):
            self._speed = speed

        def speed(self) -> float:
            return self._speed

    monkeypatch.setattr(sys, "stderr", Terminal())
    with cli._live() as (tell, watch):
        assert watch
        tell("pair [1] of 2")
        watch({"none": [Measured(10.0)], "dspine": []})
        watch({"none": [Measured(10.0), Measured(12.0)], "dspine": [Measured(22.0)]})
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "pair [1] of 2" in shown
    assert re.search(r"none +2 +11\.00 +1\.00", shown) and re.search(r"dspine +1 +22\.00 +2\.00", shown)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with cli._live() as (tell, watch):
        assert watch is None and tell is cli.say


@pytest.mark.parametrize(
    ("model", "fetched"), [("owner/name", True), ("qwen3-8b", True), ("some", False), ("./owner/name", False)]
)
def test_what_is_not_here_is_fetched_with_its_drafter_before_it_is_loaded(
    run: Run, model: str, fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    run.fake("chat", "-m", model, "--drafter", "dspine", "hi")
    assert run.fetched == ([(model, "dspine", None, False)] if fetched else [])
    run.fake("chat", "-m", model, "--offline", "hi")
    assert run.fetched == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run.fake("chat", "-m", model, "hi")
    assert run.fetched == []


# One answer


def test_the_bare_answer_is_on_stdout_and_the_rest_on_stderr(run: Run) -> None:
    assert run.fake("chat", "--model", "some", "hi") == 0
    assert run.out == "[user: hi]\n"
    assert run.err == "fake, loaded\n9 tokens, 4.0 tok/s, 1.50 accepted per round, 12 drafted, TTFT 0.25 s\n"


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        (["hi"], "", "hi"),
        ([], "a\n b\n", "a\n b"),
        (["sum up:"], "  a\nb\n", "sum up:\n\n  a\nb"),
        (["--", "--model"], "", "--model"),
        ([""], "piped", "piped"),
    ],
)
def test_prompt_and_piped_text_make_one_message(run: Run, args: list[str], stdin: str, message: str) -> None:
    assert run.fake("chat", "-m", "some", *args, stdin=stdin) == 0
    assert run.model.asked[0][0] == [{"role": "user", "content": message}]


def test_unset_sampling_options_keep_the_models_defaults(run: Run) -> None:
    run.fake("chat", "hi")
    assert run.model.asked[0][1]["sampling"] == FakeModel.sampling
    run.fake("chat", "--temperature", "0", "--seed", "7", "hi")
    assert run.model.asked[0][1]["sampling"] == Sampling(temperature=0.0, top_p=0.95, top_k=20, seed=7)


def test_every_option_arrives(run: Run) -> None:
    sampling = "--temperature 1 --top-p .5 --top-k 3 --min-p .1 --seed 4"
    penalties = "--repetition-penalty 1.1 --presence-penalty .2 --frequency-penalty .3"
    reply = "--max-tokens 5 --system S --stop one --stop two --no-thinking"
    load = "-m some --drafter ngram --width 6 --quantisation 4bit --offline --strict"
    load += " --drafter-config given.json --drafter-bits 8 --no-exact --no-kernels"
    no_blas = [] if sys.platform == "darwin" else ["--no-blas"]
    assert run.fake("chat", *f"{sampling} {penalties} {reply} {load}".split(), *no_blas, "hi") == 0
    messages, asked = run.model.asked[0]
    assert asked == {
        "sampling": Sampling(1.0, 3, 0.5, 0.1, 1.1, 0.2, 0.3, seed=4),
        "max_tokens": 5,
        "stop": ["one", "two"],
        "thinking": False,
    }
    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    name, loaded = run.model.loaded  # type: ignore[misc]
    assert name == "some" and loaded.pop("say") is cli.say
    assert loaded == {
        "drafter": "ngram",
        "drafter_config": Path("given.json"),
        "drafter_bits": 8,
        "width": 6,
        "quantisation": "4bit",
        "offline": True,
        "strict": True,
        "exact": False,
        "kernels": False,
        "blas": not no_blas,
    }


def test_a_thinking_switch_the_template_does_not_read_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "render", lambda self, messages, thinking=None: [0])
    assert run.fake("chat", "--no-thinking", "hi") == 2
    assert "cannot switch its thinking" in run.complaint()
    assert run.fake("chat", "hi") == 0


def test_a_bad_stop_string_is_told_before_a_conversation_begins(run: Run) -> None:
    assert run.fake("chat", "--stop", "", stdin=Terminal("hi\n")) == 2
    assert "stop must not be empty" in run.complaint()


def test_thinking_and_progress_are_for_terminals_only(run: Run) -> None:
    run.fake("chat", "-m", "some", "think")
    assert "hmm" not in run.out + run.err and "\r" not in run.err and "\x1b" not in run.out + run.err


def test_a_terminal_shows_progress_and_then_thinking_dimmed(run: Run) -> None:
    run.fake("chat", "-m", "some", "think", err=Terminal())
    assert run.out == "[user: think]\n"
    shown, rest = run.err.removeprefix("fake, loaded\n").split("\x1b[2m")
    line = "\rreading the prompt: 0 of 2000 tokens"
    assert shown == line + "\r" + " " * (len(line) - 1) + "\r"
    assert rest.startswith("hmm, so\x1b[0m\n9 tokens")


def test_no_color_keeps_thinking_and_drops_escape_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run.fake("chat", "-m", "some", "think", err=Terminal())
    assert "hmm, so\n9 tokens" in run.err and "\x1b" not in run.err


def test_a_short_prompt_shows_no_progress(run: Run) -> None:
    def short(messages: Messages) -> Iterator[Event]:
        yield from [
            Progress(0, 999),
            Progress(512, 999),
            Progress(999, 999),
            Tokens((1,), "ok\n"),
            Done("length", Stats()),
        ]

    run.fake("chat", "-m", "some", "hi", script=short, err=Terminal())
    assert (run.out, run.err) == ("ok\n", "fake, loaded\n0 tokens, cut off at the token limit\n")


def test_thinking_stays_in_the_message_beside_the_answer() -> None:
    model = FakeModel(echo)
    with model:
        message, reason, _ = answer(model.chat, [{"role": "user", "content": "think"}])
    assert message == {"role": "assistant", "content": "[user: think]", "reasoning_content": "hmm, so"}
    assert reason == "stop"


def test_ctrl_c_is_the_programs_own_again_after_a_reply(run: Run) -> None:
    before = signal.getsignal(signal.SIGINT)
    run.fake("chat", "hi")
    assert signal.getsignal(signal.SIGINT) is before


def process(*args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", FAKE, *args], env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def test_ctrl_c_ends_an_answer_cleanly() -> None:
    with process("chat", "-m", "some", "endless") as child:
        assert child.stdout.read(5) == "more "  # type: ignore[union-attr]
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert re.fullmatch("(more )*\n", out)
    assert re.fullmatch("fake, loaded\n9 tokens, .*, cancelled\n", err)


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    with process("chat", "-m", "some", "endless") as child:
        assert child.stdout.read(5) == "more "  # type: ignore[union-attr]
        child.stdout.close()  # type: ignore[union-attr]
        err = child.stderr.read()  # type: ignore[union-attr]
    assert child.returncode == 1 and err == "fake, loaded\n"


@pytest.mark.skipif(os.name == "nt", reason="descriptors")
def test_closed_streams_do_no_harm() -> None:
    code = "import os; os.closerange({}, {}); os.execv({!r}, {!r})"
    command = [sys.executable, "-c", FAKE, "chat", "-m", "some", "hi"]
    no_input, no_errors = (python(code.format(fd, fd + 1, sys.executable, command)) for fd in (0, 2))
    assert (no_input.returncode, no_input.stdout) == (0, "[user: hi]\n")
    assert (no_errors.returncode, no_errors.stdout, no_errors.stderr) == (0, "[user: hi]\n", "")


def test_a_pipe_nobody_ends_is_explained() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", COMMAND, "chat"]
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    child = subprocess.Popen(command, stdin=reading, stderr=subprocess.PIPE, env=env, text=True)
    os.close(reading)
    told, _, _ = select.select([child.stderr], [], [], 20)
    os.close(writing)
    err = child.communicate(timeout=60)[1]
    assert told and re.fullmatch("waiting for standard input .*\nlisa: nothing to answer.*\n", err)
    assert child.returncode == 2


# Which model

GB = 10**9


@pytest.mark.parametrize(
    ("machine", "quantisation", "here", "agrees", "name", "why"),
    [
        (Machine(False, 512 * GB), None, True, True, "smollm2-135m", "Apple silicon only"),
        (Machine(True, 17 * GB), None, True, True, "smollm2-135m", "too large for 17.0 GB"),
        (Machine(True, 24 * GB), None, True, True, "smollm2-135m", "too large"),
        (Machine(True, 26 * GB), None, True, None, "qwen3.8-27b", "on this machine"),
        (Machine(True, 26 * GB), None, False, True, "qwen3.8-27b", "you agreed"),
        (Machine(True, 26 * GB), None, False, False, "smollm2-135m", "--model qwen3.8-27b downloads 16.1 GB"),
        (Machine(True, 26 * GB), "8bit", True, True, "smollm2-135m", "too large"),
        (Machine(True, 64 * GB), "8bit", True, None, "qwen3.8-27b", "on this machine"),
        (Machine(True, 64 * GB), "bf16", True, True, "smollm2-135m", "does not come as bf16"),
    ],
)
def test_the_default_model(
    machine: Machine, quantisation: str | None, here: bool, agrees: bool | None, name: str, why: str
) -> None:
    def ask(question: str) -> bool:
        assert agrees is not None and "Qwen3.8 27B" in question and "16.1 GB" in question
        return agrees

    chosen = cli.default_model(machine, quantisation, lambda entry, weights: here, ask)
    assert chosen[0] == name and why in chosen[1]


def on_a_mac(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    def resolve(spec: str, **options: Any) -> None:
        assert options == {"offline": True}
        if not cached:
            raise NotCached(spec)

    monkeypatch.setattr(cli, "machine", lambda: Machine(True, 64 * GB))
    monkeypatch.setattr(hub, "resolve", resolve)


def test_a_cached_large_model_is_used_and_the_reason_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_mac(monkeypatch, cached=True)
    assert run.fake("chat", "hi") == 0
    assert run.model.loaded and run.model.loaded[0] == "qwen3.8-27b"
    assert run.err.startswith("using qwen3.8-27b: it is on this machine and fits its memory\n")


@pytest.mark.parametrize(
    ("typed", "options", "name"),
    [("\n", [], "smollm2-135m"), ("y\n", [], "qwen3.8-27b"), ("y\n", ["--offline"], "smollm2-135m")],
)
def test_a_download_is_agreed_to_in_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, typed: str, options: list[str], name: str
) -> None:
    on_a_mac(monkeypatch, cached=False)
    assert run.fake("chat", *options, "hi", stdin=Terminal(typed), err=Terminal()) == 0
    assert run.model.loaded and run.model.loaded[0] == name
    assert ("Download 16.1 GB and 4.0 GB for its drafter?" in run.err) == (not options) and run.out == "[user: hi]\n"


@pytest.mark.parametrize("streams", [{"stdin": "y\n", "err": Terminal()}, {"stdin": Terminal("y\n")}])
def test_nobody_is_asked_outside_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, streams: dict[str, Any]) -> None:
    on_a_mac(monkeypatch, cached=False)
    assert run.fake("chat", "hi", **streams) == 0
    assert run.model.loaded and run.model.loaded[0] == "smollm2-135m" and "Download" not in run.err


def test_models_lists_the_catalogue_and_what_is_here(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def resolve(spec: str, *, offline: bool) -> None:
        asked.append(spec)
        assert offline
        if spec.endswith("8bit"):
            raise NotCached(spec)
        if spec.startswith("mlx-community/Qwen3-8B"):
            raise DamagedModel(spec)

    def wheel_file(*_: Any, offline: bool) -> Path:
        assert offline
        raise NotCached("not here")

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.setattr(hub, "wheel_file", wheel_file)
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path)
    assert run("models") == 0 and run.err == ""
    lines = {line.split()[0]: line for line in run.out.splitlines()}
    assert list(lines) == [entry.name for entry in catalog.entries()]
    for entry in catalog.entries():
        assert all(field in lines[entry.name] for field in (entry.title, entry.licence))
    assert "4bit 16.1 GB (here), 8bit 29.5 GB" in lines["qwen3.8-27b"] and "4bit 4.6 GB (damaged)" in lines["qwen3-8b"]
    assert asked and "4bit 0.1 GB," in lines["smollm2-135m"]
    entry = catalog.find("smollm2-135m")
    assert entry and entry.weights[0].wheel
    (tmp_path / f"smollm2-135m-float32-{entry.weights[0].wheel.sha256[:8]}").mkdir()
    run("models")
    assert "4bit 0.1 GB (here)," in run.out


# The conversation


def test_the_prompt_never_reaches_a_redirected_stdout(run: Run) -> None:
    assert run.fake("chat", "-m", "some", stdin=Terminal("one\ntwo\n")) == 0
    assert run.out == "[user: one]\n[user: one][assistant: [user: one]][user: two]\n"
    assert run.err.count("> ") == 3


# Real models


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_stdout_is_exactly_the_models_answer(run: Run, tmp_path: Path, kind: str) -> None:
    from folders import write_model

    folder = write_model(tmp_path / "tiny", kind)
    with api.load(str(folder)) as model:
        text = model.chat([{"role": "user", "content": "hello"}], max_tokens=12).read().text
    assert run("chat", "--model", str(folder), "--max-tokens", "12", "hello") == 0
    assert text and run.out == text + "\n" * (not text.endswith("\n"))
    assert run.err.startswith("tiny, ") and "12 tokens" in run.err


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_a_written_folder_reads_back_as_it_was_written(tmp_path: Path, kind: str) -> None:
    import mlx.core as mx
    from folders import write_model
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    written = mx.load(str(write_model(tmp_path, kind) / "model.safetensors"))
    read = dict(tree_flatten(load_model(tmp_path)[0].parameters()))
    assert isinstance(written, dict) and read.keys() == written.keys()
    assert all(mx.array_equal(read[name], written[name]).item() for name in written)


def test_the_embedded_model_knows_the_capital_of_france() -> None:
    done = python(COMMAND, "chat", "--model", "smollm2-135m", "--max-tokens", "12", "What is the capital of France?")
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert "smollm2-135m" in done.stderr and "7 tokens" in done.stderr and "\x1b" not in done.stderr
