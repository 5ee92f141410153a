"""Sampling and acceptance: greedy match and rejection sampling.

Everything is fp32 (cumulative sums fp64) from the very logits a token was sampled from, so that
the output distribution is exactly the verifier's (Leviathan et al., arXiv 2211.17192, appendix A),
as long as the verifier's distribution does not itself depend on the drafts (see `DustinPolicy`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the logits would overflow before the choice changed."""


@dataclass(frozen=True)
class SamplingBatch:
    """How each row samples.

    temperature : Tensor `[B]` fp32, 0 is greedy
    top_k : Tensor `[B]` int64, 0 keeps every token
    top_p : Tensor `[B]` fp32 in (0, 1]
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @property
    def greedy(self) -> Tensor:
        """Rows `[B]` that take the most likely token."""
        return self.temperature < GREEDY_BELOW


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The distribution a row samples from: temperature, then top-k, then top-p.

    Parameters
    ----------
    logits : Tensor `[R, V]` fp32
    temperature, top_k, top_p : Tensor `[R]`, temperature > 0

    Returns
    -------
    Tensor `[R, V]` fp32, rows sum to 1

    Notes
    -----
    As in transformers: tokens tied with the k-th stay, and top-p keeps the smallest set whose mass
    reaches p, at least one token.
    """
    logits = logits / temperature[:, None]
    if bool((top_k > 0).any()):
        size = logits.shape[1]
        k = torch.where(top_k > 0, top_k, size).clamp(max=size)
        kth = logits.sort(descending=True).values.gather(1, k[:, None] - 1)
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if bool((top_p < 1).any()):
        ordered, order = logits.sort()
        mass = ordered.softmax(-1).cumsum(-1)
        dropped = mass <= 1 - top_p[:, None]
        dropped[:, -1] = False
        dropped &= (top_p < 1)[:, None]
        logits = logits.masked_fill(dropped.scatter(1, order, dropped), float("-inf"))
    return logits.softmax(-1)


def best(logits: Tensor) -> Tensor:
    """The likeliest token `[...]` of `[..., V]`, of equal ones the first."""
    return logits.max(-1).indices  # as argmax, which is slower on a CPU


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverting the cumulative sum; a token of weight 0 is never drawn.

    Parameters
    ----------
    weights : Tensor `[R, V]`, non-negative, not all 0, need not sum to 1
    uniform : Tensor `[R]` in [0, 1)

    Returns
    -------
    Tensor `[R]` int64
    """
    cumulative = weights.double().cumsum(-1)
    point = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


def draft_probabilities(logits: Tensor, sampling: SamplingBatch) -> Tensor | None:
    """What a drafter samples from `[B, V]`; None when no row samples. Greedy rows stay 0."""
    rows = (~sampling.greedy).nonzero().squeeze(1)
    if len(rows) == 0:
        return None
    probs = torch.zeros_like(logits)
    probs[rows] = probabilities(
        logits[rows], sampling.temperature[rows], sampling.top_k[rows], sampling.top_p[rows]
    )
    return probs


def sample(
    logits: Tensor, probs: Tensor | None, uniform: Tensor, sampling: SamplingBatch
) -> Tensor:
    """One token a row `[B]`: the likeliest for greedy rows, a draw from `probs` for others."""
    tokens = best(logits)
    if probs is not None:
        rows = (~sampling.greedy).nonzero().squeeze(1)
        tokens[rows] = draw(probs[rows], uniform[rows])
    return tokens


def accept(
    logits: Tensor,
    drafts: Tensor,
    counts: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor,
    sampling: SamplingBatch,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of the drafts and choose the token after it (step 5).

    Greedy rows accept while the draft is the verifier's most likely token. Others accept draft d
    with probability `min(1, p(d) / q(d))`, and after a rejection draw from the normalised
    `max(p - q, 0)`; when every draft is accepted the next token comes from p itself.

    Parameters
    ----------
    logits : Tensor `[B, w, V]` fp32, of `[last, d_1 … d_{w-1}]`
    drafts : Tensor `[B, w-1]` int64
    counts : Tensor `[B]` int64, drafts that count, at most w-1
    draft_probs : Tensor `[B, w-1, V]` fp32, q; None for drafts that were not sampled (q is then
        1 on the draft)
    uniforms : Tensor `[B, ≥ w]` in [0, 1), one a draft and, in the last column, one for the next
        token
    sampling : how each row samples

    Returns
    -------
    accepted : Tensor `[B]` int64, 0 … counts
    following : Tensor `[B]` int64, the token after the accepted ones
    """
    rows, width = drafts.shape
    likeliest = best(logits)
    matches = drafts == likeliest[:, :width]
    p = None
    sampled = (~sampling.greedy).nonzero().squeeze(1)
    if len(sampled):
        repeats = width + 1
        p = probabilities(
            logits[sampled].flatten(0, 1),
            sampling.temperature[sampled].repeat_interleave(repeats),
            sampling.top_k[sampled].repeat_interleave(repeats),
            sampling.top_p[sampled].repeat_interleave(repeats),
        ).view(len(sampled), repeats, -1)
        chosen = drafts[sampled, :, None]
        p_draft = p[:, :width].gather(2, chosen).squeeze(2)
        q_draft = (
            torch.ones_like(p_draft)
            if draft_probs is None
            else draft_probs[sampled].gather(2, chosen).squeeze(2)
        )
        matches[sampled] = uniforms[sampled, :width] * q_draft < p_draft
    matches &= torch.arange(width, device=drafts.device) < counts[:, None]
    accepted = matches.long().cumprod(1).sum(1)
    following = likeliest[torch.arange(rows, device=drafts.device), accepted]
    if p is not None:
        residual = _residual(
            p,
            drafts[sampled],
            counts[sampled],
            accepted[sampled],
            (None if draft_probs is None else draft_probs[sampled]),
        )
        following[sampled] = draw(residual, uniforms[sampled, -1])
    return accepted, following


def _residual(
    p: Tensor, drafts: Tensor, counts: Tensor, accepted: Tensor, q: Tensor | None
) -> Tensor:
    """`[R, V]`: `max(p - q, 0)` at the rejected draft, p after the last accepted one."""
    row = torch.arange(p.shape[0], device=p.device)
    residual = p[row, accepted].clone()
    rejected = (accepted < counts).nonzero().squeeze(1)
    at = accepted[rejected]
    if q is None:
        residual[rejected, drafts[rejected, at]] = 0
    else:
        residual[rejected] = (residual[rejected] - q[rejected, at]).clamp(min=0)
    # p and q can agree to the last bit and still round to a rejection; p is then the right answer.
    empty = residual.sum(-1) == 0
    residual[empty] = p[row, accepted][empty]
    return residual
