"""What lies between a layer's matrix products: natively, or with torch where the kernels are not.

No ops of the `dustin` namespace: they are torch's own arithmetic, in one call instead of five.
"""

from __future__ import annotations

from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_trt.ops import native

_RMS_NORM = Struct("@3Pq2ifi")
_ROTATE = Struct(f"@{native.ROWS}2P6i")
_SILU_MUL = Struct("@2Pq2i")


def _native(x: Tensor) -> bool:
    return x.is_cpu and native.takes(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""
    if not _native(x) or not x.is_contiguous():
        return F.rms_norm(x, weight.shape, weight, eps)
    dim = x.shape[-1]
    out = torch.empty_like(x)
    native.call(
        "dustin_cpu_rms_norm", _RMS_NORM, x.data_ptr(), weight.data_ptr(), out.data_ptr(),
        x.numel() // dim, dim, native.DTYPES[x.dtype], eps, 0,
    )  # fmt: skip
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of `x [B, w, heads, D]`, in place; `cos`, `sin` `[B, w, D]`."""
    batch, rows, heads, dim = x.shape
    if _native(x):
        native.call(
            "dustin_cpu_rotate", _ROTATE, *native.rows_fields(x), cos.data_ptr(), sin.data_ptr(),
            batch, rows, heads, dim, native.DTYPES[x.dtype], 0,
        )  # fmt: skip
        return
    a, b = x.chunk(2, -1)
    turned = torch.cat((-b, a), -1) * sin.unsqueeze(2)
    x.mul_(cos.unsqueeze(2)).add_(turned)


def silu_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of `x = [gate, up]`, `[..., 2 * dim]`."""
    if not _native(x) or not x.is_contiguous():
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    dim = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], dim)
    native.call(
        "dustin_cpu_silu_mul", _SILU_MUL, x.data_ptr(), out.data_ptr(),
        x.numel() // (2 * dim), dim, native.DTYPES[x.dtype],
    )  # fmt: skip
    return out
