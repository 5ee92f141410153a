"""What people call: prompts, parameters, streaming, ends, errors, seeds and statistics."""

from __future__ import annotations

import pytest
import torch

from dustin_trt import LLM, SamplingParams
from dustin_trt.config import ConfigError, DustinConfig
from dustin_trt.drafting.tokenizers import TokenizerMismatchError
from dustin_trt.engines.base import Dense
from dustin_trt.metrics import attention_recovery_rate
from dustin_trt.policies import DustinPolicy, OraclePolicy, StreamingPolicy
from dustin_trt.runtime.sampling_params import RequestError
from tests import tokenizer as text
from tests.runtime.drafts import DRAFTS, llm, writer, writing_llm
from tests.tiny import VOCAB, expected, ids, make, prompt

LENGTHS = (33, 1, 77, 5, 64)
PROMPTS = ids(*map(prompt, LENGTHS))
GREEDY = SamplingParams(max_tokens=10)
BAD = 150
"""A token whose embedding is made NaN; no prompt below holds it by chance."""


def token_ids(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


class TestPrompts:
    def test_text_is_tokenized_and_output_decoded(self):
        model, words = writing_llm(), text.make()
        [output] = model.generate("the heron and", GREEDY)
        [same] = model.generate(ids(words("the heron and").input_ids), GREEDY)
        assert output.token_ids == same.token_ids
        assert output.text == words.decode(output.token_ids)
        assert output.stats.prompt_tokens == len(words("the heron and").input_ids)

    def test_one_prompt_or_several_of_both_kinds(self):
        model = writing_llm()
        [alone] = model.generate("the heron", GREEDY)
        mixed = model.generate(["the heron", {"prompt_token_ids": prompt(9)}, "in"], GREEDY)
        assert mixed[0].token_ids == alone.token_ids
        assert [output.key for output in mixed] == [0, 1, 2]

    def test_default_parameters_are_greedy_with_128_tokens(self):
        [output] = llm("lookup").generate(PROMPTS[3])
        assert output.token_ids == list(expected("llama", (5,), 128)[0])

    def test_every_prompt_may_have_its_own_parameters(self):
        params = [
            SamplingParams(max_tokens=n, temperature=t, seed=5)
            for n, t in ((3, 0.0), (7, 1.0), (1, 0.0), (5, 2.0), (2, 0.7))
        ]
        outputs = llm("good", policy="dense", max_batch_size=3).generate(PROMPTS, params)
        assert [len(output.token_ids) for output in outputs] == [3, 7, 1, 5, 2]
        assert outputs[0].token_ids == list(expected("llama", (33,), 3)[0])
        for i, output in enumerate(outputs):
            [alone] = llm("good", policy="dense").generate(PROMPTS[i], params[i])
            assert output.token_ids == alone.token_ids

    def test_no_prompts_no_outputs(self):
        assert llm("none").generate([]) == []

    def test_token_only_models_give_empty_text(self):
        [output] = llm("none").generate(PROMPTS[0], GREEDY)
        assert output.text == ""
        assert len(output.token_ids) == 10


class TestStream:
    @pytest.mark.parametrize("draft", ("none", "lookup", "same"))
    def test_chunks_make_up_the_outputs(self, draft):
        model = writing_llm(draft, max_batch_size=2)
        params = [
            SamplingParams(max_tokens=n, temperature=t, seed=1, stop=stop)
            for n, t, stop in ((12, 0, ()), (9, 1.0, ("he", "a")), (5, 0.5, "in"), (1, 0, ()))
        ]
        texts, tokens, outputs = [""] * 4, [[] for _ in range(4)], [None] * 4
        for chunk in model.stream(PROMPTS[:4], params):
            assert outputs[chunk.key] is None, "a chunk after the last one"
            texts[chunk.key] += chunk.text
            tokens[chunk.key] += chunk.token_ids
            outputs[chunk.key] = chunk.output
        assert texts == [output.text for output in outputs]
        assert tokens == token_ids(outputs)
        assert tokens == token_ids(writing_llm(draft).generate(PROMPTS[:4], params))

    def test_the_first_chunk_comes_before_the_request_is_done(self):
        first = next(llm("none").stream(PROMPTS[0], GREEDY))
        assert (len(first.token_ids), first.output) == (1, None)

    @pytest.mark.parametrize("draft", ("lookup", "good"))
    @pytest.mark.parametrize("after", (1, 3, 9))
    def test_closing_early_frees_the_slots(self, draft, after):
        model = llm(draft, policy="dense", max_batch_size=2)
        stream = model.stream(PROMPTS, GREEDY)
        for _ in range(after):
            next(stream)
        stream.close()
        assert token_ids(model.generate(PROMPTS, GREEDY)) == [
            list(row) for row in expected("llama", LENGTHS, 10)
        ]

    def test_a_second_run_at_once_is_refused_and_the_first_goes_on(self):
        model = llm("good", policy="dense", max_batch_size=1)
        stream = model.stream(PROMPTS[:2], GREEDY)
        chunks = [next(stream)]
        while True:
            # Also between two requests, when no row is running.
            with pytest.raises(RuntimeError, match="running already"):
                model.generate(PROMPTS[2], GREEDY)
            if (chunk := next(stream, None)) is None:
                break
            chunks.append(chunk)
        outputs = [chunk.output for chunk in chunks if chunk.output]
        assert token_ids(outputs) == [list(row) for row in expected("llama", LENGTHS[:2], 10)]
        assert model.generate(PROMPTS[2], GREEDY)[0].finish_reason == "length"

    def test_an_error_in_the_callers_iterable_leaves_the_decoder_usable(self):
        model = llm("lookup", policy="dense")

        def source():
            yield model.request("a", PROMPTS[0], GREEDY)
            raise KeyError("gone")

        with pytest.raises(KeyError, match="gone"):
            list(model.decoder.run(source()))
        assert model.generate(PROMPTS[0], GREEDY)[0].finish_reason == "length"

    def test_prefill_progress_is_reported(self):
        calls = []
        model = llm("none", on_prefill=lambda request, done: calls.append((request.key, done)))
        model.generate(PROMPTS[:3], GREEDY)
        assert calls == [(0, 32), (0, 33), (1, 1), (2, 32), (2, 64), (2, 77)]


class TestBadRequests:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ({"prompt_token_ids": [3, VOCAB]}, f"token id {VOCAB} is not in the vocabulary"),
            ({"prompt_token_ids": [-1]}, "token id -1 is not in the vocabulary"),
            ({"prompt_token_ids": [1.5]}, r"token ids are integers, not 1\.5"),
            ({"prompt_token_ids": [True]}, "token ids are integers, not True"),
            ({"prompt_token_ids": prompt(503)}, "503 prompt tokens and max_tokens 10 are 513"),
            ({"tokens": [1]}, "a prompt is a text or"),
            (17, "a prompt is a text or"),
            ("text", "needs a tokenizer"),
        ],
    )
    def test_are_refused_before_any_work_and_named(self, bad, message):
        model = llm("lookup")
        with pytest.raises(RequestError, match=f"^prompt 1: .*{message}") as caught:
            model.stream([PROMPTS[0], bad, PROMPTS[1]], GREEDY)
        assert "\n" not in str(caught.value)
        assert not any(model.decoder.target.cache.resident)

    def test_the_longest_request_that_fits_is_served(self):
        [output] = llm("good").generate(ids(prompt(502)), GREEDY)
        assert output.finish_reason == "length"

    def test_the_way_out_is_named_where_max_model_len_was_lowered(self):
        with pytest.raises(RequestError, match="or raise max_model_len"):
            llm("none", max_model_len=20).generate(PROMPTS[0], GREEDY)

    def test_a_draft_with_fewer_positions_bounds_the_request(self):
        model = LLM(make(), make(max_position_embeddings=64), policy="dense")
        assert model.max_model_len == 64
        with pytest.raises(RequestError, match="more than the 64 tokens"):
            model.generate(ids(prompt(60)), GREEDY)

    def test_stop_strings_need_a_tokenizer(self):
        with pytest.raises(RequestError, match="use stop_token_ids"):
            llm("none").generate(PROMPTS[0], SamplingParams(stop="x"))

    def test_as_many_parameters_as_prompts(self):
        with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
            llm("none").generate(PROMPTS[:3], [GREEDY, GREEDY])

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"temperature": -1}, "temperature: "),
            ({"temperature": float("nan")}, "temperature: "),
            ({"top_p": 0}, "top_p: "),
            ({"top_p": 1.1}, "top_p: "),
            ({"top_k": -1}, "top_k: "),
            ({"max_tokens": 0}, "max_tokens: "),
            ({"seed": -3}, "seed: "),
            ({"stop": ["a", ""]}, "stop: a stop string must not be empty"),
            ({"beams": 3}, "beams: "),
        ],
    )
    def test_parameters_are_checked(self, fields, message):
        with pytest.raises(RequestError, match=message) as caught:
            SamplingParams(**fields)
        assert "\n" not in str(caught.value)

    def test_a_copy_of_parameters_is_checked(self):
        assert GREEDY.replace(max_tokens=3).max_tokens == 3
        with pytest.raises(RequestError):
            GREEDY.replace(max_tokens=0)


