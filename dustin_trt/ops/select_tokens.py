"""`select_tokens`: which history tokens one verification pass may read."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TypeVar

import torch
from torch import Tensor

from dustin_trt.ops import cuda, native
from dustin_trt.ops._library import define
from dustin_trt.ops._params import list_fields, score_fields


def reference(
    target_scores: Tensor | None,
    draft_scores: Tensor | None,
    lengths: Tensor,
    budget: int,
    lookahead: int,
    sink: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """`I_sink ∪ I_window ∪ TopK_m(S_draft) ∪ fill(S_target)`, exactly `min(k, N)` tokens (step 3).

    Parameters
    ----------
    target_scores, draft_scores : Tensor `[B, N]` fp32 or None. Without the draft's, the target's
        fill everything; without the target's, the draft's do. Without both, the window grows to
        fill the budget: sink + window, as in StreamingLLM.
    lengths : Tensor `[B]` int32, history length of each row
    budget : k, tokens to choose, sink and window included
    lookahead : m, tokens taken by `draft_scores` before `target_scores` fill the rest
    sink, window : the first and the last tokens of the history, always chosen;
        `sink + window <= budget`

    Returns
    -------
    indices : Tensor `[B, budget]` int32, ascending and distinct, padded with -1
    counts : Tensor `[B]` int32, `min(budget, lengths[b])`

    Notes
    -----
    Ties go to the lower index, so the result is a function of the scores alone.
    """
    device = lengths.device
    if target_scores is None:
        target_scores, draft_scores = draft_scores, None
    if draft_scores is None:
        lookahead = 0
    if target_scores is None:
        window = budget - sink
    indices = torch.full((lengths.shape[0], budget), -1, dtype=torch.int32, device=device)
    for b, length in enumerate(lengths.tolist()):
        if length <= budget:
            indices[b, :length] = torch.arange(length, dtype=torch.int32, device=device)
            continue
        chosen = torch.zeros(length, dtype=torch.bool, device=device)
        chosen[:sink] = True
        chosen[length - window :] = True
        free = budget - sink - window
        ahead = min(lookahead, free)
        if draft_scores is not None and ahead:
            _take_top(chosen, draft_scores[b, :length], ahead)
        if target_scores is not None:
            _take_top(chosen, target_scores[b, :length], free - ahead)
        indices[b] = chosen.nonzero().squeeze(1)
    return indices, lengths.clamp(max=budget)


def _take_top(chosen: Tensor, scores: Tensor, count: int) -> None:
    """Mark the `count` best tokens not chosen yet; the sort is stable, so ties keep their order."""
    candidates = (~chosen).nonzero().squeeze(1)
    order = scores[candidates].sort(descending=True, stable=True).indices
    chosen[candidates[order[:count]]] = True


_PARAMS = Struct("@5P3q8i")


def _cpu(
    target_scores: Tensor | None,
    draft_scores: Tensor | None,
    lengths: Tensor,
    budget: int,
    lookahead: int,
    sink: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    if not native.active():
        return reference(target_scores, draft_scores, lengths, budget, lookahead, sink, window)
    params, outputs = _prepare(
        target_scores, draft_scores, lengths, budget, lookahead, sink, window
    )
    native.call("dustin_cpu_select_tokens", params)
    return outputs


def _cuda(
    target_scores: Tensor | None,
    draft_scores: Tensor | None,
    lengths: Tensor,
    budget: int,
    lookahead: int,
    sink: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    def run(op: Callable[..., Result]) -> Result:
        return op(target_scores, draft_scores, lengths, budget, lookahead, sink, window)

    return cuda.run("select_tokens", lambda: run(_prepare), lambda: run(reference), lengths)


Result = TypeVar("Result")


def _prepare(
    target_scores: Tensor | None,
    draft_scores: Tensor | None,
    lengths: Tensor,
    budget: int,
    lookahead: int,
    sink: int,
    window: int,
) -> tuple[bytes, tuple[Tensor, Tensor]]:
    """`DustinSelectTokensParams`, and the outputs that it points to."""
    batch, device = lengths.shape[0], lengths.device
    target = draft = (0, 0, 0)
    if target_scores is not None:
        target = score_fields(target_scores, batch, device)
    if draft_scores is not None:
        draft = score_fields(draft_scores, batch, device)
    indices, counts = _shape(target_scores, draft_scores, lengths, budget, lookahead, sink, window)
    listed, history, _, stride, _ = list_fields(indices, lengths, device)
    params = _PARAMS.pack(
        target[0], draft[0], history, listed, counts.data_ptr(),
        target[1], draft[1], stride,
        target[2], draft[2], batch, budget, lookahead, sink, window, 0,
    )  # fmt: skip
    return params, (indices, counts)


def _shape(
    target_scores: Tensor | None,
    draft_scores: Tensor | None,
    lengths: Tensor,
    budget: int,
    lookahead: int,
    sink: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    return lengths.new_empty((lengths.shape[0], budget)), torch.empty_like(lengths)


select_tokens = define(
    "select_tokens",
    "(Tensor? target_scores, Tensor? draft_scores, Tensor lengths, int budget, int lookahead, "
    "int sink, int window) -> (Tensor, Tensor)",
    reference,
    cpu=_cpu,
    cuda=_cuda,
    shape=_shape,
)
