"""What this GPU reaches of bytes, products and launches: what every floor divides by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.inputs import random

if TYPE_CHECKING:
    from benchmarks.gpu.measure import Setting

_CHAIN = 200


def measure(setting: Setting) -> None:
    """A large copy, a large bf16 product on random data, and a chain of the smallest kernels."""
    plan, device = setting.plan, setting.device
    source = random((plan.copy // 4,), device)
    copied = torch.empty_like(source)
    a, b = (
        random((plan.product, plan.product), device, torch.bfloat16, seed) for seed in (1, 2)
    )  # fmt: skip
    product = torch.empty_like(a)
    one = torch.zeros(1, device=device)

    def chain() -> None:
        for _ in range(_CHAIN):
            one.add_(1)

    variants = {
        "copy": [lambda: copied.copy_(source)],
        "product": [lambda: torch.matmul(a, b, out=product)],
        "launch": [chain],
    }
    seconds, problems = setting.clock.time(variants, setting.plan.rounds)
    for name, problem in problems.items():
        setting.rows.problem(name, problem)
    rates = {
        "copy": {"bytes_per_second": 2.0 * plan.copy},
        "product": {"operations_per_second": 2.0 * plan.product**3},
        "launch": {},
    }
    for name, values in seconds.items():
        if name == "launch":
            values = [value / _CHAIN for value in values]
        median = sorted(values)[len(values) // 2]
        per_second = {key: amount / median for key, amount in rates[name].items()}
        setting.rows.timed(name, values, None, **per_second)