class TestBadSetUp:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"budget": 20}, "budget 20 leaves nothing to choose beside sink 4 and window 16"),
            ({"budget": 0}, "budget"),
            ({"gamma": 0}, "gamma"),
            ({"gamma": 17}, "gamma 17 is more than 16"),
            ({"policy": "magic"}, "unknown policy 'magic'; there are dense, dustin"),
            ({"signal": "loud", "policy": "dustin"}, "unknown signal 'loud'"),
            ({"draft": "lookup", "policy": "dustin", "signal": "lookahead"}, "needs a draft with"),
            ({"draft": "none", "policy": "dustin", "signal": "hybrid"}, "needs a draft with"),
            ({"draft": "lookup:x"}, "write lookup or lookup:N"),
            ({"draft": "lookup:0"}, "at least 1 token"),
            ({"draft": "skip:a"}, "write layer numbers with commas"),
            ({"draft": "skip:7"}, r"cannot skip layers \[7\]"),
            ({"draft": "skip:0,1,2"}, "cannot skip every layer"),
            ({"draft": "skip:1", "draft_window": 4}, "draft window 4 must be larger"),
            ({"max_model_len": 513}, "max_model_len 513 is not in 1–512"),
            ({"max_model_len": 0}, "max_model_len 0 is not in 1–512"),
            ({"max_batch_size": 0}, "must be at least 1"),
            ({"prefill_chunk": 0}, "must be at least 1"),
        ],
    )
    def test_is_refused_with_what_to_change(self, options, message):
        with pytest.raises(ValueError, match=message) as caught:
            llm(**{"draft": "none", **options})
        assert "\n" not in str(caught.value)

    def test_an_unknown_draft_is_no_folder(self):
        with pytest.raises(FileNotFoundError, match="neither a folder nor one of skip:LAYERS"):
            llm("nowhere")

    def test_a_target_that_is_no_checkpoint(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
            LLM(tmp_path)

    def test_an_unknown_dtype(self, tmp_path):
        folder = text.save(tmp_path / "model")
        with pytest.raises(ValueError, match="unknown dtype 'float7'"):
            LLM(folder, dtype="float7")
        assert LLM(folder, dtype="bfloat16").decoder.target.cache.k[0].dtype == torch.bfloat16

    def test_another_tokenizer(self):
        other = text.make(("q u", "z z"))
        with pytest.raises(TokenizerMismatchError, match="use a draft of the same family"):
            writing_llm(writer(1), draft_tokenizer=other)
        with pytest.raises(ValueError, match="pass draft_tokenizer"):
            writing_llm(writer(1), draft_tokenizer=None)

    def test_a_configuration_for_another_model(self):
        spec = llm("none").decoder.target.spec
        made_for = {**spec.__dict__, "num_layers": 99}
        with pytest.raises(ConfigError, match="another target: num_layers is 3 here and 99 there"):
            llm("none", config=DustinConfig(target=made_for))
        with pytest.raises(ConfigError, match="another draft: num_layers is 3 here and 99 there"):
            llm("good", config=DustinConfig(target=spec.__dict__, draft=made_for))

    def test_a_configuration_for_another_tokenizer(self):
        with pytest.raises(ConfigError, match="another tokenizer"):
            writing_llm(config=DustinConfig(tokenizer="0" * 64))

    @pytest.mark.parametrize("heads", ("target_heads", "draft_heads"))
    def test_a_head_the_model_does_not_have(self, heads):
        with pytest.raises(ConfigError, match=rf"{heads}: the model has no head \(1, 6\)"):
            llm("good", config=DustinConfig(**{heads: ((1, 5), (1, 6))}))

    def test_a_configuration_without_heads(self):
        with pytest.raises(ConfigError, match="names no target_heads"):
            llm("none", config=DustinConfig(), policy="dustin")
        alone = DustinConfig(target_heads=((1, 0),))
        for signal in ("lookahead", "hybrid"):
            with pytest.raises(ConfigError, match="names no draft_heads"):
                llm("skip:1", config=alone, policy="dustin", signal=signal)
        # Nobody asked for the lookahead: the history serves alone.
        assert llm("skip:1", config=alone, policy="dustin").decoder.policy.signal == "history"

    def test_a_configured_head_of_a_layer_that_is_skipped(self):
        config = DustinConfig(target_heads=((1, 0),), draft_heads=((0, 0), (1, 0)))
        with pytest.raises(ConfigError, match="skips layer 1"):
            llm("skip:1", config=config)

    def test_default_heads_are_those_the_draft_has(self):
        for skipped in ("0", "1", "2", "0,1"):
            heads = llm(f"skip:{skipped}").decoder.drafter.engine.srh_heads
            assert heads and not {head.layer for head in heads} & set(map(int, skipped.split(",")))

    def test_a_prompt_without_tokens_is_named(self):
        with pytest.raises(RequestError, match="prompt 1: prompt_token_ids is a list"):
            llm("none").generate([*ids([1]), {"prompt_token_ids": None}])


class TestSeeds:
    PARAMS = SamplingParams(max_tokens=12, temperature=1.2, seed=7)

    @pytest.mark.parametrize("draft", DRAFTS)
    def test_a_seed_repeats_whatever_the_neighbours(self, draft):
        model = llm(draft, policy="dustin", budget=26, max_batch_size=3)
        [alone] = model.generate(PROMPTS[0], self.PARAMS)
        others = [
            SamplingParams(max_tokens=n, temperature=t, top_p=0.8, seed=n)
            for n, t in ((3, 0.0), (15, 1.0), (9, 0.6))
        ]
        outputs = model.generate(
            [PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[3]],
            [others[0], self.PARAMS, others[1], others[2]],
        )
        assert outputs[1].token_ids == alone.token_ids

    def test_other_seeds_differ(self):
        model = llm("good", policy="dense", max_batch_size=8)
        outputs = model.generate(
            [PROMPTS[0]] * 8, [self.PARAMS.replace(seed=seed) for seed in range(8)]
        )
        assert len({tuple(output.token_ids) for output in outputs}) == 8

    def test_no_seed_differs_from_run_to_run(self):
        model = llm("lookup", policy="dense")
        outputs = model.generate([PROMPTS[0]] * 8, self.PARAMS.replace(seed=None))
        assert len({tuple(output.token_ids) for output in outputs}) > 1

    def test_a_seed_leaves_the_global_generator_alone(self):
        torch.manual_seed(5)
        wanted = torch.rand(1)
        model = llm("lookup", policy="dense")
        torch.manual_seed(5)
        model.generate(PROMPTS[0], self.PARAMS)
        assert torch.equal(torch.rand(1), wanted)


class TestEnds:
    FREE = expected("llama", LENGTHS[:2], 10)

    def cut(self, row: int, *stops: int) -> list[int]:
        """The free continuation up to and with the first of `stops`."""
        free = list(self.FREE[row])
        ends = [free.index(token) for token in stops if token in free]
        return free[: min(ends) + 1] if ends else free

    @pytest.mark.parametrize("draft", ("none", "skip:1", "same"))
    @pytest.mark.parametrize("many", (False, True))
    def test_end_of_sequence_of_the_generation_settings(self, draft, many):
        first, second = self.FREE[0][4], self.FREE[1][6]
        eos = [first, second] if many else first
        target = make()
        target.generation_config.eos_token_id = eos
        model = LLM(target, make() if draft == "same" else draft, policy="dense")
        outputs = model.generate(PROMPTS[:2], GREEDY)
        stops = (first, second) if many else (first,)
        assert token_ids(outputs) == [self.cut(0, *stops), self.cut(1, *stops)]
        assert outputs[0].finish_reason == "stop"
        ignoring = model.generate(PROMPTS[:2], GREEDY.replace(ignore_eos=True))
        assert token_ids(ignoring) == list(map(list, self.FREE))

    def test_stop_tokens_hold_even_where_the_eos_is_ignored(self):
        params = GREEDY.replace(ignore_eos=True, stop_token_ids=(self.FREE[0][3], self.FREE[0][7]))
        [output] = llm("good", policy="dense").generate(PROMPTS[0], params)
        assert output.token_ids == self.cut(0, *params.stop_token_ids)
        assert output.finish_reason == "stop"

    def test_the_first_token_may_end_the_request(self):
        params = GREEDY.replace(stop_token_ids=(self.FREE[0][0],))
        for draft in ("none", "lookup", "good"):
            model = llm(draft, policy="dense", max_batch_size=1)
            outputs = model.generate(PROMPTS[:2], [params, GREEDY])
            assert outputs[0].token_ids == [self.FREE[0][0]]
            assert outputs[0].finish_reason == "stop"
            assert outputs[0].stats.steps == 0
            assert outputs[1].token_ids == list(self.FREE[1])

    def test_the_tokenizers_eos_where_the_checkpoint_names_none(self):
        assert writing_llm().eos == {0}

    @pytest.mark.parametrize("draft", ("none", "lookup", "same"))
    def test_a_stop_string_ends_the_text_inside_an_accepted_draft(self, draft):
        model = writing_llm(draft, gamma=9)
        params = SamplingParams(max_tokens=20)
        [free] = model.generate(PROMPTS[0], params)
        stop = free.text[4:7]  # across tokens
        chunks = list(model.stream(PROMPTS[0], params.replace(stop=("never\x00", stop))))
        output = chunks[-1].output
        assert output.text == free.text[: free.text.index(stop)]
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert output.finish_reason == "stop"
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < 20
        whole = text.make().decode(output.token_ids)
        assert stop in whole
        assert stop not in text.make().decode(output.token_ids[:-1])
        if draft == "same":
            assert output.stats.steps == 1


class TestStatistics:
    @pytest.mark.parametrize("draft", DRAFTS)
    def test_counts_agree_with_each_other(self, draft):
        model = llm(draft, policy="dustin", budget=26, max_batch_size=2)
        params = [GREEDY, GREEDY.replace(max_tokens=1), GREEDY, GREEDY, GREEDY]
        outputs = model.generate(PROMPTS, params)
        for length, output in zip(LENGTHS, outputs, strict=True):
            stats = output.stats
            assert stats.prompt_tokens == length
            assert stats.generated_tokens == len(output.token_ids) == stats.step_tokens + 1
            assert stats.accepted <= stats.drafted <= 4 * stats.steps
            assert stats.step_tokens == stats.accepted + stats.steps
            assert stats.tau is None or 1 <= stats.tau <= 5
            assert stats.history_read <= stats.history
            assert stats.coverage is None or 0 < stats.coverage <= 1
        assert model.stats.total.tokens == sum(output.stats.step_tokens for output in outputs)
        assert model.stats.prefill_seconds > 0
        assert set(model.stats.total.seconds) == {"draft", "score", "select", "verify", "accept"}
        assert outputs[1].stats.steps == 0
        assert outputs[1].stats.tau is None

    def test_plain_decoding_reads_the_exact_history(self):
        [output] = llm("none", policy="dense").generate(PROMPTS[0], GREEDY)
        stats = output.stats
        assert stats.steps == 9
        assert stats.history == stats.history_read == sum(range(33, 42))
        assert (stats.kv_read_share, stats.coverage) == (1, 1)
        assert (stats.drafted, stats.acceptance_rate, stats.tau) == (0, None, 1)

    @pytest.mark.parametrize("policy", ("dustin", "streaming", "oracle"))
    def test_a_budget_limits_what_is_read(self, policy):
        model = llm("lookup", policy=policy, budget=26, record_selections=True)
        [output] = model.generate(PROMPTS[2], GREEDY)
        assert output.stats.history_read == 26 * output.stats.steps
        assert [len(chosen) for chosen in output.selections] == [26] * output.stats.steps
        assert 0.3 < output.stats.kv_read_share < 0.35

    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "good"))
    def test_coverage_is_1_when_all_is_read_and_less_below(self, draft):
        [full] = llm(draft, policy="dustin", budget=90).generate(PROMPTS[2], GREEDY)
        assert full.stats.coverage == full.stats.kv_read_share == 1
        [part] = llm(draft, policy="dustin", budget=26).generate(PROMPTS[2], GREEDY)
        assert 0.3 < part.stats.coverage < 1
        assert part.stats.kv_read_share < part.stats.coverage  # better than chance

    def test_coverage_is_unknown_without_history_scores(self):
        [output] = llm("good", policy="streaming", budget=26).generate(PROMPTS[2], GREEDY)
        assert output.stats.coverage is None
        assert output.stats.as_dict()["coverage"] is None

    def test_as_a_dictionary_they_are_plain_numbers(self):
        [output] = llm("good", policy="dustin", budget=26).generate(PROMPTS[2], GREEDY)
        stats = output.stats.as_dict()
        assert stats["generated_tokens"] == 10
        assert stats["tau"] == round(output.stats.step_tokens / output.stats.steps, 4)
        assert all(value is None or isinstance(value, int | float) for value in stats.values())


