"""Adjacent injection, transition scores and the path through them. What DSpine shares with DFlash is in test_dflash."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench.ablate import ablate
from bench.golden_drafters import GREEDY, Ends, block_vectors, check, commit, ends
from bench.golden_vectors import cases, error
from lisa import sampling
from lisa.drafters.candidates import noise
from lisa.drafters.checkpoint import read
from lisa.drafters.dflash import DFlash
from lisa.drafters.dspine import DSpine, walk
from lisa.sampling import top
from lisa.types import Proposal, Sampling

FOLDER = Path(__file__).parent / "golden" / "dspine_a"
TOLERANCE = 2e-4
WARM = Sampling(temperature=0.7, seed=11)


def model(scoring: Any = "pairs", target: Ends | None = None, **overrides: Any) -> DSpine:
    checkpoint = read(FOLDER, overrides)
    return DSpine(checkpoint, target or ends(FOLDER, checkpoint), scoring=scoring)


def features(n: int = 20, seed: int = 0) -> mx.array:
    return mx.random.normal((n, 3 * 64), key=mx.random.key(seed))


def propose(m: DSpine, width: int = 7, s: Sampling = GREEDY, anchor: int = 5, seed: int = 0) -> Proposal:
    drafter = m.new()
    drafter.observe(commit(20, features(seed=seed)))
    return drafter.propose(anchor, width, s, 20)


def test_golden_in_one_pass() -> None:
    errors = check(FOLDER)
    assert set(errors) == set(cases(FOLDER)[0]) - {"target_hidden", "anchor"}
    assert max(errors.values()) <= TOLERANCE
    assert errors["candidates"] == errors["selected"] == 0


@pytest.mark.parametrize("scoring", ["pairs", "path"])
def test_both_ways_of_scoring_select_the_golden_path(scoring: str) -> None:
    m = model(scoring)
    for given in cases(FOLDER):
        ours = block_vectors(m, given)
        assert ours["selected"].tolist() == given["selected"].tolist()


def test_each_part_matters_to_the_golden_numbers() -> None:
    given = cases(FOLDER)[2]
    for name, index in (("bias", None), ("writes", 1), ("readouts", 0)):
        m = model()
        injection = m.network.injection
        part = injection if index is None else injection[name][index]
        key = "bias" if index is None else "weight"
        part[key] = part[key] * 1.5 + 0.1
        assert error(block_vectors(m, given)["final_hidden"], given["final_hidden"]) > 10 * TOLERANCE, name


# ---- the path ----


def brute_force(table: list, gumbels: list | None, temperature: float) -> list[int]:
    """Every next candidate is compared with the best so far; the first of equals stays."""
    column, path = 0, []
    for i, slot in enumerate(table):
        best = 0
        scores = [s if gumbels is None else s / temperature + gumbels[i][j] for j, s in enumerate(slot[column])]
        for j, score in enumerate(scores):
            if score > scores[best]:
                best = j
        column = best
        path.append(column)
    return path


@pytest.mark.parametrize("levels", [None, 5, 2, 1])
def test_the_walk_equals_brute_force_ties_included(levels: int | None) -> None:
    tied = 0
    for seed in range(30):
        table = mx.random.normal((7, 6, 6), key=mx.random.key(seed))
        if levels is not None:  # few different scores: ties everywhere
            table = mx.random.randint(0, levels, table.shape, key=mx.random.key(seed)).astype(mx.float32)
        columns, rows = walk(lambda i, column, t=table: t[i, column], None, 7, GREEDY)
        assert columns.tolist() == brute_force(table.tolist(), None, 1.0)
        before = [0, *columns.tolist()[:-1]]
        assert rows.tolist() == [table[i, k].tolist() for i, k in enumerate(before)]
        tied += sum(row.count(max(row)) > 1 for row in rows.tolist())
    assert tied > 0 or levels is None


def test_the_walk_with_noise_equals_brute_force() -> None:
    ids = mx.random.randint(0, 160, (7, 6), key=mx.random.key(1))
    for seed in range(30):
        table = mx.random.normal((7, 6, 6), key=mx.random.key(seed))
        s = Sampling(temperature=0.7, seed=seed)
        gumbels = noise(ids, s, 40)
        columns, _ = walk(lambda i, column, t=table: t[i, column], gumbels, 7, s)
        assert columns.tolist() == brute_force(table.tolist(), gumbels.tolist(), 0.7)


@pytest.mark.parametrize("s", [GREEDY, WARM])
def test_pairs_and_path_are_the_same_draft(s: Sampling) -> None:
    pairs, path = model("pairs"), model("path")
    changed = 0
    for seed in range(12):
        a, b = (propose(m, 7, s, anchor=seed, seed=seed) for m in (pairs, path))
        assert a.tokens.tolist() == b.tokens.tolist()
        assert mx.allclose(a.confidence, b.confidence, atol=1e-5)
    # On random hiddens the refinement really decides: the path leaves the parallel choice.
    for seed in range(12):
        pre = 3 * mx.random.normal((7, 64), key=mx.random.key(seed))
        ids, _ = top(mx.random.normal((7, 160), key=mx.random.key(seed + 100)), 6)
        columns = []
        for m, scoring in ((pairs, "pairs"), (path, "path")):
            chosen, rows = walk(m.row_scores(pre, ids, seed, scoring), noise(ids, s, 3), 7, s)
            columns.append((chosen.tolist(), rows))
        assert columns[0][0] == columns[1][0]
        assert mx.allclose(columns[0][1], columns[1][1], atol=1e-4)
        changed += columns[0][0] != [0] * 7
    assert changed > 6


def test_equal_candidates_keep_the_more_likely_one() -> None:
    e = ends(FOLDER, read(FOLDER))
    twins = mx.concatenate([e.matrix[:80], e.matrix[:80]])  # token t and t + 80 are the same word to the head
    target = Ends(e.embedding, twins)
    for scoring in ("pairs", "path"):
        assert max(propose(model(scoring, target)).tokens.tolist()) < 80


def test_the_faster_way_is_measured_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model(None).scoring in ("pairs", "path")
    m = model("pairs")
    now, slow = 0.0, "path"

    def timed(pre: mx.array, ids: mx.array, last: int, scoring: str) -> Any:
        nonlocal now
        now += 2.0 if scoring == slow else 1.0
        return DSpine.row_scores(m, pre, ids, last, scoring)

    monkeypatch.setattr(m, "row_scores", timed)
    assert m._faster(lambda: now) == "pairs"
    slow = "pairs"
    assert m._faster(lambda: now) == "path"


# ---- drafts ----


def test_a_narrow_draft_is_a_prefix_of_the_full_one() -> None:
    for scoring in ("pairs", "path"):
        m = model(scoring)
        for s in (GREEDY, WARM):
            full = propose(m, 7, s)
            for width in range(1, 7):
                p = propose(m, width, s)
                assert p.size == width
                assert p.tokens.tolist() == full.tokens.tolist()[:width]
                assert mx.allclose(p.confidence, full.confidence[:width], atol=1e-6)


def test_a_narrow_draft_does_less_work() -> None:
    class Watched(Ends):
        rows_asked = 0

        def head(self, hidden: mx.array) -> mx.array:
            Watched.rows_asked += math.prod(hidden.shape[:-1])
            return super().head(hidden)

        def head_rows(self, ids: mx.array) -> mx.array:
            Watched.rows_asked += ids.size
            return super().head_rows(ids)

        def embed(self, tokens: mx.array) -> mx.array:
            Watched.rows_asked += tokens.size
            return super().embed(tokens)

    e = ends(FOLDER, read(FOLDER))
    m = model("pairs", Watched(e.embedding, e.matrix))
    for width in (1, 4, 7):
        Watched.rows_asked = 0
        propose(m, width)
        assert Watched.rows_asked == width + width * 6 + (width + 1)  # head, candidates, block


def test_no_write_is_exactly_the_causal_dflash() -> None:
    checkpoint = read(FOLDER)
    plain = {k: v for k, v in checkpoint.weights.items() if not k.startswith(("injection", "transfer"))}
    mute = {k: mx.zeros_like(v) if ".writes." in k else v for k, v in checkpoint.weights.items()}
    target = ends(FOLDER, checkpoint)
    spine = DSpine(replace(checkpoint, weights=mute), target, scoring="pairs")
    config = {**checkpoint.config, "is_causal": True}
    flash = DFlash(replace(checkpoint, weights=plain, kind="dflash", config=config), target)
    traces = []
    for m in (spine, flash):
        drafter = m.new()
        drafter.observe(commit(20, features()))
        drafter.propose(5, 7, GREEDY, 20)
        traces.append(m.forward(mx.array([5] + [m.mask] * 7), drafter.contexts, 20).final)
    assert bool((traces[0] == traces[1]).all())


def test_an_ablated_folder_is_the_same_drafter_with_its_writes_at_zero(tmp_path: Path) -> None:
    before = read(FOLDER).weights
    assert ablate(FOLDER, tmp_path / "ablated") == sum(".writes." in name for name in before) > 0
    after = read(tmp_path / "ablated").weights
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert bool((value == (0 if ".writes." in name else before[name])).all())


def test_in_one_layer_the_anchors_code_reaches_its_right_neighbour_alone() -> None:
    m = model()
    drafter = m.new()
    drafter.observe(commit(20, features()))
    drafter.propose(5, 7, GREEDY, 20)
    block = mx.array([5] + [m.mask] * 7)
    before = m.forward(block, drafter.contexts, 20).layers[0]
    m.codes = -m.codes
    after = m.forward(block, drafter.contexts, 20).layers[0]
    assert (mx.abs(before - after).max(axis=-1) > 0)[0].tolist() == [False, True] + [False] * 6


def test_confidence_is_the_softmax_of_the_row_that_was_chosen_from() -> None:
    m = model()
    drafter = m.new()
    drafter.observe(commit(20, features()))
    p = drafter.propose(5, 7, GREEDY, 20)
    trace = m.forward(mx.array([5] + [m.mask] * 7), drafter.contexts, 20)
    ids, _ = top(m.target.head(trace.final[0, 1:]), m.top_k)
    _, rows = walk(m.row_scores(trace.pre[0, 1:], ids, 5, "pairs"), None, 7, GREEDY)
    assert mx.allclose(p.confidence, mx.softmax(rows, -1).max(-1), atol=1e-6)
    assert p.distribution is None


def test_coupled_draws_share_the_targets_noise_on_the_candidates() -> None:
    """With the target's noise, slot 1 draws what the target would draw from the same scores."""
    m = model()
    drafter = m.new()
    drafter.observe(commit(20, features()))
    for seed in range(20):
        s = Sampling(temperature=1.3, seed=seed)
        p = drafter.propose(5, 7, s, 20)
        trace = m.forward(mx.array([5] + [m.mask] * 7), drafter.contexts, 20)
        ids, _ = top(m.target.head(trace.final[0, 1:]), m.top_k)
        first = m.row_scores(trace.pre[0, 1:], ids, 5, "pairs")(0, mx.array(0))[None]
        drawn = sampling.draw(sampling.Candidates(first / 1.3, ids[:1]), s, mx.array([21]), 160)
        assert int(p.tokens[0]) == int(drawn[0])
        assert p.distribution is None


