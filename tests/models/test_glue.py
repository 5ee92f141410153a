"""The arithmetic between matrix products, against float64, on everything that can run it."""

from __future__ import annotations

import pytest
import torch

from dustin_trt.models._glue import rms_norm, rotate_, silu_mul
from tests.ops.kernels import each_kernel  # noqa: F401 — on every instruction set
from tests.ops.paged import queries

# One rounding of the result; torch rounds in between as well.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def _close(actual, right, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 5, 96), (3, 1, 7), (1300, 1, 112)], ids=str)
def test_rms_norm(dtype, shape):
    x, weight = queries(*shape, dtype=dtype), queries(shape[-1], dtype=dtype, seed=2)
    right = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()
    _close(rms_norm(x, weight, 0.01), right, dtype)


def test_rms_norm_of_strided_rows():
    x, weight = queries(2, 3, 4, 16)[:, :, 1:3], queries(16, seed=2)
    assert torch.allclose(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_rms_norm_with_a_weight_of_another_dtype():
    x, weight = queries(2, 3, 32, dtype=torch.bfloat16), queries(32, seed=2)
    right = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 0.01).double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t[:1], lambda t: _strided(t)])
def test_rotate_with_angles_that_no_kernel_takes(change):
    heads = queries(2, 3, 4, 16)
    angles = queries(1, 3, 8, seed=3).repeat(2, 1, 2)
    right = heads.clone()
    rotate_(right, angles.cos(), angles.sin())
    rotate_(heads, change(angles.cos()), change(angles.sin()))
    torch.testing.assert_close(heads, right)


def _strided(t):
    return torch.stack((t, t), -1)[..., 0]


@dtypes
@pytest.mark.parametrize("dim", [16, 24, 64, 128])
@pytest.mark.parametrize("rows", [1, 400])
def test_rotate_turns_some_heads_in_place(dtype, dim, rows):
    heads = queries(2, rows, 5, dim, dtype=dtype)
    before = heads.clone()
    angles = queries(2, rows, dim // 2, seed=3).repeat(1, 1, 2).double()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    rotate_(heads[:, :, 1:4], cos, sin)
    # As complex numbers: the pair (x_i, x_{i + D/2}) times e^(i angle).
    a, b = before[:, :, 1:4].double().chunk(2, -1)
    c, s = (t.double()[:, :, None, : dim // 2] for t in (cos, sin))
    _close(heads[:, :, 1:4], torch.cat((a * c - b * s, b * c + a * s), -1), dtype)
    assert torch.equal(heads[:, :, [0, 4]], before[:, :, [0, 4]])


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 2 * 1536), (2, 5, 2 * 17), (1100, 1, 2 * 128)], ids=str)
def test_silu_mul(dtype, shape):
    x = 4 * queries(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    _close(silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype)


def test_silu_mul_far_out():
    """Where e^x overflows or vanishes."""
    x = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, 1.0] + [2.0] * 8])
    right = torch.tensor([[0.0, 0.0, 0.0, 0.0, 176.0, 400.0, 2e4, 1.4621172]])
    torch.testing.assert_close(silu_mul(x), right, rtol=1e-6, atol=1e-30)
