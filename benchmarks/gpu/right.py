"""Right results in float64, written independently of the ops, for a GPU's tests and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, new: int) -> tuple[Tensor, Tensor]:
    """Softmax attention of one row.

    Parameters
    ----------
    q : Tensor `[w, Hq, D]`
    k, v : Tensor `[Hkv, n, D]`, the keys and values that are read
    new : how many of them, the last ones, are new: query i sees all but the last `new - 1 - i`;
        0 where every query sees everything

    Returns
    -------
    out : Tensor `[w, Hq, D]` float64
    lse : Tensor `[w, Hq]` float64
    """
    w, heads, dim = q.shape
    kv_heads, n, _ = k.shape
    grouped = q.double().view(w, kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("whgd,hnd->whgn", grouped, k.double()) * scale
    if new:
        last = torch.arange(n - new, n, device=q.device)[-w:]
        future = torch.arange(n, device=q.device) > last[:, None]
        logits.masked_fill_(future[:, None, None], float("-inf"))
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp_()
    out = torch.einsum("whgn,hnd->whgd", weights, v.double())
    return out.reshape(w, heads, dim), lse.reshape(w, heads)


def scores(q: Tensor, kv_heads: list[int], k: Tensor, scale: float) -> Tensor:
    """Attention mass `[n]` float64 of one row's queries `[R, P, D]` on keys `[Hkv, n, D]`."""
    keys = k[kv_heads].double()
    logits = torch.einsum("rpd,pnd->rpn", q.double(), keys) * scale
    return logits.softmax(-1).sum((0, 1))


def tokens(pool: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """The tokens at `positions [n]` of one row, `[Hkv, n, D]`, from a pool of pages."""
    page_size = pool.shape[2]
    page = pages.long()[positions.long() // page_size]
    return pool[page, :, positions.long() % page_size].transpose(0, 1)
