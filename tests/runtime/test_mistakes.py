"""Mistakes that other implementations of speculative decoding made, one test each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dustin_trt import LLM, SamplingParams, ops, sampling
from dustin_trt.config import Head
from dustin_trt.drafting import DraftModel
from dustin_trt.engines.base import Window
from dustin_trt.ops._paging import history
from dustin_trt.runtime import decoder
from tests import tokenizer as text
from tests.runtime.drafts import DRAFTS, good_draft, llm, sparse_policies, writing_llm
from tests.tiny import VOCAB, expected, ids, make, prompt

LENGTHS = (33, 1, 77, 5)
PROMPTS = ids(*map(prompt, LENGTHS))
GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.9, seed=3)


def record(monkeypatch, owner, name: str) -> list:
    """(arguments, result) of every call of `owner.name`, which still runs."""
    calls: list = []
    real = getattr(owner, name)

    def spy(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(owner, name, spy)
    return calls


def watch(monkeypatch, model: LLM, look) -> None:
    """Call `look(batch, proposal)` at every step, while the batch is what it was."""
    real = model.decoder.drafter.propose

    def propose(batch, gamma):
        proposal = real(batch, gamma)
        look(batch, proposal)
        return proposal

    monkeypatch.setattr(model.decoder.drafter, "propose", propose)


def test_draft_probabilities_are_not_mutated_before_rejection(monkeypatch):
    model = llm("good", policy="dustin", budget=26)
    kept = []
    watch(monkeypatch, model, lambda _, p: kept.append((p.tokens.clone(), p.probs.clone())))
    accepts = record(monkeypatch, decoder.sampling, "accept")
    model.generate(PROMPTS, SAMPLED.replace(max_tokens=8))
    assert len(accepts) == len(kept) > 2
    for ((_, drafts, _, probs, *_), _), (tokens, q) in zip(accepts, kept, strict=True):
        assert torch.equal(drafts, tokens)
        assert torch.equal(probs, q)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_draft_is_judged_by_the_very_probabilities_it_was_sampled_from(monkeypatch, dtype):
    model = LLM(make().to(dtype), good_draft().to(dtype), policy="dense", gamma=3)
    passes = record(monkeypatch, model.decoder.drafter.engine, "propose_step")
    accepts = record(monkeypatch, decoder.sampling, "accept")
    batches = record(monkeypatch, model.decoder, "_batch")
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=1)
    model.generate(PROMPTS, params)
    for ((_, drafts, _, q, *_), _), (_, batch) in zip(accepts, batches, strict=True):
        width = drafts.shape[1]
        if width == 0:
            continue
        logits = torch.stack([logits for _, logits in passes[:width]], 1)
        del passes[:width]
        assert logits.dtype == q.dtype == torch.float32
        if dtype == torch.bfloat16:  # the logits are those the model gave, not computed anew
            assert torch.equal(logits, logits.bfloat16().float())
        assert torch.equal(q, (logits / 0.7).softmax(-1))
        for i in range(width):
            rows = batch.limits > i  # past its limit a row's drafts are padding
            drawn = sampling.draw(q[:, i], batch.uniforms[:, i])
            assert torch.equal(drafts[rows, i], drawn[rows])
    assert not passes


@pytest.mark.parametrize("size", (VOCAB - 30, VOCAB + 16))
@pytest.mark.parametrize("params", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
def test_padded_vocabularies_may_differ_in_size_either_way(monkeypatch, size, params):
    draft = make(vocab_size=size)
    if size > VOCAB:  # a draft that would choose its own padding
        draft.lm_head.weight.data[VOCAB:] = 40 * draft.lm_head.weight.data[:16].sign()
    model = LLM(make(), draft, policy="dustin", budget=512, gamma=3)
    assert model.decoder.drafter.target_vocab_size == VOCAB
    proposals = record(monkeypatch, model.decoder.drafter, "propose")
    prompts = [*PROMPTS, *ids([VOCAB - 1, *prompt(20), VOCAB - 1])]
    outputs = model.generate(prompts, params)
    for _, proposal in proposals:
        padding = torch.arange(proposal.tokens.shape[1]) >= proposal.counts[:, None]
        assert (padding | (proposal.tokens < min(size, VOCAB))).all()
        assert proposal.probs is None or proposal.probs.shape[2] == VOCAB
    assert max(max(output.token_ids) for output in outputs) < VOCAB
    if params is GREEDY:
        exact = [list(row) for row in expected("llama", LENGTHS, 10)]
        assert [output.token_ids for output in outputs[:-1]] == exact


def caches(model: LLM, draft: str):
    """Every cache the model writes, with the name of its engine."""
    yield model.decoder.target
    if draft in ("good", "windowed", "bad", "same"):
        yield model.decoder.drafter.engine


@pytest.mark.parametrize("draft", DRAFTS)
def test_cache_lengths_follow_ragged_acceptance(monkeypatch, draft):
    # Rejected K and V are neither left nor is too much trimmed: all but the last token is cached.
    model = llm(draft, policy="dense")
    steps = []

    def look(batch, _):
        steps.append(len(batch.tokens))
        for engine in caches(model, draft):
            lengths = engine.cache.lengths[batch.slots].tolist()
            assert lengths == [len(tokens) - 1 for tokens in batch.tokens]

    watch(monkeypatch, model, look)
    model.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert len(steps) > 5


@pytest.mark.parametrize("draft", ("lookup", "skip:1", "good", "bad", "same"))
@pytest.mark.parametrize("page_size", (None, 7))
def test_rejected_keys_are_overwritten_and_positions_right_after_a_rollback(draft, page_size):
    model = llm(draft, policy="dense", page_size=page_size, draft_window=0)
    outputs = model.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert any(0 < output.stats.accepted < output.stats.drafted for output in outputs) or (
        draft in ("lookup", "bad", "same")
    )
    if draft == "same":  # its own cache has no hole where every draft was accepted
        assert all(output.stats.acceptance_rate == 1 for output in outputs)
    for engine in caches(model, draft):
        for slot, (length, output) in enumerate(zip(LENGTHS, outputs, strict=True)):
            # What the last step committed may lie past what a draft has run.
            tokens = [*prompt(length), *output.token_ids][: length + 18]
            fresh = LLM(engine.model.model, policy="dense").decoder.target
            fresh.cache.reserve(0, len(tokens))
            fresh.prefill(0, tokens, chunk=512)
            for layer in range(engine.spec.num_layers):
                for part in ("k", "v"):
                    held, exact = (
                        history(getattr(cache, part)[layer], cache.page_table[row], len(tokens))
                        for cache, row in ((engine.cache, slot), (fresh.cache, 0))
                    )
                    torch.testing.assert_close(held, exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("draft", ("lookup", "skip:1", "good"))
def test_positions_continue_where_the_accepted_tokens_end(monkeypatch, draft):
    model = llm(draft, policy="dense")
    forwards = record(monkeypatch, model.decoder.target.model, "forward")
    starts = []
    watch(monkeypatch, model, lambda batch, _: starts.append([len(t) - 1 for t in batch.tokens]))
    verifies = record(monkeypatch, model.decoder.target, "verify")
    model.generate(PROMPTS, SamplingParams(max_tokens=16))
    assert len(verifies) == len(starts) > 3
    passes = [args[1] for args, _ in forwards[-len(starts) :]]  # after those of the prefills
    for positions, rows in zip(passes, starts, strict=True):
        assert torch.equal(
            positions, torch.tensor(rows)[:, None] + torch.arange(positions.shape[1])
        )


def test_nothing_is_emitted_after_an_eos_inside_an_accepted_draft():
    [free] = expected("llama", (33,), 12)
    eos = free[6]
    end = free.index(eos) + 1
    target = make()
    target.generation_config.eos_token_id = eos
    model = LLM(target, make(), policy="dense", gamma=10)  # every draft is accepted
    chunks = list(model.stream(PROMPTS[:1], SamplingParams(max_tokens=12)))
    streamed = [token for chunk in chunks for token in chunk.token_ids]
    output = chunks[-1].output
    assert streamed == output.token_ids == list(free[:end])
    assert output.finish_reason == "stop"
    assert output.stats.steps == 1
    assert output.stats.accepted == end - 1 < output.stats.drafted


@pytest.mark.parametrize("draft", ("none", "same"))
def test_a_stop_that_meets_the_length_limit_is_a_stop(draft):
    model, words = writing_llm(draft), text.make()
    free = SamplingParams(max_tokens=10, ignore_eos=True)
    [output] = model.generate(ids(prompt(33)), free)
    last = output.token_ids[-1]
    assert last not in output.token_ids[:-1]
    [stopped] = model.generate(ids(prompt(33)), free.replace(stop_token_ids=(last,)))
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", 10)
    ending = words.decode([last])
    assert output.text.index(ending) == len(output.text) - len(ending)
    [stopped] = model.generate(ids(prompt(33)), free.replace(stop=(ending,)))
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", 10)
    assert stopped.text == output.text.removesuffix(ending)


@pytest.mark.parametrize("draft", ("lookup", "skip:1", "same", "short"))
def test_nothing_is_drafted_past_the_models_last_position(monkeypatch, draft):
    size = 48
    target = make(max_position_embeddings=size)
    models = {"same": {"max_position_embeddings": size}, "short": {"max_position_embeddings": 44}}
    model = LLM(
        target, make(**models[draft]) if draft in models else draft, policy="dense", gamma=8
    )
    limit = models.get(draft, models["same"])["max_position_embeddings"]
    assert model.max_model_len == limit
    ends = []
    watch(
        monkeypatch, model,
        lambda batch, p: ends.extend(p.counts.add(torch.tensor(list(map(len, batch.tokens))))),
    )  # fmt: skip
    params = [SamplingParams(max_tokens=limit - length) for length in (33, 1, 40)]
    outputs = model.generate(ids(prompt(33), prompt(1), prompt(40)), params)
    for length, output in zip((33, 1, 40), outputs, strict=True):
        assert output.finish_reason == "length"
        assert length + len(output.token_ids) == limit
        # Positions are relative, so the larger model says the same.
        [exact] = expected("llama", (length,), limit - length)
        assert output.token_ids == list(exact)
    assert max(ends) == limit - 1  # the token after the last draft still has a place


def test_selection_among_equal_scores_takes_the_lower_index_every_time():
    scores = torch.ones(2, 1000)
    scores[:, 500::100] = 2
    lengths = torch.tensor([1000, 900], dtype=torch.int32)
    first, _ = ops.select_tokens(scores, scores, lengths, 40, 10, 4, 16)
    best = list(range(500, 1000, 100))
    for row, length in enumerate((1000, 900)):
        top = [j for j in best if j < length - 16]
        free = [j for j in range(4, length) if j not in top][: 20 - len(top)]
        wanted = sorted([*range(4), *range(length - 16, length), *top, *free])
        assert first[row].tolist() == wanted
    for _ in range(5):
        again, _ = ops.select_tokens(scores, scores, lengths, 40, 10, 4, 16)
        assert torch.equal(again, first)


def test_a_row_that_may_read_no_history_attends_to_its_new_tokens_only():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 6, 16, generator=generator)
    k_cache, v_cache = torch.randn(2, 2, 2, 32, 16, generator=generator)
    pages = torch.tensor([[0], [1]], dtype=torch.int32)
    lengths = torch.tensor([20, 20], dtype=torch.int32)
    none = torch.full((2, 8), -1, dtype=torch.int32)
    out, lse = ops.sparse_attention(
        q, k_cache, v_cache, pages, lengths, none, torch.zeros(2, dtype=torch.int32), 0.25
    )  # fmt: skip
    moved = [cache[:, :, 20:].contiguous() for cache in (k_cache, v_cache)]
    alone, alone_lse = ops.dense_attention(q, *moved, pages, torch.zeros_like(lengths), 0.25)
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(lse, alone_lse)
    # The first new token sees itself alone, so its output is its value, weight 1.
    values = v_cache[:, :, None, 20].expand(2, 2, 3, 16)
    torch.testing.assert_close(out[:, 0].view(2, 2, 3, 16), values)


def test_28_query_heads_read_4_kv_heads_in_groups_of_7():
    engine = LLM(make("qwen2-28/4"), policy="dense").decoder.target
    assert [engine.spec.kv_head(head) for head in range(28)] == [h // 7 for h in range(28)]
    engine.cache.reserve(0, 40)
    engine.prefill(0, prompt(33), chunk=16)
    keys = engine.cache.k[1][int(engine.cache.page_table[0, 0]), :, :33]
    query = torch.randn(engine.spec.head_dim, generator=torch.Generator().manual_seed(0))
    for head in (0, 6, 7, 13, 27):
        scores = engine.attention_scores(
            torch.tensor([0]), query.view(1, 1, 1, -1), heads=(Head(1, head),)
        )
        wanted = (keys[head // 7] @ query / engine.spec.head_dim**0.5).softmax(0)
        torch.testing.assert_close(scores[0], wanted)


@pytest.mark.parametrize("draft", ("none", "skip:1", "good"))
def test_the_eos_of_one_row_ends_that_row_only(draft):
    exact = [list(row) for row in expected("llama", LENGTHS, 10)]
    model = llm(draft, policy="dense")
    params = [GREEDY.replace(stop_token_ids=(exact[0][3],)), GREEDY, GREEDY, GREEDY]
    outputs = model.generate(PROMPTS, params)
    assert outputs[0].token_ids == exact[0][: exact[0].index(exact[0][3]) + 1]
    assert [output.finish_reason for output in outputs] == ["stop", *["length"] * 3]
    assert [output.token_ids for output in outputs[1:]] == exact[1:]


def test_every_token_reaches_the_request_it_was_made_for():
    lengths = (33, 1, 77, 5, 130, 18)
    exact = expected("llama", lengths, 10)
    model = llm("good", policy="dense", max_batch_size=2)
    limits = (7, 2, 10, 1, 4, 9)
    streamed: dict[int, list[int]] = {}
    for chunk in model.stream(
        ids(*map(prompt, lengths)), [SamplingParams(max_tokens=n) for n in limits]
    ):
        streamed.setdefault(chunk.key, []).extend(chunk.token_ids)
        if chunk.output:
            assert chunk.output.key == chunk.key
            assert chunk.output.token_ids == streamed[chunk.key]
    assert streamed == {i: list(exact[i][:n]) for i, n in enumerate(limits)}


@pytest.mark.parametrize("params", (GREEDY, SAMPLED), ids=("greedy", "sampled"))
def test_acceptance_rate_is_never_above_1(params):
    stop = expected("llama", LENGTHS, 10)[0][4]
    model = LLM(make(), make(), policy="dense", gamma=7)  # accepts nearly everything
    for limit in range(1, 10):
        asked = params.replace(max_tokens=limit, stop_token_ids=(stop,))
        for output in model.generate(PROMPTS, asked):
            stats = output.stats
            assert 0 <= stats.accepted <= stats.drafted <= 7 * stats.steps
            assert stats.accepted <= stats.step_tokens
            assert stats.acceptance_rate is None or stats.acceptance_rate <= 1


@pytest.mark.parametrize("draft", ("none", "lookup", "skip:1", "good"))
def test_a_seed_decides_what_is_sampled(draft):
    model = llm(draft, policy="dense")
    params = SamplingParams(max_tokens=16, temperature=1.5, seed=11)
    first, other = (
        [output.token_ids for output in model.generate(PROMPTS, asked)]
        for asked in (params, params.replace(seed=12))
    )
    again = [output.token_ids for output in model.generate(PROMPTS, params)]
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("draft", ("lookup", "skip:1", "windowed"))
def test_prompts_shorter_than_sink_and_window(draft):
    lengths = (1, 2, 3, 5, 16)
    exact = [list(row) for row in expected("llama", lengths, 10)]
    for options in sparse_policies(draft):
        outputs = llm(draft, **options).generate(ids(*map(prompt, lengths)), GREEDY)
        assert [output.token_ids for output in outputs] == exact


@pytest.mark.parametrize("draft", ("lookup", "skip:1", "good"))
def test_no_pass_reads_a_stale_index_list(monkeypatch, draft):
    for options in sparse_policies(draft):
        if options["policy"] == "dense":
            continue
        model = llm(draft, **options, record_selections=True)
        plans = record(monkeypatch, model.decoder.policy, "plan")
        ends: list[int] = []
        watch(monkeypatch, model, lambda batch, _, ends=ends: ends.append(len(batch.tokens[0])))
        [output] = model.generate(PROMPTS[2], SamplingParams(max_tokens=16))
        assert len(output.selections) == len(plans) == output.stats.steps > 3
        assert len({id(plan) for _, plan in plans}) == len(plans)
        assert all(len(set(chosen.tolist())) == 26 for chosen in output.selections)
        if options["policy"] != "oracle":
            # The window moves with the history: the last cached token is always among those read.
            lasts = [int(chosen[-1]) for chosen in output.selections]
            assert lasts == [end - 2 for end in ends]
        queries = [getattr(plan, "history_queries", None) for _, plan in plans]
        for before, after in pairwise(queries):
            assert before is None or not torch.equal(before, after)


def test_the_history_query_is_that_of_the_last_cached_token(monkeypatch):
    model = llm("good", policy="dustin", budget=512, gamma=3)
    batches = record(monkeypatch, model.decoder, "_batch")
    kept = []
    for _ in model.stream(PROMPTS[:1], SamplingParams(max_tokens=14)):
        if len(batches) > len(kept):
            batch = batches[-1][1]
            kept.append((batch.history_queries[0].clone(), int(batch.previous)))
    tokens = [*prompt(LENGTHS[0])]
    [exact] = expected("llama", LENGTHS[:1], 14)
    fresh = llm("good", policy="dustin", budget=512, gamma=3, max_batch_size=1).decoder.target
    sequence = [*tokens, *exact]
    fresh.cache.reserve(0, len(sequence))
    found = 0
    for n in range(len(tokens), len(sequence)):
        query = fresh.prefill(0, sequence[:n], chunk=512).srh_queries
        found += any(
            torch.allclose(query, q, atol=1e-3) and last == sequence[n - 1] for q, last in kept
        )
    assert found == len(kept) > 2


def test_a_windowed_draft_reads_its_window_only(monkeypatch):
    model = llm("windowed", policy="dense")
    assert isinstance(model.decoder.drafter, DraftModel)
    passes = record(monkeypatch, model.decoder.drafter.engine, "propose_step")
    model.generate(PROMPTS, GREEDY)
    assert passes
    for (_, _, _, selection, _), _ in passes:
        assert selection == Window(12, 4)
