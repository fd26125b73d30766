"""State: all caches of a model as one thing that can be taken back.

A forward outside `open` is final (a prefill chunk). `open(rows)` announces rows that may be taken back and `commit(n)`
keeps exactly the first n of them, in every layer or in none. Each kind of cache has one adaptor below that knows how to
do this exactly; a kind without one is refused by name when the model is loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from lisa.errors import UnsupportedModel

SLACK = 16
"""Rows a window keeps beyond what attention sees, so that a short rewind needs no re-reading."""


Pending = tuple[mx.array, mx.array, mx.array, mx.array]
"""k [1, T, Hk, Dk], v [1, T, Hv, Dv], decay and beta [1, T, Hv] of the rows of a call."""


class RecurrentCache(ArraysCache):  # type: ignore[misc]
    """An ArraysCache whose layer can rebuild it after fewer rows than it read.

    While `recording`, the layer leaves in `replay` a function n -> arrays: the states after the first n rows of its
    last call, computed again from what the call recorded. Or its commit is pending: the arrays are from before its last
    call, `pending` holds the rows of that call, and `kept` says how many of them hold.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.recording = False
        self.replay: Callable[[int], list[mx.array]] | None = None
        self.pending: Pending | None = None
        self.kept = 0


class WindowCache:
    """K/V of the last `window` positions in order of time, with the interface mlx-lm's attention layers expect.

    mlx-lm's RotatingKVCache overwrites its oldest entry in place, which cannot be taken back, and orders keys by the
    number of rows in a call. This one appends, and moves the window to a new buffer when the buffer is full. Resident
    rows stay under window + 16 + 64, or the window and one prefill chunk.
    """

    step = 64

    def __init__(self, window: int):
        self.window = window
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.held = 0  # rows in the buffer; the last one is position offset - 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append S rows [B, heads, S, D]; what they may attend to: up to window - 1 earlier rows and themselves."""
        rows = keys.shape[2]
        if self.keys is None or self.held + rows > self.keys.shape[2]:
            self._move(keys, values)
        assert self.keys is not None and self.values is not None
        end = self.held + rows
        self.keys[..., self.held : end, :] = keys
        self.values[..., self.held : end, :] = values
        begin = max(0, self.held - (self.window - 1))
        self.held = end
        self.offset += rows
        return self.keys[..., begin:end, :], self.values[..., begin:end, :]

    def _move(self, keys: mx.array, values: mx.array) -> None:
        kept = min(self.held, self.window - 1 + SLACK)
        capacity = max(self.window + SLACK + self.step, kept + keys.shape[2])
        self.keys = self._moved(self.keys, keys, kept, capacity)
        self.values = self._moved(self.values, values, kept, capacity)
        self.held = kept

    def _moved(self, old: mx.array | None, like: mx.array, kept: int, capacity: int) -> mx.array:
        batch, heads, _, dims = like.shape
        room = mx.zeros((batch, heads, capacity - kept, dims), like.dtype)
        return room if old is None else mx.concatenate([old[..., self.held - kept : self.held, :], room], axis=2)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Mask for N rows over what update_and_fetch will return (mlx-lm's create_attention_mask calls this)."""
        before = min(self.held, self.window - 1)
        if N == 1:
            return None
        if before + N <= self.window and not return_array:
            return "causal"
        mask: mx.array = create_causal_mask(N, before, window_size=self.window)
        return mask

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else int(self.keys.nbytes + self.values.nbytes)


@dataclass(eq=False)
class _KVPart:
    """K/V up to `length`: by reference to a live cache, or as copies once that cache was about to overwrite them."""

    cache: Any
    length: int
    copies: tuple[Any, Any] | None = None

    def copy(self) -> int:
        """Stop depending on the cache; the bytes copied."""
        if self.copies is not None or self.cache.keys is None:
            return 0
        self.copies = self.cut()
        self.cache = None
        return _bytes(self.copies)

    def cut(self) -> tuple[Any, Any]:
        """Copies of the cache's rows up to `length`."""
        cut = [
            [mx.contiguous(a[..., : self.length, :]) for a in _leaves(x)] for x in (self.cache.keys, self.cache.values)
        ]
        mx.eval(cut)
        keys, values = (tuple(x) if isinstance(self.cache, QuantizedKVCache) else x[0] for x in cut)
        return keys, values


class _Leaf(Protocol):
    """What State needs of one cache. `reach` is the longest exact prefix of at most `length` it can go back to, `own`
    the bytes that a saved part holds beside the cache it came from."""

    def open(self) -> None: ...
    def can_keep(self, n: int, rows: int) -> bool: ...
    def keep(self, n: int, rows: int) -> None: ...
    def reach(self, length: int, current: int) -> int: ...
    def rewind(self, length: int) -> int: ...
    def save(self, length: int) -> Any: ...
    def load(self, part: Any) -> int: ...
    def own(self, part: Any) -> int: ...


class _KV:
    """KVCache and QuantizedKVCache: rows past the offset are simply not looked at."""

    def __init__(self, cache: Any):
        self.cache = cache
        self._mark = 0
        self._parts: weakref.WeakSet[_KVPart] = weakref.WeakSet()

    def open(self) -> None:
        self._mark = self.cache.offset

    def can_keep(self, n: int, rows: int) -> bool:
        return True

    def keep(self, n: int, rows: int) -> None:
        self.cache.offset = self._mark + n

    def reach(self, length: int, current: int) -> int:
        return length

    def rewind(self, length: int) -> int:
        copied = sum(part.copy() for part in list(self._parts) if part.length > length)
        self.cache.offset = length
        return copied

    def save(self, length: int) -> _KVPart:
        part = _KVPart(self.cache, length)
        self._parts.add(part)
        return part

    def load(self, part: _KVPart) -> int:
        if part.cache is self.cache:
            return self.rewind(part.length)
        copied = self.rewind(0)
        if part.copies is not None:
            # New array objects over the same memory: MLX copies them when this branch first appends.
            self.cache.keys, self.cache.values = (_shared(x) for x in part.copies)
            copied += int(self.cache.nbytes)
        elif part.cache.keys is not None:
            self.cache.keys, self.cache.values = part.cut()
            copied += int(self.cache.nbytes)
        self.cache.offset = part.length
        return copied

    def own(self, part: _KVPart) -> int:
        return _bytes(part.copies)


class _Window:
    """WindowCache: rows at the end are dropped, as long as the window before them is still held."""

    def __init__(self, cache: WindowCache):
        self.cache = cache
        self._mark = 0

    def open(self) -> None:
        self._mark = self.cache.offset

    def can_keep(self, n: int, rows: int) -> bool:
        return True

    def keep(self, n: int, rows: int) -> None:
        self.rewind(self._mark + n)

    def reach(self, length: int, current: int) -> int:
        c = self.cache
        first = c.offset - c.held
        return length if first == 0 or length - first >= c.window - 1 else 0

    def rewind(self, length: int) -> int:
        c = self.cache
        c.held = max(0, c.held - (c.offset - length))
        c.offset = length
        return 0

    def save(self, length: int) -> tuple[Any, Any, int, int]:
        c = self.cache
        if c.keys is None or c.values is None:
            return None, None, 0, 0
        kept = min(c.held, c.window - 1 + SLACK)
        keys, values = (mx.contiguous(a[..., c.held - kept : c.held, :]) for a in (c.keys, c.values))
        mx.eval(keys, values)
        return keys, values, kept, c.offset

    def load(self, part: tuple[Any, Any, int, int]) -> int:
        keys, values, held, offset = part
        c = self.cache
        c.keys, c.values = (None if a is None else _shared(a) for a in (keys, values))
        c.held, c.offset = held, offset
        return c.nbytes

    def own(self, part: tuple[Any, Any, int, int]) -> int:
        return _bytes(part[:2])


class _Recurrent:
    """ArraysCache: states are new arrays each call, so a kept list is a free snapshot; fewer rows are replayed."""

    def __init__(self, cache: Any):
        self.cache = cache
        self._mark: _Held | None = None

    def open(self) -> None:
        self._mark = self.save(0)
        if isinstance(self.cache, RecurrentCache):
            self.cache.recording, self.cache.replay = True, None

    def can_keep(self, n: int, rows: int) -> bool:
        if n in (0, rows):
            return True
        return isinstance(self.cache, RecurrentCache) and bool(self.cache.replay or self.cache.pending)

    def keep(self, n: int, rows: int) -> None:
        if n == 0:
            assert self._mark is not None
            self.load(self._mark)
        elif n < rows and self.cache.replay is not None:
            self.cache.cache = self.cache.replay(n)
        elif n < rows:
            self.cache.kept = n
        self._mark = None
        if isinstance(self.cache, RecurrentCache):
            self.cache.recording, self.cache.replay = False, None

    def reach(self, length: int, current: int) -> int:
        return length if length == current else 0

    def rewind(self, length: int) -> int:
        if length == 0:
            self.load(([None] * len(self.cache.cache), None, 0))
        return 0

    def save(self, length: int) -> _Held:
        if not isinstance(self.cache, RecurrentCache):
            return list(self.cache.cache), None, 0
        return list(self.cache.cache), self.cache.pending, self.cache.kept

    def load(self, part: _Held) -> int:
        arrays, pending, kept = part
        self.cache.cache = list(arrays)
        if isinstance(self.cache, RecurrentCache):
            self.cache.pending, self.cache.kept = pending, kept
        return 0

    def own(self, part: _Held) -> int:
        return _bytes(part[:2])


_Held = tuple[list[mx.array | None], Pending | None, int]
"""Arrays of a recurrent cache, the rows that are pending, and how many of them hold."""

_ADAPTORS: dict[type, Callable[[Any], _Leaf]] = {
    KVCache: _KV,
    QuantizedKVCache: _KV,
    WindowCache: _Window,
    ArraysCache: _Recurrent,
    RecurrentCache: _Recurrent,
}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state at `length`. Valid for as long as it is held, whatever the state it came from does next."""

    length: int
    parts: tuple[Any, ...]
    nbytes: int
    """Of what it holds beside the state it was taken from."""


class State:
    """The caches of one timeline. `copied` counts bytes copied for snapshots and branches."""

    def __init__(self, caches: Sequence[Any]):
        """Raises UnsupportedModel for a cache class without an exact way back, naming it."""
        self.caches = [_windowed(cache) for cache in caches]
        self._leaves = [_adaptor(leaf) for cache in self.caches for leaf in _flat(cache)]
        self._length = 0
        self._rows: int | None = None
        self._read = 0
        self.copied = 0

    @property
    def length(self) -> int:
        """Tokens held, announced rows included once a forward has read them."""
        return self._length + self._read

    @property
    def opened(self) -> bool:
        return self._rows is not None

    def open(self, rows: int) -> None:
        """Announce `rows` rows of the next forward that may be taken back."""
        if self._rows is not None:
            raise RuntimeError("State.open while open: commit the last rows first")
        self._rows = rows
        for leaf in self._leaves:
            leaf.open()

    def advance(self, rows: int) -> None:
        """A forward has read `rows` rows (Target.forward calls this)."""
        if self._rows is None:
            self._length += rows
        elif self._read + rows != self._rows:
            raise RuntimeError(f"State was opened for {self._rows} rows, but {self._read + rows} were read")
        else:
            self._read = rows

    def commit(self, n: int) -> None:
        """Keep the first n announced rows, 0 = take all back. An error leaves every layer as it was."""
        rows = self._rows
        if rows is None:
            raise RuntimeError("State.commit without open")
        if not 0 <= n <= self._read:
            raise ValueError(f"cannot keep {n} of {self._read} rows")
        if not all(leaf.can_keep(n, rows) for leaf in self._leaves):
            raise RuntimeError(f"a layer recorded nothing to keep {n} of {rows} rows from")
        for leaf in self._leaves:
            leaf.keep(n, rows)
        self._length += n
        self._rows, self._read = None, 0

    def rewind(self, length: int) -> int:
        """Go back to at most `length` tokens; the length really reached, the same for every layer."""
        if self._rows is not None:
            raise RuntimeError("State.rewind while open")
        reached = self.reach(length)
        if reached < self._length:
            self.copied += sum(leaf.rewind(reached) for leaf in self._leaves)
            self._length = reached
        return reached

    def reach(self, length: int) -> int:
        """The length `rewind` would reach."""
        reached = min(length, self._length)
        for leaf in self._leaves:
            reached = leaf.reach(reached, self._length)
        if reached < self._length and any(leaf.reach(reached, self._length) != reached for leaf in self._leaves):
            return 0
        return reached

    @property
    def anywhere(self) -> bool:
        """Whether every cache can go back to any length, so that no snapshot is needed on the way."""
        return all(isinstance(leaf, _KV) for leaf in self._leaves)

    def snapshot(self, length: int | None = None) -> Snapshot:
        """The state as it is, or as it was at `length` where it can go back anywhere."""
        if self._rows is not None:
            raise RuntimeError("State.snapshot while open")
        if length is not None and length != self._length and not self.anywhere:
            raise RuntimeError("State.snapshot of an earlier length needs caches that can go back anywhere")
        length = self._length if length is None else length
        parts = tuple(leaf.save(length) for leaf in self._leaves)
        own = sum(leaf.own(part) for leaf, part in zip(self._leaves, parts, strict=True))
        return Snapshot(length, parts, own)

    def restore(self, snapshot: Snapshot) -> None:
        """Become the state the snapshot was taken from, in this State or in another of the same model."""
        if self._rows is not None:
            raise RuntimeError("State.restore while open")
        self.copied += sum(leaf.load(part) for leaf, part in zip(self._leaves, snapshot.parts, strict=True))
        self._length = snapshot.length

    @property
    def nbytes(self) -> int:
        """Bytes of memory the caches hold, growth room included."""
        return sum(int(leaf.nbytes) for cache in self.caches for leaf in _flat(cache))

    def arrays(self) -> list[mx.array]:
        """Every array held, to be evaluated."""
        held: list[mx.array] = []
        for cache in self.caches:
            for leaf in _flat(cache):
                values = leaf.cache if isinstance(leaf, ArraysCache) else [leaf.keys, leaf.values]
                values = [*values, *(getattr(leaf, "pending", None) or ())]
                held += [a for a in _leaves(values) if a is not None]
        return held


def _windowed(cache: Any) -> Any:
    """mlx-lm's ring cannot be taken back; a window that keeps no first tokens is held in order of time instead."""
    if type(cache) is RotatingKVCache and not cache.keep and cache.empty():
        return WindowCache(cache.max_size)
    if type(cache) is CacheList:
        return CacheList(*(_windowed(c) for c in cache.caches))
    return cache


def _flat(cache: Any) -> Iterator[Any]:
    if type(cache) is CacheList:
        for inner in cache.caches:
            yield from _flat(inner)
    else:
        yield cache


def _adaptor(cache: Any) -> _Leaf:
    make = _ADAPTORS.get(type(cache))
    if make is None:
        raise UnsupportedModel(
            f"this model keeps its context in a {type(cache).__name__}, which Lisa cannot take back exactly; "
            "use a model of a supported family (llama, qwen3, qwen3_5)"
        )
    return make(cache)


def _leaves(tree: Any) -> list[Any]:
    return [value for _, value in tree_flatten(tree)] if isinstance(tree, (tuple, list)) else [tree]


def _bytes(tree: Any) -> int:
    return sum(a.nbytes for a in _leaves(tree) if isinstance(a, mx.array))


def _shared(tree: Any) -> Any:
    return tuple(a[...] for a in tree) if isinstance(tree, tuple) else tree[...]
