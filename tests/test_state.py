"""State: what is taken back is gone from every layer, what is kept is what a fresh run over it holds, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from tiny import VOCAB, target

from lisa.errors import UnsupportedModel
from lisa.state import RecurrentCache, State, WindowCache
from lisa.target import Target

KINDS = ["dense", "hybrid", "sliding"]
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 20).tolist()


def read(target: Target, state: State, tokens: list[int]) -> mx.array:
    logits, _ = target.forward(mx.array(tokens, mx.int32), state, rows=1)
    mx.eval(logits, state.arrays())
    return logits


def contents(state: State) -> list[np.ndarray]:
    """What attention and recurrence would look at, whatever the buffers' growth room."""
    held: list[np.ndarray] = []
    for cache in state.caches:
        if isinstance(cache, ArraysCache):
            held += [np.array(a) for a in cache.cache if a is not None]
        elif isinstance(cache, WindowCache):
            begin = max(0, cache.held - (cache.window - 1))
            held += [np.array(a[..., begin : cache.held, :]) for a in (cache.keys, cache.values) if a is not None]
        elif cache.keys is not None:
            held += [np.array(a[..., : cache.offset, :]) for a in (cache.keys, cache.values)]
    return held


def same(a: State, b: State) -> bool:
    x, y = contents(a), contents(b)
    return a.length == b.length and len(x) == len(y) and all(np.array_equal(p, q) for p, q in zip(x, y, strict=True))


def after(target: Target, tokens: list[int]) -> State:
    state = target.new_state()
    if tokens:
        read(target, state, tokens)
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", range(7))
def test_B1_every_layer_equals_a_fresh_run_over_the_kept_tokens(kind: str, kept: int) -> None:
    t = target(kind)
    state = after(t, PROMPT)
    draft = [3, 1, 4, 1, 5, 9]
    for _ in range(3):
        state.open(6)
        read(t, state, draft)
        state.commit(kept)
    fresh = after(t, PROMPT)
    for _ in range(3):
        if kept:
            read(t, fresh, draft[:kept])
    assert same(state, fresh)
    assert np.array_equal(np.array(read(t, state, [7])), np.array(read(t, fresh, [7])))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_bit_equal_whatever_rows_stand_beside_them(kind: str) -> None:
    t = target(kind)
    one = after(t, PROMPT)
    singles = [np.array(read(t, one, [token]))[0] for token in range(16)]
    for rows in range(1, 17):
        state = after(t, PROMPT)
        logits, _ = t.forward(mx.array(list(range(rows)), mx.int32), state, rows=rows)
        assert np.array_equal(np.array(logits), np.array(singles[:rows])), rows


def test_B2_a_cache_that_cannot_keep_a_part_refuses_before_any_layer_changes() -> None:
    attention, plain = KVCache(), ArraysCache(1)
    state = State([attention, plain])

    def forward(rows: int) -> None:
        attention.update_and_fetch(mx.ones((1, 1, rows, 4)), mx.ones((1, 1, rows, 4)))
        plain[0] = mx.full((1, 2), state.length + rows)
        state.advance(rows)

    forward(5)
    state.open(4)
    forward(4)
    with pytest.raises(RuntimeError, match="recorded nothing"):
        state.commit(2)
    assert attention.offset == 9 and state.opened
    state.commit(0)
    assert attention.offset == 5 and plain[0].tolist() == [[5, 5]] and state.length == 5


def test_B2_an_unknown_cache_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="ChunkedKVCache"):
        State([KVCache(), CacheList(KVCache(), ChunkedKVCache(8))])
    with pytest.raises(UnsupportedModel, match="RotatingKVCache"):
        State([RotatingKVCache(8, keep=4)])


@pytest.mark.parametrize("rejected", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [3, 6, 7, 8, 9, 15, 16, 17, 40])
def test_B3_taking_back_rows_before_at_and_past_the_wrap_leaves_no_trace(start: int, rejected: int) -> None:
    t = target("sliding")
    tokens = [(7 * i + 3) % VOCAB for i in range(start)]
    state = after(t, tokens)
    state.open(5)
    read(t, state, [11, 12, 13, 14, 15])
    state.commit(5 - rejected)
    fresh = after(t, tokens)
    read(t, fresh, [11, 12, 13, 14, 15][: 5 - rejected])
    assert same(state, fresh)
    assert np.array_equal(np.array(read(t, state, [1, 2])), np.array(read(t, fresh, [1, 2])))


@pytest.mark.parametrize("rows", range(1, 7))
def test_B4_a_window_stays_bounded_and_shows_attention_exactly_itself(rows: int) -> None:
    window, cache, seen = 8, WindowCache(8), 0
    for _ in range(100):
        values = mx.arange(seen, seen + rows, dtype=mx.float32).reshape(1, 1, rows, 1)
        mask = cache.make_mask(rows, window_size=window)
        keys, _ = cache.update_and_fetch(values, values)
        shown = keys[0, 0, :, 0].tolist()
        assert shown == list(range(max(0, seen - window + 1), seen + rows)), "in order of time"
        if not isinstance(mask, mx.array):  # None, "causal": every row sees all shown up to itself
            assert len(shown) <= window
        else:
            for i, row in enumerate(mask.tolist()):
                position = seen + i
                visible = [p for p, allowed in zip(shown, row, strict=True) if allowed]
                assert visible == list(range(max(0, position - window + 1), position + 1))
        seen += rows
        assert cache.keys is not None and cache.keys.shape[2] <= window + 16 + 64


