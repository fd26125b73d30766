"""What a drafter remembers of the committed tokens: keys and values, [1, heads, C, D] each, one context a layer.

Both kinds can go back (`reach` is the longest exact prefix of at most `length`; `rewind` takes what `reach` returned)
and be saved for free. What was saved stays valid whatever happens next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lisa.state import SLACK


@dataclass(eq=False)
class _Buffer:
    """K/V with room at the end: one context writes it, saved contexts rely on its first `pinned` rows."""

    keys: mx.array
    values: mx.array
    pinned: int = 0
    writer: Callable[[], Context | None] = lambda: None


class Context:
    """For a layer that sees everything: rows are written in place, behind those that count.

    Saving is the buffer and a length. Rows move to a buffer of their own before a saved row would be overwritten, and
    before a second context writes behind the same rows.
    """

    step = 256

    def __init__(self) -> None:
        self._buffer: _Buffer | None = None
        self.length = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add n rows, [1, heads, n, D] each."""
        end = self.length + keys.shape[2]
        buffer = self._writable(end, keys)
        buffer.keys[..., self.length : end, :] = keys
        buffer.values[..., self.length : end, :] = values
        self.length = end

    def view(self) -> tuple[mx.array, mx.array]:
        assert self._buffer is not None
        return self._buffer.keys[..., : self.length, :], self._buffer.values[..., : self.length, :]

    def beside(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What a block attends to: the context, then the block's own rows, which are not kept."""
        self.append(keys, values)
        both = self.view()
        self.length -= keys.shape[2]
        return both

    def _writable(self, end: int, like: mx.array) -> _Buffer:
        buffer = self._buffer
        owned = buffer is not None and self.length >= buffer.pinned and buffer.writer() in (None, self)
        if buffer is None or not owned or end > buffer.keys.shape[2]:
            # A quarter more than needed, so that a long generation moves each row a bounded number of times.
            capacity = -(-(end + end // 4) // self.step) * self.step
            room = mx.zeros((1, like.shape[1], capacity - self.length, like.shape[3]), like.dtype)
            keys, values = (
                mx.concatenate([rows, room], axis=2) for rows in (self.view() if buffer else (room[:, :, :0],) * 2)
            )
            if buffer is not None and owned:
                buffer.keys, buffer.values = keys, values  # saved contexts follow, so the smaller one is not kept
            else:
                self._buffer = buffer = _Buffer(keys, values)
        buffer.writer = weakref.ref(self)
        return buffer

    def reach(self, length: int) -> int:
        return length

    def rewind(self, length: int) -> None:
        self.length = length

    def save(self) -> Any:
        if self._buffer is not None:
            self._buffer.pinned = max(self._buffer.pinned, self.length)
        return self._buffer, self.length

    def load(self, saved: Any) -> None:
        self._buffer, self.length = saved

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self._buffer is None else [self._buffer.keys, self._buffer.values]


class Window:
    """For a sliding layer: the last window - 1 rows and 16 for short rewinds, in arrays that are never written to."""

    def __init__(self, window: int):
        self.window = window
        self.length = 0
        self._rows: tuple[mx.array, ...] = ()

    def append(self, keys: mx.array, values: mx.array) -> None:
        kept = self.window - 1 + SLACK
        self.length += keys.shape[2]
        self._rows = tuple(mx.contiguous(rows[..., -kept:, :]) for rows in self._followed_by(keys, values, kept))

    def beside(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        k, v = self._followed_by(keys, values, self.window - 1)
        return k, v

    def _followed_by(self, keys: mx.array, values: mx.array, last: int) -> tuple[mx.array, ...]:
        if not self._rows or last == 0:
            return keys, values
        return tuple(
            mx.concatenate([old[..., -last:, :], new], axis=2)
            for old, new in zip(self._rows, (keys, values), strict=True)
        )

    def reach(self, length: int) -> int:
        kept = self._held - (self.length - length)
        return length if self._held == self.length or kept >= self.window - 1 else 0

    def rewind(self, length: int) -> None:
        kept = self._held - (self.length - length)
        self._rows = tuple(rows[..., :kept, :] for rows in self._rows) if kept > 0 else ()
        self.length = length

    def save(self) -> Any:
        return self._rows, self.length

    def load(self, saved: Any) -> None:
        self._rows, self.length = saved

    @property
    def _held(self) -> int:
        return self._rows[0].shape[2] if self._rows else 0

    @property
    def arrays(self) -> list[mx.array]:
        return list(self._rows)
