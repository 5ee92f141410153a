"""Pass keys in the real loop: what the chosen configuration finds beside other ways to choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dustin_trt.calibration.check import ALL, CHOSEN, HISTORY, LOOKAHEAD, STREAMING
from dustin_trt.calibration.recipe import Recipe
from dustin_trt.calibration.sequences import pass_keys
from dustin_trt.calibration.work import Progress
from dustin_trt.config import DustinConfig
from dustin_trt.evaluation.passkey import PassKeyPrompt
from dustin_trt.runtime.llm import LLM
from dustin_trt.runtime.sampling_params import SamplingParams

_NEW_TOKENS = 8
ROWS = 8  # prompts at a time: their caches are what this step takes of memory
_RUN = 40  # what answering one prompt in one way costs, in tokens of prefill


def answer_pass_keys(
    target: str,
    draft: str,
    recipe: Recipe,
    config: DustinConfig,
    progress: Progress,
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """How many keys each way to verify finds (see `check.Policies`), by budget; the guard is off.

    The first token of an answer comes from the dense prefill in every way; the other digits come
    from verification.
    """
    part = recipe.check.pass_keys
    assert part is not None
    both = config.replace(join="sum", lookahead_weight=0.5, lookahead=None)
    ahead = {"heads": "all"} if not config.draft_heads else {}
    ways: dict[str, dict[str, Any]] = {
        CHOSEN: {},
        HISTORY: {"signal": "history"},
        LOOKAHEAD: {"signal": "lookahead", **ahead},
        ALL: {"heads": "all", "signal": "hybrid", "config": both},
        STREAMING: {"policy": "streaming"},
    }
    budgets = recipe.check.answer_budgets
    progress.begin("pass keys", part.count * (part.length + _RUN * (1 + len(budgets) * len(ways))))
    done: dict[Any, int] = {}

    def on_prefill(request: Any, tokens: int) -> None:
        tell(tokens - done.get(request.key, 0))
        done[request.key] = tokens

    llm = LLM(
        target, draft, config=config, policy="dense", guard=0,
        dtype=recipe.dtype, max_batch_size=min(ROWS, part.count),
        max_model_len=part.length + 2 * _NEW_TOKENS, on_prefill=on_prefill,
    )  # fmt: skip
    prompts = pass_keys(llm.tokenizer, part, recipe.seed)
    full = 0
    counts = {name: dict.fromkeys(map(str, budgets), 0) for name in ways}
    for first in range(0, len(prompts), ROWS):
        some = prompts[first : first + ROWS]
        asked: list[Any] = [{"prompt_token_ids": prompt.tokens} for prompt in some]

        def found(one: LLM, some: list[PassKeyPrompt] = some, asked: list[Any] = asked) -> int:
            outputs = one.generate(asked, SamplingParams(max_tokens=_NEW_TOKENS))
            tell(_RUN * len(some))
            return sum(p.found_in(o.text) for p, o in zip(some, outputs, strict=True))

        done.clear()
        full += found(llm)
        for name, options in ways.items():
            for budget in budgets:
                way = {"policy": "dustin", "budget": budget, **options}
                counts[name][str(budget)] += found(llm.variant(**way))
    return {"length": part.length, "count": part.count, "full": full, "found": counts}
