"""A row fails for logits it used, and for nothing else."""

import dataclasses

import pytest
import torch

from dustin_trt import LLM, SamplingParams
from dustin_trt.drafting import Batch, Drafter, Proposal
from tests.tiny import ids, make, prompt

NAN_TOKEN = 198
PROMPTS, PARAMS = ids(prompt(30), prompt(50)), SamplingParams(max_tokens=9)


class Constant(Drafter):
    """Drafts one token over and over, of which the first `counts` are meant."""

    def __init__(self, token, counts):
        self.token = token
        self.counts = counts

    def propose(self, batch: Batch, gamma: int) -> Proposal:
        tokens = torch.full((len(batch.slots), gamma), self.token)
        return Proposal(tokens, batch.limits.clamp(max=self.counts), None, None, {})


@pytest.fixture
def llm():
    model = make()
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = float("nan")
    return LLM(model, max_batch_size=2)


def test_padding_is_not_what_was_drafted(llm):
    plain = llm.generate(PROMPTS, PARAMS)
    assert not any(NAN_TOKEN in output.token_ids for output in plain)
    llm.decoder.drafter = Constant(NAN_TOKEN, counts=0)
    for output, expected in zip(llm.generate(PROMPTS, PARAMS), plain, strict=True):
        assert output.error is None
        assert output.token_ids == expected.token_ids


def test_a_rejected_draft_may_lead_to_nan(llm, monkeypatch):
    plain = llm.generate(PROMPTS, PARAMS)
    unused = next(t for t in range(199) if not any(t in o.token_ids for o in plain))
    llm.decoder.drafter = Constant(unused, counts=4)
    verify = llm.decoder.target.verify

    def after_a_draft(*inputs, **options):
        verified = verify(*inputs, **options)
        logits = verified.logits.clone()
        logits[:, 1:] = float("nan")
        return dataclasses.replace(verified, logits=logits)

    monkeypatch.setattr(llm.decoder.target, "verify", after_a_draft)
    for output, expected in zip(llm.generate(PROMPTS, PARAMS), plain, strict=True):
        assert output.error is None
        assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_were_used_fail_their_row_alone(llm, monkeypatch, bad):
    plain = llm.generate(PROMPTS, PARAMS)
    verify = llm.decoder.target.verify
    at = next(i for i, t in enumerate(plain[1].token_ids) if t not in plain[0].token_ids)

    def of_the_second_row(slots, tokens, *rest, **options):
        verified = verify(slots, tokens, *rest, **options)
        row = (tokens[:, 0] == plain[1].token_ids[at]).nonzero()
        logits = verified.logits.clone()
        logits[row, 0, 7] = bad
        return dataclasses.replace(verified, logits=logits)

    monkeypatch.setattr(llm.decoder.target, "verify", of_the_second_row)
    good, failed = llm.generate(PROMPTS, PARAMS)
    assert good.token_ids == plain[0].token_ids and good.error is None
    assert failed.finish_reason == "error" and "non-finite logits" in failed.error
    assert failed.token_ids == plain[1].token_ids[: at + 1]


def test_an_infinite_draft_costs_drafts_only():
    draft = make(seed=1)
    with torch.no_grad():
        draft.lm_head.weight[7] = 3e38  # overflows to infinity, of either sign
    params = SamplingParams(max_tokens=8, temperature=0.5, seed=3)
    model = LLM(make(), draft, policy="dense")
    outputs = model.generate(ids(prompt(20), prompt(9)), params)
    assert [output.finish_reason for output in outputs] == ["length"] * 2


def test_a_long_prompt_is_diagnosed_in_parts(monkeypatch):
    monkeypatch.setattr("dustin_trt.engines.torch_engine._DIAGNOSED_AT_ONCE", 16)
    model = LLM(make(), prefill_chunk=32)
    causal_lm = model.decoder.target.model
    with torch.no_grad():
        causal_lm.model.model.embed_tokens.weight[5] = float("nan")
    widths, forward = [], causal_lm.forward

    def recorded(tokens, *args, **options):
        widths.append(tokens.shape[1])
        return forward(tokens, *args, **options)

    monkeypatch.setattr(causal_lm, "forward", recorded)
    bad = [t if t != 5 else 6 for t in prompt(100)]
    bad[70] = 5
    output = model.generate(ids(bad), SamplingParams(max_tokens=3))[0]
    assert "first in embedding" in output.error
    assert max(widths) <= 32 and widths[-5:] == [16] * 5  # stops at the part that holds it