def poison(model: LLM) -> None:
    """Make the embedding of token BAD NaN in the target."""
    with torch.no_grad():
        model.decoder.target.model.model.model.embed_tokens.weight[BAD] = float("nan")


class TestNonFiniteLogits:
    @pytest.mark.parametrize(
        ("draft", "place"),
        [("none", 0), ("lookup", 20), ("skip:1", 39), ("good", 0), ("bad", 20), ("windowed", 39)],
    )
    def test_fail_the_requests_whose_prompt_causes_them(self, draft, place):
        model = llm(draft, policy="dustin", budget=26, max_batch_size=2)
        clean = model.generate(PROMPTS, GREEDY)
        model = llm(draft, policy="dustin", budget=26, max_batch_size=2)
        poison(model)
        bad = prompt(40, seed=3)
        bad[place] = BAD
        assert not any(BAD in output.token_ids for output in clean)
        outputs = model.generate([PROMPTS[0], *ids(bad), *PROMPTS[1:]], GREEDY)
        failed = outputs.pop(1)
        assert failed.finish_reason == "error"
        assert "first in embedding" in failed.error
        assert "\n" not in failed.error
        assert (failed.token_ids, failed.text, failed.stats.steps) == ([], "", 0)
        assert token_ids(outputs) == token_ids(clean)
        assert all(output.error is None for output in outputs)

    @pytest.mark.parametrize("draft", ("none", "lookup", "skip:1", "good"))
    @pytest.mark.parametrize("temperature", (0.0, 1.0))
    def test_in_the_middle_of_a_generation_spare_the_neighbours(self, draft, temperature):
        params = SamplingParams(
            max_tokens=10, temperature=temperature, top_k=50, top_p=0.95, seed=2
        )  # fmt: skip
        clean = llm(draft, policy="dense").generate(PROMPTS, params)
        texts = [[*prompt(n), *o.token_ids] for n, o in zip(LENGTHS, clean, strict=True)]
        row, at = next(
            (row, at)
            for row in range(len(LENGTHS))
            for at in range(2, 9)
            if sum(text.count(clean[row].token_ids[at]) for text in texts) == 1
        )
        victim = clean[row].token_ids[at]
        model = llm(draft, policy="dense", max_batch_size=3)
        with torch.no_grad():
            model.decoder.target.model.model.model.embed_tokens.weight[victim] = float("nan")
        real, drafted = model.decoder.drafter.propose, set()

        def propose(batch, gamma):
            proposal = real(batch, gamma)
            for tokens, drafts in zip(batch.tokens, proposal.tokens.tolist(), strict=True):
                drafted.update({tuple(tokens[:2])} if victim in drafts else ())
            return proposal

        model.decoder.drafter.propose = propose
        outputs = model.generate(PROMPTS, params)
        failed = outputs[row]
        assert failed.finish_reason == "error"
        assert "first in embedding" in failed.error
        assert "\n" not in failed.error
        assert failed.token_ids == clean[row].token_ids[: len(failed.token_ids)]
        assert len(failed.token_ids) <= at + 1
        assert failed.stats.generated_tokens == len(failed.token_ids)
        assert failed.stats.step_tokens + 1 == len(failed.token_ids)
        # A row that only drafted the token may fail too: its window held it.
        touched = {*drafted, tuple(texts[row][:2])}
        spared = [i for i, text in enumerate(texts) if tuple(text[:2]) not in touched]
        assert len(spared) >= 3
        for i in spared:
            assert outputs[i].token_ids == clean[i].token_ids

    def test_name_the_layer(self):
        model = llm("lookup", policy="dense")
        layer = model.decoder.target.model.model.model.layers[1]
        with torch.no_grad():
            layer.mlp.down_proj.weight.fill_(float("inf"))
        [output] = model.generate(PROMPTS[0], GREEDY)
        assert "first in layer 1" in output.error

    def test_padding_of_a_shorter_draft_fails_no_row(self):
        # Rows of one step draft different numbers of tokens; what fills up the shorter ones
        # depends on the neighbours, so it must not matter what the model makes of it.
        model = llm("lookup", policy="dense")
        with torch.no_grad():
            model.decoder.target.model.model.model.embed_tokens.weight[0] = float("nan")
        params = [SamplingParams(max_tokens=n) for n in (20, 4, 18, 9, 13)]
        outputs = model.generate(PROMPTS, params)
        exact = expected("llama", LENGTHS, 20)
        assert not any(0 in row for row in exact)
        assert token_ids(outputs) == [
            list(row[: p.max_tokens]) for row, p in zip(exact, params, strict=True)
        ]

    @pytest.mark.parametrize("draft", ("lookup", "skip:1", "good"))
    def test_padding_of_a_shorter_draft_is_the_rows_last_token(self, draft):
        model = llm(draft, policy="dense")
        real, padded = model.decoder.drafter.propose, []

        def propose(batch, gamma):
            proposal = real(batch, gamma)
            window = proposal.window(batch.last)
            rows = zip(batch.last, proposal.tokens, window, proposal.counts.tolist(), strict=True)
            for last, drafts, row, count in rows:
                assert row[: count + 1].tolist() == [last, *drafts[:count].tolist()]
                assert (row[count + 1 :] == last).all()
                padded.extend(row[count + 1 :].tolist())
            return proposal

        model.decoder.drafter.propose = propose
        model.generate(PROMPTS, [SamplingParams(max_tokens=n) for n in (20, 4, 18, 9, 13)])
        assert padded

    def test_a_slot_serves_again_after_a_failure(self):
        model = llm("good", policy="dustin", budget=512, max_batch_size=1)
        poison(model)
        outputs = model.generate([*ids([BAD, 3]), *PROMPTS], GREEDY)
        assert outputs[0].finish_reason == "error"
        assert token_ids(outputs[1:]) == [list(row) for row in expected("llama", LENGTHS, 10)]


