"""What lies between a layer's matrix products: natively, or with torch where the kernels are not.

No ops of the `dustin` namespace: they are torch's own arithmetic, in one call instead of five.
"""

from __future__ import annotations

from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_trt.ops import native
from dustin_trt.ops._params import DTYPES, ROWS

_RMS_NORM = Struct("@3Pq2ifi")
_ROTATE = Struct(f"@{ROWS}2P6i")
_SILU_MUL = Struct("@2Pq2i")


def _native(x: Tensor) -> bool:
    return native.takes(x) and x.is_cpu


def _like(x: Tensor, other: Tensor, size: int) -> bool:
    """Whether `other` is what a kernel that works on x expects: so many elements, of x's dtype."""
    return (
        other.dtype is x.dtype and other.numel() == size and other.is_contiguous() and other.is_cpu
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""
    dim = x.shape[-1]
    if not _native(x) or not x.is_contiguous() or not _like(x, weight, dim):
        return F.rms_norm(x, weight.shape, weight, eps)
    out = torch.empty_like(x)
    params = _RMS_NORM.pack(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(),
        x.numel() // dim, dim, DTYPES[x.dtype], eps, 0,
    )  # fmt: skip
    native.call("dustin_cpu_rms_norm", params)
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of `x [B, w, heads, D]`, in place; `cos`, `sin` `[B, w, D]`."""
    batch, rows, heads, dim = x.shape
    strides = x.stride()
    size = batch * rows * dim
    if _native(x) and strides[3] == 1 and _like(x, cos, size) and _like(x, sin, size):
        params = _ROTATE.pack(
            x.data_ptr(), *strides[:3], cos.data_ptr(), sin.data_ptr(),
            batch, rows, heads, dim, DTYPES[x.dtype], 0,
        )  # fmt: skip
        native.call("dustin_cpu_rotate", params)
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
    params = _SILU_MUL.pack(
        x.data_ptr(), out.data_ptr(), x.numel() // (2 * dim), dim, DTYPES[x.dtype]
    )
    native.call("dustin_cpu_silu_mul", params)
    return out
