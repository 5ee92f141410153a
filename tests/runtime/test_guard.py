"""The guard: rows of low coverage are verified densely, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from dustin_trt import SamplingParams, ops
from dustin_trt.config import ConfigError, DustinConfig
from dustin_trt.engines.base import Dense, Dustin, Indices
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.runtime.stats import RequestStats
from tests.runtime.drafts import DRAFTS, llm
from tests.tiny import expected, ids, prompt

LENGTHS = (33, 5, 77, 130, 64, 100)
PROMPTS = ids(*map(prompt, LENGTHS))
PARAMS = SamplingParams(max_tokens=24)
SMALL = {"policy": "dustin", "budget": 26}
BETWEEN = 0.5
"""A guard that some steps of most prompts above fall below and others not, with every draft."""


def outcome(output) -> tuple:
    """All that a row's own run decides, what it read included."""
    stats = output.stats
    chosen = [None if read is None else read.tolist() for read in output.selections]
    return (
        output.token_ids, output.finish_reason, stats.steps, stats.drafted, stats.accepted,
        stats.history_read, stats.history, stats.guarded_steps, chosen,
    )  # fmt: skip


class TestOnePass:
    """`Engine.verify` of a ragged batch in slots out of order."""

    LENGTHS = (40, 1, 130, 64, 17, 90, 110)
    BUDGET = 30

    def engine(self, page_size: int | None) -> tuple[TorchEngine, torch.Tensor, torch.Tensor]:
        model = llm("none", **SMALL, max_batch_size=9, page_size=page_size)
        engine = model.decoder.target
        slots = torch.tensor([4, 0, 6, 2, 3, 8, 1])
        for slot, length in zip(slots.tolist(), self.LENGTHS, strict=True):
            engine.cache.reserve(slot, length + 8)
            engine.prefill(slot, prompt(length), chunk=32)
        return engine, slots, torch.tensor([prompt(5, seed) for seed in range(7)])

    def selection(self, engine, guard, *, ahead: bool = True, sharpness: float = 1.0) -> Dustin:
        generator = torch.Generator().manual_seed(0)
        heads, dim = len(engine.srh_heads), engine.spec.head_dim
        queries = torch.randn(len(self.LENGTHS), heads, dim, generator=generator) * sharpness
        scores = torch.rand(len(self.LENGTHS), 130, generator=generator) if ahead else None
        return Dustin(queries, scores, self.BUDGET, 5, 4, 16, guard=guard)

    @pytest.mark.parametrize("page_size", (None, 7))
    @pytest.mark.parametrize("rows_guarded", (1, 2, 3, 4))
    def test_guarded_rows_are_dense_and_the_others_as_before(self, page_size, rows_guarded):
        engine, slots, window = self.engine(page_size)
        dense = engine.verify(slots, window, Dense())
        free = engine.verify(slots, window, self.selection(engine, None))
        assert not free.guarded.any()
        # Five rows are longer than the budget; the guard goes between their coverages.
        low = free.coverage.sort().values.tolist()
        guard = (low[rows_guarded - 1] + low[rows_guarded]) / 2
        result = engine.verify(slots, window, self.selection(engine, guard))
        assert torch.equal(result.guarded, free.coverage < guard)
        assert result.guarded.sum() == rows_guarded
        assert torch.equal(result.coverage, free.coverage)
        for b, length in enumerate(self.LENGTHS):
            source = dense if result.guarded[b] else free
            assert torch.equal(result.logits[b], source.logits[b])
            assert torch.equal(result.srh_queries[b], source.srh_queries[b])
            if result.guarded[b]:
                assert not torch.equal(result.logits[b], free.logits[b])
                assert result.counts[b] == length
                assert set(result.indices[b].tolist()) == {-1}
            else:
                assert result.counts[b] == min(length, self.BUDGET)
                assert torch.equal(result.indices[b], free.indices[b])

    def test_a_guard_of_1_leaves_only_what_the_budget_holds(self):
        engine, slots, window = self.engine(None)
        dense = engine.verify(slots, window, Dense())
        result = engine.verify(slots, window, self.selection(engine, 1.0))
        assert result.guarded.tolist() == [length > self.BUDGET for length in self.LENGTHS]
        assert torch.equal(result.logits, dense.logits)
        assert result.counts.tolist() == list(self.LENGTHS)
        long = [b for b, length in enumerate(self.LENGTHS) if length > self.BUDGET]
        only = self.selection(engine, 1.0, ahead=False)
        only = Dustin(only.history_queries[long], None, self.BUDGET, 5, 4, 16, guard=1.0)
        alone = engine.verify(slots[long], window[long], only)  # no row is left for the other op
        assert alone.guarded.all()
        assert torch.equal(alone.logits, engine.verify(slots[long], window[long], Dense()).logits)

    def test_a_guard_of_1_holds_where_a_coverage_rounds_to_1(self):
        engine, slots, window = self.engine(None)
        # Each head's softmax is 1 for one token and 0 for the others, all of which are chosen.
        engine.srh_heads = engine.srh_heads[:3]
        peaked = {"ahead": False, "sharpness": 1000.0}
        below = engine.verify(slots, window, self.selection(engine, 0.999, **peaked))
        assert (below.coverage == 1).all() and not below.guarded.any()
        result = engine.verify(slots, window, self.selection(engine, 1.0, **peaked))
        assert result.guarded.tolist() == [length > self.BUDGET for length in self.LENGTHS]

    @pytest.mark.parametrize("guard", (None, 0.0))
    def test_off_is_off(self, guard):
        engine, slots, window = self.engine(None)
        free = engine.verify(slots, window, self.selection(engine, 1e-6))  # below every coverage
        result = engine.verify(slots, window, self.selection(engine, guard))
        assert not result.guarded.any() and not free.guarded.any()
        assert torch.equal(result.logits, free.logits)

    def test_without_history_scores_nothing_is_guarded(self):
        engine, slots, window = self.engine(None)
        ahead = self.selection(engine, 1.0).lookahead_scores
        selection = Dustin(None, ahead, self.BUDGET, 10, 4, 16, guard=1.0)
        result = engine.verify(slots, window, selection)
        assert not result.guarded.any()
        assert result.coverage.isnan().tolist() == [n > self.BUDGET for n in self.LENGTHS]

    def test_other_selections_have_no_guard(self):
        engine, slots, window = self.engine(None)
        lengths = engine.cache.lengths[slots]
        streaming = Indices(*ops.select_tokens(None, None, lengths, self.BUDGET, 0, 4, 16))
        for selection in (Dense(), streaming):
            assert engine.verify(slots, window, selection).guarded.tolist() == [False] * 7


