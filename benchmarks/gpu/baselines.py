"""Dense attention as torch does it: every backend and layout; the fastest is the baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Baseline:
    """One way to attend.

    name : backend and layout
    run : takes queries `[B, w, Hq, D]`, keys and values `[B, Hkv, N + w, D]` as `prepare` made them
    prepare : brings them into the layout; a model could keep them in it, so it is not timed
    repeats : whether it wants keys and values once for every query head, `[B, Hq, N + w, D]`
    restore : brings the output back to `[B, w, Hq, D]`, for the check
    exact : whether the new tokens are read causally; where not, they are left out, which flatters
        torch: no exact way through this backend and layout is faster
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    prepare: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    restore: Callable[[Tensor, Tensor], Tensor]
    exact: bool
    repeats: bool = False


def baselines(
    *, w: int, context: int, group: int, scale: float, device: str, dtype: torch.dtype
) -> list[Baseline]:
    """All of them for w queries after `context` tokens.

    The layouts: the query heads of a KV head folded into rows; `enable_gqa`; keys and values
    repeated for every query head.
    """
    n = context + w
    found = []
    for backend, kind in BACKENDS.items():
        causal: Tensor | None = causal_lower_right(w, n) if w > 1 else None
        if w > 1 and context and kind is SDPBackend.CUDNN_ATTENTION:
            # It has no such bias of its own, and torch would make this tensor in every call.
            causal = _causal_mask(1, w, n, device, dtype)

        def attend(
            q: Tensor, k: Tensor, v: Tensor, kind: SDPBackend = kind, gqa: bool = False,
            causal: Tensor | None = causal,
        ) -> Tensor:  # fmt: skip
            with sdpa_kernel(kind):
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=causal, scale=scale, enable_gqa=gqa
                )

        def grouped(q: Tensor, k: Tensor, v: Tensor, attend: Callable = attend) -> Tensor:
            return attend(q, k, v, gqa=True)

        found += [
            Baseline(f"{backend}, enable_gqa", grouped, _by_head, _from_heads, True),
            Baseline(f"{backend}, repeated", attend, _by_head, _from_heads, True, repeats=True),
        ]
        if context == 0 or w > _FOLDED:
            continue  # a prefill's causal mask has no folded form, and takes memory as a tensor
        mask = _causal_mask(group, w, n, device, dtype) if w > 1 else None
        found.append(_folded(backend, kind, mask, scale, slice(None)))
        if w > 1:
            found.append(_folded(backend, kind, None, scale, slice(context)))
    return found


_FOLDED = 16


def _folded(
    backend: str, kind: SDPBackend, mask: Tensor | None, scale: float, read: slice
) -> Baseline:
    history_only = read.stop is not None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, w, heads, dim = q.shape
        kv_heads = k.shape[1]
        rows = q.view(batch, w, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        return rows.reshape(batch, kv_heads, -1, dim), k[:, :, read], v[:, :, read]

    def restore(out: Tensor, q: Tensor) -> Tensor:
        batch, w, heads, dim = q.shape
        kv_heads = out.shape[1]
        split = out.view(batch, kv_heads, heads // kv_heads, w, dim)
        return split.permute(0, 3, 1, 2, 4).reshape(q.shape)

    name = f"{backend}, folded" + (", history only" if history_only else "")
    return Baseline(name, run, prepare, restore, not history_only)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k, v


def repeat(x: Tensor, group: int) -> Tensor:
    """Keys or values `[B, Hkv, n, D]` once for every query head."""
    return x.repeat_interleave(group, 1)


def _from_heads(out: Tensor, q: Tensor) -> Tensor:
    return out.transpose(1, 2)


def _causal_mask(group: int, w: int, n: int, device: str, dtype: torch.dtype) -> Tensor:
    """Additive `[1, 1, G w, n]`, in memory whose rows are padded to what the backends ask for."""
    mask = torch.zeros(w, -(-n // 16) * 16, device=device, dtype=dtype)
    future = torch.ones(w, w, device=device, dtype=torch.bool).triu(1)
    mask[:, n - w : n].masked_fill_(future, float("-inf"))
    return mask.repeat(group, 1)[None, None, :, :n]


def refusal(error: Exception) -> str:
    """Why torch does not take this backend and layout here, in one line."""
    return str(error).strip().splitlines()[0][:120]
