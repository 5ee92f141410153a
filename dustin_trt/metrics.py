"""Measures of what a selection keeps."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_recovery_rate(scores: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    """ARR: the share of attention mass that the chosen tokens hold (Dustin, section on ARR).

    `ARR[b] = Σ_{j ∈ I_b} scores[b, j] / Σ_j scores[b, j]`. With the target's own history scores
    this is the *coverage* a verification pass reports of itself.

    Parameters
    ----------
    scores : Tensor `[B, N]` fp32, attention mass a token, 0 past a row's history
    indices : Tensor `[B, k]` int32, distinct history positions; entries past `counts[b]` are -1
    counts : Tensor `[B]` int32

    Returns
    -------
    Tensor `[B]` fp32; 1 for a row without attention mass (an empty history)
    """
    valid = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    kept = scores.gather(1, indices.clamp(min=0).long()).masked_fill(~valid, 0).sum(1)
    total = scores.sum(1)
    return torch.where(total > 0, kept / total, torch.ones_like(total))
