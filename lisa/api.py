"""`lisa.load(...)` and what it returns: text or messages in, events out, from any thread or coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lisa import blas as blas_
from lisa.errors import LisaError, NoBackend, UsageError
from lisa.types import Done, Event, Messages, Reason, Request, Sampling, Stats, TokenLogprob, Tokens
from lisa.worker import Job, Worker

if TYPE_CHECKING:  # importing these brings MLX in, and the BLAS must be chosen before
    from lisa.engine import Session
    from lisa.loader import Loaded

Say = Callable[[str], None]


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
    blas: bool = True,
    strict: bool = False,
    slots: int = 1,
    say: Say | None = None,
) -> Model:
    """Load a model by catalogue name, folder or Hub id.

    `drafter` is auto, none, ngram, dspine, dflash, eagle, a folder or a Hub id; "+ngram" behind a learned one puts
    prompt lookup in front of it. `drafter_config` is a JSON file of fields that win over the drafter's own, and
    `drafter_bits` 8 or 4 packs its matrices. `width` fixes how many tokens are drafted at once (0..15). `kv_bits` 8 or
    4 packs the attention cache. `chunk` is the number of prompt tokens read at once. `offline` opens no connection. On
    a Linux CPU, `blas` False declines MKL and `strict` asks for bit-equal rows (lisa/blas.py). `slots` requests run
    interleaved, each with a context of its own. `say` takes progress lines. Raises LisaError.
    """
    in_use = blas_.use(mkl=blas, strict=strict)
    worker = Worker(slots)

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
            say=say,
        )

    try:
        return Model(worker.call(loaded), worker, in_use)
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
    """The events of one request: iterate it with `for` or `async for`, once. Leaving the loop early cancels."""

    def __init__(self, job: Job):
        self._job = job

    def __iter__(self) -> Iterator[Event]:
        return iter(self._job)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._job.__aiter__()

    def cancel(self) -> None:
        """End the reply at the next round, from any thread."""
        self._job.cancel()

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

    def __init__(self, loaded: Loaded, worker: Worker, blas: blas_.Blas):
        self._loaded: Loaded | None = loaded
        self._worker = worker
        self._idle: list[Session] = []  # touched on the worker's thread only
        self.tokenizer = loaded.tokenizer
        self.name = loaded.name
        self.sampling = loaded.sampling
        self.context = loaded.engine.target.context
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
        thinking: bool | None = None,
        effort: str | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The assistant's next message.

        `sampling` None takes the model's defaults. `stop` strings end the answer and are not part of it. `logprobs` n
        adds each token's log-probability and the n best alternatives. `thinking`, `effort` and `template` are options
        of the model's chat template. Raises NoTemplate, UsageError; ContextFull arrives with the events.
        """
        prompt = self.tokenizer.render(messages, tools=tools, thinking=thinking, effort=effort, extra=template)
        return self._reply(prompt, sampling, max_tokens, stop, logprobs, reasoning=True)

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
        return self._reply(ids, sampling, max_tokens, stop, logprobs, reasoning=False)

    def _reply(
        self,
        prompt: list[int],
        sampling: Sampling | None,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        logprobs: int | None,
        reasoning: bool,
    ) -> Reply:
        sampling = self.sampling if sampling is None else sampling
        check_options(sampling, max_tokens, logprobs)
        _check_tokens([*prompt, *(token for token, _ in sampling.logit_bias)], self.tokenizer.vocab)
        reader = self.tokenizer.reader(stop=stop, prompt=prompt, reasoning=reasoning)
        request = Request(tuple(prompt), sampling, max_tokens, self.tokenizer.eos, logprobs, reader)
        return Reply(self._worker.stream(lambda: self._run(request)))

    def _run(self, request: Request) -> Generator[Event, None, None]:
        """On the worker's thread: one request on the session that has read most of its prompt."""
        session = self._session(request.tokens)
        try:
            yield from session.run(request)
        except LisaError:
            self._idle.append(session)
            raise
        # Not after any other error: what a bug has left in doubt is not used again.
        self._idle.append(session)

    def _session(self, tokens: tuple[int, ...]) -> Session:
        if not self._idle:
            assert self._loaded is not None
            return self._loaded.engine.session()
        best = max(self._idle, key=lambda session: session.shared(tokens))
        self._idle.remove(best)
        return best

    def redraft(self, drafter: str, *, say: Say | None = None) -> None:
        """Take another drafter, named as in `load`; the weights stay, the contexts are forgotten. Raises LisaError."""

        def redrafted() -> Loaded:
            from lisa.loader import redraft, remember

            assert self._loaded is not None
            loaded = redraft(self._loaded, drafter, say=say)
            remember(self._loaded)
            self._idle.clear()
            self._loaded = loaded
            return loaded

        self.about = self._about(self._worker.call(redrafted))

    def _about(self, loaded: Loaded) -> str:
        return f"{loaded.about}, BLAS {self._blas}" if " on CPU" in loaded.about else loaded.about

    def close(self) -> None:
        """Cancel every reply, end the thread and let go of the weights. Harmless to repeat."""
        self._worker.close()
        if self._loaded is not None:
            from lisa.loader import remember

            remember(self._loaded)
        self._idle.clear()
        self._loaded = None

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
