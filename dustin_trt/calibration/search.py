"""Greedy search for the heads to score: of the target, then of the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dustin_trt.calibration.cost import CostModel
from dustin_trt.calibration.value import Choice, Judge, Value, history_scores, lookahead_scores
from dustin_trt.config import Head, ModelSpec

Role = Literal["target", "draft"]


@dataclass(frozen=True)
class Step:
    """What was taken: these heads of one KV head; and what the whole choice is worth since."""

    role: Role
    layer: int
    kv_head: int
    heads: tuple[int, ...]
    choice: Choice
    value: Value


def candidate_heads(
    scores: Tensor, spec: ModelSpec, count: int, layers: Sequence[int] | None = None
) -> tuple[Head, ...]:
    """The query heads of the `count` KV heads whose best head scores highest, by KV head.

    Within a KV head the best come first: the search takes the first one, two, … of them, because
    reading their keys costs the same. Ties go to the lower layer and head.

    Parameters
    ----------
    scores : Tensor `[L, Hq]`, semantic-retrieval-head scores
    """
    groups: dict[tuple[int, int], list[Head]] = {}
    for head in spec.all_heads(layers):
        groups.setdefault((head.layer, spec.kv_head(head.head)), []).append(head)
    ranked = sorted(
        (sorted(heads, key=lambda head: (-float(scores[head]), head)) for heads in groups.values()),
        key=lambda heads: (-float(scores[heads[0]]), heads[0]),
    )
    return tuple(head for heads in ranked[:count] for head in heads)


def search_heads(
    judge: Judge,
    cost: CostModel,
    start: Choice,
    candidates: dict[Role, tuple[Head, ...]],
    limits: dict[Role, int],
    *,
    min_gain: float,
    tell: Callable[[Step], None] | None = None,
) -> list[Step]:
    """Add the KV head that gains most value per byte; when none gains enough, exchange one.

    Target heads are chosen for the history signal alone, then draft heads for both signals
    together, at the join that serves them best. An exchange that gains as much as an addition must
    is taken, and additions go on; without one, the search is over (floating search, Pudil et al.
    1994).

    Parameters
    ----------
    judge : values a choice
    cost : bytes of a KV head
    start : sink, window and Γ to search with
    candidates : by model, heads of one KV head together, the better ones first
    limits : KV heads that may be scored, by model
    min_gain : value that a KV head of the target must add; one of the draft in proportion to its
        bytes
    tell : called after each addition or exchange

    Returns
    -------
    Every addition and exchange, in order; the last one's choice is the result.
    """
    steps: list[Step] = []
    choice, total = start, 0.0
    for role in _ROLES:
        least = min_gain * cost.kv_head_bytes(role) / cost.kv_head_bytes("target")
        groups = _by_kv_head(candidates[role], cost, role)
        chosen: _Groups = {}

        def take(found: _Found, role: Role = role, chosen: _Groups = chosen) -> None:
            nonlocal choice, total
            choice, total = found.choice, found.value.total
            chosen[found.kv_head] = found.heads
            heads = tuple(head.head for head in found.heads)
            steps.append(Step(role, *found.kv_head, heads, choice, found.value))
            if tell:
                tell(steps[-1])

        while True:
            free = {key: heads for key, heads in groups.items() if key not in chosen}
            best = _best_addition(judge, choice, role, free) if len(chosen) < limits[role] else None
            if best and best.value.total > total + least:
                take(best)
                continue
            # What was taken early may serve less well beside what came later.
            for key, heads in list(chosen.items()):
                without = _without(choice, role, heads)
                best = _best_addition(judge, without, role, {**free, key: groups[key]})
                if best and best.value.total > total + least:
                    del chosen[key]
                    take(best)
                    break
            else:
                break
    return steps


_ROLES: tuple[Role, ...] = ("target", "draft")
# A weak draft's lookahead helps a little of it at a time; which share is best is tuned later.
_JOINS = (("sum", 0.1), ("sum", 0.25), ("sum", 0.5), ("split", 0.25))

_Groups = dict[tuple[int, int], tuple[Head, ...]]


def _by_kv_head(heads: Sequence[Head], cost: CostModel, role: Role) -> _Groups:
    spec = cost.target if role == "target" else cost.draft
    groups: _Groups = {}
    for head in heads:
        key = (head.layer, spec.kv_head(head.head))
        groups[key] = (*groups.get(key, ()), head)
    return groups


@dataclass(frozen=True)
class _Found:
    """A KV head with its query heads, and the choice with it."""

    kv_head: tuple[int, int]
    heads: tuple[Head, ...]
    choice: Choice
    value: Value


def _without(choice: Choice, role: Role, heads: tuple[Head, ...]) -> Choice:
    name = f"{role}_heads"
    return choice.replace(
        **{name: tuple(head for head in getattr(choice, name) if head not in heads)}
    )


def _best_addition(judge: Judge, choice: Choice, role: Role, groups: _Groups) -> _Found | None:
    """The KV head, its query heads and the join that reach the highest value."""
    samples = [*judge.texts, *judge.prompts]
    fixed = [
        (
            history_scores(some, choice.target_heads),
            lookahead_scores(some, choice.draft_heads, choice.gamma),
        )
        for some in samples
    ]
    best: _Found | None = None
    for key, members in groups.items():
        for count in range(1, len(members) + 1):
            heads = members[:count]
            scores: list[tuple[Tensor | None, Tensor | None]] = []
            for some, (history, ahead) in zip(samples, fixed, strict=True):
                if role == "target":
                    history = _plus(history, history_scores(some, heads))
                else:
                    ahead = _plus(ahead, lookahead_scores(some, heads, choice.gamma))
                scores.append((history, ahead))
            for join, share in _JOINS if role == "draft" else _JOINS[:1]:
                name = f"{role}_heads"
                tried = choice.replace(
                    **{name: (*getattr(choice, name), *heads)}, join=join, share=share
                )
                value = judge.value(tried, scores)
                if best is None or value.total > best.value.total:
                    best = _Found(key, heads, tried, value)
    return best


def _plus(sum_so_far: Tensor | None, more: Tensor | None) -> Tensor:
    assert more is not None
    return more if sum_so_far is None else torch.add(sum_so_far, more)
