"""Exactness of the loop: against transformers, and a row against itself in other company."""

from __future__ import annotations

import pytest
import torch

from dustin_trt import SamplingParams, ops
from dustin_trt.engines.base import Dense, Dustin, Indices
from dustin_trt.runtime.sequence import RequestOutput
from tests.runtime.drafts import DRAFTS, llm, sparse_policies
from tests.tiny import FAMILIES, expected, ids, prompt

LENGTHS = (33, 1, 77, 130, 5, 64, 2, 18)
"""Ragged, with prompts of one token, of a whole prefill chunk and of several."""
NEW = 10
PROMPTS = ids(*map(prompt, LENGTHS))
GREEDY = SamplingParams(max_tokens=NEW)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def counts(output: RequestOutput) -> tuple:
    """All that a row's own run decides, timing left out."""
    stats = output.stats
    return (
        output.token_ids, output.finish_reason, stats.steps, stats.drafted, stats.accepted,
        stats.history_read, stats.history,
    )  # fmt: skip


def mixed_params(rows: int) -> list[SamplingParams]:
    """Greedy and sampled rows of different lengths and settings."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.3, "top_k": 20, "seed": 2},
        {"temperature": 1.0, "top_p": 0.8, "seed": 3},
    ]
    return [SamplingParams(max_tokens=(9, 12, 1, 5, 2)[i % 5], **kinds[i % 4]) for i in range(rows)]


class TestGreedyEqualsTransformers:
    @pytest.mark.parametrize(
        ("batch_size", "policy"), [(1, "dustin"), (3, "dustin"), (3, "dense"), (8, "dustin")]
    )
    @pytest.mark.parametrize("draft", DRAFTS)
    def test_every_drafter_and_batch_size(self, draft, batch_size, policy):
        model = llm(draft, policy=policy, budget=512, max_batch_size=batch_size)
        outputs = model.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == [list(row) for row in expected("llama", LENGTHS, NEW)]
        assert all(output.finish_reason == "length" for output in outputs)

    @pytest.mark.parametrize("draft", ("skip:1", "good"))
    @pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
    def test_every_family(self, family, draft):
        model = llm(draft, family, policy="dustin", budget=512)
        outputs = model.generate(PROMPTS[:4], GREEDY)
        assert tokens(outputs) == [list(row) for row in expected(family, LENGTHS[:4], NEW)]

    @pytest.mark.parametrize("gamma", (1, 2, 7, 16))
    def test_every_gamma(self, gamma):
        model = llm("good", policy="dustin", budget=512, gamma=gamma)
        outputs = model.generate(PROMPTS[:4], GREEDY)
        assert tokens(outputs) == [list(row) for row in expected("llama", LENGTHS[:4], NEW)]
        assert sum(output.stats.accepted for output in outputs) > 0

    def test_drafts_are_partly_accepted_so_that_rows_fall_out_of_step(self):
        outputs = llm("good", policy="dense").generate(PROMPTS, SamplingParams(max_tokens=24))
        rates = {output.stats.acceptance_rate for output in outputs}
        assert min(rates) < 1
        assert len(rates) > 3

    def test_long_generations_stay_equal(self):
        model = llm("good", policy="dustin", budget=512)
        outputs = model.generate(PROMPTS[:3], SamplingParams(max_tokens=60))
        assert tokens(outputs) == [list(row) for row in expected("llama", LENGTHS[:3], 60)]


class TestBudgetOfAtLeastTheContext:
    """Bit-identical to dense verification."""

    LENGTHS = (40, 1, 130, 64, 17)

    def engine(self, page_size: int | None):
        engine = llm(
            "none", policy="dustin", budget=100, max_batch_size=7, page_size=page_size
        ).decoder.target  # fmt: skip
        slots = torch.tensor([4, 0, 6, 2, 3])
        for slot, length in zip(slots.tolist(), self.LENGTHS, strict=True):
            engine.cache.reserve(slot, length + 8)
            engine.prefill(slot, prompt(length), chunk=32)
        window = torch.tensor([prompt(5, seed) for seed in range(5)])
        return engine, slots, window

    def selections(self, engine, slots, budget):
        lengths = engine.cache.lengths[slots]
        yield Indices(*ops.select_tokens(None, None, lengths, budget, 0, 4, 16))
        generator = torch.Generator().manual_seed(0)
        heads, dim = len(engine.srh_heads), engine.spec.head_dim
        queries = torch.randn(len(slots), heads, dim, generator=generator)
        ahead = torch.rand(len(slots), int(lengths.max()), generator=generator)
        for join in ("split", "sum"):
            yield Dustin(queries, ahead, budget, (budget - 20) // 2, 4, 16, join)
        yield Dustin(queries, None, budget, 0, 4, 16)
        yield Dustin(None, ahead, budget, budget - 20, 4, 16)

    @pytest.mark.parametrize("page_size", (None, 7, 16))
    @pytest.mark.parametrize("budget", (130, 131, 4096))
    def test_logits(self, budget, page_size):
        engine, slots, window = self.engine(page_size)
        dense = engine.verify(slots, window, Dense())
        for selection in self.selections(engine, slots, budget):
            sparse = engine.verify(slots, window, selection)
            assert torch.equal(sparse.logits, dense.logits)
            assert torch.equal(sparse.srh_queries, dense.srh_queries)
            assert sparse.counts.tolist() == list(self.LENGTHS)

    @pytest.mark.parametrize("page_size", (None, 7))
    def test_logits_of_the_short_rows_when_others_are_longer(self, page_size):
        engine, slots, window = self.engine(page_size)
        dense = engine.verify(slots, window, Dense())
        for selection in self.selections(engine, slots, 64):
            sparse = engine.verify(slots, window, selection)
            same = [torch.equal(a, b) for a, b in zip(sparse.logits, dense.logits, strict=True)]
            assert same == [True, True, False, True, True]
            assert sparse.counts.tolist() == [40, 1, 64, 64, 17]
            assert sparse.coverage[[0, 1, 3, 4]].nan_to_num(1.0).tolist() == [1.0] * 4

    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "good"))
    def test_sampled_generations(self, draft):
        params = mixed_params(len(PROMPTS))
        dense = llm(draft, policy="dense").generate(PROMPTS, params)
        sparse = llm(draft, policy="dustin", budget=142).generate(PROMPTS, params)
        assert list(map(counts, sparse)) == list(map(counts, dense))


class TestARowEqualsItsOwnRun:
    ROWS = (0, 1, 2, 3, 6)
    PROMPTS = [PROMPTS[i] for i in ROWS]  # noqa: RUF012

    @pytest.mark.parametrize(
        ("draft", "options"),
        [(draft, options) for draft in DRAFTS for options in sparse_policies(draft)],
        ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
    )
    def test_for_every_drafter_and_policy_at_a_small_budget(self, draft, options):
        params = mixed_params(len(self.PROMPTS))
        together = llm(draft, **options, max_batch_size=3).generate(self.PROMPTS, params)
        single = llm(draft, **options, max_batch_size=1)
        for i in (3, 0):  # the longest prompt, which samples, and a greedy one
            [alone] = single.generate(self.PROMPTS[i], params[i])
            assert counts(together[i]) == counts(alone)

    @pytest.mark.parametrize("budget", (21, 40, 70))
    def test_at_every_budget(self, budget):
        model = llm("good", policy="dustin", budget=budget)
        together = model.generate(PROMPTS, GREEDY)
        single = llm("good", policy="dustin", budget=budget, max_batch_size=1)
        for i in (0, 2, 3):
            assert counts(together[i]) == counts(single.generate(PROMPTS[i], GREEDY)[0])

    def test_a_small_budget_changes_the_output(self):
        # Otherwise nothing above would show that the budget reaches the model.
        sparse = llm("good", policy="streaming", budget=21).generate(PROMPTS, GREEDY)
        assert tokens(sparse) != [list(row) for row in expected("llama", LENGTHS, NEW)]


class TestCompany:
    """Order, neighbours and refilling change nothing."""

    OPTIONS = {"policy": "dustin", "budget": 26}  # noqa: RUF012

    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "windowed"))
    def test_order_and_refilling(self, draft):
        params = mixed_params(len(PROMPTS))
        wide = llm(draft, **self.OPTIONS, max_batch_size=8).generate(PROMPTS, params)
        narrow = llm(draft, **self.OPTIONS, max_batch_size=2).generate(PROMPTS, params)
        backwards = llm(draft, **self.OPTIONS, max_batch_size=3).generate(
            PROMPTS[::-1], params[::-1]
        )
        assert list(map(counts, narrow)) == list(map(counts, wide))
        assert list(map(counts, backwards[::-1])) == list(map(counts, wide))

    def test_neighbours(self):
        model = llm("good", **self.OPTIONS, max_batch_size=4)
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=4)
        subject = PROMPTS[2]
        seen = []
        for others in ([], PROMPTS[:2], PROMPTS[3:6]):
            outputs = model.generate([*others, subject], [*mixed_params(len(others)), params])
            seen.append(counts(outputs[-1]))
        assert seen[0] == seen[1] == seen[2]

    def test_slots_are_refilled_as_rows_finish(self):
        model = llm("none", policy="dense", max_batch_size=2)
        lengths = (1, 12, 3, 3, 3)
        params = [SamplingParams(max_tokens=n) for n in lengths]
        keys = [chunk.key for chunk in model.stream(PROMPTS[:5], params)]
        # Row 1 runs on while the rows after it come and go through the other slot.
        assert max(i for i, key in enumerate(keys) if key == 1) > keys.index(4)
        assert model.stats.total.steps == 11
        assert model.stats.total.tokens == sum(lengths) - len(lengths)

    def test_requests_are_taken_only_when_a_slot_is_free(self):
        model = llm("none", policy="dense", max_batch_size=2)
        taken = []

        def source():
            for key in range(5):
                taken.append(key)
                yield model.request(key, PROMPTS[key], SamplingParams(max_tokens=4))

        run = model.decoder.run(source())
        next(run)
        assert len(taken) <= 2
        assert len({chunk.key for chunk in run}) == 5


class TestPagedCache:
    @pytest.mark.parametrize("page_size", (7, 16))
    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "windowed"))
    def test_equals_the_contiguous_one(self, draft, page_size):
        params = mixed_params(len(PROMPTS))
        options = {"policy": "dustin", "budget": 26, "max_batch_size": 3}
        contiguous = llm(draft, **options).generate(PROMPTS, params)
        paged = llm(draft, **options, page_size=page_size).generate(PROMPTS, params)
        assert list(map(counts, paged)) == list(map(counts, contiguous))


class TestPrefixReuse:
    OPTIONS = {"policy": "dustin", "budget": 26, "max_batch_size": 2}  # noqa: RUF012
    TEXT = prompt(150, seed=7)

    def fresh(self, draft: str, tokens: list[int], params: SamplingParams = GREEDY):
        [output] = llm(draft, **self.OPTIONS).generate(ids(tokens), params)
        assert output.stats.cached_prompt_tokens == 0
        return output

    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "good", "windowed"))
    def test_longer_same_and_shorter_prompts_equal_a_fresh_run(self, draft):
        model = llm(draft, **self.OPTIONS)
        for length, cached in ((90, 0), (120, 90), (120, 119), (100, 99)):
            [output] = model.generate(ids(self.TEXT[:length]), GREEDY)
            assert counts(output) == counts(self.fresh(draft, self.TEXT[:length]))
            assert output.stats.cached_prompt_tokens == cached

    def test_the_slot_with_the_longest_common_beginning_is_taken(self):
        model = llm("lookup", **self.OPTIONS)
        first, second = self.TEXT[:60], prompt(70, seed=8)
        model.generate(ids(first, second), GREEDY)
        forked = [*second[:50], *self.TEXT[100:120]]
        outputs = model.generate(ids(forked, [*first, 5]), GREEDY)
        assert [output.stats.cached_prompt_tokens for output in outputs] == [50, 60]
        assert counts(outputs[0]) == counts(self.fresh("lookup", forked))
        assert counts(outputs[1]) == counts(self.fresh("lookup", [*first, 5]))

    def test_a_prompt_that_another_has_overwritten_in_part_is_run_again(self):
        model = llm("good", **{**self.OPTIONS, "max_batch_size": 1})
        first, forked = self.TEXT[:90], [*self.TEXT[:50], *prompt(30, seed=8)]
        for tokens, cached in ((first, 0), (forked, 50), (first, 50)):
            [output] = model.generate(ids(tokens), GREEDY)
            assert output.stats.cached_prompt_tokens == cached
            assert counts(output) == counts(self.fresh("good", tokens))

    @pytest.mark.parametrize("draft", ("none", "lookup", "skip:1", "windowed"))
    def test_keys_written_by_sparse_passes_are_never_reused(self, draft):
        model, params = llm(draft, **self.OPTIONS), SamplingParams(max_tokens=20)
        start = self.TEXT[:100]
        [first] = model.generate(ids(start), params)
        continued = [*start, *first.token_ids, 17, 18]
        [second] = model.generate(ids(continued), params)
        assert second.stats.cached_prompt_tokens == len(start)
        assert counts(second) == counts(self.fresh(draft, continued, params))

    def test_a_draft_cache_keeps_only_what_its_prefill_wrote(self):
        # The first draft pass writes the prompt's last token again, reading its window only.
        model, start = llm("windowed", **self.OPTIONS), self.TEXT[:100]
        model.generate(ids(start), GREEDY)
        engine = model.decoder.drafter.engine
        [slot] = [i for i, held in enumerate(engine.cache.resident) if held]
        held = engine.cache.resident[slot]
        assert held == start[: len(held)]
        page = int(engine.cache.page_table[slot, 0])
        kept = [cache[page, :, : len(held)].clone() for cache in engine.cache.k]
        other = llm("windowed", **self.OPTIONS)
        engine = other.decoder.drafter.engine
        engine.cache.reserve(0, 100)
        engine.prefill(0, start, chunk=32)
        page = int(engine.cache.page_table[0, 0])
        for layer, keys in enumerate(kept):
            wanted = engine.cache.k[layer][page, :, : len(held)]
            torch.testing.assert_close(keys, wanted, rtol=0, atol=1e-3)

    def test_a_prompt_reused_by_rows_at_once_is_cached_in_its_slot_only(self):
        model = llm("good", **self.OPTIONS)
        model.generate(ids(self.TEXT[:80]), GREEDY)
        outputs = model.generate(ids(self.TEXT[:80], self.TEXT[:80]), GREEDY)
        assert sorted(output.stats.cached_prompt_tokens for output in outputs) == [0, 79]
        assert outputs[0].token_ids == outputs[1].token_ids

    def test_a_failed_prefill_leaves_nothing_to_reuse(self):
        model = llm("none", policy="dense", max_batch_size=1)
        bad = 150
        with torch.no_grad():
            model.decoder.target.model.model.model.embed_tokens.weight[bad] = float("nan")
        [failed] = model.generate(ids([*self.TEXT[:40], bad]), GREEDY)
        assert failed.finish_reason == "error"
        [output] = model.generate(ids(self.TEXT[:60]), GREEDY)
        assert output.finish_reason == "length"
        assert output.stats.cached_prompt_tokens == 0


def test_a_finished_prompt_is_kept_while_other_slots_are_empty():
    model = llm(None, policy="dense", max_batch_size=3)
    # They begin alike, as chats do, which is no reason to give up a whole prompt.
    prompts = [prompt(6) + prompt(54, seed) for seed in range(3)]
    model.generate(ids(*prompts), SamplingParams(max_tokens=1))  # each ends before the next begins
    outputs = model.generate(ids(*prompts), SamplingParams(max_tokens=2))
    assert [output.stats.cached_prompt_tokens for output in outputs] == [59] * 3
    model.generate(ids(prompt(20), prompts[1]), SamplingParams(max_tokens=1))
    assert sorted(map(len, model.decoder.target.cache.resident)) == [20, 60, 60]


def test_requests_wait_for_pages_and_finished_prompts_make_room():
    # 20 pages of 16 tokens: one request of about 250 tokens at a time, though there are 3 slots.
    model = llm("skip:1", policy="dense", max_batch_size=3, page_size=16, num_pages=20)
    lengths = (200, 210, 40, 205)
    outputs = model.generate(ids(*map(prompt, lengths)), GREEDY)
    assert tokens(outputs) == [list(row) for row in expected("llama", lengths, NEW)]
    with pytest.raises(ValueError, match="room for"):
        model.generate(ids(prompt(320)), GREEDY)
