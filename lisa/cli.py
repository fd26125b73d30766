"""The `lisa` command: reads options, chooses a model, reports errors. Works, and says so, where MLX does not."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import lisa
from lisa import api, bandwidth, catalog, drawing, fit, hub, manage
from lisa.chat import answer, converse
from lisa.errors import DamagedModel, LisaError, NotCached, UsageError
from lisa.memory import Machine, gigabytes, machine
from lisa.screen import is_terminal, say, wrapped
from lisa.slash import Conversation
from lisa.types import MAX_WIDTH, Message

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

# Options that several commands share; those about models are in manage.py.
DrafterName = Annotated[
    str, typer.Option(help="auto, none, ngram, dspine, dflash, eagle, a folder or a Hub id; +ngram goes behind.")
]
DrafterConfig = Annotated[
    Path | None, typer.Option(dir_okay=False, help="JSON fields that win over the drafter's own.")
]
DrafterBits = Annotated[int | None, typer.Option(help="8 or 4 packs the drafter's matrices.")]
Width = Annotated[int | None, typer.Option(min=0, max=MAX_WIDTH, help="Tokens drafted at once.")]
Strict = Annotated[bool, typer.Option("--strict", help="Bit-equal rows on a CPU, slower.")]
NoBlas = Annotated[bool, typer.Option("--no-blas", help="Leave Intel MKL out, on Linux.")]
NoExact = Annotated[bool, typer.Option("--no-exact", help="On a Mac: plain steps as fast as can be.")]
NoKernels = Annotated[bool, typer.Option("--no-kernels", help="On a Mac: MLX's own ops alone.")]


app.command()(manage.pull)
app.command("list")(manage.list_models)
app.command()(manage.show)
app.command()(manage.rm)
app.command("doctor")(manage.check_machine)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. Exits with 0, a LisaError's exit_code, 2 for a usage mistake or 130 after Ctrl-C."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  MLX cannot read a file that was given descriptor 0
    # What comes in must be text; an answer may hold what this terminal cannot show.
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        app(args=args, prog_name="lisa")
    except LisaError as error:
        say(f"lisa: {error}")
        sys.exit(error.exit_code)


def _version(asked: bool) -> None:
    if asked:
        print(f"lisa {lisa.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Local language models with parallel drafting."""


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(help="Answer this and exit. Text piped in is put after it.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Catalogue name, folder or Hub id.", autocompletion=manage.names),
    ] = None,
    drafter: DrafterName = "auto",
    drafter_config: DrafterConfig = None,
    drafter_bits: DrafterBits = None,
    width: Width = None,
    quantisation: manage.Quantisation = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Keep the likeliest tokens of this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep this many likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Drop tokens below this share of the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(min=0, help="1 is off.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest reply.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End a reply before this text; may be repeated.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Where a model has both.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Neither read nor write the history of messages.")] = False,
    offline: manage.Offline = False,
    strict: Strict = False,
    no_blas: NoBlas = False,
    no_exact: NoExact = False,
    no_kernels: NoKernels = False,
) -> None:
    """Talk to a model: a conversation in a terminal, one answer to PROMPT or to piped text.

    Sampling options not given keep the model's own defaults.
    """
    if drafter == "none" and width:
        raise UsageError("--width needs a drafter: leave it out or choose another --drafter than none")
    if no_blas and sys.platform == "darwin":
        raise UsageError("--no-blas leaves out Intel MKL, which is never used on a Mac: leave out the option")
    message = _message(prompt)
    named = model is not None
    if model is None:
        model, why = default_model(machine(), quantisation, _here, _declines if offline else _agrees)
        say(f"using {model}: {why}")
    _fetch(model, drafter, quantisation, offline, agreed=not named)

    def load(name: str) -> api.Model:
        return api.load(
            name,
            drafter=drafter,
            drafter_config=drafter_config,
            drafter_bits=drafter_bits,
            width=width,
            quantisation=quantisation if name == model else None,
            offline=offline,
            blas=not no_blas,
            strict=strict,
            exact=not no_exact,
            kernels=not no_kernels,
            say=say,
        )

    def another(name: str) -> api.Model:
        try:
            _fetch(name, drafter, None, offline)
        except typer.Exit:
            raise NotCached(f"{name} was not downloaded") from None
        return load(name)

    try:
        loaded = load(model)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    talk = Conversation(
        loaded, model, another, replace(loaded.sampling, **chosen), opening, max_tokens, stop or None, thinking
    )
    try:
        say(wrapped(loaded.about))
        _check(loaded, opening, stop, thinking)
        if message is None:
            converse(talk, private=private)
        elif answer(talk.ask, [*opening, {"role": "user", "content": message}])[1] == "cancelled":
            raise typer.Exit(130)
    finally:
        talk.model.close()


