"""A draft against its target: what a token costs, and how many are accepted on held-out books.

    python benchmarks/draft.py --draft calibration/results/smollm2/draft [--json FILE]

Acceptance is that of the real loop with full verification and greedy decoding, on continuations of
plays that neither the draft nor its calibration saw; texts are first held against plain decoding.
Costs are forward passes over the same caches, taking turns; medians.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dustin_trt import LLM, SamplingParams
from dustin_trt.engines.base import Dense, Engine
from dustin_trt.evaluation import assets, machine
from dustin_trt.evaluation.bench.timing import Spread, take_turns
from dustin_trt.evaluation.texts import read_text
from dustin_trt.runtime.decoder import Decoder

BOOKS = ("othello", "macbeth", "coriolanus", "winters_tale", "hamlet", "king_lear")
STARTS = (6000, 18000)  # tokens into a play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", required=True, help="folder, or skip:LAYERS")
    parser.add_argument("--dtype", default=machine.fastest_dtype())
    parser.add_argument("--context", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    target = options.target or assets.smollm2()
    llm = LLM(
        target, options.draft, policy="dense", draft_window=0, dtype=options.dtype,
        max_batch_size=len(BOOKS) * len(STARTS), max_model_len=options.context + options.new_tokens,
    )  # fmt: skip
    prompts: list[Any] = []
    for book in BOOKS:
        tokens = llm.tokenizer(read_text(f"books:{book}"), verbose=False).input_ids
        prompts += [{"prompt_token_ids": tokens[at : at + options.context]} for at in STARTS]
    params = SamplingParams(max_tokens=options.new_tokens, ignore_eos=True)
    plain = llm.variant(draft="none").generate(prompts, params)
    record: dict[str, Any] = {
        "machine": machine.describe(), "dtype": options.dtype, "draft": Path(options.draft).name,
        "books": BOOKS, "starts": STARTS, "context": options.context,
        "new_tokens": options.new_tokens, "acceptance": {},
    }  # fmt: skip
    for gamma in options.gamma:
        outputs = llm.variant(gamma=gamma).generate(prompts, params)
        equal = sum(a.token_ids == b.token_ids for a, b in zip(outputs, plain, strict=True))
        if options.dtype == "float32" and equal < len(prompts):
            raise SystemExit(f"{len(prompts) - equal} outputs differ from plain decoding")
        accepted = sum(o.stats.accepted for o in outputs)
        drafted = sum(o.stats.drafted for o in outputs)
        tau = sum(o.stats.step_tokens for o in outputs) / sum(o.stats.steps for o in outputs)
        record["acceptance"][gamma] = {
            "rate": round(accepted / drafted, 4), "tau": round(tau, 3), "equal_to_plain": equal,
        }  # fmt: skip
        print(f"gamma {gamma}: {accepted / drafted:.1%} of drafts accepted, tau {tau:.2f}")
    record["passes"] = time_passes(llm, options.rounds)
    for name, figures in record["passes"].items():
        print(f"{name}: {figures}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def time_passes(llm: LLM, rounds: int) -> dict[str, Any]:
    """Milliseconds of a pass of one token a row, over the caches as they are; and their ratio."""
    decoder: Decoder = llm.decoder
    draft: Any = decoder.drafter
    slots = torch.arange(min(8, decoder.target.cache.num_slots))
    tokens = torch.full((len(slots), 1), 100)

    def one(engine: Engine) -> None:
        engine.propose_step(slots, tokens, 0, Dense())

    took = take_turns(
        [{"target": lambda: one(decoder.target)}, {"draft": lambda: one(draft.engine)}], rounds
    )
    shares = [d / t for d, t in zip(took["draft"], took["target"], strict=True)]
    spreads = {name: Spread.of([1000 * s for s in values]) for name, values in took.items()}
    history = int(decoder.target.cache.lengths[slots].float().mean())
    return {
        "rows": len(slots), "mean_history": history,
        **{f"{name}_ms": [round(v, 2) for v in (s.median, s.q1, s.q3)]
           for name, s in spreads.items()},
        "draft_share_of_target": round(Spread.of(shares).median, 4),
        "weights_share": round(draft.engine.model.pass_weights / llm._target_model.pass_weights, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
