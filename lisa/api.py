"""`lisa.load(...)` and what it returns: text or messages in, events out, from any thread or coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from lisa import blas as blas_
from lisa.constrain import Constrained, Grammars
from lisa.errors import ContextFull, LisaError, NoBackend, UsageError
from lisa.grammar import call_grammar, either, json_grammar, led
from lisa.memory import Budget
from lisa.prefix import Timelines, places
from lisa.text import CLOSE, OPEN, TextReader
from lisa.tools import Style, Tool, style
from lisa.types import MARKS, Constraint, Done, Event, Messages, Reason, Request, Sampling, Stats, TokenLogprob, Tokens
from lisa.worker import Job, Worker

if TYPE_CHECKING:  # importing these brings MLX in, and the BLAS must be chosen before
    from lisa.engine import Session
    from lisa.loader import Loaded

Say = Callable[[str], None]

_USUAL = 4096
"""Tokens of an answer that memory is looked for when a request sets no limit."""


def load(
    model: str,
    *,
    drafter: str = "auto",
    drafter_config: str | Path | None = None,
    drafter_bits: int | None = None,
    width: int | None = None,
    quantisation: str | None = None,
    kv_bits: int | None = None,
    chunk: int = 512,
    offline: bool = False,
    exact: bool = True,
    kernels: bool = True,
    blas: bool = True,
    strict: bool = False,
    context: int | None = None,
    cache: float | None = None,
    slots: int = 1,
    queue: int | None = None,
    backlog: int | None = None,
    say: Say | None = None,
) -> Model:
    """Load a model by catalogue name, folder or Hub id.

    `drafter` is auto, none, ngram, dspine, dflash, eagle, a folder or a Hub id; "+ngram" behind a learned one puts
    prompt lookup in front of it. `drafter_config` is a JSON file of fields that win over the drafter's own, and
    `drafter_bits` 8 or 4 packs its matrices. `width` fixes how many tokens are drafted at once (0..15). `kv_bits` 8 or
    4 packs the attention cache. `chunk` is the number of prompt tokens read at once. `offline` opens no connection.
    `context` limits prompt and answer together to fewer tokens than the model was made for. `cache` is the most that
    earlier conversations may keep, in GB (None: a quarter of the memory that the weights leave). `slots` requests run
    interleaved, each with a context of its own; `queue` more may wait, and `backlog` events of one may be left unread
    (None: any number). `say` takes progress lines.

    On a Mac `kernels` False declines Lisa's own kernels, and `exact` False lets a plain step use whatever is fastest:
    its text may then differ from drafted text at near ties. On a Linux CPU `blas` False declines MKL and `strict` asks
    for bit-equal rows (lisa/blas.py). Raises LisaError.
    """
    if context is not None and context < 2:
        raise UsageError(f"a context holds at least 2 tokens, not {context}")
    if cache is not None and not 0 <= cache < inf:
        raise UsageError(f"cache is a number of GB, not {cache}")
    in_use = blas_.use(mkl=blas, strict=strict)
    worker = Worker(slots, queue, backlog)

    def loaded() -> Loaded:
        import_mlx()
        from lisa.loader import load as load_

        return load_(
            model,
            drafter=drafter,
            drafter_config=None if drafter_config is None else Path(drafter_config),
            drafter_bits=drafter_bits,
            width=width,
            quantisation=quantisation,
            kv_bits=kv_bits,
            chunk=chunk,
            offline=offline,
            exact=exact,
            kernels=kernels,
            say=say,
        )

    try:
        return Model(worker.call(loaded), worker, in_use, context, cache)
    except BaseException as error:
        worker.close(wait=not isinstance(error, KeyboardInterrupt))  # a download can take an hour
        raise


def import_mlx() -> None:
    """Bring MLX in, once the BLAS is chosen and on the thread that is to own it. Raises NoBackend."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise NoBackend(f"MLX cannot be loaded ({error}); reinstall it: pip install --force-reinstall mlx") from error


@dataclass(frozen=True)
class Answer:
    """A whole reply. `logprobs` is empty unless asked for."""

    text: str
    reasoning: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: Reason
    stats: Stats


