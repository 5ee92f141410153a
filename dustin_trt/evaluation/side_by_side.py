"""What the demo and the decoding benchmark share: one prefill for all methods, fair steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dustin_trt.runtime.llm import LLM, Prompt
from dustin_trt.runtime.sampling_params import SamplingParams
from dustin_trt.runtime.sequence import Request, RequestOutput
from dustin_trt.runtime.stats import RunStats, StepStats

PARTS = ("draft", "score", "select", "verify", "accept")
"""The parts of a step, as `StepStats.seconds` names them."""


@contextmanager
def progress_bar(console: Console, unit: str) -> Iterator[Progress]:
    """A bar that counts `unit` and says how long it took and will take."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        yield progress


def prefill_once(llm: LLM, prompts: Sequence[Prompt], tokens: int, console: Console) -> None:
    """Cache every prompt, `tokens` in all; the variants of `llm` then share it."""
    with progress_bar(console, "tokens") as progress:
        task = progress.add_task("caching the prompts", total=tokens)
        done: dict[int, int] = {}

        def on_prefill(request: Request, cached: int) -> None:
            done[request.key] = cached
            progress.update(task, completed=sum(done.values()))

        plain = llm.variant(draft="none", policy="dense", on_prefill=on_prefill)
        plain.generate(prompts, SamplingParams(max_tokens=1))


def full_batch(run: RunStats) -> StepStats:
    """The steps that every prompt took part in.

    Prompts end at different times, and a batch that shrinks is no fair comparison.
    """
    return run.by_rows[max(run.by_rows)]


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Where two outputs of equal length first differ; None where they do not."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((i for i, (token, other) in pairs if token != other), None)


def describe_difference(first: Sequence[int | None]) -> str:
    """Of `first_difference` for each output, for example "none" or "7 (3 of 6)"."""
    differing = [at for at in first if at is not None]
    if not differing:
        return "none"
    return f"{min(differing)} ({len(differing)} of {len(first)})"


def decoding_figures(
    llm: LLM, outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]
) -> dict[str, Any]:
    """What does not depend on time: tokens a step, acceptance, what was read, what came out.

    `others` is another way's outputs of the same requests, to say where these differ from them.
    """
    stats = [output.stats for output in outputs]
    drafted = sum(s.drafted for s in stats)
    known = [s.coverage for s in stats if s.coverage is not None]
    return {
        "tau": sum(s.step_tokens for s in stats) / sum(s.steps for s in stats),
        "acceptance_rate": sum(s.accepted for s in stats) / drafted if drafted else None,
        "kv_read_share": sum(s.history_read for s in stats) / sum(s.history for s in stats),
        "scoring_share": llm.scoring_share,
        "coverage": statistics.mean(known) if known else None,
        "first_difference": [
            first_difference(output.token_ids, other.token_ids)
            for output, other in zip(outputs, others, strict=True)
        ],
    }
