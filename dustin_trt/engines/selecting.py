"""How the two signals become one index list: the part of a selection that needs no model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dustin_trt import ops


def join_and_select(
    history: Tensor | None,
    lookahead: Tensor | None,
    lengths: Tensor,
    *,
    budget: int,
    lookahead_tokens: int,
    sink: int,
    window: int,
    join: Literal["split", "sum"],
    lookahead_weight: float,
) -> tuple[Tensor, Tensor]:
    """Choose the history tokens of a verification pass by one signal or both.

    Parameters
    ----------
    history, lookahead : Tensor `[B, N]` fp32, `S_target` and `S_draft`, or None
    lengths, budget, sink, window : as in `ops.select_tokens`
    lookahead_tokens : m, for "split"
    join : "split": top-m of the lookahead, then the history fills (the paper); "sum": top of the
        weighted sum of the scores, each normalised to mass 1
    lookahead_weight : of the lookahead in the sum

    Returns
    -------
    indices, counts : see `ops.select_tokens`
    """
    if join == "sum" and history is not None and lookahead is not None:
        # As wide as their caches can be, which may differ; the narrower holds every row too.
        width = min(history.shape[1], lookahead.shape[1])
        history, lookahead = history[:, :width], lookahead[:, :width]
        history = (1 - lookahead_weight) * _normalised(history) + lookahead_weight * _normalised(
            lookahead
        )
        lookahead = None
    return ops.select_tokens(history, lookahead, lengths, budget, lookahead_tokens, sink, window)


def _normalised(scores: Tensor) -> Tensor:
    # In fp64, or the zeros past a short row, which its neighbours decide, would change a last bit.
    total = scores.sum(1, keepdim=True, dtype=torch.float64).float()
    return scores / total.clamp(min=torch.finfo(scores.dtype).tiny)
