"""What a training is asked for, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from lisa.errors import UsageError

Kind = Literal["dspine", "dflash", "eagle"]
Objective = Literal["mixed", "published"]
Head = Literal["auto", "full", "sampled"]
Storage = Literal["float16", "8bit"]


@dataclass(frozen=True)
class Settings:
    """One training. None leaves a choice to what fits the target.

    Data: `data` is a JSONL file of prompts, None lets the target write them; `tokens` of answers are wanted, at most
    `answer` tokens each, `parallel` at once. At most `budget` GB of features are kept in `work` (beside `out` by
    default), which several trainings on one target may share. `sampled` is the share of answers drawn at temperature 1,
    the others are greedy; `thinking` switches a template that has both.
    Network: `layers`, `block` slots (anchor included), `taps` and the `rank` of DSpine's features; or those of `adapt`,
    a drafter folder to start from. Training: `minutes`, or `steps` for a run that any machine repeats; `batch`
    conversations of `anchors` blocks each, or with EAGLE-3 all drafts of an answer, `unroll` tokens deep; `evaluate`
    minutes (or, with `steps`, steps) between two measurements.
    """

    model: str
    kind: Kind
    out: Path
    data: Path | None = None
    work: Path | None = None
    adapt: Path | None = None
    minutes: float = 60.0
    steps: int | None = None
    evaluate: float = 5.0
    tokens: int = 200_000
    answer: int = 256
    sampled: float = 0.25
    budget: float = 8.0
    layers: int | None = None
    block: int | None = None
    taps: tuple[int, ...] | None = None
    rank: int | None = None
    objective: Objective = "mixed"
    head: Head = "auto"
    storage: Storage = "float16"
    rate: float = 2e-3
    batch: int = 4
    anchors: int = 32
    unroll: int = 4
    parallel: int = 32
    seed: int = 0
    quantisation: str | None = None
    thinking: bool | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        positive = (
            "minutes",
            "evaluate",
            "tokens",
            "answer",
            "budget",
            "rate",
            "batch",
            "anchors",
            "unroll",
            "parallel",
        )
        for field in fields(self):
            value = getattr(self, field.name)
            if (field.name in positive and not value > 0) or (
                field.name == "steps" and value is not None and value < 1
            ):
                raise UsageError(f"{field.name} must be above 0, not {value}")
        if not 0 <= self.sampled <= 1:
            raise UsageError(f"sampled is the share of drawn answers, between 0 and 1, not {self.sampled}")
        if self.layers is not None and not 1 <= self.layers <= 16:
            raise UsageError(f"a drafter has 1 to 16 layers, not {self.layers}")
        if self.block is not None and not 2 <= self.block <= 16:
            raise UsageError(f"a block has 2 to 16 slots, the anchor included, not {self.block}")
        for name, known in (("kind", Kind), ("objective", Objective), ("head", Head), ("storage", Storage)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"{name} is one of {', '.join(get_args(known))}, not {getattr(self, name)!r}")
        if self.adapt is not None and (self.layers, self.block, self.rank, self.taps) != (None,) * 4:
            raise UsageError("layers, block, rank and taps are the adapted drafter's own: leave them out with --adapt")

    @property
    def workplace(self) -> Path:
        return self.work or self.out.with_name(self.out.name + "-work")

    @property
    def checkpoint(self) -> Path:
        return self.workplace / f"{self.out.name}.checkpoint.safetensors"


@dataclass(frozen=True)
class Trained:
    """`accepted` is the mean tokens of a round on held-out prompts at temperature 0, the target's own included.

    `curve` holds (minutes trained, steps, accepted). `finished` is False after Ctrl-C.
    """

    out: Path
    accepted: float
    curve: tuple[tuple[float, int, float], ...]
    losses: tuple[float, ...]
    finished: bool