class TestGenerations:
    @pytest.mark.parametrize("draft", DRAFTS)
    @pytest.mark.parametrize("guard", (None, 0))
    def test_off_equals_a_run_without(self, draft, guard):
        options = {**SMALL, "record_selections": True}
        free = llm(draft, **options).generate(PROMPTS, PARAMS)
        off = llm(draft, **options, guard=guard).generate(PROMPTS, PARAMS)
        assert list(map(outcome, off)) == list(map(outcome, free))
        assert all(output.stats.guarded_steps == 0 for output in free)

    @pytest.mark.parametrize("draft", DRAFTS)
    def test_a_guard_of_1_equals_full_verification(self, draft):
        model = llm(draft, **SMALL, guard=1.0, record_selections=True)
        dense = llm(draft, policy="dense").generate(PROMPTS, PARAMS)
        outputs = model.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == [o.token_ids for o in dense]
        assert [o.token_ids for o in dense] == [list(r) for r in expected("llama", LENGTHS, 24)]
        for length, output, full in zip(LENGTHS, outputs, dense, strict=True):
            stats = output.stats
            assert stats.accepted == full.stats.accepted
            assert stats.kv_read_share == 1
            if length > SMALL["budget"]:
                assert stats.guarded_steps == stats.steps
                assert output.selections == [None] * stats.steps
                assert stats.coverage < 1

    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "good", "windowed"))
    def test_a_row_equals_its_own_run(self, draft):
        options = {**SMALL, "guard": BETWEEN, "record_selections": True}
        free = llm(draft, **SMALL).generate(PROMPTS, PARAMS)
        together = llm(draft, **options, max_batch_size=4).generate(PROMPTS, PARAMS)
        single = llm(draft, **options, max_batch_size=1)
        for tokens, output in zip(PROMPTS, together, strict=True):
            assert outcome(output) == outcome(single.generate(tokens, PARAMS)[0])
        # The guard must have parted rows of the same step, and changed what is written.
        shares = [output.stats.guarded_steps / output.stats.steps for output in together]
        assert sum(0 < share < 1 for share in shares) >= 3
        assert [o.token_ids for o in together] != [o.token_ids for o in free]

    def test_sampled_rows_equal_their_own_runs(self):
        options = {**SMALL, "guard": BETWEEN}
        params = [PARAMS.replace(temperature=t, seed=s) for s, t in enumerate((0, 0.9, 1.3) * 2)]
        together = llm("good", **options).generate(PROMPTS, params)
        single = llm("good", **options, max_batch_size=1)
        for tokens, param, output in zip(PROMPTS, params, together, strict=True):
            assert outcome(output) == outcome(single.generate(tokens, param)[0])

    def test_guarded_steps_are_recorded_and_counted(self):
        model = llm("good", **SMALL, guard=BETWEEN, record_selections=True)
        outputs = model.generate(PROMPTS, PARAMS)
        assert sum(output.stats.guarded_steps for output in outputs) > 3
        for output in outputs:
            stats = output.stats
            assert len(output.selections) == stats.steps
            whole = [chosen is None for chosen in output.selections]
            assert sum(whole) == stats.guarded_steps
            assert stats.as_dict()["guarded_steps"] == stats.guarded_steps
            sparse = sum(len(chosen) for chosen in output.selections if chosen is not None)
            assert stats.history_read > sparse or not any(whole)

    def test_the_lookahead_alone_is_never_guarded(self):
        options = {**SMALL, "signal": "lookahead"}
        free = llm("good", **options).generate(PROMPTS, PARAMS)
        outputs = llm("good", **options, guard=1.0).generate(PROMPTS, PARAMS)
        assert list(map(outcome, outputs)) == list(map(outcome, free))
        assert all(output.stats.guarded_steps == 0 for output in outputs)

    def test_the_configuration_has_one_and_an_argument_overrides_it(self):
        model = llm("good", **SMALL)
        config = model.config.replace(guard=BETWEEN)
        configured = llm("good", **SMALL, config=config)
        given = llm("good", **SMALL, guard=BETWEEN)
        outputs = configured.generate(PROMPTS, PARAMS)
        assert list(map(outcome, outputs)) == list(map(outcome, given.generate(PROMPTS, PARAMS)))
        assert sum(output.stats.guarded_steps for output in outputs) > 0
        off = configured.variant(guard=0).generate(PROMPTS, PARAMS)
        assert list(map(outcome, off)) == list(map(outcome, model.generate(PROMPTS, PARAMS)))
        assert configured.variant(guard=1.0).config.guard == 1
        assert DustinConfig().guard is None

    @pytest.mark.parametrize("guard", (-0.1, 1.5, float("nan")))
    def test_a_guard_that_is_no_share_is_refused(self, guard):
        with pytest.raises(ConfigError, match="guard: Input should be"):
            llm("good", **SMALL, guard=guard)


def test_coverage_of_a_guarded_step_is_what_it_was_before():
    # Two steps of 30 of 100 tokens, the second guarded: 130 of 200 read, coverage (0.9 + 0.5) / 2.
    stats = RequestStats()
    step = {"drafted": 4, "accepted": 2, "committed": 3, "history": 100}
    stats.add_step(**step, read=30, coverage=0.9, guarded=False)
    stats.add_step(**step, read=100, coverage=0.5, guarded=True)
    assert (stats.guarded_steps, stats.kv_read_share, stats.coverage) == (1, 0.65, 0.7)
    assert stats.as_dict()["guarded_steps"] == 1


def test_a_calibrated_guard_belongs_to_its_heads_and_budget():
    config = DustinConfig(
        target_heads=((0, 0),), draft_heads=((0, 1),), budget=32, sink=1, window=4, guard=0.5
    )
    model = llm("good", policy="dustin", config=config)
    assert model.config.guard == 0.5
    assert model.variant(budget=32).config.guard == 0.5
    assert model.variant(budget=40).config.guard is None
    assert model.variant(heads="all").config.guard is None
    assert model.variant(heads="all", guard=0.4).config.guard == 0.4
