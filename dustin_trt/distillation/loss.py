"""The distance of two distributions over the output tokens, without a graph through the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 1024  # positions at a time: bounds the logits in memory


@torch.no_grad()
def distillation_loss(
    student: Tensor, teacher: Tensor, head: Tensor, *, hard: float
) -> tuple[float, Tensor]:
    """How far the student is from the target's distribution over the output tokens.

    The training target is `t = (1 - hard) p + hard · onehot(argmax p)`, `p` the target's
    distribution restricted to the output tokens: greedy acceptance asks for the likeliest token
    alone. The cross entropy of a softmax `q` with `t` has the gradient `q - t` by the logits, so
    that no graph is kept through them.

    Parameters
    ----------
    student, teacher : Tensor `[N, hidden]`, normed final hidden states
    head : Tensor `[Vd, hidden]`, output rows
    hard : weight of the likeliest token

    Returns
    -------
    divergence : KL(p ‖ q) in nats, mean over positions
    gradient : Tensor `[N, hidden]` fp32, of the mean cross entropy by the student's hidden states
    """
    total, pieces = 0.0, []
    for mine, theirs in _pieces(student, teacher):
        rows = head.to(theirs.dtype)
        p_log = (theirs @ rows.T).float().log_softmax(-1)
        q_log = (mine @ rows.T).float().log_softmax(-1)
        best = p_log.argmax(-1)
        p = p_log.exp()
        total += float((p * (p_log - q_log)).sum())
        wanted = p.mul_(1 - hard)
        wanted[torch.arange(len(best)), best] += hard
        pieces.append((q_log.exp_().sub_(wanted).to(rows.dtype) @ rows).float())
    return total / len(student), torch.cat(pieces).div_(len(student))


@dataclass(frozen=True)
class Acceptance:
    """How a student would fare as a draft, means over positions.

    agreement : share where both are likeliest to say the same token: acceptance of greedy decoding
    overlap : Σ min(p, q): acceptance of rejection sampling (arXiv 2211.17192)
    """

    agreement: float
    overlap: float


@torch.no_grad()
def acceptance(student: Tensor, teacher: Tensor, head: Tensor, tokens: Tensor) -> Acceptance:
    """Compare with the target's distribution over its whole vocabulary.

    Parameters
    ----------
    student, teacher : Tensor `[N, hidden]`, normed final hidden states
    head : Tensor `[V, hidden]`, the target's output rows
    tokens : Tensor `[Vd]` int64, what the student can propose
    """
    agreed = shared = 0.0
    for mine, theirs in _pieces(student, teacher):
        rows = head.to(theirs.dtype)
        p = (theirs @ rows.T).float().softmax(-1)
        q = (mine @ rows[tokens].T).float().softmax(-1)
        agreed += float((tokens[q.argmax(-1)] == p.argmax(-1)).sum())
        shared += float(torch.minimum(p[:, tokens], q).sum())
    return Acceptance(agreed / len(student), shared / len(student))


def _pieces(student: Tensor, teacher: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for mine, theirs in zip(student.split(_ROWS), teacher.split(_ROWS), strict=True):
        yield mine.to(theirs.dtype), theirs
