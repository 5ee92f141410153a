"""What must hold before decoding is timed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dustin_trt import ops
from dustin_trt.engines.base import Dense, Indices, Selection
from dustin_trt.evaluation.bench.report import BenchmarkError
from dustin_trt.evaluation.side_by_side import first_difference
from dustin_trt.runtime.llm import LLM, Prompt
from dustin_trt.runtime.sampling_params import SamplingParams

SHORT_CONTEXT, NEW_TOKENS, ROWS = 192, 12, 2
_OPS = ("dense_attention", "kv_append", "select_tokens", "sparse_attention", "srh_score")
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of logits after all layers, largest error over the largest value."""


def check_decoding(
    vanilla: LLM, lossless: dict[str, LLM], dense: LLM, dustin: LLM, prompts: Sequence[list[int]]
) -> list[str]:
    """Decode the beginnings of a few prompts and compare.

    Parameters
    ----------
    vanilla : plain decoding
    lossless : methods that must give its tokens, exactly so in fp32
    dense, dustin : the same draft with full verification, and with a budget of the whole context

    Returns
    -------
    list of str
        What was found, for the report.

    Raises
    ------
    BenchmarkError
        Logits off the reference, fp32 tokens that differ from vanilla's, or Dustin reading
        everything and differing from full verification.
    """
    short: list[Prompt] = [{"prompt_token_ids": p[:SHORT_CONTEXT]} for p in prompts[:ROWS]]
    expected = _tokens(vanilla, short)
    error = _logit_error(vanilla, prompts[:ROWS])
    found = [
        f"Checked on {len(short)} prompts of {SHORT_CONTEXT} tokens: logits of dense and sparse "
        f"passes are within {error:.2%} of the reference's largest one; Dustin with a budget of "
        "the whole context gives full verification's tokens."
    ]
    for name, llm in lossless.items():
        differences = _differences(_tokens(llm, short), expected)
        if differences and vanilla.dtype == torch.float32:
            raise BenchmarkError(
                f"{name} differs from vanilla at new token {min(differences)} in fp32, where it "
                "must not: nothing was timed"
            )
        found.append(_lossless_note(name, differences, len(short), str(vanilla.dtype)))
    if _differences(_tokens(dustin, short), _tokens(dense, short)):
        raise BenchmarkError(
            "Dustin with a budget of the whole context differs from full verification with the "
            "same draft: nothing was timed"
        )
    return found


def _lossless_note(name: str, differences: list[int], rows: int, dtype: str) -> str:
    dtype = dtype.removeprefix("torch.")
    if not differences:
        return f"There {name} gives vanilla's {NEW_TOKENS} tokens exactly ({dtype})."
    return (
        f"There {name} first differs from vanilla at new token {min(differences)}, in "
        f"{len(differences)} of {rows} rows, by {dtype} rounding."
    )


def _tokens(llm: LLM, prompts: Sequence[Prompt]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]


def _differences(some: list[list[int]], others: list[list[int]]) -> list[int]:
    found = (first_difference(a, b) for a, b in zip(some, others, strict=True))
    return [at for at in found if at is not None]


def _logit_error(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """Run one window with the ops in use and with their references, densely and sparsely."""
    engine = llm.decoder.target
    slots = torch.arange(len(prompts))  # cached there: `vanilla` has just decoded them
    window = torch.tensor([prompt[:5] for prompt in prompts])
    lengths = engine.cache.lengths[slots]
    part = Indices(*ops.select_tokens(None, None, lengths, 64, 0, 4, 16))

    def logits(selection: Selection) -> Tensor:
        return engine.verify(slots, window, selection).logits

    worst = 0.0
    for name, selection in (("dense_attention", Dense()), ("sparse_attention", part)):
        found = logits(selection)
        with reference_ops():
            expected = logits(selection)
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= _TOLERANCE[llm.dtype]:  # NaN is an error too
            raise BenchmarkError(
                f"logits with {name} differ from the reference's by {error:.1%} of the largest: "
                "nothing was timed"
            )
        worst = max(worst, error)
    return worst


@contextmanager
def reference_ops() -> Iterator[None]:
    """The specifications in place of whatever is faster, for what calls them as `ops.NAME`."""
    used = {name: getattr(ops, name) for name in _OPS}
    try:
        for name in _OPS:
            setattr(ops, name, importlib.import_module(f"dustin_trt.ops.{name}").reference)
        yield
    finally:
        for name, op in used.items():
            setattr(ops, name, op)