class TestOracle:
    def test_keeps_more_attention_than_any_other_policy(self):
        model = llm("good", policy="dustin", budget=26, heads="all")
        target, drafter, config = model.decoder.target, model.decoder.drafter, model.config
        lengths = [length for length in LENGTHS if length > 26]
        batches, plans = [], {}
        real = drafter.propose

        def propose(batch, gamma):
            proposal = real(batch, gamma)
            if not batches and len(batch.tokens) == len(lengths):
                batches.append(batch)
                window = torch.cat([batch.last[:, None], proposal.tokens], 1)
                heads = target.spec.all_heads()
                seen = target.verify(batch.slots, window, Dense(), heads=heads)
                mass = target.attention_scores(batch.slots, seen.srh_queries, heads=heads)
                policies = [OraclePolicy(config), StreamingPolicy(config)]
                policies += [DustinPolicy(config, s) for s in ("hybrid", "history", "lookahead")]
                for policy in policies:
                    chosen = target.verify(
                        batch.slots, window, policy.plan(target, batch, proposal)
                    )  # fmt: skip
                    name = getattr(policy, "signal", policy.name)
                    plans[name] = attention_recovery_rate(mass, chosen.indices, chosen.counts)
            return proposal

        drafter.propose = propose
        model.generate(ids(*map(prompt, lengths)), GREEDY)
        oracle = plans.pop("oracle")
        assert set(plans) == {"streaming", "hybrid", "history", "lookahead"}
        for rates in plans.values():
            assert (rates < oracle).all()
        assert (oracle < 1).all()
        assert (plans["hybrid"] > plans["streaming"]).all()


