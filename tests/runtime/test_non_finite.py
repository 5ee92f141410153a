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