def test_a_ring_of_mlx_lm_is_held_as_a_window() -> None:
    state = State([RotatingKVCache(8), CacheList(KVCache(), RotatingKVCache(4))])
    assert isinstance(state.caches[0], WindowCache) and isinstance(state.caches[1][1], WindowCache)


@pytest.mark.parametrize("kind", KINDS)
def test_B7_prefill_in_pieces_of_any_size_gives_the_same_state(kind: str) -> None:
    t = target(kind)
    tokens = [(5 * i + 1) % VOCAB for i in range(97)]
    whole = after(t, tokens)
    logits = np.array(read(t, whole, [2]))
    for piece in (1, 2, 3, 7, 32, 33, 96, 97):
        state = t.new_state()
        for start in range(0, 97, piece):
            read(t, state, tokens[start : start + piece])
        for a, b in zip(contents(state), contents(after(t, tokens)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        np.testing.assert_allclose(np.array(read(t, state, [2])), logits, atol=2e-4)


def test_a_quantised_kv_cache_takes_rows_back() -> None:
    dense = target("dense")
    kv = 8
    state = State([QuantizedKVCache(group_size=32, bits=kv) for _ in range(3)])
    fresh = State([QuantizedKVCache(group_size=32, bits=kv) for _ in range(3)])
    big = mx.random.normal((1, 2, 9, 32))
    for s, rows in ((state, 9), (fresh, 6)):
        for c in s.caches:
            c.update_and_fetch(big[:, :, :4], big[:, :, :4])
        s.advance(4)
        s.open(rows - 4)
        for c in s.caches:
            c.update_and_fetch(big[:, :, 4:rows], big[:, :, 4:rows])
        s.advance(rows - 4)
        s.commit(2)
    assert dense.layers == 3 and state.length == fresh.length == 6
    for a, b in zip(state.caches, fresh.caches, strict=True):
        for x, y in zip(a.keys, b.keys, strict=True):
            assert mx.array_equal(x[..., :6, :], y[..., :6, :])


@pytest.mark.parametrize("kind", KINDS)
def test_rewind_reaches_what_is_exact_and_says_where_that_is(kind: str) -> None:
    t = target(kind)
    state = after(t, PROMPT)
    assert state.rewind(20) == 20 and state.rewind(99) == 20
    reached = state.rewind(12)
    assert reached == {"dense": 12, "hybrid": 0, "sliding": 12}[kind]
    read(t, state, PROMPT[reached:])
    assert same(state, after(t, PROMPT)) or kind != "hybrid"
    np.testing.assert_allclose(np.array(read(t, state, [5])), np.array(read(t, after(t, PROMPT), [5])), atol=1e-5)


def test_a_window_that_has_moved_on_rewinds_to_the_start() -> None:
    t = target("sliding")
    state = after(t, PROMPT)
    for i in range(90):
        read(t, state, [i % VOCAB])
    assert state.rewind(20) == 0 and state.length == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_survives_what_its_state_does_next(kind: str) -> None:
    t = target(kind)
    state = after(t, PROMPT)
    snapshot = state.snapshot()
    read(t, state, [1, 2, 3])
    state.rewind(5)
    read(t, state, [9] * 30)
    state.restore(snapshot)
    assert same(state, after(t, PROMPT))


@pytest.mark.parametrize("kind", KINDS)
def test_two_branches_of_a_snapshot_do_not_see_each_other(kind: str) -> None:
    t = target(kind)
    state = after(t, PROMPT)
    snapshot = state.snapshot()
    branch = t.new_state()
    branch.restore(snapshot)
    a, b = read(t, state, [1]), read(t, branch, [2])
    assert np.array_equal(np.array(a), np.array(read(t, after(t, PROMPT), [1])))
    assert np.array_equal(np.array(b), np.array(read(t, after(t, PROMPT), [2])))
    third = t.new_state()
    third.restore(snapshot)
    assert same(third, after(t, PROMPT))


def test_a_snapshot_costs_nothing_until_it_is_written_below() -> None:
    t = target("dense")
    state = after(t, PROMPT)
    snapshot = state.snapshot()
    read(t, state, [1, 2, 3])
    state.restore(snapshot)
    assert state.copied == 0
    state.rewind(10)
    per_token = 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 heads of 8 floats
    assert state.copied == 20 * per_token


def test_open_rows_must_be_read_and_settled_before_anything_else() -> None:
    t = target("dense")
    state = after(t, PROMPT)
    state.open(3)
    with pytest.raises(RuntimeError, match="opened for 3 rows"):
        t.forward(mx.array([1, 2], mx.int32), state)
    for forbidden in (lambda: state.open(1), lambda: state.rewind(1), state.snapshot):
        with pytest.raises(RuntimeError, match="open"):
            forbidden()
    state.commit(0)
    assert same(state, after(t, PROMPT))


def test_a_recurrent_cache_records_only_while_open() -> None:
    t = target("hybrid")
    state = after(t, PROMPT)
    recurrent = [c for c in state.caches if isinstance(c, RecurrentCache)]
    assert recurrent and all(c.replay is None and not c.recording for c in recurrent)
    state.open(2)
    read(t, state, [1, 2])
    assert all(c.replay is not None for c in recurrent)
    state.commit(1)
    assert all(c.replay is None and not c.recording for c in recurrent)
