"""EAGLE-3: rows that pair a feature with the next token, its own vocabulary, its own context."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench.golden_drafters import GREEDY, Ends, check, commit, eagle_vectors, ends
from bench.golden_vectors import cases, error
from lisa import sampling
from lisa.drafters.checkpoint import Checkpoint, read
from lisa.drafters.eagle import Eagle, EagleDrafter
from lisa.errors import BadDrafter
from lisa.types import Sampling

FOLDER = Path(__file__).parent / "golden" / "eagle3_a"
TOLERANCE = 2e-4


def model(changes: dict[str, Any] | None = None, target: Ends | None = None, **options: Any) -> Eagle:
    """The golden drafter with other weights (None takes one away)."""
    checkpoint = read(FOLDER)
    weights = {k: v for k, v in {**checkpoint.weights, **(changes or {})}.items() if v is not None}
    return Eagle(replace(checkpoint, weights=weights), target or ends(FOLDER, checkpoint), **options)


def features(n: int, seed: int = 0) -> mx.array:
    return mx.random.normal((n, 3 * 64), key=mx.random.key(seed))


def tokens(n: int, seed: int = 0) -> list[int]:
    return mx.random.randint(0, 160, (n,), key=mx.random.key(100 + seed)).tolist()


def fed(drafter: EagleDrafter, text: list[int], rows: mx.array, pieces: list[int] | None = None) -> EagleDrafter:
    while drafter.length < len(text):
        start = drafter.length
        size = min(pieces.pop(0) if pieces else len(text), len(text) - start)
        drafter.observe(commit(text[start : start + size], rows[start : start + size], start))
    return drafter


def draft(drafter: EagleDrafter, last: int = 9, s: Sampling = GREEDY) -> tuple[list[int], list[float]]:
    p = drafter.propose(last, 7, s, drafter.length)
    return p.tokens.tolist(), p.confidence.tolist()


# ---- golden numbers ----


def test_golden_in_one_pass() -> None:
    errors = check(FOLDER)
    assert set(errors) == {"draft_tokens", "draft_hidden", "draft_logits"}
    assert max(errors.values()) <= TOLERANCE
    assert errors["draft_tokens"] == 0


def test_the_golden_check_sees_a_wrong_pairing() -> None:
    given = dict(cases(FOLDER)[1])
    given["next_tokens"] = mx.concatenate([given["next_tokens"][:, 1:], given["next_tokens"][:, :1]], axis=1)
    assert error(eagle_vectors(model(), given)["draft_hidden"], given["draft_hidden"]) > 10 * TOLERANCE


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_golden_with_the_context_in_pieces_and_drafts_in_between(chunk: int) -> None:
    m = model(chunk=chunk)
    for case, given in enumerate(cases(FOLDER)):
        following = given["next_tokens"][0].tolist()
        text, rows = [0, *following[:-1]], given["target_hidden"][0]
        drafter = m.new()
        accepted = mx.random.randint(1, 5, (40,), key=mx.random.key(case)).tolist()
        while drafter.length < len(text):
            mx.eval(drafter.propose(77, 5, GREEDY, drafter.length).tokens)  # a wrong anchor, too
            size = min(accepted.pop(), len(text) - drafter.length)
            fed(drafter, text[: drafter.length + size], rows)
        expected = given["draft_tokens"][0].tolist()
        assert drafter.propose(following[-1], len(expected), GREEDY, len(text)).tokens.tolist() == expected


# ---- vocabulary ----


def four_tokens(table: list[int] | None, target_rows: int = 160, rows: int = 4) -> Eagle:
    """A drafter that knows `rows` tokens, of which row 2 is always the most likely."""
    head = mx.zeros((rows, 64)) + mx.array([[0.0], [0.0], [1.0]] + [[0.0]] * (rows - 3)) * 100
    changes = {
        "lm_head.weight": head,
        "d2t": None if table is None else mx.array(table, mx.int64),
        "norm.weight": mx.abs(mx.ones(64)),
    }
    m = model(changes)
    # The hidden of a positive sum picks row 2.
    m.network.norm.weight = mx.zeros(64)
    m.network.lm_head.bias = mx.array([0.0, 0.0, 5.0] + [0.0] * (rows - 3))
    return m


def test_C7_the_table_holds_offsets() -> None:
    m = four_tokens([3, 3, 5, 9])
    assert m.ids.tolist() == [3, 4, 7, 12]
    drafter = fed(m.new(), tokens(6), features(6))
    assert draft(drafter)[0] == [7] * 7


def test_C7_no_table_and_the_full_vocabulary_is_the_identity() -> None:
    m = four_tokens(None, rows=160)
    assert m.ids.tolist() == list(range(160))
    assert draft(fed(m.new(), tokens(6), features(6)))[0] == [2] * 7


def test_C7_no_table_and_a_reduced_vocabulary_is_refused() -> None:
    with pytest.raises(BadDrafter, match=r"eagle3_a knows 96 of 160 tokens, and has no d2t"):
        model({"d2t": None})


@pytest.mark.parametrize(
    ("table", "why"), [([0] * 95 + [200], "leads past"), ([-1] + [0] * 95, "leads past"), ([0] * 95, "95 entries")]
)
def test_a_table_that_cannot_be_is_refused(table: list[int], why: str) -> None:
    with pytest.raises(BadDrafter, match=why):
        model({"d2t": mx.array(table)})


def test_C8_padding_is_never_proposed() -> None:
    checkpoint = read(FOLDER)
    e = ends(FOLDER, checkpoint)
    backwards = mx.array([159 - 2 * d for d in range(96)])
    m = model({"d2t": backwards}, target=Ends(e.embedding, e.matrix, padding=60))
    assert 0 < m.ids.size < 96 and max(m.ids.tolist()) < 100
    assert m.network.lm_head.weight.shape[0] == m.ids.size
    drafter = fed(m.new(), tokens(20), features(20))
    for seed in range(10):
        assert max(draft(drafter, s=Sampling(temperature=2.0, seed=seed))[0]) < 100
    # The rows that stay mean the same tokens.
    head = checkpoint.weights["lm_head.weight"]
    for row, token in enumerate(m.ids.tolist()):
        assert (m.network.lm_head.weight[row] == head[159 - token]).all()


# ---- layouts ----


def speculators(folder: Path, **fields: Any) -> Checkpoint:
    """The golden drafter in vLLM-speculators' layout."""
    import json

    golden = mx.load(str(FOLDER / "model.safetensors"))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {k.replace("midlayer.", "layers.0."): v for k, v in golden.items()}
    )
    inner = json.loads((FOLDER / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": inner.pop("draft_vocab_size"),
        "transformer_layer_config": inner,
        "speculators_config": {"verifier": {"name_or_path": "owner/Golden-Target"}},
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return read(folder)


def test_both_layouts_are_the_same_drafter(tmp_path: Path) -> None:
    other = speculators(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    assert other.kind == "eagle" and other.base == "owner/Golden-Target"
    assert other.taps == (1, 3, 5)  # counted there as the state entering a layer
    m = Eagle(other, ends(FOLDER, read(FOLDER)))
    assert m.taps == (1, 3, 5) and m.warning is None
    given = cases(FOLDER)[1]
    assert error(eagle_vectors(m, given)["draft_logits"], given["draft_logits"]) <= TOLERANCE


def test_default_taps_are_part_of_the_format_and_are_said() -> None:
    checkpoint = read(FOLDER)
    assert checkpoint.taps is None
    assert checkpoint.provenance["eagle_aux_hidden_state_layer_ids"] == "EAGLE-3 default"
    assert model().taps == (1, 9 // 2 - 1, 9 - 4)
    assert read(FOLDER, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}}).taps == (0, 4, 8)


def reference_step(m: Eagle, rows: list[tuple[mx.array, mx.array]], before_residual: bool) -> mx.array:
    """The last row's output, from all (embedding, fused) pairs [1, H], written from the definition."""
    p = {k.removeprefix("layer."): v for k, v in tree_flatten(m.network.parameters())}

    def rms(x: mx.array, name: str) -> mx.array:
        return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]

    def rotate(x: mx.array) -> mx.array:
        half = x.shape[-1] // 2
        angle = (mx.arange(len(x))[:, None] * 10000.0 ** (-mx.arange(half) / half))[:, None]
        a, b = x[..., :half], x[..., half:]
        return mx.concatenate([a * mx.cos(angle) - b * mx.sin(angle), b * mx.cos(angle) + a * mx.sin(angle)], -1)

    e, g = (mx.concatenate(list(x)) for x in zip(*rows, strict=True))
    x = mx.concatenate([rms(e, "input_layernorm"), rms(g, "hidden_norm")], -1)
    n = len(rows)
    q, k, v = (x @ p[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = rotate(q.reshape(n, 4, 16))[-1], rotate(k.reshape(n, 2, 16)), v.reshape(n, 2, 16)
    heads = [mx.softmax(k[:, h // 2] @ q[h] / 4.0) @ v[:, h // 2] for h in range(4)]
    residual = rms(g[-1:], "hidden_norm") if before_residual else g[-1:]
    h = residual + mx.concatenate(heads)[None] @ p["self_attn.o_proj.weight"].T
    x = rms(h, "post_attention_layernorm")
    gate, up = (x @ p[f"mlp.{w}_proj.weight"].T for w in ("gate", "up"))
    return h + (gate * mx.sigmoid(gate) * up) @ p["mlp.down_proj.weight"].T


@pytest.mark.parametrize("before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_options_of_the_layouts_equal_their_definition(
    before_residual: bool, norm_output: bool, fc_norm: bool
) -> None:
    checkpoint = read(FOLDER, {"norm_before_residual": before_residual, "norm_output": norm_output})
    extra = {f"fc_norm.{i}.weight": mx.random.uniform(0.5, 2, (64,)) for i in range(3)} if fc_norm else {}
    extra["norm.weight"] = mx.random.uniform(0.2, 3, (64,), key=mx.random.key(3))
    m = Eagle(replace(checkpoint, weights={**checkpoint.weights, **extra}), ends(FOLDER, checkpoint))
    text, rows = tokens(6), features(6)
    x = rows
    if fc_norm:
        pieces = mx.split(rows, 3, axis=-1)
        normed = [
            a * mx.rsqrt((a * a).mean(-1, keepdims=True) + 1e-6) * w
            for a, w in zip(pieces, extra.values(), strict=False)
        ]
        x = mx.concatenate(normed, -1)
    fused = x @ m.network.fc.weight.T
    embed = m.network.embed_tokens.weight
    pairs = [(embed[t][None], fused[i : i + 1]) for i, t in enumerate([*text[1:], 9])]
    expected = []
    for _ in range(4):
        h = reference_step(m, pairs, before_residual)
        normed = m.network.norm(h)
        token = int(m.ids[mx.argmax(m.network.lm_head(normed))])
        expected.append(token)
        pairs.append((embed[token][None], normed if norm_output else h))
    assert fed(m.new(), text, rows).propose(9, 4, GREEDY, 6).tokens.tolist() == expected


def test_without_an_embedding_of_its_own_the_targets_is_used() -> None:
    e = ends(FOLDER, read(FOLDER))
    shared = model({"embed_tokens.weight": None})
    drafter, own = (fed(m.new(), tokens(12), features(12)) for m in (shared, model()))
    assert draft(drafter) == draft(own)
    assert not any(160 in a.shape for _, a in tree_flatten(shared.network.parameters()))
    other = model({"embed_tokens.weight": None}, Ends(mx.roll(e.embedding, 1, axis=0), e.matrix))
    assert draft(fed(other.new(), tokens(12), features(12))) != draft(own)


def test_what_lisa_does_not_compute_is_refused() -> None:
    golden = read(FOLDER).weights
    with pytest.raises(BadDrafter, match=r"unexpected tensor layers\.1\.mlp\.up_proj\.weight"):
        model({"layers.1.mlp.up_proj.weight": golden["layer.mlp.up_proj.weight"]})
    with pytest.raises(BadDrafter, match=r"lacks lm_head\.weight"):
        model({"lm_head.weight": None, "d2t": None})
    with pytest.raises(BadDrafter, match=r"lacks layer\.self_attn\.k_proj\.weight"):
        model({"layer.self_attn.k_proj.weight": None})


# ---- the contract ----


def test_proposing_leaves_the_drafter_as_it_was() -> None:
    drafter = fed(model().new(), tokens(20), features(20), [7, 13])
    first = draft(drafter)
    assert draft(drafter, last=10) != first  # another anchor does not stick
    assert draft(drafter) == first and drafter.length == 20


@pytest.mark.parametrize("s", [GREEDY, Sampling(temperature=1.0, seed=2, rule="rejection")])
def test_proposing_waits_for_nothing(s: Sampling) -> None:
    m = model()

    def traced(rows: mx.array) -> mx.array:
        drafter = m.new()
        drafter.queue = ((rows, tuple(tokens(9))),)
        return drafter.propose(7, 5, s, 9).tokens

    # Inside a trace MLX raises on any evaluation; the trace itself is not run.
    assert mx.compile(traced)(features(9)).shape == (5,)


def test_a_gap_raises() -> None:
    drafter = fed(model().new(), tokens(5), features(5))
    with pytest.raises(RuntimeError, match="gap: 5 tokens observed"):
        drafter.observe(commit([1], features(1), 6))
    with pytest.raises(RuntimeError, match="gap: 5 tokens observed"):
        drafter.propose(7, 3, GREEDY, 4)
    assert drafter.length == 5


def test_nothing_is_drafted_before_there_is_a_feature() -> None:
    p = model().new().propose(7, 5, GREEDY, 0)
    assert p.size == 0 and p.tokens.tolist() == []


def test_accepted_tokens_are_read_again_with_true_features() -> None:
    m = model()
    text, rows = tokens(20), features(20)
    drafter = fed(m.new(), text[:12], rows)
    for end in (13, 16, 20):
        draft(drafter, last=text[drafter.length])  # the right anchor, guesses after it
        fed(drafter, text[:end], rows)
    assert draft(drafter) == draft(fed(m.new(), text, rows))


@pytest.mark.parametrize("fused", [True, False])
def test_rewind_then_observe_equals_fresh(fused: bool) -> None:
    m = model()
    text, rows, other, others = tokens(80), features(80), tokens(80, 1), features(80, 1)
    for length in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 79, 80):
        drafter = fed(m.new(), text, rows, [9, 30, 11, 1])
        if fused:
            draft(drafter)
        reached = drafter.rewind(length)
        # Exact where the row before the next token is still known: all of the queue, else every 16th.
        assert reached == drafter.length == (length if length == 80 or not fused else length // 16 * 16)
        assert drafter.rewind(reached) == reached
        timeline = [*text[:reached], *other[reached:]]
        fed(drafter, timeline, mx.concatenate([rows[:reached], others[reached:]]), [3, 1])
        assert draft(drafter) == draft(fed(m.new(), timeline, mx.concatenate([rows[:reached], others[reached:]])))


def test_a_rewind_needs_no_observation_before_the_next_draft() -> None:
    m = model()
    text, rows = tokens(80), features(80)
    drafter = fed(m.new(), text, rows)
    draft(drafter)
    for length in (64, 48, 16):
        assert drafter.rewind(length) == length
        # The token after the prefix is another one than before.
        assert draft(drafter, last=text[length] ^ 1) == draft(fed(m.new(), text[:length], rows), last=text[length] ^ 1)


def test_a_snapshot_stays_valid_whatever_happens_next() -> None:
    m = model(chunk=8)
    text, rows, other, others = tokens(60), features(60), tokens(60, 1), features(60, 1)
    drafter = fed(m.new(), text[:30], rows)
    expected, snapshot = draft(drafter), drafter.snapshot()
    fed(drafter, text, rows)
    at_60, longer = draft(drafter), drafter.snapshot()
    assert drafter.rewind(20) == 16
    fed(drafter, [*text[:16], *other[16:]], mx.concatenate([rows[:16], others[16:]]), [5] * 12)
    draft(drafter)
    second = m.new()
    second.restore(snapshot)
    drafter.restore(snapshot)
    assert draft(second) == draft(drafter) == expected
    for end in range(31, 50):
        fed(second, [*text[:30], *other[30:end]], mx.concatenate([rows[:30], others[30:end]]))
        fed(drafter, text[:end], rows)
        draft(second), draft(drafter)
    assert draft(drafter) == draft(fed(m.new(), text[:49], rows))
    timeline = [*text[:30], *other[30:49]]
    assert draft(second) == draft(fed(m.new(), timeline, mx.concatenate([rows[:30], others[30:]])))
    drafter.restore(longer)
    assert draft(drafter) == at_60


def test_D1_the_first_draft_does_not_depend_on_the_pieces_of_the_prompt() -> None:
    m = model(chunk=16)
    text, rows = tokens(67), features(67)
    expected = draft(fed(m.new(), text, rows))
    for piece in (1, 2, 7, 16, 17, 66):
        assert draft(fed(m.new(), text, rows, [piece] * 67)) == expected


def test_D2_a_long_prompt_leaves_features_of_one_chunk_at_most() -> None:
    m = model(chunk=256)
    drafter = m.new()
    feature, row = 3 * 64 * 4, 2 * 2 * 16 * 4
    mx.synchronize()
    before = mx.get_active_memory()
    for start in range(0, 4000, 250):
        piece = features(250, start)
        mx.eval(piece)
        drafter.observe(commit(tokens(250, start), piece, start))
        del piece
        kept = row * (1.25 * (start + 250) + 256) + (start + 250) / 16 * 64 * 4 + 64 * 4
        assert drafter.nbytes <= 256 * feature + kept
        mx.synchronize()
        assert mx.get_active_memory() - before <= drafter.nbytes + 2 * 250 * feature
    assert drafter.length == 4000


def test_the_width_and_the_position_limit_bound_a_draft() -> None:
    assert model().new().width == 7 and model(width=40).new().width == 15 and model().new().limit == 2048
    drafter = fed(model(width=3).new(), tokens(20), features(20))
    assert drafter.propose(9, 7, GREEDY, 20).size == 3
    checkpoint = read(FOLDER, {"max_position_embeddings": 24})
    drafter = fed(Eagle(checkpoint, ends(FOLDER, checkpoint)).new(), tokens(20), features(20))
    assert drafter.propose(9, 7, GREEDY, 20).size == 3
    assert drafter.propose(9, 0, GREEDY, 20).size == 0


def test_a_narrow_draft_is_a_prefix() -> None:
    drafter = fed(model().new(), tokens(20), features(20))
    for s in (GREEDY, Sampling(temperature=1.0, seed=8)):
        full = drafter.propose(9, 7, s, 20).tokens.tolist()
        assert [drafter.propose(9, w, s, 20).tokens.tolist() for w in range(1, 8)] == [full[:w] for w in range(1, 8)]


# ---- sampling ----


def test_coupled_draws_share_the_targets_noise_by_position_and_target_id() -> None:
    m = model()
    drafter = fed(m.new(), tokens(20), features(20))
    draft(drafter)
    for seed in range(15):
        s = Sampling(temperature=0.9, seed=seed)
        h, guesses, token, expected = drafter.tail[None], None, 9, []
        for i in range(4):
            h, guesses = m.network.layer.step(m.embed(mx.array([token])), h, drafter.context.view(), guesses, 19 + i)
            logits = m.network.lm_head(m.network.norm(h))[0]
            logits = mx.where(logits < mx.sort(logits)[:, -32:-31], -mx.inf, logits)  # its candidates
            # What the target would draw at that position from the very same distribution.
            candidates = sampling.Candidates(logits / 0.9, m.ids[None])
            token = int(sampling.draw(candidates, s, mx.array([21 + i]), 160)[0])
            expected.append(token)
        assert drafter.propose(9, 4, s, 20).tokens.tolist() == expected


def test_rejection_keeps_the_distribution_in_target_ids() -> None:
    drafter = fed(model().new(), tokens(20), features(20))
    p = drafter.propose(9, 5, Sampling(temperature=1.0, seed=4, rule="rejection"), 20)
    assert p.distribution.ids.shape == p.distribution.probabilities.shape == (5, 32)
    assert mx.allclose(p.distribution.probabilities.sum(-1), mx.ones(5), atol=1e-5)
    assert (p.distribution.ids == p.tokens[:, None]).sum(-1).tolist() == [1] * 5
    known = set(model().ids.tolist())
    assert {t for row in p.distribution.ids.tolist() for t in row} <= known
    drawn: dict[int, int] = {}
    for seed in range(300):
        first = drafter.propose(9, 1, Sampling(temperature=1.0, seed=seed, rule="rejection"), 20)
        drawn[int(first.tokens[0])] = drawn.get(int(first.tokens[0]), 0) + 1
    for token, q in zip(first.distribution.ids[0].tolist(), first.distribution.probabilities[0].tolist(), strict=True):
        assert abs(drawn.get(token, 0) / 300 - q) < 4 * math.sqrt(q * (1 - q) / 300) + 0.005


@pytest.mark.parametrize("bits", [4, 8])
def test_its_matrices_can_be_packed_at_load(bits: int) -> None:
    m = model(bits=bits)
    packed = {n.rsplit(".", 2)[-2] for n, a in tree_flatten(m.network.parameters()) if a.dtype == mx.uint32}
    assert packed == {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert len(draft(fed(m.new(), tokens(20), features(20)))[0]) == 7
