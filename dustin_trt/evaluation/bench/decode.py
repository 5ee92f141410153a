"""`bench decode`: tokens a second end to end, and where the time of a step goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from dustin_trt.evaluation.bench import bandwidth
from dustin_trt.evaluation.bench.decode_checks import NEW_TOKENS, SHORT_CONTEXT, check_decoding
from dustin_trt.evaluation.bench.floors import step_bytes
from dustin_trt.evaluation.bench.random_model import CoinAcceptance, fill_history
from dustin_trt.evaluation.bench.report import Report
from dustin_trt.evaluation.bench.subject import DecodeSettings, Subject, load_subject
from dustin_trt.evaluation.bench.timing import Spread
from dustin_trt.evaluation.side_by_side import (
    PARTS,
    decoding_figures,
    describe_difference,
    full_batch,
    prefill_once,
    progress_bar,
)
from dustin_trt.ops import native
from dustin_trt.runtime.llm import LLM, Prompt
from dustin_trt.runtime.sampling_params import SamplingParams
from dustin_trt.runtime.sequence import RequestOutput
from dustin_trt.runtime.stats import RunStats, StepStats

__all__ = ["DecodeSettings", "run_decode"]


@dataclass
class Method:
    """One way to decode, and what its rounds gave.

    name : for the report
    llm : decodes
    isa : instruction set of the ops, "reference" for torch
    vanilla : whether it may be the baseline
    rounds : of each timed round
    bookkeeping : seconds a timed round spent outside the parts of its steps and prefill
    outputs : of the last round
    """

    name: str
    llm: LLM
    isa: str
    vanilla: bool = False
    rounds: list[RunStats] = field(default_factory=list)
    bookkeeping: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def steps(self) -> list[StepStats]:
        """The full-batch steps of each round."""
        return [full_batch(run) for run in self.rounds]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each round."""
        return [step.tokens_per_second or 0.0 for step in self.steps]

    def run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """One round."""
        with native.using(self.isa):
            started = time.perf_counter()
            self.outputs = self.llm.generate(prompts, params)
            took = time.perf_counter() - started
        stats = self.llm.stats
        self.rounds.append(stats)
        self.bookkeeping.append(took - stats.prefill_seconds - stats.total.decode_seconds)


def run_decode(settings: DecodeSettings, console: Console) -> Report:
    """Decode the same prompts in every way, in turns.

    Raises
    ------
    BenchmarkError
        When a method gives what it must not.
    ValueError, FileNotFoundError, MemoryError
        See `load_subject`.
    """
    subject = load_subject(settings)
    console.print(_introduction(subject, settings))
    methods = _methods(subject, settings)
    with console.status("checking the methods on short prompts"):
        found = _check(subject, methods, settings)
        stream = bandwidth.stream_bandwidth()
    requests: list[Prompt] = [{"prompt_token_ids": tokens} for tokens in subject.prompts]
    _cache_prompts(subject, methods, requests, console)
    params = [
        SamplingParams(max_tokens=settings.new_tokens, ignore_eos=True, seed=row)
        for row in range(settings.batch)
    ]
    with progress_bar(console, "runs") as progress:
        task = progress.add_task("", total=len(methods) * settings.rounds)
        for turn in range(settings.rounds):
            for method in methods[turn % len(methods) :] + methods[: turn % len(methods)]:
                progress.update(task, description=method.name)
                method.run(requests, params)
                progress.advance(task)
    baseline = max((m for m in methods if m.vanilla), key=lambda m: statistics.median(m.rates))
    rows = [_row(method, baseline, methods, settings, stream.median) for method in methods]
    notes = [*_notes(subject, methods, rows, settings, stream), *found]
    return Report("decode", subject.describe(settings), rows, notes)


def _methods(subject: Subject, settings: DecodeSettings) -> list[Method]:
    isa, plain = native.isa(), subject.llm.variant(draft="none", policy="dense")
    drafting = subject.llm.variant(draft=subject.draft, policy="dense", draft_window=0)
    windowed = {"draft_window": settings.draft_window}
    vanilla = [Method("vanilla (SDPA)", plain, native.REFERENCE, vanilla=True)]
    if isa != native.REFERENCE:
        vanilla.append(Method("vanilla (kernel)", plain, isa, vanilla=True))
    return [
        *vanilla,
        Method("classic", drafting, isa),
        Method(f"MagicDec {settings.draft_window}", drafting.variant(**windowed), isa),
        Method(
            f"Dustin {settings.budget}",
            drafting.variant(
                **windowed, policy="dustin", config=subject.config, budget=settings.budget
            ),
            isa,
        ),
    ]


def _check(subject: Subject, methods: list[Method], settings: DecodeSettings) -> list[str]:
    classic, magicdec, dustin = (method.llm for method in methods[-3:])
    everything = SHORT_CONTEXT + NEW_TOKENS + settings.gamma
    return check_decoding(
        methods[0].llm,
        {"classic": classic, "MagicDec": magicdec},
        magicdec,
        dustin.variant(budget=max(everything, settings.budget)),
        subject.prompts,
    )