class Reply:
    """The events of one request: iterate it with `for` or `async for`, once. Leaving the loop early cancels.

    `prompt` is what was asked, as tokens.
    """

    def __init__(self, job: Job, prompt: tuple[int, ...] = (), reader: TextReader | None = None):
        self._job = job
        self._reader = reader
        self.prompt = prompt

    def __iter__(self) -> Iterator[Event]:
        return iter(self._job)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._job.__aiter__()

    def cancel(self) -> None:
        """End the reply at the next round, from any thread."""
        self._job.cancel()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, once it has ended."""
        return None if self._reader is None else self._reader.stopped_by

    def read(self) -> Answer:
        """Wait for the whole reply."""
        return _answer(list(self))

    async def aread(self) -> Answer:
        return _answer([event async for event in self])


def _answer(events: Sequence[Event]) -> Answer:
    rounds = [event for event in events if isinstance(event, Tokens)]
    done = events[-1]
    assert isinstance(done, Done)
    return Answer(
        "".join(event.text for event in rounds),
        "".join(event.reasoning for event in rounds),
        tuple(token for event in rounds for token in event.ids),
        tuple(entry for event in rounds for entry in event.logprobs),
        done.reason,
        done.stats,
    )


class Model:
    """A loaded model. Its methods may be called from several threads; requests beyond `slots` wait their turn."""

    def __init__(
        self,
        loaded: Loaded,
        worker: Worker,
        blas: blas_.Blas,
        context: int | None = None,
        cache: float | None = None,
    ):
        self._loaded: Loaded | None = loaded
        self._worker = worker
        self._grammars = Grammars(loaded.tokenizer)
        self._vocab = loaded.engine.target.vocab
        self._budget = Budget(*_sizes(loaded), kept=None if cache is None else int(cache * 1e9))
        self._timelines = Timelines()  # touched on the worker's thread only
        self._chunk = loaded.engine.chunk
        self.tokenizer = loaded.tokenizer
        self.name = loaded.name
        self.sampling = loaded.sampling
        self.drafter = loaded.drafter
        limits = [limit for limit in (context, loaded.engine.target.context) if limit is not None]
        self.context = min(limits, default=None)
        self.memory = self._budget.weights  # bytes of weights and of idle contexts, as of the last reply
        self._blas = blas
        self.about = self._about(loaded)

    def chat(
        self,
        messages: Messages,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel: bool = True,
        schema: Mapping[str, Any] | Literal["object"] | None = None,
        thinking: bool | None = None,
        thinking_budget: int | None = None,
        effort: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The assistant's next message.

        `sampling` None takes the model's defaults. `stop` strings end the answer and are not part of it. `logprobs` n
        adds each token's log-probability and the n best alternatives. `thinking`, `effort` and `template` are options
        of the model's chat template; thinking is ended after `thinking_budget` tokens.

        `tools` are shown to the model unless `tool_choice` is none; required, or the name of one, makes it call
        (lisa/tools.py reads the calls out of the text), without `parallel` only once. `schema` is a JSON schema that
        the answer fits, "object" any JSON object; beside tools the model may call one instead. Raises NoTemplate,
        ContextFull, MemoryFull, Busy, UsageError.
        """
        chosen = self._tools(tools, tool_choice, schema)
        shown = [tool.described for tool in chosen]
        prompt = self.tokenizer.render(messages, tools=shown, thinking=thinking, effort=effort, extra=template)
        if thinking is not None or thinking_budget is not None:
            self._check_thinking(thinking, thinking_budget)
        constraint = self._constraint(prompt, self._grammar(chosen, tool_choice, parallel, schema), thinking_budget)
        turns = self.tokenizer.turns(prompt)
        return self._reply(prompt, sampling, max_tokens, stop, logprobs, True, constraint, turns)

    def _constraint(self, prompt: Sequence[int], grammar: str | None, budget: int | None) -> Constraint | None:
        if grammar is None and budget is None:
            return None
        tail = self.tokenizer.decode(prompt[-16:])
        may_think = self.tokenizer.raw.token_to_id(CLOSE) is not None and not tail.rstrip().endswith(CLOSE)
        matcher = None if grammar is None else self._grammars.matcher(led(grammar, may_think))
        return Constrained(self.tokenizer, self._vocab, tail, matcher, budget)

    def _tools(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: str,
        schema: Mapping[str, Any] | Literal["object"] | None,
    ) -> list[Tool]:
        """The tools the model is shown."""
        given = [_tool(tool) for tool in tools or ()]
        if choice not in ("auto", "none", "required", *(tool.name for tool in given)):
            raise UsageError(f"tool_choice {choice!r} is not among the tools")
        if choice == "required" and not given:
            raise UsageError("tool_choice asks for a call, and there are no tools")
        if not given or choice == "none":
            return []
        if self.calls is None:
            raise UsageError(f"tools: the chat template of {self.name} knows none; leave them out")
        if schema is not None and choice != "auto":
            raise UsageError("tool_choice and a schema for the answer exclude one another")
        return given if choice in ("auto", "required") else [tool for tool in given if tool.name == choice]

    def _grammar(
        self,
        tools: list[Tool],
        choice: str,
        parallel: bool,
        schema: Mapping[str, Any] | Literal["object"] | None,
    ) -> str | None:
        answer = None if schema is None else json_grammar(None if schema == "object" else schema)
        if not tools or self.calls is None:
            return answer
        literal = self._grammars.literal
        if answer is not None:
            return either(call_grammar(tools, self.calls, literal, several=parallel), answer)
        if choice == "auto" and not any(tool.strict for tool in tools):
            return None
        return call_grammar(tools, self.calls, literal, several=parallel, free_text=choice == "auto")

    def _check_thinking(self, thinking: bool | None, budget: int | None) -> None:
        """Raise for what the template would ignore."""
        if budget is not None and budget < 0:
            raise UsageError(f"thinking_budget is a number of tokens, not {budget}")
        if (thinking or budget is not None) and not self.thinks:
            raise UsageError(f"thinking: {self.name} does not think; leave it out")
        if thinking is False and self.thinks and "enable_thinking" not in self._template:
            raise UsageError(f"thinking: {self.name} cannot be told not to think; leave it out")

    @property
    def _template(self) -> str:
        template = self.tokenizer.fast.chat_template
        return template if isinstance(template, str) else "".join((template or {}).values())

    @property
    def thinks(self) -> bool:
        """Whether the model's chat template knows thinking."""
        return self.tokenizer.raw.token_to_id(CLOSE) is not None and any(
            word in self._template for word in (OPEN, "enable_thinking")
        )

    @property
    def calls(self) -> Style | None:
        """How the model writes tool calls; None for a model whose template shows it no tools."""
        return style(self._template)

    def reads(self, option: str) -> bool:
        """Whether the chat template looks at an option of this name."""
        return option in self._template

    def prompt_tokens(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, thinking: bool | None = None
    ) -> int:
        """Tokens of the prompt that `chat` would read."""
        shown = [tool.described for tool in self._tools(tools, "auto", None)]
        return len(self.tokenizer.render(messages, tools=shown, thinking=thinking))

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
    ) -> Reply:
        """Plain completion of a text or of token ids: no template, nothing split off. Options as in `chat`."""
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        return self._reply(ids, sampling, max_tokens, stop, logprobs, False)

    def _reply(
        self,
        prompt: list[int],
        sampling: Sampling | None,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        logprobs: int | None,
        reasoning: bool,
        constraint: Constraint | None = None,
        turns: Sequence[int] = (),
    ) -> Reply:
        sampling = self.sampling if sampling is None else sampling
        check_options(sampling, max_tokens, logprobs)
        _check_tokens([*prompt, *(token for token, _ in sampling.logit_bias)], self.tokenizer.vocab)
        room = self._room(prompt)
        longest = room if max_tokens is None else max_tokens if room is None else min(room, max_tokens)
        # An answer without a limit of its own is expected to need this much; it may grow past it while there is memory.
        need = self._budget.need(len(prompt) + min(longest or _USUAL, max_tokens or _USUAL))
        self._budget.check(need)
        reader = self.tokenizer.reader(stop=stop, prompt=prompt, reasoning=reasoning)
        marks = places(turns, len(prompt), self._chunk)
        request = Request(tuple(prompt), sampling, longest, self.tokenizer.eos, logprobs, reader, constraint, marks)
        return Reply(self._worker.stream(lambda: self._run(request, need)), request.tokens, reader)

    def _room(self, prompt: Sequence[int]) -> int | None:
        """Tokens left for an answer. Raises ContextFull."""
        if not prompt:
            raise ContextFull("the prompt is empty; give at least one token")
        if self.context is not None and len(prompt) >= self.context:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context}; shorten the conversation"
            )
        return None if self.context is None else self.context - len(prompt)

    def _run(self, request: Request, need: int) -> Generator[Event, None, None]:
        """On the worker's thread: one request on the session that spares most of reading its prompt."""
        self._budget.check(need, self._budget.in_use)
        session = self._session(request.tokens, need)
        try:
            marks = self._budget.marks(min(MARKS, len(session.marks) + len(request.marks)))
            if self._budget.fits(need + marks, 0):
                need += marks
            else:  # an answer is worth more than a faster next turn
                request = replace(request, marks=())
            need = max(need, session.nbytes)
            self._make_room(need)
            with self._budget.held(need):
                yield from session.run(request)
        except LisaError:
            self._keep(session)
            raise
        # Not after any other error: what a bug has left in doubt is not used again.
        self._keep(session)

    def _session(self, tokens: tuple[int, ...], need: int) -> Session:
        """The session that `tokens` go on from, a branch of one that begins alike, or a new one."""
        found = self._timelines.find(tokens)
        if found is None:
            return self._new()
        if not found.goes_on and self._make_room(need, spare=found.session):
            self._timelines.keep(found.session)
            return found.session.branch(tokens)
        session = self._timelines.take(found.session)
        # Buffers of a longer conversation may be too large by now, beside others that run.
        return session if self._budget.fits(session.nbytes, 0) else self._new()

    def _make_room(self, need: int, spare: Session | None = None) -> bool:
        """Contexts of earlier conversations give way to a request, `spare` excepted; whether there is room."""
        return self._timelines.make_room(lambda: self._budget.fits(need, self._timelines.nbytes), spare)

    def _keep(self, session: Session) -> None:
        if self._loaded is not None and session.engine is self._loaded.engine:  # else its drafter has been replaced
            self._timelines.keep(session)
            # The latest one stays if any may, so that a long conversation is not read again each turn.
            latest = session if self._budget.caches else None
            self._timelines.make_room(lambda: self._timelines.nbytes <= self._budget.caches, spare=latest)
        self.memory = self._budget.weights + self._timelines.nbytes

    @property
    def alive(self) -> bool:
        """Whether the engine's thread lives."""
        return self._worker.alive

    @property
    def unfinished(self) -> int:
        """Replies that run or wait."""
        return self._worker.unfinished

    def _new(self) -> Session:
        assert self._loaded is not None
        return self._loaded.engine.session()

    def uncovered(self) -> list[str]:
        """What of the model none of Lisa's kernels computes, and why, a line a reason."""
        from lisa import layers

        assert self._loaded is not None
        target = self._loaded.engine.target
        return self._worker.call(lambda: layers.uncovered(target.model, target.kernels))

    def redraft(self, drafter: str, *, say: Say | None = None) -> None:
        """Take another drafter, named as in `load`; the weights stay, the contexts are forgotten. Raises LisaError.

        Interrupted, the drafter stays; a download under way ends before the next reply begins.
        """
        given_up = False

        def redrafted() -> Loaded:
            from lisa.loader import keep_pace, redraft

            assert self._loaded is not None
            loaded = redraft(self._loaded, drafter, say=say)
            if given_up:
                return self._loaded
            keep_pace(self._loaded)
            self._timelines.clear()
            self._loaded, self.drafter = loaded, loaded.drafter
            self._budget.resize(*_sizes(loaded))
            self.memory = self._budget.weights
            return loaded

        try:
            self.about = self._about(self._worker.call(redrafted))
        except KeyboardInterrupt:
            given_up = True
            raise

    def _about(self, loaded: Loaded) -> str:
        return f"{loaded.about}, BLAS {self._blas}" if " on CPU" in loaded.about else loaded.about

    def close(self) -> None:
        """Cancel every reply, end the thread and let go of the weights. Harmless to repeat."""
        self._worker.close()
        if self._loaded is not None:
            from lisa.loader import keep_pace

            keep_pace(self._loaded)
        self._timelines.clear()
        self._loaded = None

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sizes(loaded: Loaded) -> tuple[int, int, int, int]:
    """For a Budget: the room less the working memory, the weights, a token of context, and a context of none."""
    room, need = loaded.room, loaded.need
    return room.bytes - need.working, need.weights + need.drafter, need.kv + need.drafter_kv, need.state


