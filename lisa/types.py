"""The nouns as pure values (architecture: docs/how-it-works.md).

Arrays are opaque here: this room imports nothing, so that the command line and the server can speak these nouns
without MLX. Shapes and dtypes are in the docstrings. V is the target's vocabulary, H its hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Array = Any

Rule = Literal["coupled", "rejection"]
Reason = Literal["stop", "length", "cancelled"]

MAX_WIDTH = 15
"""Most tokens a draft may hold. A verify pass reads width + 1 rows, and the kernels cover 16."""

MARKS = 8
"""Most places that a context remembers to come back to: with recurrent layers each holds all their states."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the same order of operations everywhere (lisa/sampling.py).

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `repetition_penalty` looks at prompt and
    answer, `presence_penalty` and `frequency_penalty` at the answer only. `logit_bias` holds (token id, addend).
    `seed` None draws a fresh seed for each request, which `Stats.seed` reports. `rule` is the acceptance rule.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    rule: Rule = "coupled"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class Distribution:
    """What a token was drawn from, sparse, one row for each slot.

    `ids` int32 [k, K] token ids; `probabilities` float32 [k, K], each row summing to 1.
    """

    ids: Array
    probabilities: Array


@dataclass(frozen=True)
class Proposal:
    """A draft. `tokens` int32 [k], k >= 0, may be unevaluated; slot i (from 1) stands at `position + i`.

    `distribution` is what each token was drawn from, None when the drafter was certain of each (one-hot).
    `confidence` float32 [k] in 0..1 or None. `source` names the drafter: pace keeps cost and acceptance per source.
    """

    tokens: Array
    size: int
    source: str
    distribution: Distribution | None = None
    confidence: Array | None = None


@dataclass(frozen=True)
class Commit:
    """These tokens are now true, this is what the target felt at each, and `next` comes after.

    `features` [len(tokens), taps*H]: the taps in the drafter's order, concatenated; None for a drafter without taps.
    `start` is the index of tokens[0]: a drafter raises on a gap. The next of a prefill chunk is the first token of the
    following chunk.
    """

    tokens: tuple[int, ...]
    features: Array | None
    next: int
    start: int


class Drafter(Protocol):
    """Hears only of committed tokens, from the first token of the prompt on, gapless and in order.

    `taps` are target layer ids whose outputs it wants. `width` is the most it proposes (at most MAX_WIDTH). `limit` is
    the first position it cannot draft at, None for no limit. It may queue features and project them when asked to
    propose, so that a parked drafter costs nothing. `length` is the number of tokens observed.
    """

    source: str
    taps: tuple[int, ...]
    width: int
    limit: int | None

    @property
    def length(self) -> int: ...

    def observe(self, commit: Commit) -> None:
        """Take in the next committed tokens."""

    def propose(self, last: int, width: int, sampling: Sampling, position: int) -> Proposal:
        """Draft up to `width` tokens after `last`, which stands at index `position`. Leaves the state as it found it.

        `position` equals `length`: everything before `last` has been observed. Slot i uses the noise of position + i.
        `sampling.seed` is an int here.
        """

    def rewind(self, length: int) -> int:
        """Forget everything past `length` tokens; the length really reached, which may be smaller."""

    def snapshot(self) -> object: ...

    def restore(self, snapshot: object) -> None: ...

    @property
    def nbytes(self) -> int:
        """Bytes of context held (K/V, queued features), not of weights."""


class Reader(Protocol):
    """Turns committed tokens into text while they are generated, and knows the stop strings (lisa/text.py)."""

    def push(self, token: int) -> bool:
        """Take one committed token (never an end-of-turn token); True when a stop string is complete."""

    def take(self) -> tuple[str, str]:
        """(answer text, reasoning text) that became certain since the last call."""

    def finish(self) -> tuple[str, str]:
        """What was held back, once no further token will come."""


class Constraint(Protocol):
    """Says which tokens may come next, row by row (lisa/constrain.py). One serves one request."""

    def free(self, rows: int) -> bool:
        """Whether the next `rows` tokens may be any at all, whatever they turn out to be."""

    def allowed(self, draft: Sequence[int]) -> Array | None:
        """bool [len(draft) + 1, V]: row j is what may follow draft[:j]; None where all may. Changes nothing."""

    def push(self, token: int) -> None:
        """Take one committed token, an end of turn included."""


@dataclass(frozen=True)
class Request:
    """One generation: the whole conversation as tokens, and what to do with what follows.

    `max_tokens` None means up to the end of the context. `eos` end the turn and are never delivered. `logprobs` None is
    off; n >= 0 asks for each token's log-probability and the n most likely alternatives. `marks` are places in
    `tokens` at which the session remembers how to come back.
    """

    tokens: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    eos: frozenset[int] = frozenset()
    logprobs: int | None = None
    reader: Reader | None = None
    constraint: Constraint | None = None
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a delivered token under the target's own softmax (before any sampling option)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """Prefill: `done` of `total` prompt tokens are in the state."""

    done: int
    total: int


@dataclass(frozen=True)
class Tokens:
    """One round's delivered tokens. `drafted` were proposed, `accepted` of `ids` came from the draft.

    `text` and `reasoning` are what became certain; pieces join to the full decode.
    """

    ids: tuple[int, ...]
    text: str = ""
    reasoning: str = ""
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Stats:
    """What a request cost. Times in seconds. `proposed_at[i]` / `accepted_at[i]` count slot i + 1 over all rounds.

    `drafter` ran, for the reason `why`; `notes` are lines on what became of it, such as a limit it reached.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    ttft: float = 0.0
    decode: float = 0.0
    seed: int = 0
    drafter: str = "none"
    why: str = ""
    notes: tuple[str, ...] = ()

    @property
    def acceptance(self) -> float | None:
        """Accepted over proposed; None when nothing was proposed. The target's own token is in neither number."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens of a round including the target's own; None before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed after the first token; None for fewer than two tokens."""
        return (self.completion_tokens - 1) / self.decode if self.completion_tokens > 1 and self.decode > 0 else None


@dataclass(frozen=True)
class Done:
    reason: Reason
    stats: Stats = field(default_factory=Stats)


Event = Progress | Tokens | Done

Message = dict[str, Any]
"""A chat message as every chat API writes it: {"role": ..., "content": ...}."""

Messages = Sequence[Message]
