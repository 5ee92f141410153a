"""What a request and a run cost."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RequestStats:
    """Counts of one request; ratios are derived, so that they cannot disagree with the counts.

    Attributes
    ----------
    prompt_tokens, cached_prompt_tokens : prompt length, and how much of it was cached already
    generated_tokens : tokens returned
    steps : verification passes
    step_tokens : tokens those passes committed
    drafted, accepted : draft tokens verified, and accepted of them
    history_read, history : history tokens read by verification, and those there were, over steps
    coverage_sum, coverage_steps : of the steps whose coverage is known; of a guarded step what was
        measured before its row was read whole, so that hard inputs show
    guarded_steps : verification passes that a guard made dense for this request
    prefill_seconds, decode_seconds : until the first token, and from there to the last
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    history_read: int = 0
    history: int = 0
    coverage_sum: float = 0.0
    coverage_steps: int = 0
    guarded_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tau(self) -> float | None:
        """τ: mean tokens committed a step."""
        return _ratio(self.step_tokens, self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return _ratio(self.accepted, self.drafted)

    @property
    def kv_read_share(self) -> float | None:
        """History tokens that verification read, over those cached."""
        return _ratio(self.history_read, self.history)

    @property
    def coverage(self) -> float | None:
        """Mean share of the target's history score that was chosen: an online estimate of ARR."""
        return _ratio(self.coverage_sum, self.coverage_steps)

    def add_step(self, *, drafted: int, accepted: int, committed: int, read: int, history: int,
                 coverage: float, guarded: bool) -> None:  # fmt: skip
        """Count one verification pass of this request."""
        self.steps += 1
        self.step_tokens += committed
        self.drafted += drafted
        self.accepted += accepted
        self.history_read += read
        self.history += history
        if not math.isnan(coverage):
            self.coverage_sum += coverage
            self.coverage_steps += 1
        self.guarded_steps += guarded

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the counts a reader wants and the ratios, rounded."""
        counts = asdict(self)
        for hidden in ("history_read", "history", "coverage_sum", "coverage_steps", "step_tokens"):
            del counts[hidden]
        ratios = {
            name: None if (value := getattr(self, name)) is None else round(value, 4)
            for name in ("tau", "acceptance_rate", "kv_read_share", "coverage")
        }
        seconds = {k: round(v, 4) for k, v in counts.items() if k.endswith("seconds")}
        return counts | ratios | seconds


@dataclass
class StepStats:
    """Totals of some steps of the loop.

    Attributes
    ----------
    steps : steps, each over the whole batch
    tokens : tokens they committed
    seconds : time by part: draft, score, select, verify, accept
    """

    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("draft", "score", "select", "verify", "accept"), 0.0)
    )

    @property
    def decode_seconds(self) -> float:
        """Time of all parts."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens a second over the batch, prefill left out."""
        return _ratio(self.tokens, self.decode_seconds)

    def add(self, steps: int, tokens: int, *seconds: dict[str, float]) -> None:
        """Add steps, tokens and times by part."""
        self.steps += steps
        self.tokens += tokens
        for part in seconds:
            for name, value in part.items():
                self.seconds[name] += value


@dataclass
class RunStats:
    """What one run of the loop cost over all its requests.

    Attributes
    ----------
    prefill_seconds : in prefill
    by_rows : totals of the steps that ran with so many rows. A step costs almost as much with few
        rows as with many, so rates compare at the same number.
    """

    prefill_seconds: float = 0.0
    by_rows: dict[int, StepStats] = field(default_factory=dict)

    def add_step(self, rows: int, tokens: int, *seconds: dict[str, float]) -> None:
        """Count one step."""
        self.by_rows.setdefault(rows, StepStats()).add(1, tokens, *seconds)

    @property
    def total(self) -> StepStats:
        """Over all steps."""
        total = StepStats()
        for some in self.by_rows.values():
            total.add(some.steps, some.tokens, some.seconds)
        return total


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