class TestVariant:
    def test_shares_cache_and_weights(self):
        model = llm("skip:1", policy="dustin", budget=26)
        sparse = model.generate(PROMPTS, GREEDY)
        plain = model.variant(draft="none", policy="dense")
        assert plain.decoder.target.cache is model.decoder.target.cache
        assert plain.decoder.target.model is model.decoder.target.model
        outputs = plain.generate(PROMPTS, GREEDY)
        assert [o.stats.cached_prompt_tokens for o in outputs] == [n - 1 for n in LENGTHS]
        assert token_ids(outputs) == [list(row) for row in expected("llama", LENGTHS, 10)]
        assert token_ids(model.generate(PROMPTS, GREEDY)) == token_ids(sparse)

    def test_takes_over_what_it_is_not_told(self):
        model = llm("skip:1", policy="dustin", budget=26, gamma=3)
        twin = model.variant(policy="streaming")
        assert (twin.gamma, twin.config.budget) == (3, 26)
        assert twin.decoder.policy.name == "streaming"

    def test_refuses_what_concerns_the_target(self):
        model = llm("none")
        with pytest.raises(TypeError, match="does not take target"):
            model.variant(target=make())
        with pytest.raises(TypeError, match="shares its target's dtype"):
            model.variant(dtype="float16")
