"""The check's measurements as the curves and rows of `results.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dustin_trt.calibration.check import CHOSEN, HISTORY, LOOKAHEAD, ORACLE, POLICIES, Policies
from dustin_trt.calibration.recipe import Recipe
from dustin_trt.calibration.samples import AGES
from dustin_trt.calibration.sequences import Passage

Measured = dict[str, list[tuple[float, float]]]
"""Of one passage: "policy@budget" to (KL, agreement) by window."""


def key(policy: str, budget: int) -> str:
    """How `Measured` names a policy at a budget."""
    return f"{policy}@{budget}"


def fidelity_budgets(recipe: Recipe) -> list[int]:
    """Budgets at which logits are compared: the recipe's, and the configuration's."""
    return sorted({*recipe.check.fidelity_budgets, recipe.budget})


def curves(
    recipe: Recipe, passages: Sequence[Passage], policies: Sequence[Policies]
) -> dict[str, Any]:
    """Attention recovered, by budget, by age of the query and by layer."""
    budgets = recipe.check.budgets
    contexts = sorted(recipe.check.texts.context)
    groups = {
        str(context): [p for p, t in zip(policies, passages, strict=True) if t.context == context]
        for context in contexts
    }

    def curve(some: Sequence[Policies], rate: Callable[[Policies, int], Tensor]) -> list[float]:
        return [_mean([rate(one, budget) for one in some]) for budget in budgets]

    def by_policy(name: str) -> Callable[[Policies, int], Tensor]:
        return lambda one, budget: one.arr(name, budget)

    def by_age(number: int) -> Callable[[Policies, int], Tensor]:
        return lambda one, budget: one.age_arr(number, budget)

    deepest = groups[str(contexts[-1])]
    layers = {
        name: [
            round(sum(rates) / len(rates), 5)
            for rates in zip(*(one.layer_arr(name, recipe.budget) for one in deepest), strict=True)
        ]
        for name in (ORACLE, HISTORY, LOOKAHEAD, CHOSEN)
    }
    return {
        "contexts": contexts,
        "budgets": list(budgets),
        "arr": {
            context: {name: curve(some, by_policy(name)) for name in POLICIES}
            for context, some in groups.items()
        },
        "age": {
            context: {str(age): curve(some, by_age(number)) for number, age in enumerate(AGES)}
            for context, some in groups.items()
        },
        "by_layer": {"budget": recipe.budget, "context": contexts[-1], **layers},
    }


def fidelity_rows(
    recipe: Recipe,
    passages: Sequence[Passage],
    measured: Sequence[Measured],
    arr: dict[str, dict[str, list[float]]],
) -> list[dict[str, Any]]:
    """Means over windows by context, policy and budget, each beside the attention it recovers."""
    rows = []
    for context in sorted(recipe.check.texts.context):
        some = [m for m, t in zip(measured, passages, strict=True) if t.context == context]
        for name in POLICIES:
            for budget in fidelity_budgets(recipe):
                pairs = [pair for one in some for pair in one[key(name, budget)]]
                kl, agreement = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
                place = recipe.check.budgets.index(budget)
                rows.append(
                    {
                        "context": context, "budget": budget, "policy": name,
                        "kl": round(kl, 5), "agreement": round(agreement, 4),
                        "arr": arr[str(context)][name][place],
                    }
                )  # fmt: skip
    return rows


def guard_trade(
    recipe: Recipe,
    policies: Sequence[Policies],
    measured: Sequence[Measured],
    threshold: float | None,
) -> dict[str, Any]:
    """Coverage and divergence of every window at the configured budget."""
    coverage = torch.cat([one.coverage(recipe.budget) for one in policies]).tolist()
    kl = [pair[0] for one in measured for pair in one[key(CHOSEN, recipe.budget)]]
    return {
        "threshold": threshold,
        "coverage": [round(value, 5) for value in coverage],
        "kl": [round(value, 5) for value in kl],
    }


def _mean(parts: Sequence[Tensor]) -> float:
    return round(float(torch.cat(list(parts)).mean()), 5)
