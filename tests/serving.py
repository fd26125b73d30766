"""A running server for tests: a scripted model that says what a test wants, behind real HTTP."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from tiny import ScriptedDrafter, ScriptedTarget
from tokenizers_tiny import make_tokenizer

from lisa.api import Model
from lisa.blas import use
from lisa.engine import Engine
from lisa.fit import Need, Room
from lisa.pace import Fixed
from lisa.server.app import make_app
from lisa.server.desk import Service, Settings
from lisa.tokenizer import Tokenizer, load_tokenizer
from lisa.types import Sampling
from lisa.worker import Worker

XML_TEMPLATE = (Path(__file__).parent.parent / "bench" / "tiny" / "chat_template.jinja").read_text("utf-8")
CHAT = [{"role": "user", "content": "hello"}]

Script = Callable[[str], str]
"""The conversation as the template wrote it -> everything the model says next."""


class Speech:
    """Logits of a model that says what `script` says, and where it is not allowed to, the shortest way out."""

    def __init__(self, tokenizer: Tokenizer, script: Script):
        self.tokenizer = tokenizer
        self.script = script
        self.prompts: list[str] = []
        raw = tokenizer.raw
        self._start = raw.token_to_id("<|im_start|>")
        self._eos = raw.token_to_id("<|im_end|>")
        self._mark = tokenizer.encode(">")[0]
        self._header = tokenizer.encode("assistant\n")
        self._prefixes = [tokenizer.encode(t) for t in ("<think>\n\n</think>\n\n", "<think>\n")]
        self._base = [0.0] * tokenizer.vocab
        for text, value in (
            (":", 1.2),
            (",", 0.2),
            ("1", 1.0),
            ("}", 3.0),
            ("]", 2.8),
            ('"', 3.5),
            ("<", 2.0),
            ("{", 1.5),
        ):
            self._base[tokenizer.encode(text)[0]] = value
        self._base[self._eos] = 4.0

    def logits(self, tokens: tuple[int, ...]) -> list[float]:
        row = list(self._base)
        row[self.next(tokens)] = 9.0
        return row

    def next(self, tokens: tuple[int, ...]) -> int:
        at = self._answer(tokens)
        ids = self._ids(self.tokenizer.raw.decode(tokens[:at], skip_special_tokens=False))
        said = list(tokens[at:])
        return ids[len(said)] if len(said) < len(ids) and list(ids[: len(said)]) == said else self._eos

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def _ids(self, conversation: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(self.script(conversation)))

    def _answer(self, tokens: tuple[int, ...]) -> int:
        """Where the answer begins: behind the header and what the template puts there, or behind the last ">"."""
        if self._start not in tokens:
            if self._mark not in tokens:
                return len(tokens)
            return len(tokens) - tokens[::-1].index(self._mark)
        at = len(tokens) - tokens[::-1].index(self._start) + len(self._header)
        for prefix in self._prefixes:
            if list(tokens[at : at + len(prefix)]) == prefix:
                return at + len(prefix)
        return at

    def drafter(self, right: int, wrong: int) -> ScriptedDrafter:
        """Drafts what the model is about to say, `right` tokens rightly and then `wrong` ones wrongly."""
        return _Foresight(self, right, wrong)


class _Foresight(ScriptedDrafter):
    def __init__(self, speech: Speech, right: int, wrong: int):
        super().__init__(self._draft)
        self._speech, self._right, self._wrong = speech, right, wrong

    def _draft(self, position: int, width: int) -> Sequence[int]:
        tokens = [*self.heard, self.next]
        for i in range(min(width, self._right + self._wrong)):
            token = self._speech.next(tuple(tokens))  # type: ignore[arg-type]
            tokens.append(token if i < self._right else (token + 1) % self._speech.tokenizer.vocab)
        return tokens[position + 1 :]  # type: ignore[return-value]


def scripted(
    folder: Path,
    script: Script,
    *,
    template: str | None = None,
    context: int | None = None,
    slots: int = 2,
    queue: int | None = None,
    backlog: int | None = None,
    right: int = 0,
    wrong: int = 0,
    gate: Callable[[], object] = lambda: None,
    limit: int = 1 << 40,
    kv_bytes: int = 1000,
    name: str = "scripted",
    chunk: int = 64,
) -> Model:
    """An api.Model around a scripted target; `gate` is called at each forward and may block."""
    use(strict=False)
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    if template is not None:
        tokenizer.fast.chat_template = template
    speech = Speech(tokenizer, script)

    def logits(tokens: tuple[int, ...]) -> list[float]:
        gate()
        return speech.logits(tokens)

    target = ScriptedTarget(logits, tokenizer.vocab, context)
    engine = Engine(target, lambda: speech.drafter(right, wrong), lambda: Fixed(right + wrong), chunk, "a test says so")  # type: ignore[arg-type]
    loaded = SimpleNamespace(
        engine=engine,
        tokenizer=tokenizer,
        sampling=Sampling(),
        name=name,
        drafter="scripted",
        about=f"{name}, a script",
        need=Need(1000, kv=kv_bytes),
        room=Room(limit, "the room"),
    )
    return Model(loaded, Worker(slots, queue, backlog), use())  # type: ignore[arg-type]


@contextmanager
def running(model: Model | None, settings: Settings | None = None, service: Service | None = None) -> Iterator[str]:
    """Serve on a free port in a thread; gives the URL. Closes the model."""
    service = service or Service(model)
    app = make_app(service, settings or Settings())
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        if service.model is not None:
            service.model.close()
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()