def _cache_prompts(
    subject: Subject, methods: list[Method], requests: list[Prompt], console: Console
) -> None:
    """Cache the prompts once for all methods, and let the coin decide where weights are random."""
    if subject.acceptance is None:
        prefill_once(subject.llm, requests, sum(map(len, subject.prompts)), console)
        return
    caches = {id(method.llm.decoder.target.cache): method.llm.decoder.target for method in methods}
    for method in methods:
        method.llm.decoder.accept = CoinAcceptance(subject.acceptance)
        engine = getattr(method.llm.decoder.drafter, "engine", None)
        if engine is not None:
            caches[id(engine.cache)] = engine
    for engine in caches.values():
        fill_history(engine.cache, subject.prompts)


def _row(
    method: Method, baseline: Method, methods: list[Method], settings: DecodeSettings, stream: float
) -> dict[str, Any]:
    """One method's figures: medians over the rounds for times, the last round for the rest."""
    stats = [output.stats for output in method.outputs]
    steps = sum(s.steps for s in stats)
    milliseconds = {
        part: [1000 * step.seconds[part] / step.steps for step in method.steps] for part in PARTS
    }
    read = step_bytes(
        method.llm,
        rows=settings.batch,
        history=sum(s.history for s in stats) / steps,
        read=sum(s.history_read for s in stats) / steps,
    )
    return {
        "method": method.name,
        "context": settings.context,
        "batch": settings.batch,
        "is_baseline": method is baseline,
        "tokens_per_second": statistics.median(method.rates),
        "tokens_per_second_by_round": method.rates,
        "tokens_per_second_range": [min(method.rates), max(method.rates)],
        "speedup": _speedup(method, baseline),
        "speedup_over": {other.name: _speedup(method, other) for other in methods},
        **decoding_figures(method.llm, method.outputs, baseline.outputs),
        "median_ms": {part: statistics.median(values) for part, values in milliseconds.items()},
        "range_ms": {part: [min(values), max(values)] for part, values in milliseconds.items()},
        "read_mb": {part: size / 1e6 for part, size in read.items()},
        "floor_ms": {part: 1000 * size / stream for part, size in read.items()},
        "bookkeeping_share": statistics.median(
            spent / (spent + run.total.decode_seconds)
            for spent, run in zip(method.bookkeeping, method.rounds, strict=True)
        ),
    }


def _speedup(method: Method, other: Method) -> float:
    """Median of the rounds' ratios, so that what slowed a whole round cancels."""
    return statistics.median(a / b for a, b in zip(method.rates, other.rates, strict=True))


def _introduction(subject: Subject, settings: DecodeSettings) -> str:
    what = "plays" if subject.acceptance is None else "random tokens"
    return (
        f"{subject.name} in {subject.dtype}, draft {subject.draft_name}; {settings.batch} prompts "
        f"of {settings.context} tokens of {what}, {settings.new_tokens} new tokens each, gamma "
        f"{settings.gamma}"
    )


def _notes(
    subject: Subject, methods: list[Method], rows: list[dict[str, Any]], settings: DecodeSettings,
    stream: Spread,
) -> list[str]:  # fmt: skip
    *_, magicdec, dustin = rows
    notes = [
        _introduction(subject, settings) + ".",
        f"Medians of {settings.rounds} rounds in which the methods take turns, over the steps that "
        "all prompts took part in; the prompts were cached before. * is the baseline, the fastest "
        f"vanilla. Dustin is {dustin['speedup_over'][magicdec['method']]:.2f}× MagicDec.",
        "Least time, and its share of the time taken: weights, keys, values, scores and logits "
        f"that a part must read, over {stream.median / 1e9:.1f} GB/s (quartiles "
        f"{stream.q1 / 1e9:.1f}–{stream.q3 / 1e9:.1f}) of streaming from memory by "
        f"{bandwidth.reader()}. More than 100 % means that the processor's cache served a part.",
        "Outside of these parts the loop spends "
        f"{max(row['bookkeeping_share'] for row in rows):.1%} of its time at most.",
        *_vanilla_notes(rows, methods),
        _scoring_note(subject, methods[-1]),
    ]
    if subject.acceptance is None:
        return [*notes, _difference_note(rows)]
    expected = sum(subject.acceptance**i for i in range(settings.gamma + 1))
    return [
        f"SIMULATED: random weights; a coin accepts each draft with probability "
        f"{subject.acceptance:g}, the same coins for every method (τ {expected:.2f} expected). The "
        "history is random keys and values, not a prefill. All other work of the loop is done. "
        "The speed says nothing about quality.",
        *notes,
    ]


def _vanilla_notes(rows: list[dict[str, Any]], methods: list[Method]) -> list[str]:
    if sum(method.vanilla for method in methods) == 1:
        return ["Without native kernels every method runs torch's ops."]
    if rows[0]["is_baseline"]:
        return ["torch SDPA was faster here than the dense kernel that classic and MagicDec use."]
    return []


def _scoring_note(subject: Subject, dustin: Method) -> str:
    config = dustin.llm.config
    heads = f"{len(config.target_heads)} target and {len(config.draft_heads)} draft heads"
    kind = "calibrated" if config.calibrated else "uncalibrated"
    return f"Dustin scores with {heads} ({kind})."


def _difference_note(rows: list[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        if row["is_baseline"]:
            continue
        parts.append(f"{row['method']}: {describe_difference(row['first_difference'])}")
    return (
        "First new token that differs from the baseline's, and in how many rows: "
        f"{'; '.join(parts)}. Dustin is lossy; the others differ by rounding only."
    )
