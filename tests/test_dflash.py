"""The shared backbone, the context it keeps, and DFlash's own proposals. Weights are those of tests/golden."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench.golden_drafters import GREEDY, Ends, block_vectors, check, commit, ends
from bench.golden_vectors import cases, error
from lisa import sampling
from lisa.drafters.checkpoint import read
from lisa.drafters.dflash import BlockDrafter, DFlash
from lisa.drafters.dspine import DSpine
from lisa.sampling import top
from lisa.types import Sampling

GOLDEN = Path(__file__).parent / "golden"
HIDDEN, TAPS, BLOCK = 64, 3, 8
TOLERANCE = 2e-4


def model(kind: str = "dflash", target: Ends | None = None, chunk: int = 512, **overrides: Any) -> DFlash:
    folder = GOLDEN / f"{kind}_a"
    checkpoint = read(folder, overrides)
    options = {"scoring": "pairs"} if kind == "dspine" else {}
    make = DSpine if kind == "dspine" else DFlash
    return make(checkpoint, target or ends(folder, checkpoint), chunk=chunk, **options)


def sliding(window: int, kinds: str = "sss", **overrides: Any) -> DFlash:
    names = {"s": "sliding_attention", "f": "full_attention"}
    return model(layer_types=[names[k] for k in kinds], sliding_window=window, **overrides)


def random_features(n: int, seed: int = 0) -> mx.array:
    return mx.random.normal((n, TAPS * HIDDEN), key=mx.random.key(seed))


def fed(drafter: Any, features: mx.array, pieces: list[int] | None = None) -> Any:
    """The drafter after features in pieces of those sizes (in one without), continuing where it stands."""
    start = drafter.length
    while start < len(features):
        size = min(pieces.pop(0) if pieces else len(features), len(features) - start)
        drafter.observe(commit(size, features[start : start + size], start))
        start += size
    return drafter


def block(drafter: BlockDrafter, anchor: int = 7) -> mx.array:
    """The final hiddens [1, B, H] of a full block after what the drafter has observed."""
    m, position = drafter.model, drafter.length
    drafter.propose(anchor, m.width, GREEDY, position)  # projects the queue
    return m.forward(mx.array([anchor] + [m.mask] * (m.block - 1)), drafter.contexts, position).final


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool((a == b).all())


# ---- golden numbers ----


def test_golden_in_one_pass() -> None:
    errors = check(GOLDEN / "dflash_a")
    assert set(errors) == {"final_hidden", "base_logits"}
    assert max(errors.values()) <= TOLERANCE


def test_the_golden_check_sees_a_wrong_number() -> None:
    given = cases(GOLDEN / "dflash_a")[0]
    ours = block_vectors(model(rms_norm_eps=0.1), given)
    assert error(ours["final_hidden"], given["final_hidden"]) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_golden_with_the_context_in_pieces_and_drafts_in_between(kind: str, chunk: int) -> None:
    m = model(kind, chunk=chunk)
    for case, given in enumerate(cases(GOLDEN / f"{kind}_a")):
        features, anchor = given["target_hidden"][0], int(given["anchor"][0])
        drafter = m.new()
        rows = mx.random.randint(1, 5, (40,), key=mx.random.key(case)).tolist()
        while drafter.length < len(features):  # rounds: a draft of which 1 .. 4 tokens turn out true
            mx.eval(drafter.propose(3, m.width, GREEDY, drafter.length).tokens)
            n = min(rows.pop(), len(features) - drafter.length)
            drafter.observe(commit(n, features[drafter.length : drafter.length + n], drafter.length))
        assert error(block(drafter, anchor), given["final_hidden"]) <= TOLERANCE
        if kind == "dspine":
            assert (
                drafter.propose(anchor, m.width, GREEDY, len(features)).tokens.tolist() == given["selected"][0].tolist()
            )


# ---- against a dense mask ----


def dense_reference(
    m: DFlash, features: mx.array, anchor: int, windows: list[int | None], causal: list[bool]
) -> mx.array:
    """All of it at once, written from the definition: no cache, explicit rotation, one mask entry a pair."""
    p = dict(tree_flatten(m.network.parameters()))
    C, B = len(features), m.block
    at = mx.arange(C + B)

    def rms(x: mx.array, name: str) -> mx.array:
        return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]

    def rotate(x: mx.array, positions: mx.array) -> mx.array:  # [n, heads, 16]
        half = x.shape[-1] // 2
        angle = (positions[:, None] * 10000.0 ** (-mx.arange(half) / half))[:, None]
        a, b = x[..., :half], x[..., half:]
        return mx.concatenate([a * mx.cos(angle) - b * mx.sin(angle), b * mx.cos(angle) + a * mx.sin(angle)], -1)

    context = rms(features @ p["fc.weight"].T, "hidden_norm")
    h = m.target.embed(mx.array([anchor] + [m.mask] * (B - 1)))
    for i, (window, is_causal) in enumerate(zip(windows, causal, strict=True)):
        a, n = f"layers.{i}.self_attn", f"layers.{i}"
        x = rms(h, f"{n}.input_layernorm")
        both = mx.concatenate([context, x])
        q = rotate(rms((x @ p[f"{a}.q_proj.weight"].T).reshape(B, 4, 16), f"{a}.q_norm"), at[C:])
        k = rotate(rms((both @ p[f"{a}.k_proj.weight"].T).reshape(C + B, 2, 16), f"{a}.k_norm"), at)
        v = (both @ p[f"{a}.v_proj.weight"].T).reshape(C + B, 2, 16)
        seen = (at[None] < C) | (at[None] <= at[C:, None]) | (not is_causal)
        if window is not None:
            seen = seen & (at[C:, None] - at[None] < window)
        out = []
        for head in range(4):
            scores = mx.where(seen, q[:, head] @ k[:, head // 2].T / math.sqrt(16), -mx.inf)
            out.append(mx.softmax(scores, -1) @ v[:, head // 2])
        h = h + mx.concatenate(out, -1) @ p[f"{a}.o_proj.weight"].T
        x = rms(h, f"{n}.post_attention_layernorm")
        gate, up = (x @ p[f"{n}.mlp.{w}_proj.weight"].T for w in ("gate", "up"))
        h = h + (gate * mx.sigmoid(gate) * up) @ p[f"{n}.mlp.down_proj.weight"].T
    return rms(h, "norm")[None]


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("window", [1, 4, 8, 20, 200])
@pytest.mark.parametrize("length", [0, 3, 25, 61])
def test_sliding_layers_equal_a_dense_mask(window: int, length: int, is_causal: bool | None) -> None:
    m = sliding(window, "sfs", **({} if is_causal is None else {"is_causal": is_causal}))
    features = random_features(length)
    drafter = fed(m.new(), features, [5] * 20)
    causal = [True, False, True] if is_causal is None else [is_causal] * 3
    reference = dense_reference(m, features, 7, [window, None, window], causal)
    assert error(block(drafter), reference) <= 1e-5


def test_B4_a_window_holds_no_more_than_itself_and_the_slack() -> None:
    m = sliding(8)
    drafter = m.new()
    for i in range(60):
        fed(drafter, random_features(3 * i + 3))
        block(drafter)
        assert all(rows.shape[2] <= 8 - 1 + 16 for context in drafter.contexts for rows in context.arrays)


def test_a_layer_is_causal_in_the_block_where_declared_else_where_it_slides() -> None:
    assert model().causal == [False] * 3
    assert sliding(8, "sfs").causal == [True, False, True]
    assert model(is_causal=True).causal == [True] * 3
    assert sliding(8, is_causal=False).causal == [False] * 3
    assert model("dspine").causal == [True] * 3


# ---- what is drafted ----


class Watched(Ends):
    """Ends that note which tokens were embedded and how many rows went through the head."""

    def embed(self, tokens: mx.array) -> mx.array:
        if tokens.size > 1:
            self.__dict__.setdefault("embedded", []).append(tokens.tolist())
        return super().embed(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        self.__dict__.setdefault("headed", []).append(hidden.shape[-2])
        return super().head(hidden)


def watched(kind: str = "dflash") -> Watched:
    e = ends(GOLDEN / f"{kind}_a", read(GOLDEN / f"{kind}_a"))
    return Watched(e.embedding, e.matrix)


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
@pytest.mark.parametrize("size", [2, 7, 16])
def test_C5_the_block_is_the_anchor_then_masks_and_the_anchor_is_no_proposal(kind: str, size: int) -> None:
    target = watched(kind)
    drafter = fed(model(kind, target, block_size=size).new(), random_features(5))
    assert drafter.width == size - 1
    p = drafter.propose(42, 15, GREEDY, 5)
    assert p.size == size - 1 and p.tokens.shape == (size - 1,) and p.tokens.dtype == mx.int32
    assert target.embedded == [[42] + [159] * (size - 1)]
    assert p.source == kind


def test_a_narrow_causal_draft_is_a_prefix_and_reads_fewer_slots() -> None:
    target = watched()
    drafter = fed(model(target=target, is_causal=True).new(), random_features(20))
    full = drafter.propose(7, 7, GREEDY, 20).tokens.tolist()
    for width in range(1, 8):
        assert drafter.propose(7, width, GREEDY, 20).tokens.tolist() == full[:width]
        assert len(target.embedded[-1]) == width + 1


def test_a_narrow_bidirectional_draft_is_cut_from_the_full_block() -> None:
    target = watched()
    drafter = fed(model(target=target).new(), random_features(20))
    full = drafter.propose(7, 7, GREEDY, 20).tokens.tolist()
    for width in range(1, 8):
        assert drafter.propose(7, width, GREEDY, 20).tokens.tolist() == full[:width]
        assert len(target.embedded[-1]) == BLOCK
        assert target.headed[-1] == width


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
def test_C8_padding_is_never_proposed(kind: str) -> None:
    e = ends(GOLDEN / f"{kind}_a", read(GOLDEN / f"{kind}_a"))
    # The padded rows would win every slot: they look like what the network says most strongly.
    loud = mx.concatenate([e.matrix[:150], 50 * e.matrix[86:96]])
    target = Ends(e.embedding, loud, padding=10)
    for s in (GREEDY, Sampling(temperature=1.0, seed=1)):
        drafter = fed(model(kind, target).new(), random_features(20))
        assert max(drafter.propose(7, 7, s, 20).tokens.tolist()) < 150
    unpadded = fed(model(kind, Ends(e.embedding, loud)).new(), random_features(20))
    assert max(unpadded.propose(7, 7, GREEDY, 20).tokens.tolist()) >= 150


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
def test_the_position_limit_narrows_and_then_ends_drafting(kind: str) -> None:
    m = model(kind, max_position_embeddings=30)
    assert m.new().limit == 30
    for position, size in [(20, 7), (22, 7), (23, 6), (28, 1), (29, 0), (40, 0)]:
        p = fed(m.new(), random_features(position)).propose(7, 7, GREEDY, position)
        assert p.size == size and p.tokens.shape == (size,)
    assert replace(GREEDY) == GREEDY and model(max_position_embeddings=None).new().limit is None


def test_confidence_is_the_probability_among_the_candidates() -> None:
    m = model()
    drafter = fed(m.new(), random_features(20))
    p = drafter.propose(7, 7, GREEDY, 20)
    logits = m.target.head(block(drafter)[0, 1:])
    best = -mx.sort(-logits, axis=-1)[:, :32]
    assert mx.allclose(p.confidence, mx.softmax(best, -1)[:, 0], atol=1e-6)
    assert p.tokens.tolist() == mx.argmax(logits, -1).tolist()
    assert p.distribution is None


def test_a_coupled_draw_shares_the_noise_of_the_target() -> None:
    drafter = fed(model().new(), random_features(20))
    logits = drafter.model.target.head(block(drafter)[0, 1:])
    logits = mx.where(logits < mx.sort(logits)[:, -32:-31], -mx.inf, logits)  # its candidates
    for seed in range(20):
        s = Sampling(temperature=0.8, seed=seed)
        p = drafter.propose(7, 7, s, 20)
        # What the target would draw from the very same distribution.
        drawn = sampling.draw(sampling.filtered(logits, s), s, mx.arange(21, 28), 160)
        assert p.tokens.tolist() == drawn.tolist()
        assert p.distribution is None


def test_rejection_hands_over_the_distribution_the_draft_was_drawn_from() -> None:
    drafter = fed(model().new(), random_features(20))
    drawn: dict[int, int] = {}
    for seed in range(400):
        p = drafter.propose(7, 7, Sampling(temperature=1.0, rule="rejection", seed=seed), 20)
        first = int(p.tokens[0])
        drawn[first] = drawn.get(first, 0) + 1
    assert p.distribution.ids.shape == p.distribution.probabilities.shape == (7, 32)
    assert mx.allclose(p.distribution.probabilities.sum(-1), mx.ones(7), atol=1e-5)
    for token, q in zip(p.distribution.ids[0].tolist(), p.distribution.probabilities[0].tolist(), strict=True):
        assert abs(drawn.get(token, 0) / 400 - q) < 4 * math.sqrt(q * (1 - q) / 400) + 0.005


def test_a_rejection_draft_is_independent_of_the_verifiers_noise() -> None:
    drafter = fed(model().new(), random_features(20))
    a, b = (
        drafter.propose(7, 7, Sampling(temperature=3.0, rule=r, seed=5), 20).tokens.tolist()
        for r in ("coupled", "rejection")
    )
    assert a != b


# ---- the contract ----


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
def test_proposing_leaves_the_drafter_as_it_was(kind: str) -> None:
    drafter = fed(model(kind).new(), random_features(20), [7, 13])
    first = drafter.propose(7, 7, GREEDY, 20)
    again = drafter.propose(7, 7, GREEDY, 20)
    assert drafter.length == 20
    assert same(first.tokens, again.tokens) and same(first.confidence, again.confidence)


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
@pytest.mark.parametrize(
    "s", [GREEDY, Sampling(temperature=1.0, seed=2), Sampling(temperature=1.0, seed=2, rule="rejection")]
)
def test_proposing_waits_for_nothing(kind: str, s: Sampling) -> None:
    m = model(kind)

    def traced(features: mx.array) -> mx.array:
        drafter = m.new()
        drafter.observe(commit(9, features))
        return drafter.propose(7, 7, s, 9).tokens

    # Inside a trace MLX raises on any evaluation; the trace itself is not run.
    assert mx.compile(traced)(random_features(9)).shape == (7,)
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda features: traced(features).sum().item())(random_features(9))


def test_a_gap_raises() -> None:
    drafter = fed(model().new(), random_features(5))
    with pytest.raises(RuntimeError, match="gap: 5 tokens observed"):
        drafter.observe(commit(2, random_features(2), 6))
    with pytest.raises(RuntimeError, match="gap: 5 tokens observed"):
        drafter.observe(commit(2, random_features(2), 4))
    with pytest.raises(RuntimeError, match="gap: 5 tokens observed"):
        drafter.propose(7, 3, GREEDY, 6)
    with pytest.raises(RuntimeError, match="rows of features"):
        drafter.observe(commit(3, random_features(2), 5))
    assert drafter.length == 5


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("kinds", ["fff", "sss", "sfs"])
def test_rewind_then_observe_equals_fresh(kinds: str, projected: bool) -> None:
    features, other = random_features(40), random_features(40, seed=1)
    m = sliding(8, kinds)
    for back in (0, 1, 15, 16, 17, 30, 39, 40):
        drafter = fed(m.new(), features, [9, 20, 11])
        if projected:
            mx.eval(drafter.propose(3, 7, GREEDY, 40).tokens)
        reached = drafter.rewind(40 - back)
        exact = not projected or kinds == "fff" or back <= 16
        assert reached == drafter.length == (40 - back if exact else 0)
        timeline = mx.concatenate([features[:reached], other[reached:]])
        fed(drafter, timeline, [3, 1, 1])
        assert same(block(drafter), block(fed(m.new(), timeline)))


def test_B3_rewinds_around_the_edge_of_the_window_keep_positions() -> None:
    m = sliding(8)
    for length in range(4, 34):
        for back in range(0, 5):
            drafter = fed(m.new(), random_features(length), [2] * 20)
            block(drafter)
            assert drafter.rewind(length - back) == max(0, length - back)
            timeline = mx.concatenate([random_features(length)[: length - back], random_features(6, seed=3)])
            fed(drafter, timeline)
            assert error(block(drafter), dense_reference(m, timeline, 7, [8] * 3, [True] * 3)) <= 1e-5


@pytest.mark.parametrize("kinds", ["fff", "sfs"])
def test_a_snapshot_stays_valid_whatever_happens_next(kinds: str) -> None:
    m = sliding(8, kinds)
    a, b, c = (random_features(60, seed) for seed in range(3))
    drafter = fed(m.new(), a[:30], [20, 10])
    block(drafter)
    snapshot = drafter.snapshot()
    expected = block(drafter)
    fed(drafter, a)  # goes on
    longer, at_60 = drafter.snapshot(), block(drafter)
    if drafter.rewind(20) == 20:  # goes back below the snapshot, and elsewhere
        fed(drafter, mx.concatenate([a[:20], b[20:]]))
        block(drafter)
    other = m.new()
    other.restore(snapshot)
    drafter.restore(snapshot)
    assert other.length == drafter.length == 30
    assert same(block(other), expected) and same(block(drafter), expected)
    # Two sessions go on from one snapshot, in turn, and do not see each other.
    for step in range(31, 50):
        fed(other, mx.concatenate([a[:30], b[30:step]]))
        fed(drafter, mx.concatenate([a[:30], c[30:step]]))
        block(other), block(drafter)
    for session, rest in ((other, b), (drafter, c)):
        assert same(block(session), block(fed(m.new(), mx.concatenate([a[:30], rest[30:49]]))))
    drafter.restore(longer)
    assert same(block(drafter), at_60)
    drafter.restore(snapshot)
    assert same(block(drafter), expected)


def test_a_snapshot_of_queued_features_needs_no_projection() -> None:
    m = model()
    drafter = fed(m.new(), random_features(12), [5, 7])
    snapshot = drafter.snapshot()
    assert not drafter.contexts[0].arrays
    fed(drafter, random_features(20))
    block(drafter)
    drafter.restore(snapshot)
    assert drafter.length == 12
    assert same(block(drafter), block(fed(m.new(), random_features(12))))


def test_snapshots_of_one_timeline_share_its_memory() -> None:
    m = model(chunk=8)
    features = random_features(2000)
    drafter = m.new()
    snapshots = []
    for start in range(0, 2000, 20):
        fed(drafter, features[: start + 20])
        block(drafter)
        snapshots.append(drafter.snapshot())
    mx.eval(block(drafter))
    held = {id(buffer): buffer for saved, _ in snapshots for buffer, _ in saved}
    assert len(held) == len(drafter.contexts)
    row = 2 * 2 * 16 * 4  # K and V, 2 heads of 16, float32
    assert sum(b.keys.nbytes + b.values.nbytes for b in held.values()) <= 3 * row * (2008 * 1.25 + 256)
    restored = m.new()
    restored.restore(snapshots[3])
    assert same(block(restored), block(fed(m.new(), features[:80])))


def test_B9_a_new_session_knows_nothing_of_the_last() -> None:
    m = model()
    block(fed(m.new(), random_features(900)))
    short = fed(m.new(), random_features(3, seed=5))
    assert same(block(short), block(fed(model().new(), random_features(3, seed=5))))


def test_the_first_token_can_be_drafted_after_without_context() -> None:
    m = model("dspine")
    p = m.new().propose(7, 7, GREEDY, 0)
    assert p.size == 7 and len(p.tokens.tolist()) == 7
    assert m.new().propose(7, 0, GREEDY, 0).size == 0


def test_D1_the_first_draft_does_not_depend_on_the_pieces_of_the_prompt() -> None:
    features = random_features(67)
    m = model("dspine", chunk=16)
    expected = fed(m.new(), features).propose(7, 7, GREEDY, 67).confidence
    for piece in (1, 2, 7, 16, 17, 20, 66):
        drafter = fed(m.new(), features, [piece] * 67)
        assert same(drafter.propose(7, 7, GREEDY, 67).confidence, expected), piece


@pytest.mark.parametrize("kinds", ["fff", "sss"])
def test_D2_a_long_prompt_leaves_features_of_one_chunk_at_most(kinds: str) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    m = model(chunk=256, layer_types=[names[k] for k in kinds], sliding_window=64)
    drafter = m.new()
    feature, row = TAPS * HIDDEN * 4, 2 * 2 * 16 * 4  # bytes a token: taps; K and V of one layer
    mx.synchronize()
    before = mx.get_active_memory()
    for start in range(0, 4000, 250):
        piece = random_features(250, seed=start)
        mx.eval(piece)
        drafter.observe(commit(250, piece, start))
        del piece
        rows = 64 - 1 + 16 if kinds == "sss" else 1.25 * (start + 250) + 256
        assert drafter.nbytes <= 256 * feature + 3 * row * rows
        mx.synchronize()
        # Not only counted: nothing else is alive either.
        assert mx.get_active_memory() - before <= drafter.nbytes + 2 * 250 * feature
    assert drafter.length == 4000
    block(drafter)
    assert not drafter.queue


def test_a_parked_drafter_projects_nothing() -> None:
    drafter = fed(model().new(), random_features(300), [1] * 300)
    assert not drafter.contexts[0].arrays
    assert drafter.nbytes == 300 * TAPS * HIDDEN * 4


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
def test_D4_the_embedding_and_the_head_are_shared_not_copied(kind: str) -> None:
    e = ends(GOLDEN / f"{kind}_a", read(GOLDEN / f"{kind}_a"))
    m = model(kind, e)
    assert m.target is e
    own = [a for _, a in tree_flatten(m.network.parameters())]
    assert not any(160 in a.shape for a in own)
    assert not m.checkpoint.weights  # the file's own values are let go
    # Sessions share the weights.
    assert m.new().model is m.new().model


@pytest.mark.parametrize("bits", [4, 8])
def test_the_backbone_can_be_packed_at_load(bits: int) -> None:
    folder = GOLDEN / "dspine_a"
    checkpoint = read(folder)
    packed = DSpine(checkpoint, ends(folder, checkpoint), bits=bits, scoring="pairs")
    names = {name for name, a in tree_flatten(packed.network.parameters()) if a.dtype == mx.uint32}
    assert {n.rsplit(".", 2)[-2] for n in names} == {
        "fc",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert packed.codes.dtype == mx.float32
    features = random_features(20)
    exact = block(fed(model("dspine").new(), features))
    rough = block(fed(packed.new(), features))
    assert error(rough, exact) < (0.4 if bits == 4 else 0.05)


def test_weights_follow_the_targets_dtype() -> None:
    e = ends(GOLDEN / "dspine_a", read(GOLDEN / "dspine_a"))
    m = model("dspine", Ends(e.embedding.astype(mx.bfloat16), e.matrix.astype(mx.bfloat16)))
    assert {a.dtype for _, a in tree_flatten(m.network.parameters())} == {mx.bfloat16}
    assert {a.dtype for _, a in tree_flatten(m.refinement.parameters())} == {mx.float32}
    drafter = fed(m.new(), random_features(20).astype(mx.bfloat16))
    assert block(drafter).dtype == mx.bfloat16
    p = drafter.propose(7, 7, GREEDY, 20)
    assert p.confidence.dtype == mx.float32 and p.size == 7


# ---- the largest of a row ----


@pytest.mark.parametrize("size", [5, 64, 160, 700, 4096 + 13])
@pytest.mark.parametrize("k", [1, 6, 16])
def test_top_equals_a_stable_sort_ties_included(size: int, k: int) -> None:
    for seed, ties in enumerate([False, True]):
        logits = mx.random.normal((4, size), key=mx.random.key(seed))
        if ties:
            logits = mx.round(2 * logits)
        ids, values = top(logits, k)
        for row, chosen, scores in zip(logits.tolist(), ids.tolist(), values.tolist(), strict=True):
            assert scores == sorted(row, reverse=True)[:k]
            assert [row[i] for i in chosen] == scores and len(set(chosen)) == len(chosen)
            assert all(a != b or i < j for a, b, i, j in zip(scores, scores[1:], chosen, chosen[1:], strict=False))
        assert ids.dtype == mx.int32