def _tool(tool: Mapping[str, Any]) -> Tool:
    """A tool as chat APIs write it: {"type": "function", "function": {"name", "description", "parameters"}}."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError('tools: each is {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", parameters, bool(function.get("strict")))


def check_options(sampling: Sampling, max_tokens: int | None = None, logprobs: int | None = None) -> None:
    """UsageError for an option outside its range, naming it."""
    s = sampling
    wrong = [
        ("temperature", s.temperature, "at least 0", 0 <= s.temperature < inf),
        ("top_k", s.top_k, "0 (off) or more", s.top_k >= 0),
        ("top_p", s.top_p, "above 0 and at most 1", 0 < s.top_p <= 1),
        ("min_p", s.min_p, "between 0 and 1", 0 <= s.min_p <= 1),
        ("repetition_penalty", s.repetition_penalty, "above 0", 0 < s.repetition_penalty < inf),
        ("presence_penalty", s.presence_penalty, "a number", isfinite(s.presence_penalty)),
        ("frequency_penalty", s.frequency_penalty, "a number", isfinite(s.frequency_penalty)),
        ("seed", s.seed, "between 0 and 2**64 - 1", s.seed is None or 0 <= s.seed < 1 << 64),
        ("rule", s.rule, "coupled or rejection", s.rule in ("coupled", "rejection")),
        ("max_tokens", max_tokens, "at least 1", max_tokens is None or max_tokens >= 1),
        ("logprobs", logprobs, "between 0 and 20", logprobs is None or 0 <= logprobs <= 20),
    ]
    for name, value, wanted, fine in wrong:
        if not fine:
            raise UsageError(f"{name} must be {wanted}, not {value!r}")


def _check_tokens(tokens: Sequence[int], vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise UsageError(f"token id {token} is outside the vocabulary of {vocab}")
