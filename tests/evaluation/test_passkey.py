import os

import pytest
import torch

from dustin_trt import LLM, SamplingParams
from dustin_trt.evaluation import assets, machine
from dustin_trt.evaluation.passkey import passkey_prompts
from tests import tokenizer as tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
)
TEXT = "the grass is green and the sky is blue; here we go, there and back again. " * 200


def make_tokenizer():
    tokenizer = tiny_tokenizer.make()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class TestPrompts:
    def test_length_key_and_needle_are_where_they_are_said_to_be(self):
        tokenizer = make_tokenizer()
        for prompt in passkey_prompts(tokenizer, TEXT, length=900, count=5, seed=3):
            text = tokenizer.decode(prompt.tokens)
            hidden = tokenizer.decode([prompt.tokens[i] for i in prompt.needle])
            assert len(prompt.tokens) == 900
            assert f"The pass key is {prompt.key}." in hidden
            assert text.count(prompt.key) == 2 == hidden.count(prompt.key)
            assert text.endswith("The pass key is")
            assert prompt.found_in(f" {prompt.key}.") and not prompt.found_in(prompt.key[:4])

    def test_keys_and_depths_follow_the_seed(self):
        def make(seed):
            return passkey_prompts(make_tokenizer(), TEXT, length=900, count=3, seed=seed)

        assert make(1) == make(1) != make(2)
        assert len({prompt.key for prompt in make(1)}) == 3
        assert len({prompt.needle.start for prompt in make(1)}) == 3

    def test_a_text_too_short_is_refused(self):
        with pytest.raises(ValueError, match="fewer than a prompt of 900"):
            passkey_prompts(make_tokenizer(), "short", length=900, count=1, seed=0)


@pytest.mark.model
def test_dustin_finds_the_keys_that_full_verification_finds_and_streaming_none():
    """Ten keys in 4096 tokens of a play, every head scored, budget 512; prefilled once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        dtype = machine.fastest_dtype()
        llm = LLM(assets.smollm2(), dtype=dtype, max_batch_size=10, max_model_len=4112)
        text = assets.books()["winters_tale"].read_text(encoding="utf-8")
        prompts = passkey_prompts(llm.tokenizer, text, length=4096, count=10, seed=1)

        def found(**options):
            outputs = llm.variant(**options).generate(
                [{"prompt_token_ids": prompt.tokens} for prompt in prompts],
                SamplingParams(max_tokens=8),
            )
            return [p.found_in(o.text) for p, o in zip(prompts, outputs, strict=True)], outputs

        full, _ = found(draft="none", policy="dense")
        sparse = {"draft": "skip:14,17", "budget": 512}
        dustin, outputs = found(policy="dustin", heads="all", **sparse)
        streaming, _ = found(policy="streaming", **sparse)
    finally:
        torch.set_num_threads(threads)
    assert sum(full) >= 6  # or the comparison says nothing
    assert sum(dustin) >= sum(full)
    assert sum(streaming) == 0
    assert all(o.stats.kv_read_share < 0.13 for o in outputs)
    assert all(o.stats.cached_prompt_tokens == 4095 for o in outputs)
