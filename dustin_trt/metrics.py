"""Measures of what a selection keeps, and of what is lost with the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_trt.ops import select_tokens


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
    return _recovered(scores, indices, valid)


def windowed_attention_recovery_rate(attention: Tensor, indices: Tensor) -> Tensor:
    """Windowed ARR: the mean over a verification window of each step's own ARR.

    `(1/w) Σ_{s<w} ARR_s` with `ARR_s = Σ_{j ∈ I} A[s, j] / Σ_j A[s, j]` and one set I for the whole
    window (Dustin, section on ARR). Steps count alike, however much of their attention is on the
    history and however much on the window's own tokens.

    Parameters
    ----------
    attention : Tensor `[w, N]` fp32, or `[S, w, N]` for S windows: attention mass of a window's
        steps on every history token, 0 past a window's history
    indices : Tensor `[k]` int32, or `[S, k]`: distinct history positions; -1 pads

    Returns
    -------
    Tensor `[]` fp32, or `[S]`; a step without attention mass counts as 1 (an empty history)
    """
    *windows, w, _ = attention.shape
    each = indices[..., None, :].expand(*windows, w, -1)
    return _recovered(attention, each, each >= 0).mean(-1)


def oracle_indices(attention: Tensor, budget: int) -> Tensor:
    """The SD oracle: `TopK_k` of a window's mean attention `Ā[j] = (1/w) Σ_{s<w} A[s, j]`.

    It knows the window's attention beforehand. Ties go to the lower index. The bound it gives is on
    the share of Ā; windowed ARR, a mean of ratios, can be higher for another set where steps
    differ in how much of their attention is on the history.

    Parameters
    ----------
    attention : Tensor `[w, N]` fp32, or `[S, w, N]` for S windows
    budget : k, tokens to choose

    Returns
    -------
    Tensor `[k]` int32, or `[S, k]`; ascending, -1 pads where k is more than N
    """
    *windows, _, history = attention.shape
    # In fp64 the mean of equal attentions in another order is equal too, and stays a tie.
    mean = attention.mean(-2, dtype=torch.float64).float()[None].flatten(0, -2)
    lengths = torch.full((len(mean),), history, dtype=torch.int32, device=mean.device)
    indices, _ = select_tokens(mean, None, lengths, budget, 0, 0, 0)
    return indices.reshape(*windows, budget)


def kl_divergence(full_logits: Tensor, sparse_logits: Tensor) -> Tensor:
    """`KL(full ‖ sparse) = Σ_v p_v (log p_v - log q_v)`: what sparse verification loses, in nats.

    Computed in fp64. A token of no probability under full verification adds nothing, whatever its
    sparse logit; one that only sparse verification excludes makes the divergence infinite.

    Parameters
    ----------
    full_logits, sparse_logits : Tensor `[..., V]`, unnormalised, in any float type; -inf excludes

    Returns
    -------
    Tensor `[...]` fp32, at least 0, and 0 for equal logits; NaN where logits are NaN, +inf, or
    exclude every token
    """
    log_p = full_logits.double().log_softmax(-1)
    log_q = sparse_logits.double().log_softmax(-1)
    p = log_p.exp()
    # Where p is 0 the product is 0 · ∞; a NaN is not 0 and stays one.
    return (p * (log_p - log_q)).masked_fill(p == 0, 0).sum(-1).clamp(min=0).float()


def greedy_agreement(full_logits: Tensor, sparse_logits: Tensor) -> Tensor:
    """Whether greedy decoding takes the same token from both; ties go to the lower token.

    Parameters
    ----------
    full_logits, sparse_logits : Tensor `[..., V]`

    Returns
    -------
    Tensor `[...]` bool
    """
    return full_logits.argmax(-1) == sparse_logits.argmax(-1)


def acceptance_length(drafts: Tensor, target_argmax: Tensor) -> Tensor:
    """Drafts that greedy verification accepts: the longest prefix that the target would write.

    Parameters
    ----------
    drafts : Tensor `[B, Γ]` int, draft tokens; -1 pads and is never accepted
    target_argmax : Tensor `[B, Γ]` int, the target's greedy token at each draft's place

    Returns
    -------
    Tensor `[B]` int64, within 0 … Γ; a step commits one token more
    """
    return (drafts == target_argmax).long().cumprod(-1).sum(-1)


def _recovered(scores: Tensor, indices: Tensor, valid: Tensor) -> Tensor:
    """Share of `scores [..., N]` on the valid ones of `indices [..., k]`; 1 where there is none.

    Summed in fp64: in fp32 the zeros after a short row change the last bit of its sum, so that its
    neighbours would decide whether a coverage just reaches a threshold.
    """
    if scores.shape[-1] == 0:  # nothing can be gathered from no tokens
        return scores.new_ones(scores.shape[:-1])
    kept = scores.gather(-1, indices.clamp(min=0).long()).masked_fill(~valid, 0)
    kept, total = kept.sum(-1, dtype=torch.float64), scores.sum(-1, dtype=torch.float64)
    return torch.where(total == 0, torch.ones_like(total), kept / total).float()
