"""A target and its draft, loaded to be looked at one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dustin_trt.config import ConfigError, ModelSpec, tokenizer_fingerprint
from dustin_trt.drafting import Batch, DraftModel
from dustin_trt.engines.torch_engine import TorchEngine, TorchLookahead
from dustin_trt.runtime.loading import load_draft, load_model, load_tokenizer, make_cache
from dustin_trt.sampling import SamplingBatch

PREFILL_CHUNK = 512
SLOT = torch.zeros(1, dtype=torch.long)
"""The one slot of a pair's caches."""


@dataclass(frozen=True)
class Pair:
    """Both models with a cache of one slot each (one for both, where the draft shares it).

    target : its engine stashes no queries of its own: callers name the heads
    drafter : stashes the queries of every head of the draft
    tokenizer : the one they share
    """

    target: TorchEngine
    drafter: DraftModel
    tokenizer: Any

    @property
    def draft(self) -> TorchEngine:
        """The draft's engine."""
        assert isinstance(self.drafter.engine, TorchEngine)
        return self.drafter.engine

    @property
    def specs(self) -> tuple[ModelSpec, ModelSpec]:
        """Shapes of target and draft."""
        return self.target.spec, self.draft.spec

    @property
    def tokenizer_fingerprint(self) -> str:
        """What `dustin.json` remembers of the tokenizer."""
        return tokenizer_fingerprint(self.tokenizer)

    def roll_out(self, tokens: list[int], at: int, steps: int) -> tuple[Tensor, Tensor]:
        """Let the draft go on greedily after the history `tokens[:at]`, which its cache holds.

        Returns
        -------
        drafts : Tensor `[steps]` int64
        queries : Tensor `[steps, P, D]`, of every head of the draft
        """
        self.draft.cache.lengths[0] = at
        greedy = SamplingBatch(
            temperature=torch.zeros(1), top_k=torch.zeros(1, dtype=torch.long),
            top_p=torch.ones(1),
        )  # fmt: skip
        batch = Batch(
            slots=SLOT,
            last=torch.tensor([tokens[at]]),
            previous=torch.tensor([tokens[at - 1]]),
            limits=torch.tensor([steps]),
            history_queries=torch.empty(1, 0, 0),
            uniforms=torch.zeros(1, 2 * steps + 1, dtype=torch.float64),
            sampling=greedy,
            tokens=[tokens],
        )
        asked = TorchLookahead(self.draft, SLOT, None)
        drafts, _ = self.drafter.roll_out(batch, steps, asked)
        return drafts[0], torch.cat(asked.queries)


def load_pair(
    target: str | Path,
    draft: str | Path,
    *,
    dtype: str,
    draft_window: int,
    length: int,
) -> Pair:
    """Load both models, with caches for sequences of `length` tokens.

    Raises
    ------
    ConfigError
        A draft without attention, sequences longer than the models have positions.
    ValueError
        Tokenizers that differ, models that cannot be read (see `LLM`).
    """
    model = load_model(target, dtype, "cpu")
    tokenizer = load_tokenizer(target)
    loaded = load_draft(draft, model, tokenizer, None, dtype, "cpu")
    if loaded.model is None:
        raise ConfigError(f"draft {str(draft)!r} has no attention to look ahead with: name a model")
    positions = min(model.spec.max_positions, loaded.model.spec.max_positions)
    if length > positions:
        raise ConfigError(
            f"the recipe needs sequences of {length} tokens and the models have {positions} "
            "positions: lower context, windows or stride"
        )
    cache = make_cache(model, length, 1, None)
    drafter = loaded.drafter(
        model,
        cache,
        loaded.model.spec.all_heads(loaded.model.layers),
        lookahead=True,
        max_model_len=length,
        window=draft_window or None,
        prefill_chunk=PREFILL_CHUNK,
        page_size=None,
    )
    assert isinstance(drafter, DraftModel)
    return Pair(TorchEngine(model, cache), drafter, tokenizer)
