"""`dense_attention`: w queries over the whole history and, causally, the w new tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dustin_trt.ops._attend import Attend, attend_cpu, attend_reference, empty_like_queries
from dustin_trt.ops._library import define
from dustin_trt.ops._paging import history


def _implementation(attend: Attend) -> Callable[..., tuple[Tensor, Tensor]]:
    def dense_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend to positions `0 … lengths[b] + i` for query i; the new K and V are cached already.

        Parameters
        ----------
        q : Tensor `[B, w, Hq, D]`, after rotary embedding
        k_cache, v_cache : Tensor `[pages, Hkv, page_size, D]`
        page_table : Tensor `[B, max_pages]` int32
        lengths : Tensor `[B]` int32, history length before the w new tokens
        scale : logit scale

        Returns
        -------
        out : Tensor `[B, w, Hq, D]`
        lse : Tensor `[B, w, Hq]` fp32
        """
        out, lse = empty_like_queries(q)
        for b, length in enumerate(lengths.tolist()):
            n = length + q.shape[1]
            k, v = (history(cache, page_table[b], n)[None] for cache in (k_cache, v_cache))
            out[b : b + 1], lse[b : b + 1] = attend(q[b : b + 1], k, v, scale)
        return out, lse

    return dense_attention


reference = _implementation(attend_reference)

dense_attention = define(
    "dense_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor lengths, float scale) "
    "-> (Tensor, Tensor)",
    reference,
    cpu=_implementation(attend_cpu),
    shape=lambda q, k_cache, v_cache, page_table, lengths, scale: empty_like_queries(q),
)
