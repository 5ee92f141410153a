"""The decoding loop on a GPU, with and without CUDA graphs: exactness on tiny random models."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import DEVICE, REHEARSAL, needs_gpu

pytest.importorskip("pydantic", reason="the decoding loop needs pydantic, which is not installed")

from dustin_trt import LLM, SamplingParams
from tests.tiny import expected, ids, make, prompt

# In float32 the ops are the reference's, which they say.
pytestmark = pytest.mark.filterwarnings("ignore:.*the torch reference runs instead")

LENGTHS = (33, 1, 77, 130, 5, 64, 2, 18)
NEW = 12
PROMPTS = ids(*map(prompt, LENGTHS))
GREEDY = SamplingParams(max_tokens=NEW)
DRAFTS = ("none", "lookup", "skip:1", "good")
EVERYTHING = max(LENGTHS) + NEW

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
graphs = pytest.mark.parametrize(
    "graphs", [False, pytest.param(True, marks=needs_gpu)], ids=["eager", "graphs"]
)


def tiny(dtype, family="llama", noise=0.0):
    """A tiny model with heads of a size that the kernels take."""
    # Smaller weights than on the CPU: float16 has to hold what they add up to.
    model = make(family, head_dim=64, initializer_range=0.1)
    if noise:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter += noise * parameter.std() * drawn
    return model.to(dtype).to(DEVICE)


def llm(draft, dtype, *, graphs=False, family="llama", **options):
    model = tiny(dtype, family, noise=0.06) if draft == "good" else draft
    if graphs:
        options["cuda_graphs"] = True
    return LLM(
        tiny(dtype, family), model,
        **{"device": DEVICE, "dtype": dtype, "prefill_chunk": 32, "max_batch_size": 8, **options},
    )  # fmt: skip


def params(rows):
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1},
             {"temperature": 1.3, "top_k": 20, "seed": 2}]  # fmt: skip
    return [SamplingParams(max_tokens=(9, 12, 1, 5)[i % 4], **kinds[i % 3]) for i in range(rows)]


def counts(output):
    stats = output.stats
    return output.token_ids, stats.steps, stats.drafted, stats.accepted, stats.history


def check_against_eager(outputs, dtype, family="llama"):
    """Each token is the one that transformers' eager attention takes, or ties with it."""
    model = tiny(dtype, family)
    model.set_attn_implementation("eager")
    for asked, output in zip(PROMPTS, outputs, strict=True):
        given = asked["prompt_token_ids"]
        tokens = torch.tensor([[*given, *output.token_ids]], device=DEVICE)
        logits = model(tokens).logits[0, len(given) - 1 : -1].float()
        taken = logits.gather(1, tokens[0, len(given) :, None])[:, 0]
        near = 2**-5 * logits.abs().amax(1)  # what bf16 rounds off on the way through three layers
        assert bool((taken >= logits.amax(1) - near).all())


@torch.inference_mode()
def test_smallest_greedy_run_equals_eager_torch():
    dtype = torch.float32 if REHEARSAL == "cpu" else torch.bfloat16
    check_against_eager(llm("skip:1", dtype, budget=EVERYTHING).generate(PROMPTS, GREEDY), dtype)


@graphs
@dtypes
@pytest.mark.parametrize("family", ["llama", "qwen2-28/4", "qwen3-head_dim", "mistral"])
@pytest.mark.parametrize("draft", ["none", "good"])
def test_greedy_equals_eager_torch(draft, family, dtype, graphs):
    model = llm(draft, dtype, graphs=graphs, family=family, policy="dustin", budget=EVERYTHING)
    outputs = model.generate(PROMPTS, GREEDY)
    with torch.inference_mode():
        check_against_eager(outputs, dtype, family)


@pytest.mark.parametrize("draft", ["none", "lookup", "skip:1", "bad"])
def test_fp32_greedy_equals_transformers(draft):
    """Heads of 16 and fp32 are not for the kernels: torch serves them, and says the same."""
    model = make(seed=1).to(DEVICE) if draft == "bad" else draft
    found = LLM(
        make().to(DEVICE), model, device=DEVICE, policy="dustin", budget=512, prefill_chunk=32
    ).generate(PROMPTS, SamplingParams(max_tokens=10))
    right = expected("llama", LENGTHS, 10)
    assert [output.token_ids for output in found] == [list(row) for row in right]


@graphs
@dtypes
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_budget_of_the_history_is_dense(draft, page_size, dtype, graphs):
    options = {"graphs": graphs, "page_size": page_size}
    dense = llm(draft, dtype, policy="dense", **options).generate(PROMPTS, params(8))
    sparse = llm(draft, dtype, policy="dustin", budget=EVERYTHING, **options)
    assert [*map(counts, sparse.generate(PROMPTS, params(8)))] == [*map(counts, dense)]


@needs_gpu
@dtypes
@pytest.mark.parametrize("policy", ["dense", "dustin", "streaming"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_graphs_change_nothing(draft, policy, dtype):
    options = {"policy": policy, "budget": 26}
    eager = llm(draft, dtype, **options).generate(PROMPTS, params(8))
    replayed = llm(draft, dtype, graphs=True, **options)
    for _ in range(2):  # the second time on graphs that were captured before
        assert [*map(counts, replayed.generate(PROMPTS, params(8)))] == [*map(counts, eager)]


@graphs
@dtypes
@pytest.mark.parametrize("draft", ["skip:1", "good"])
def test_a_guard_of_one_is_dense(draft, dtype, graphs):
    options = {"graphs": graphs}
    dense = llm(draft, dtype, policy="dense", **options).generate(PROMPTS, params(8))
    guarded = llm(draft, dtype, policy="dustin", budget=26, guard=1.0, **options)
    tokens = [output.token_ids for output in guarded.generate(PROMPTS, params(8))]
    assert tokens == [output.token_ids for output in dense]