def _fetch(model: str, drafter: str, quantisation: str | None, offline: bool, agreed: bool = False) -> None:
    """Download what of a model on the Hub is not here, with a bar and, where it is large, with a question first."""
    on_the_hub = catalog.find(model) is not None or ("/" in model and not Path(model).expanduser().exists())
    if offline or hub.offline_environment() or not on_the_hub or model.startswith((".", "/", "~")):
        return  # loading says what is missing
    if not manage.fetch(model, drafter, quantisation, offline, manage.agrees_or_refuses(agreed)):
        raise typer.Exit(1)


def _message(prompt: str | None) -> str | None:
    """What to answer once, PROMPT and then what is piped in; None for a conversation."""
    if is_terminal(sys.stdin):
        if prompt is None:
            return None
        piped = ""
    else:
        piped = _piped()
    text = "\n\n".join(part for part in (prompt, piped) if part)
    if not text.strip():
        raise UsageError("nothing to answer: give a PROMPT, pipe some text in, or run `lisa chat` in a terminal")
    return text


def _piped() -> str:
    # Some shells and job runners leave a pipe open that nobody writes to.
    notice = threading.Timer(2, say, ["waiting for standard input to end; if nothing is piped in: < /dev/null"])
    notice.daemon = True
    notice.start()
    try:
        return sys.stdin.read().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"what is piped in is not {error.encoding} text") from error
    finally:
        notice.cancel()


def _check(model: api.Model, opening: list[Message], stop: list[str] | None, thinking: bool | None) -> None:
    """Raise before the first message what every message would raise, and for a switch the template does not read."""
    probe = [*opening, {"role": "user", "content": "?"}]
    prompt = model.tokenizer.render(probe, thinking=thinking)
    if thinking is not None and prompt == model.tokenizer.render(probe, thinking=not thinking):
        raise UsageError(f"{model.name} cannot switch its thinking: leave out --thinking and --no-thinking")
    model.tokenizer.reader(stop=stop)


def default_model(
    machine: Machine,
    quantisation: str | None,
    here: Callable[[catalog.Entry, catalog.Weights], bool],
    agrees: Callable[[str], bool],
) -> tuple[str, str]:
    """What to run when nobody says, and why. `here`: is it on this machine; `agrees` puts a question to the user."""
    large, small = (next(e for e in catalog.entries() if e.default == where) for where in ("metal", "anywhere"))
    weights = next((w for w in large.weights if quantisation in (None, w.quantisation)), None)
    if not machine.metal:
        return small.name, f"{large.name} is chosen on Apple silicon only"
    if weights is None:
        return small.name, f"{large.name} does not come as {quantisation}"
    size = gigabytes(weights.bytes)
    if not fit.of_entry(large, weights, machine).fits(fit.room(machine)):
        return small.name, f"{large.name} ({size}) is too large for {gigabytes(machine.memory)} of memory"
    if here(large, weights):
        return large.name, "it is on this machine and fits its memory"
    drafter = large.drafters[0].bytes if large.drafters else None
    both = f"{size} and {gigabytes(drafter)} for its drafter" if drafter else size
    if agrees(f"{large.title} is not on this machine. Download {both}?"):
        return large.name, "you agreed to its download"
    return small.name, f"{large.name} is not on this machine; --model {large.name} downloads {size}"


def _here(entry: catalog.Entry, weights: catalog.Weights) -> bool:
    """Whether it can be loaded without a download. Raises DamagedModel."""
    if weights.folder is not None:
        return True
    try:
        if (wheel := weights.wheel) is None:
            hub.resolve(str(weights.repo), offline=True)
        elif not any(hub.cache_folder().glob(hub.converted_name(entry.name, "*", wheel.sha256))):
            hub.wheel_file(wheel.requirement, wheel.file, wheel.sha256, hub.cache_folder(), offline=True)
    except NotCached:
        return False
    return True


