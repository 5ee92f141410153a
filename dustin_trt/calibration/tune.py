"""Optuna over the numbers: how the signals join, sink, window and Γ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial

from dustin_trt.calibration.cost import CostModel
from dustin_trt.calibration.recipe import Search
from dustin_trt.calibration.value import Choice, Judge, Value


@dataclass(frozen=True)
class Trial:
    """A choice that was tried.

    fidelity : windowed ARR plus the weighted recall; unlike `Value.total` not against the oracle of
        the same Γ, because a longer window is harder to serve and that is a reason against it
    speed : tokens per byte read, against plain decoding (`CostModel`)
    """

    number: int
    choice: Choice
    value: Value
    fidelity: float
    speed: float


def tune(
    judge: Judge,
    cost: CostModel,
    start: Choice,
    search: Search,
    tau: dict[int, float],
    *,
    budget: int,
    storage: Path,
    seed: int,
    tell: Callable[[int], None] | None = None,
) -> list[Trial]:
    """Tune a choice's numbers with multi-objective TPE (fidelity and predicted speed).

    Every trial has a sampler seeded by its own number that sees finished trials only, so that a
    study that was killed and goes on proposes what it would have proposed undisturbed.

    Parameters
    ----------
    judge, cost : as in the heads' search
    start : its heads stay; its numbers are the first trial
    search : trials, and what is tried
    tau : mean tokens a step by Γ, as measured
    budget : k of the speed prediction
    storage : SQLite file of the study
    tell : called with the number of trials done, after each
    """
    optuna.logging.set_verbosity(logging.ERROR)
    database = RDBStorage(f"sqlite:///{storage}")
    study = optuna.create_study(
        storage=database, study_name="dustin", directions=["maximize", "maximize"],
        load_if_exists=True,
    )  # fmt: skip
    trials: list[Trial] = []

    def assess(choice: Choice, number: int) -> Trial:
        value = judge.value(choice)
        read = cost.step_bytes(choice.gamma, budget, choice.target_heads, choice.draft_heads)
        return Trial(
            number, choice, value,
            fidelity=value.arr + judge.recall_weight * value.recall,
            speed=tau[choice.gamma] * cost.plain_bytes() / read,
        )  # fmt: skip

    def objectives(trial: Trial) -> list[float]:
        return [trial.fidelity, trial.speed]

    space, firsts = _space(search, start), _firsts(start, search)
    stored = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    for number in range(search.trials):
        if number < len(stored):
            trials.append(assess(start.replace(**stored[number].params), number))
        elif number < len(firsts):
            trials.append(assess(start.replace(**firsts[number]), number))
            study.add_trial(
                create_trial(
                    params=firsts[number], distributions=space, values=objectives(trials[-1])
                )
            )
        else:
            study.sampler = TPESampler(seed=seed + number, constant_liar=False)
            asked = study.ask(space)
            trials.append(assess(start.replace(**asked.params), number))
            study.tell(asked, objectives(trials[-1]))
        if tell:
            tell(number + 1)
    return trials


def pick(trials: list[Trial], tolerance: float) -> Trial:
    """The fastest of those that lose at most `tolerance` of the best fidelity."""
    floor = max(trial.fidelity for trial in trials) - tolerance
    good = [trial for trial in trials if trial.fidelity >= floor]
    return max(good, key=lambda trial: (trial.speed, trial.fidelity, -trial.number))


def settle_join(judge: Judge, choice: Choice, steps: int = 16) -> list[tuple[Choice, Value]]:
    """Both joins at every share from nothing to all of the lookahead, other numbers as they are.

    A sampler seldom proposes exactly one signal alone; this does, so that the join that comes out
    is never worse than either on what it was searched on. Without draft heads there is nothing to
    join.
    """
    if not choice.draft_heads:
        alone = choice.replace(join="sum", share=0.0)
        return [(alone, judge.value(alone))]
    tried = [
        choice.replace(join=join, share=number / steps)
        for join in ("sum", "split")
        for number in range(steps + 1)
    ]
    return [(one, judge.value(one)) for one in tried]


def pareto_front(trials: list[Trial]) -> set[int]:
    """Numbers of the trials that no other one beats in both fidelity and speed."""
    return {
        one.number
        for one in trials
        if not any(
            other.fidelity >= one.fidelity
            and other.speed >= one.speed
            and (other.fidelity, other.speed) != (one.fidelity, one.speed)
            for other in trials
        )
    }


def _space(search: Search, start: Choice) -> dict[str, BaseDistribution]:
    both: dict[str, BaseDistribution] = {
        "join": CategoricalDistribution(("sum", "split")),
        "share": FloatDistribution(0, 1),
    }
    return {
        **(both if start.draft_heads else {}),
        "sink": CategoricalDistribution(search.sinks),
        "window": CategoricalDistribution(search.windows),
        "gamma": IntDistribution(1, search.max_gamma),
    }


def _firsts(start: Choice, search: Search) -> list[dict[str, Any]]:
    """What to try before the sampler proposes: the start at every Γ."""
    near = {
        **({"join": start.join, "share": start.share} if start.draft_heads else {}),
        "sink": _nearest(search.sinks, start.sink),
        "window": _nearest(search.windows, start.window),
    }  # fmt: skip
    return [{**near, "gamma": gamma} for gamma in range(1, search.max_gamma + 1)]


def _nearest(values: tuple[int, ...], wanted: int) -> int:
    return min(values, key=lambda value: (abs(value - wanted), value))
