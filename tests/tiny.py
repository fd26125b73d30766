"""Tiny random targets, scripted targets and scripted drafters: what the tests run on instead of downloads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama, qwen3, qwen3_5

from lisa.engine import Engine, Session
from lisa.pace import Fixed
from lisa.sampling import Candidates, Sampler, draw
from lisa.state import Snapshot, State
from lisa.target import Hybrid, Target
from lisa.types import Commit, Done, Event, Proposal, Request, Sampling, Stats, Tokens

VOCAB = 48

_DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_HYBRID = {
    **_DENSE,
    "model_type": "qwen3_5",
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

_SLIDING = {
    **_DENSE,
    "model_type": "llama",
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}


@functools.cache
def target(kind: str, seed: int = 0) -> Target:
    """A random float32 target: "dense" (qwen3), "hybrid" (3 Gated DeltaNet layers, 1 attention), "sliding" (llama)."""
    mx.random.seed(seed)
    config, model = {
        "dense": lambda: (_DENSE, qwen3.Model(qwen3.ModelArgs.from_dict(_DENSE))),
        "hybrid": lambda: (_HYBRID, Hybrid(qwen3_5.ModelArgs.from_dict(_HYBRID))),
        "sliding": lambda: (_SLIDING, llama.Model(llama.ModelArgs.from_dict(_SLIDING))),
    }[kind]()
    model.update(livelier(model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return Target(model, config, name=f"tiny-{kind}")


def livelier(tree: Any) -> Any:
    """Random initial weights give nearly constant logits; larger ones give text that varies."""
    from mlx.utils import tree_map

    return tree_map(lambda a: a * 2.5 if a.ndim >= 2 else a, tree)


class ScriptedTarget:
    """Logits are a fixed function of the tokens read so far. Speaks the part of Target the engine uses."""

    name = "scripted"
    layers = 4
    hidden = 4

    def __init__(self, logits: Callable[[tuple[int, ...]], Sequence[float]], vocab: int, context: int | None = None):
        self._logits = logits
        self.vocab = vocab
        self.context = context

    def new_state(self) -> State:
        return _TokenState()

    def forward(
        self, tokens: mx.array, state: Any, taps: Sequence[int] = (), rows: int = 1, best: bool = False
    ) -> tuple[mx.array, Any]:
        read = tokens.tolist()
        before = state.tokens
        out = [self._logits((*before, *read[: i + 1])) for i in range(len(read) - rows, len(read))]
        state.tokens = (*before, *read)
        state.advance(len(read))
        features = None
        if taps:
            # Row t of tap l says which token was read where: enough to check what a drafter is handed.
            columns = [
                [[float(token), float(len(before) + i), float(tap), 0.0] for i, token in enumerate(read)]
                for tap in taps
            ]
            features = mx.concatenate([mx.array(c) for c in columns], axis=-1)
        logits = mx.array(out).reshape(rows, self.vocab)
        return mx.argmax(logits, axis=-1).astype(mx.int32) if best else logits, features


class _TokenState(State):
    """A State that holds the tokens themselves."""

    def __init__(self) -> None:
        super().__init__([])
        self.tokens: tuple[int, ...] = ()

    def commit(self, n: int) -> None:
        kept = self._length + n
        super().commit(n)
        self.tokens = self.tokens[:kept]

    def rewind(self, length: int) -> int:
        reached = super().rewind(length)
        self.tokens = self.tokens[:reached]
        return reached

    def snapshot(self, length: int | None = None) -> Any:
        saved = super().snapshot(length)
        return Snapshot(saved.length, self.tokens[: saved.length], 0)

    def restore(self, snapshot: Any) -> None:
        super().restore(Snapshot(snapshot.length, (), 0))
        self.tokens = snapshot.parts


class ScriptedDrafter:
    """Proposes what `script(position, width)` says and checks that it is told everything once, in order."""

    source = "scripted"
    limit: int | None = None

    def __init__(self, script: Callable[[int, int], Sequence[int]], taps: tuple[int, ...] = (), width: int = 15):
        self.script = script
        self.taps = taps
        self.width = width
        self.heard: list[int] = []
        self.next: int | None = None
        self.asked = 0
        self.commits: list[Commit] = []

    @property
    def length(self) -> int:
        return len(self.heard)

    def observe(self, commit: Commit) -> None:
        assert commit.start == self.length, "gap"
        assert self.next is None or commit.tokens[0] == self.next, "next was not what followed"
        assert (commit.features is None) == (not self.taps)
        assert commit.features is None or commit.features.shape[0] == len(commit.tokens)
        self.heard += commit.tokens
        self.next = commit.next
        self.commits.append(commit)

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        assert position == self.length and last == self.next and 0 < width <= self.width
        self.asked += 1
        tokens = list(self.script(position, width))[:width]
        return Proposal(mx.array(tokens, mx.int32), len(tokens), self.source)

    def rewind(self, length: int) -> int:
        if length < self.length:
            self.heard = self.heard[:length]
            self.next = None
        return self.length

    def snapshot(self) -> tuple[list[int], int | None]:
        return list(self.heard), self.next

    def restore(self, snapshot: Any) -> None:
        self.heard, self.next = list(snapshot[0]), snapshot[1]

    @property
    def nbytes(self) -> int:
        return 0


class SelfDrafter(ScriptedDrafter):
    """The target drafting for itself, with the request's own filters and, unless `stream` is changed, its noise."""

    source = "self"

    def __init__(self, target: Target, stream: int = 0):
        super().__init__(lambda position, width: [])
        self.target = target
        self.stream = stream

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        assert position == self.length and last == self.next
        state = self.target.new_state()
        if self.heard:
            self.target.forward(mx.array(self.heard, mx.int32), state, rows=0)
        sampler = Sampler(sampling, self.target.vocab)
        tokens: list[int] = []
        for i in range(width):
            logits, _ = self.target.forward(mx.array([(last, *tokens)[-1]], mx.int32), state)
            candidates: Candidates = sampler.candidates(logits, mx.array([], mx.int32))
            at = mx.array([position + 1 + i])
            tokens.append(int(draw(candidates, sampling, at, self.target.vocab, self.stream).item()))
        return Proposal(mx.array(tokens, mx.int32), width, self.source)


def session(target: Any, drafter: Callable[[], Any], width: int = 15, chunk: int = 7) -> Session:
    return Engine(target, drafter, lambda: Fixed(width), chunk).session()


def events(session: Session, request: Request) -> Iterator[Event]:
    """The events of a run, with the invariant checked after every one."""
    for event in session.run(request):
        if isinstance(event, Tokens):
            expected = len(session.tokens) - 1 + int(session.state.opened)
            assert session.state.length == expected, "the state holds all tokens but the last"
            assert session.drafter.length == len(session.tokens) - 1
        assert not isinstance(event, Done) or not session.state.opened
        yield event
    assert session.state.length == len(session.tokens) - 1 and not session.state.opened


def outcome(events: Iterator[Event]) -> tuple[list[int], str, list[Any], str, Stats]:
    """(ids, text, logprob entries, finish reason, stats) of a run."""
    ids: list[int] = []
    text, logprobs = "", []
    for event in events:
        if isinstance(event, Tokens):
            ids += event.ids
            text += event.text
            logprobs += event.logprobs
        elif isinstance(event, Done):
            return ids, text, logprobs, event.reason, event.stats
    raise AssertionError("a run ends with Done")
