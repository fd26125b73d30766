"""Conversations and what the target felt at each of their tokens, on disk.

A work folder belongs to one target. `conversations.jsonl` grows by a line a conversation; features are one float16
array a conversation, [tokens, (taps + 1) * H], the last H columns being the last layer's output, from which the
target's own distribution is computed again. Every file is complete or absent, whenever a run ends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from lisa.errors import LisaError
from lisa.target import Target

Say = Callable[[str], None]

_LARGEST = 6e4  # of float16, nearly: residual streams have a few huge columns


@dataclass(frozen=True)
class Conversation:
    """Token `ids`, the first `prompt` of which are the prompt, whose `key` this has. `held` ones are not trained on."""

    ids: tuple[int, ...]
    prompt: int
    key: str
    held: bool
    reason: str
    drawn: bool
    batch: int = 0


def fingerprint(target: Target) -> str:
    """A hash of a target's config and of the first numbers of each of its tensors, whatever they are loaded as."""
    digest = hashlib.sha256(json.dumps(dict(target.config), sort_keys=True, default=str).encode())
    parameters: Any = tree_flatten(target.model.parameters())  # type: ignore[no-untyped-call]
    for name, value in sorted(parameters, key=lambda pair: str(pair[0])):
        digest.update(f"{name} {value.shape}".encode())
        digest.update(np.array(value.reshape(-1)[:16].astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]


def write(path: Path, put: Callable[[Path], Any]) -> None:
    """A file that is complete or absent: `put` fills a temporary one beside it, of the same suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    put(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Store:
    """The work folder of one target. Raises LisaError for a folder that belongs to another."""

    def __init__(self, folder: Path, target: Target):
        self.folder, self.target = folder, target
        self.conversations: list[Conversation] = []
        owner = {"target": target.name, "fingerprint": fingerprint(target)}
        self.fingerprint = owner["fingerprint"]
        card = folder / "target.json"
        if card.is_file():
            self._check(json.loads(card.read_text("utf-8")))
        else:
            write(card, lambda path: path.write_text(json.dumps(owner), "utf-8"))
        self._lines = folder / "conversations.jsonl"
        if self._lines.is_file():
            self._load()

    def _check(self, owner: Mapping[str, str]) -> None:
        if owner.get("fingerprint") != self.fingerprint:
            raise LisaError(
                f"{self.folder} holds answers of {owner.get('target')}, whose weights are not those of "
                f"{self.target.name}: give another --work or --out"
            )

    def _load(self) -> None:
        """Conversations as written; a last line that a kill cut short is dropped."""
        text = self._lines.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write(self._lines, lambda path: path.write_text(whole, "utf-8"))
        for line in whole.splitlines():
            fields = json.loads(line)
            self.conversations.append(Conversation(**{**fields, "ids": tuple(fields["ids"])}))

    def add(self, conversations: Sequence[Conversation]) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(each)) + "\n" for each in conversations)
            file.flush()
            os.fsync(file.fileno())
        self.conversations += conversations

    @property
    def answered(self) -> int:
        """Tokens of all answers that may be trained on."""
        return sum(len(c.ids) - c.prompt for c in self.conversations if not c.held)


class Features:
    """What `Store` holds for one choice of `taps`; the union of several may be kept, and `columns` picks some."""

    def __init__(self, store: Store, taps: Sequence[int]):
        self.store, self.target = store, store.target
        self.folder = store.folder / ("features-" + "-".join(map(str, taps)))
        self.taps = tuple(taps)

    def path(self, index: int) -> Path:
        return self.folder / f"{index:06d}.npy"

    def read_all(self, budget: float, say: Say, chunk: int = 512) -> list[int]:
        """Read what is not on disk yet, held-out conversations first; the indices of all that fit `budget` GB."""
        order = sorted(range(len(self.store.conversations)), key=lambda i: not self.store.conversations[i].held)
        row, left = 2 * (len(self.taps) + 1) * self.target.hidden, budget * 1e9
        usable: list[int] = []
        missing = sum(not self.path(i).is_file() for i in order)
        if missing:
            say(f"reading the features of {missing} conversations, {row / 1000:.1f} kB a token")
        for i in order:
            ids = self.store.conversations[i].ids
            left -= len(ids) * row
            if left < 0:
                say(
                    f"the budget of {budget:g} GB holds {len(usable)} of {len(order)} conversations; --budget raises it"
                )
                break
            if not self.path(i).is_file():
                features = np.concatenate(list(self._read(ids, chunk)))
                write(self.path(i), lambda path, features=features: np.save(path, features))  # type: ignore[misc]
            usable.append(i)
        return sorted(usable)

    def _read(self, ids: Sequence[int], chunk: int) -> Iterator[Any]:
        state, last = self.target.new_state(), self.target.layers - 1
        asked = tuple(dict.fromkeys((*self.taps, last)))
        for start in range(0, len(ids), chunk):
            piece = mx.array(list(ids[start : start + chunk]), mx.int32)
            _, features = self.target.forward(piece, state, asked, rows=0)
            assert features is not None
            hidden = self.target.hidden
            columns = [asked.index(tap) * hidden for tap in (*self.taps, last)]
            rows = mx.concatenate([features[:, c : c + hidden] for c in columns], axis=-1)
            rows = mx.clip(rows.astype(mx.float32), -_LARGEST, _LARGEST).astype(mx.float16)
            mx.eval(rows, state.arrays())
            yield np.array(rows)

    def of(self, index: int, taps: Sequence[int]) -> tuple[Any, Any]:
        """The columns of `taps` [n, len(taps)*H] and the last layer's output [n, H], float16 NumPy arrays."""
        hidden = self.target.hidden
        rows = np.load(self.path(index), mmap_mode="r")
        if tuple(taps) == self.taps:
            return rows[:, :-hidden], rows[:, -hidden:]
        picked = [rows[:, self.taps.index(t) * hidden :][:, :hidden] for t in taps]
        return np.concatenate(picked, axis=-1), rows[:, -hidden:]

    def scale(self, indices: Sequence[int], taps: Sequence[int]) -> Any:
        """Root mean square of each column of the taps, float32 [len(taps)*H]; the first token, an outlier, left out."""
        total, count = np.zeros(len(taps) * self.target.hidden), 0
        for i in indices[:300]:
            rows = self.of(i, taps)[0][1:].astype(np.float32)
            total += np.square(rows).sum(axis=0)
            count += len(rows)
        return np.sqrt(np.maximum(total / max(count, 1), 1e-6)).astype(np.float32)
