"""A whole training: collect, train, measure, write; and go on after a kill."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_flatten, tree_unflatten

from lisa import loader
from lisa.errors import DamagedModel, LisaError, UsageError
from lisa.target import Target
from lisa.tokenizer import Tokenizer
from lisa.train import networks
from lisa.train.acceptance import Acceptance, draft_width, measure
from lisa.train.collect import collect
from lisa.train.export import Story, export
from lisa.train.interrupt import Interrupt, Stopped
from lisa.train.objective import Vocabularies
from lisa.train.settings import Settings, Trained
from lisa.train.steps import Data, Step
from lisa.train.store import Features, Store, write

Say = Callable[[str], None]

_WARM_UP = 40
_FLOOR = 0.02  # of the learning rate, at the end
_PAUSE = 30.0  # seconds: a longer step means that the machine slept or the process was stopped
_MEASURED = 48  # held-out conversations at most
_LOW_IDS = 16_000  # an EAGLE-3 knows these and all that its answers hold


@dataclass
class Progress:
    """What a checkpoint remembers beside the tensors. `seconds` of training alone, `losses` of the first 20 steps."""

    step: int = 0
    seconds: float = 0.0
    anchors: int = 0
    losses: list[float] = field(default_factory=list)
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    best: float = 0.0


def run(settings: Settings, say: Say) -> Trained:
    """See lisa.train.train. MLX must be importable and its BLAS chosen."""
    if (settings.out / "config.json").exists() and not settings.checkpoint.is_file():
        raise UsageError(f"{settings.out} holds a model already, which is not written over: give another --out")
    loaded = loader.load(
        settings.model,
        drafter="none",
        quantisation=settings.quantisation,
        offline=settings.offline,
        kernels=False,  # answers are decoded side by side, which they do not do
        say=say,
    )
    target, tokenizer = loaded.engine.target, loaded.tokenizer
    say(loaded.about)
    store = Store(settings.workplace, target)
    try:
        collect(store, target, tokenizer, settings, say)
        features = Features(store, networks.stored_taps(settings, target))
        indices = features.read_all(settings.budget, say)
    except KeyboardInterrupt:
        raise Stopped("stopped before training; the same command goes on where this one stopped") from None
    with Interrupt() as interrupt:
        return Training(settings, target, tokenizer, features, indices, say).run(interrupt)


class Training:
    """A network, its optimiser and how far they are."""

    def __init__(
        self,
        settings: Settings,
        target: Target,
        tokenizer: Tokenizer,
        features: Features,
        indices: list[int],
        say: Say,
    ):
        self.settings, self.target, self.say, self.fingerprint = settings, target, say, features.store.fingerprint
        self.checkpoint = settings.checkpoint
        saved = self._read()
        taps = networks.taps_of(settings, target)
        scale = features.scale([i for i in indices if not features.store.conversations[i].held], taps)
        if saved is not None:
            scale = np.array(saved[0].pop("scale"))
        self.data = Data(features, indices, taps, scale)
        if not self.data.train or not self.data.held:
            raise LisaError("too few answers fit the budget to train on some and measure on others: raise --budget")
        self.counts = self.data.counts(target.vocab)
        mask = _unused(tokenizer, features.store, target) if saved is None else saved[1]["mask"]
        vocabulary = _vocabulary(self.counts) if saved is None else np.array(saved[0].pop("vocabulary"))
        self.fixed = {"mask": mask, "vocabulary": vocabulary}
        if settings.adapt is None:
            self.draft = networks.new(settings, target, mask, vocabulary)
        else:
            self.draft = networks.adapted(settings, target)
        networks.rescale(self.draft, scale)
        self.optimiser = AdamW(settings.rate, betas=[0.9, 0.95], weight_decay=0.01)
        self.optimiser.init(self.draft.network.trainable_parameters())
        self.progress = Progress()
        if saved is not None:
            self._restore(*saved)
        self.story = Story(settings, target, features.store, self.data, self.draft)
        self._recent: tuple[tuple[float, int, float], ...] = ()

    # A checkpoint is one file: tensors, and in its header what is no tensor.

    def _read(self) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        if not self.checkpoint.is_file():
            return None
        try:
            loaded: Any = mx.load(str(self.checkpoint), return_metadata=True)
            tensors, header = loaded
            words = json.loads(header["lisa"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise DamagedModel(f"{self.checkpoint} is damaged: remove it, and training begins again") from error
        for name, value in self._identity().items():
            if words["identity"].get(name) != value:
                raise LisaError(
                    f"{self.checkpoint} was trained with {name} {words['identity'].get(name)!r}, not {value!r}: "
                    "give another --out, or remove it"
                )
        return tensors, words

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        s = self.settings
        names = ("kind", "layers", "block", "rank", "objective", "seed", "batch", "anchors", "unroll", "rate")
        chosen = {name: getattr(s, name) for name in names}
        chosen |= {"taps": list(networks.taps_of(s, self.target)), "adapt": None if s.adapt is None else str(s.adapt)}
        return {"target": self.fingerprint, **chosen}

    def save(self) -> None:
        parts = {"network": self.draft.network.parameters(), "optimiser": self.optimiser.state}
        arrays: dict[str, Any] = {
            f"{part}.{name}": value for part, tree in parts.items() for name, value in tree_flatten(tree)
        }
        arrays |= {"scale": mx.array(self.data.scale), "vocabulary": mx.array(self.fixed["vocabulary"], mx.int32)}
        words = {"identity": self._identity(), "mask": self.fixed["mask"], "progress": asdict(self.progress)}
        write(
            self.checkpoint,
            lambda path: mx.save_safetensors(str(path), arrays, {"format": "mlx", "lisa": json.dumps(words)}),
        )

    def _restore(self, arrays: dict[str, mx.array], words: dict[str, Any]) -> None:
        parts: dict[str, list[tuple[str, mx.array]]] = {"network": [], "optimiser": []}
        for name, value in arrays.items():
            part, _, rest = name.partition(".")
            parts[part].append((rest, value))
        self.draft.network.load_weights(parts["network"])
        self.optimiser.state = tree_unflatten(parts["optimiser"])
        progress = words["progress"]
        progress["curve"] = [tuple(point) for point in progress["curve"]]
        self.progress = Progress(**progress)
        self.say(f"going on from step {self.progress.step}, {self.progress.seconds / 60:.1f} minutes in")

    @property
    def share(self) -> float:
        """How much of the training is done, 0 to 1."""
        if self.settings.steps is not None:
            return self.progress.step / self.settings.steps
        return self.progress.seconds / (60 * self.settings.minutes)

    def run(self, interrupt: Interrupt) -> Trained:
        """Steps until the time is used up, measuring and saving on the way."""
        settings = self.settings
        head = self.draft.network.lm_head.weight if self.draft.kind == "eagle" else None
        vocabularies = Vocabularies(self.target, self.counts, _sampled(settings), self.draft.ids, head)
        step = Step(self.draft, self.data, vocabularies, settings)
        p, due = self.progress, self._due()
        self.say(self._opening())
        while self.share < 1 and not interrupt.asked:
            self._one(step)
            if self._due() > due:
                due = self._due()
                self._measure()
        if not interrupt.asked and (not p.curve or p.curve[-1][1] < p.step):
            self._measure()
        self.save()
        if interrupt.asked:
            self.say(f"stopped at step {self.progress.step}; the same command goes on where this one stopped")
        return Trained(settings.out, p.best, tuple(p.curve), tuple(p.losses), not interrupt.asked)

    def _opening(self) -> str:
        size = sum(value.size for _, value in tree_flatten(self.draft.network.trainable_parameters()))
        tokens = sum(len(c.ids) - c.prompt for c in map(self.data.conversation, self.data.train))
        return (
            f"training a {self.draft.kind} drafter of {size / 1e6:.1f} M parameters on {tokens} tokens of "
            f"{len(self.data.train)} answers, measuring on {min(len(self.data.held), _MEASURED)} held-out ones"
        )

    def _due(self) -> int:
        """Counts the measurements that should have been made."""
        p, every = self.progress, self.settings.evaluate
        return int(p.step // every) if self.settings.steps is not None else int(p.seconds // (60 * every))

    def _one(self, step: Step) -> None:
        began = time.perf_counter()
        p, network = self.progress, self.draft.network
        loss, anchors = step.prepare(p.step, self.share)
        value, gradients = value_and_grad(network, loss)()
        gradients, _ = clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        warm = min(1.0, (p.step + 1) / _WARM_UP)
        falling = 0.5 + 0.5 * math.cos(math.pi * min(self.share, 1.0))
        self.optimiser.learning_rate = self.settings.rate * warm * max(falling, _FLOOR)
        self.optimiser.update(network, gradients)
        mx.eval(network.parameters(), self.optimiser.state, value)
        if not math.isfinite(number := float(value.item())):
            raise LisaError(f"the loss of step {p.step} is {number}: lower --rate, or go on from the last checkpoint")
        seconds = min(time.perf_counter() - began, _PAUSE)
        p.step, p.seconds, p.anchors = p.step + 1, p.seconds + seconds, p.anchors + anchors
        if len(p.losses) < 20:
            p.losses.append(number)
        self._recent = (*self._recent[-99:], (number, anchors, seconds))

    def _measure(self) -> None:
        """Acceptance on held-out answers; the best network so far is written out, and the latest is checkpointed."""
        got = measure(self.draft, self.data, self.data.held[:_MEASURED])
        p = self.progress
        p.curve.append((round(p.seconds / 60, 2), p.step, round(got.length, 4)))
        self.say(self._line(got))
        if got.length >= p.best:
            p.best = got.length
            export(
                self.draft, self.data.scale, self.settings, self.story.card(got, p.curve, p.step, p.seconds, p.anchors)
            )
        self.save()
        mx.clear_cache()  # no two steps have arrays of the same sizes

    def _line(self, got: Acceptance) -> str:
        losses, anchors, seconds = zip(*(self._recent or ((math.nan, 0, 1.0),)), strict=True)
        slots = " ".join(f"{slot:.2f}" for slot in got.slots)
        return (
            f"step {self.progress.step}, {self.progress.seconds / 60:.1f} min: loss {np.mean(losses):.3f}, "
            f"{sum(anchors) * draft_width(self.draft) / sum(seconds):.0f} tokens/s, "
            f"accepted length {got.length:.3f} on held-out prompts (by slot {slots})"
        )


def _sampled(settings: Settings) -> bool:
    return settings.head == "sampled" or (settings.head == "auto" and mx.default_device() == mx.cpu)


def _vocabulary(counts: Any) -> Any:
    """What an EAGLE-3 knows: the tokens of the answers, and the low ids, which are a BPE's frequent ones."""
    return np.nonzero((counts > 0) | (np.arange(len(counts)) < _LOW_IDS))[0]


def _unused(tokenizer: Tokenizer, store: Store, target: Target) -> int:
    """A token id that no text holds, to stand for what is not yet known: a control token if one is free."""
    used = {token for conversation in store.conversations for token in conversation.ids}
    for candidates in (sorted(tokenizer.hidden - tokenizer.eos), range(target.vocab)):
        free = [token for token in candidates if token not in used and token < target.rows]
        if free:
            return free[-1]
    return target.vocab - 1