def _agrees(question: str) -> bool:
    """No without a terminal."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr) and manage.confirmed(question)


def _declines(question: str) -> bool:
    return False


@app.command()
def serve(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Catalogue name, folder or Hub id.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's own need a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    api_key_file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File with the key clients must show; or LISA_API_KEY.")
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A name clients may reach this machine by.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="A web site that may ask, as https://name.")] = None,
    max_concurrent: Annotated[int, typer.Option(min=1, max=64, help="Requests decoded in turn.")] = 4,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait beside them.")] = 64,
    timeout: Annotated[float | None, typer.Option(min=0, help="Most seconds a reply may take.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Most tokens of prompt and answer together.")] = None,
    drafter: DrafterName = "auto",
    drafter_config: DrafterConfig = None,
    drafter_bits: DrafterBits = None,
    width: Width = None,
    kv_bits: Annotated[int | None, typer.Option(help="8 or 4 packs the attention cache.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens read at once, between rounds of others.")] = 512,
    quantisation: manage.Quantisation = None,
    offline: manage.Offline = False,
    no_exact: NoExact = False,
    no_kernels: NoKernels = False,
    cache: Annotated[
        float | None,
        typer.Option(min=0, help="GB that earlier conversations may keep; else a quarter of what is free."),
    ] = None,
    strict: Strict = False,
    no_blas: NoBlas = False,
) -> None:
    """Serve a model to programs: OpenAI's chat completions, completions and responses, Anthropic's messages, a page.

    docs/server.md has examples. Nothing is reachable from another machine unless --host says so.
    """
    if no_blas and sys.platform == "darwin":
        raise UsageError("--no-blas leaves out Intel MKL, which is never used on a Mac: leave out the option")
    try:
        from lisa.server import run
        from lisa.server.desk import Settings
    except ImportError as error:
        raise UsageError(f'lisa serve needs {error.name}: pip install "lisa[serve]"') from error
    key = run.read_key(None if api_key_file is None else str(api_key_file), os.environ.get("LISA_API_KEY"))
    listening = run.bind(host, port, key)
    if model is None:
        model, why = default_model(machine(), quantisation, _here, _declines if offline else _agrees)
        say(f"using {model}: {why}")
    load = partial(
        api.load,
        model,
        drafter=drafter,
        drafter_config=drafter_config,
        drafter_bits=drafter_bits,
        width=width,
        quantisation=quantisation,
        kv_bits=kv_bits,
        chunk=chunk,
        offline=offline,
        blas=not no_blas,
        strict=strict,
        exact=not no_exact,
        kernels=not no_kernels,
        context=context,
        cache=cache,
        slots=max_concurrent,
        queue=max_queue,
        backlog=1024,
        say=say,
    )
    hosts = (host, *(allow_host or ()))
    run.serve(listening, load, Settings(key, hosts, tuple(allow_origin or ()), timeout=timeout), say)


@app.command()
def bench(
    model: manage.Model,
    drafters: Annotated[str, typer.Option(help="What to compare with plain decoding, separated by commas.")] = "auto",
    prompts: Annotated[Path | None, typer.Option(dir_okay=False, help="JSON lines; the model's own or Lisa's.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each prompt.")] = 32,
    pairs: Annotated[int, typer.Option(min=9, help="Measurements of each drafter.")] = 9,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    rule: Annotated[str, typer.Option(help="coupled or rejection, above temperature 0.")] = "coupled",
    width: Width = None,
    quantisation: manage.Quantisation = None,
    offline: manage.Offline = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the whole report on the last line, as JSON.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Append the report to the machine's results.")] = False,
    contexts: Annotated[str, typer.Option(help="Context lengths to measure too, separated by commas.")] = "",
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw speed and acceptance into this file.")] = None,
) -> None:
    """Measure drafters against plain decoding: parity first, then speed, acceptance and memory."""
    if plot is not None:
        drawing.check(plot)  # before an hour of measuring
    lengths = _numbers(contexts, "--contexts are numbers of tokens")
    from lisa.blas import use

    use()  # before MLX comes in
    api.import_mlx()
    from lisa import measure

    _fetch(model, "none", quantisation, offline)

    settings = measure.Settings(tokens, pairs, temperature, seed, rule, width)  # type: ignore[arg-type]
    names = [name.strip() for name in drafters.split(",") if name.strip()]
    with _live() as (tell, watch):
        report = measure.run(
            model,
            names,
            prompts,
            settings,
            quantisation=quantisation,
            offline=offline,
            say=tell,
            frontiers=lengths,
            watch=watch,
        )
    for line in measure.table(report):
        print(line)
    bandwidth.keep(report["machine"]["cpu"], report["bandwidth"]["bytes_s"], hub.cache_folder())
    if plot is not None:
        drawing.draw(report, plot)
        say(f"drawn into {plot}")
    if save:
        say(f"saved to {measure.save(report)}")
    if as_json:
        print(json.dumps(report))


@contextmanager
def _live() -> Iterator[tuple[Callable[[str], None], Callable[[Mapping[str, Sequence[Any]]], None] | None]]:
    """How lines are said, and on a terminal a table of the medians so far; it is gone when the report comes."""
    if not is_terminal(sys.stderr):
        yield say, None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def tell(line: str) -> None:
            live.console.print(line, markup=False, highlight=False)  # above the table

        def watch(measured: Mapping[str, Sequence[Any]]) -> None:
            table = Table("drafter", "measured", "tok/s", "to plain", box=None)
            speeds = {name: median(run.speed() for run in runs) for name, runs in measured.items() if runs}
            for name, speed in speeds.items():
                ratio = f"{speed / speeds['none']:.2f}" if "none" in speeds else ""
                table.add_row(name, str(len(measured[name])), f"{speed:.2f}", ratio)
            live.update(table, refresh=True)

        yield tell, watch


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="The target: catalogue name, folder or Hub id.")],
    kind: Annotated[str, typer.Option(help="dspine, dflash or eagle.")] = "dspine",
    out: Annotated[Path | None, typer.Option(file_okay=False, help="The drafter folder; MODEL-KIND here.")] = None,
    data: Annotated[
        Path | None, typer.Option(dir_okay=False, help='Lines of {"messages": [...]} or {"prompt": "..."}.')
    ] = None,
    adapt: Annotated[Path | None, typer.Option(file_okay=False, help="Start from this drafter folder.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Of training, once there are answers.")] = 60,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of --minutes.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to train on.")] = 200_000,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 256,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="Share of answers at temperature 1.")] = 0.25,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Where a model has both.")] = None,
    work: Annotated[Path | None, typer.Option(file_okay=False, help="Answers and features; OUT-work.")] = None,
    budget: Annotated[float, typer.Option(min=0, help="GB of features on disk.")] = 8,
    parallel: Annotated[int, typer.Option(min=1, help="Answers decoded at once.")] = 32,
    layers: Annotated[int | None, typer.Option(help="Of a new block drafter.")] = None,
    block: Annotated[int | None, typer.Option(help="Slots, the anchor included.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Numbers in a feature of DSpine.")] = None,
    taps: Annotated[str | None, typer.Option(help="Target layers read, separated by commas.")] = None,
    objective: Annotated[str, typer.Option(help="mixed or published.")] = "mixed",
    head: Annotated[str, typer.Option(help="auto, full or sampled vocabulary.")] = "auto",
    storage: Annotated[str, typer.Option(help="float16, or 8bit, which only Lisa reads.")] = "float16",
    rate: Annotated[float, typer.Option(min=0, help="Learning rate at its highest.")] = 2e-3,
    batch: Annotated[int, typer.Option(min=1, help="Conversations a step.")] = 4,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks of each conversation a step.")] = 32,
    evaluate: Annotated[float, typer.Option(min=0, help="Minutes (with --steps: steps) between measurements.")] = 5,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    quantisation: manage.Quantisation = None,
    offline: manage.Offline = False,
) -> None:
    """Train a drafter on a model's own answers. Ctrl-C saves; the same command goes on where it stopped."""
    from lisa import train as training

    settings = training.Settings(
        model=model,
        kind=kind,  # type: ignore[arg-type]  # it checks all of these itself
        out=out or Path(f"{Path(model).name}-{kind}"),
        data=data,
        work=work,
        adapt=adapt,
        minutes=minutes,
        steps=steps,
        evaluate=evaluate,
        tokens=tokens,
        answer=answer_tokens,
        sampled=sampled,
        budget=budget,
        layers=layers,
        block=block,
        taps=None if taps is None else _numbers(taps, "--taps are layer numbers"),
        rank=rank,
        objective=objective,  # type: ignore[arg-type]
        head=head,  # type: ignore[arg-type]
        storage=storage,  # type: ignore[arg-type]
        rate=rate,
        batch=batch,
        anchors=anchors,
        parallel=parallel,
        seed=seed,
        quantisation=quantisation,
        thinking=thinking,
        offline=offline,
    )
    _fetch(model, "none", quantisation, offline)
    trained = training.train(settings, say)
    print(f"{trained.out}: {trained.accepted:.2f} tokens a round on held-out prompts")
    if not trained.finished:
        raise typer.Exit(130)


def _numbers(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text.strip() else ()
    except ValueError:
        raise UsageError(f"{what} separated by commas, not {text!r}") from None


@app.command()
def models() -> None:
    """List the catalogue and what of it is on this machine. Opens no connection."""
    for entry in catalog.entries():
        sizes = ", ".join(f"{w.quantisation} {gigabytes(w.bytes)}{_mark(entry, w)}" for w in entry.weights)
        print(f"{entry.name:<14}{entry.title:<23}{entry.licence:<12}{sizes}")


def _mark(entry: catalog.Entry, weights: catalog.Weights) -> str:
    try:
        return " (here)" if _here(entry, weights) else ""
    except DamagedModel:
        return " (damaged)"