def test_rejection_keeps_the_drawn_distribution_sparse() -> None:
    s = Sampling(temperature=0.9, seed=4, rule="rejection")
    p = propose(model(), 7, s)
    assert p.distribution.ids.shape == p.distribution.probabilities.shape == (7, 6)
    assert mx.allclose(p.distribution.probabilities.sum(-1), mx.ones(7), atol=1e-5)
    where = p.distribution.ids == p.tokens[:, None]
    assert where.sum(-1).tolist() == [1] * 7
    assert mx.allclose((p.distribution.probabilities * where).sum(-1), p.confidence, atol=1e-6)


def test_a_seed_reproduces_and_seeds_differ() -> None:
    m = model()
    hot = [Sampling(temperature=3.0, seed=seed) for seed in range(6)]
    drafts = [propose(m, 7, s).tokens.tolist() for s in hot]
    assert drafts == [propose(m, 7, s).tokens.tolist() for s in hot]
    assert len({tuple(d) for d in drafts}) > 3


def test_codes_without_the_targets_padding_limit_what_is_proposed() -> None:
    checkpoint = read(FOLDER)
    short = {**checkpoint.weights, "transfer_codes": checkpoint.weights["transfer_codes"][:159]}
    m = DSpine(replace(checkpoint, weights=short), ends(FOLDER, checkpoint), scoring="pairs")
    assert m.vocab == 159
    assert max(propose(m).tokens.tolist()) < 159


def test_fewer_candidates_can_be_asked_for() -> None:
    m = model(top_k=1)
    drafter = m.new()
    drafter.observe(commit(20, features()))
    p = drafter.propose(5, 7, GREEDY, 20)
    trace = m.forward(mx.array([5] + [m.mask] * 7), drafter.contexts, 20)
    assert p.tokens.tolist() == mx.argmax(m.target.head(trace.final[0, 1:]), -1).tolist()
