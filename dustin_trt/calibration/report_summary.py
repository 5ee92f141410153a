"""The top of the report: the verdict in words, and the tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dustin_trt.calibration.report_results import (
    Results,
    contexts,
    find,
    guard_threshold,
    guarded_share,
    kl_at_budget,
    pass_keys_found,
    share_at_budget,
    shares_at_budget,
)
from dustin_trt.calibration.report_words import NOT_MEASURED, count, number, percent

# (at least this share of the oracle's ARR, in every context; of full verification's pass keys)
GOOD = (0.985, 0.90)
USABLE = (0.97, 0.70)
_ROUNDING = 1e-9  # a ratio that is 0.985 on paper may be a last bit below it

Grade = Literal["good", "usable", "poor"]
_ORDER: tuple[Grade, ...] = ("poor", "usable", "good")


@dataclass(frozen=True)
class Verdict:
    """Whether the pair is good: `grade` is None where nothing that it is judged by was measured."""

    grade: Grade | None
    headline: str
    reasons: tuple[str, ...]
    rule: str


@dataclass(frozen=True)
class Tile:
    """A large number, what it is, and what it is to be read against."""

    label: str
    value: str
    notes: tuple[str, ...] = ()
    grade: Grade | None = None


def grade(share: float | None, good: float, usable: float) -> Grade | None:
    """The grade of one criterion; None where it was not measured."""
    if share is None:
        return None
    if share >= good - _ROUNDING:
        return "good"
    return "usable" if share >= usable - _ROUNDING else "poor"


def arr_share(results: Results) -> float | None:
    """The chosen heads' share of the oracle's ARR in the worst context; None if one is missing."""
    shares = shares_at_budget(results, "chosen")
    return min(shares) if shares else None


def key_share(results: Results) -> float | None:
    """Pass keys found, as a share of full verification's; None where that finds none either."""
    found, full = pass_keys_found(results, "chosen"), find(results, "check", "pass_keys", "full")
    return found / full if found is not None and full else None


def verdict(results: Results) -> Verdict:
    """Judge the pair by `GOOD` and `USABLE`: the worse of the two criteria counts."""
    kept, found = arr_share(results), key_share(results)
    grades = {
        "ARR": grade(kept, GOOD[0], USABLE[0]),
        "pass keys": grade(found, GOOD[1], USABLE[1]),
    }
    measured = {name: value for name, value in grades.items() if value is not None}
    worst = min(measured.values(), key=_ORDER.index) if measured else None
    headline = f"A {worst} pair" if worst else NOT_MEASURED.capitalize()
    if len(measured) == 1:
        headline += f", judged by {next(iter(measured))} alone"
    borders = [f"{100 * border:g}\u00a0%" for border in (*GOOD, *USABLE)]
    rule = (
        f"Good: at the configured budget, windowed ARR is at least {borders[0]} of the oracle’s in "
        f"every context, and at least {borders[1]} of the pass keys that full verification finds "
        f"are found. Usable: at least {borders[2]} and {borders[3]}. Poor: less."
    )
    return Verdict(worst, headline, _reasons(results, kept, found), rule)


def _reasons(results: Results, kept: float | None, found: float | None) -> tuple[str, ...]:
    """What was gained and what it costs, each as far as it was measured."""
    budget = find(results, "chosen", "budget")
    attention, keys, cost = f"ARR: {NOT_MEASURED}.", f"Pass keys: {NOT_MEASURED}.", ""
    if kept is not None:
        attention = (
            f"With {count(budget)} tokens read, it keeps at least {percent(kept)} of the attention "
            "that the oracle keeps."
        )
    if found is not None:
        keys = (
            f"It finds {pass_keys_found(results, 'chosen')} pass keys where full verification "
            f"finds {results['check']['pass_keys']['full']}."
        )
    elif find(results, "check", "pass_keys", "full") == 0:
        keys = "Full verification finds no pass key, so they say nothing of the pair."
    if (share := find(results, "chosen", "bytes_share")) is not None:
        cost = f"Scoring reads {percent(share)} of the bytes that full attention reads."
    return tuple(line for line in (attention, keys, cost) if line)


def tiles(results: Results) -> list[Tile]:
    """The six numbers that say whether the pair is good and what it costs."""
    return [
        _arr(results), _keys(results), _kl(results), _heads(results), _tau(results), _guard(results)
    ]  # fmt: skip


def _arr(results: Results) -> Tile:
    kept = arr_share(results)
    notes = [
        f"{context:,} tokens: {percent(share_at_budget(results, 'chosen', context))}"
        for context in contexts(results)
    ]
    budget = find(results, "chosen", "budget")
    return Tile(
        "of the oracle’s ARR, worst context", percent(kept),
        (f"at budget {count(budget)}", *notes), grade(kept, GOOD[0], USABLE[0]),
    )  # fmt: skip


def _keys(results: Results) -> Tile:
    keys, found = find(results, "check", "pass_keys"), pass_keys_found(results, "chosen")
    value = NOT_MEASURED if found is None else f"{found} of {keys['count']}"
    notes = [] if not keys else [
        f"full verification finds {count(keys.get('full'))}",
        f"hidden in {count(keys.get('length'))} tokens",
    ]  # fmt: skip
    return Tile(
        "pass keys found", value, tuple(notes), grade(key_share(results), GOOD[1], USABLE[1])
    )


def _kl(results: Results) -> Tile:
    """The context with the largest KL, beside what scoring every head by history alone gives."""
    rows = {context: kl_at_budget(results, "chosen", context) for context in contexts(results)}
    known = {context: value for context, value in rows.items() if value is not None}
    notes = [
        f"{context:,} tokens: {number(value)}; all heads’ history "
        f"{number(kl_at_budget(results, 'all heads, history', context))}"
        for context, value in known.items()
    ]
    worst = max(known.values()) if known and len(known) == len(rows) else None
    notes.insert(0, "from full verification’s logits")
    return Tile("nats KL a token, worst context", number(worst), tuple(notes))


def _heads(results: Results) -> Tile:
    chosen = results.get("chosen") or {}
    parts = {
        name: (chosen.get(f"{name}_kv_heads"), chosen.get(f"all_{name}_kv_heads"))
        for name in ("target", "draft")
    }
    known = {name: pair for name, pair in parts.items() if None not in pair}
    value = NOT_MEASURED
    if known:
        read, of = (sum(numbers) for numbers in zip(*known.values(), strict=True))
        value = f"{read} of {of}"
    notes = [f"{name}: {read} of {of}" for name, (read, of) in known.items()]
    share = percent(chosen.get("bytes_share"))
    return Tile(
        "KV heads scored", value, (", ".join(notes), f"bytes read, of full attention’s: {share}")
    )


def _tau(results: Results) -> Tile:
    acceptance = find(results, "check", "acceptance") or {}
    tau, gamma = acceptance.get("tau"), find(results, "chosen", "gamma")
    return Tile(
        "τ, mean tokens committed a step",
        NOT_MEASURED if tau is None else f"{tau:.2f}",
        (
            f"drafts accepted: {percent(acceptance.get('rate'))}",
            f"draft tokens a step: {count(gamma)}",
        ),
    )


def _guard(results: Results) -> Tile:
    threshold = guard_threshold(results)
    note = "no guard threshold"
    if threshold is not None:
        note = f"by the guard, where coverage is below {threshold:.3g}"
    return Tile("of steps verified densely", percent(guarded_share(results)), (note,))
