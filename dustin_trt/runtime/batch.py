"""The batch job: a JSONL file of prompts in, a JSONL file of texts out, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dustin_trt.drafting import NoDrafter
from dustin_trt.runtime.batch_input import (
    BatchError,
    Id,
    LineError,
    count_lines,
    line_id,
    parse_line,
    read_lines,
)
from dustin_trt.runtime.batch_output import OutputFile, check_files
from dustin_trt.runtime.llm import LLM
from dustin_trt.runtime.sampling_params import RequestError, SamplingParams
from dustin_trt.runtime.sequence import Chunk, Request, RequestOutput
from dustin_trt.runtime.stats import RunStats

__all__ = ["BatchError", "BatchSummary", "check_files", "run_batch"]


@dataclass
class BatchSummary:
    """Where a job stands, and at the end what it did.

    Attributes
    ----------
    total : input lines; None where the input can be read only once
    done, failed : lines finished in this run, and lines that became error lines in it
    skipped : lines that the output had already
    skipped_failed : of them, error lines
    tokens : generated in this run
    steps, step_tokens : verification passes, counted a row, and the tokens they committed
    seconds : since the start
    running : requests in decoding or prefill
    prefill : (tokens cached, prompt length) of the prompt being cached now
    interrupted : stopped from the keyboard; the same job started again goes on
    run : times of the decoding loop by part
    """

    total: int | None = None
    done: int = 0
    failed: int = 0
    skipped: int = 0
    skipped_failed: int = 0
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    seconds: float = 0.0
    running: int = 0
    prefill: tuple[int, int] | None = None
    interrupted: bool = False
    run: RunStats = field(default_factory=RunStats)

    @property
    def finished(self) -> int:
        """Lines that need no more work."""
        return self.done + self.failed + self.skipped

    @property
    def tau(self) -> float | None:
        """τ: mean tokens committed a step and row."""
        return self.step_tokens / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens a second, over the batch, prefill left out."""
        return self.run.total.tokens_per_second


def run_batch(
    llm: LLM,
    input_path: str | Path,
    output_path: str | Path,
    defaults: SamplingParams | None = None,
    *,
    progress: Callable[[BatchSummary], None] | None = None,
) -> BatchSummary:
    """Serve every line of a JSONL file.

    Input lines hold `prompt` or `prompt_token_ids`, and may hold `id` (a string or an integer,
    otherwise the line's number as a string) and their own sampling parameters. Output lines hold
    `id`, `text`, `token_ids`, `finish_reason` and `stats`, or `id` and `error`; they are appended
    as requests finish, in any order. A line that cannot be served becomes an error line and the
    others go on.

    Started again with the same files, the job leaves the lines alone that the output has, error
    lines included (delete those to try them again), and serves the rest. The input is read as
    slots become free; what grows with its length is the set of ids only.

    Parameters
    ----------
    llm : decodes
    input_path, output_path : JSONL files
    defaults : for parameters that a line does not bring. Their seed is mixed with the line's id
        (see `mix_seed`): equal prompts differ, and a run started again draws the same.
    progress : called after every step of a request and every part of a prefill

    Returns
    -------
    BatchSummary
        With `interrupted` set after a KeyboardInterrupt, everything finished being saved.

    Raises
    ------
    BatchError
        Files that cannot be used (nothing is written then), or a disk that is full later on.
    """
    input_path, output_path = Path(input_path), Path(output_path)
    check_files(input_path, output_path)
    with OutputFile(output_path) as output:
        job = _Job(llm, input_path, output, defaults or SamplingParams(), progress)
        try:
            job.run()
        except KeyboardInterrupt:
            job.summary.interrupted = True
    return job.summary


class _Job:
    def __init__(
        self,
        llm: LLM,
        source: Path,
        output: OutputFile,
        defaults: SamplingParams,
        progress: Callable[[BatchSummary], None] | None,
    ) -> None:
        self._llm = llm
        self._source = source
        self._output = output
        self._defaults = defaults
        self._progress = progress
        self._started = time.perf_counter()
        self._begun: set[Id] = set()
        self.summary = BatchSummary()

    def run(self) -> None:
        decoder = self._llm.decoder
        on_prefill, decoder.on_prefill = decoder.on_prefill, self._prefill
        try:
            self.summary.total = count_lines(self._source)
            with closing(decoder.run(self._requests())) as chunks:
                for chunk in chunks:
                    self._take(chunk)
        finally:
            decoder.on_prefill = on_prefill
            self._report()

    def _requests(self) -> Iterator[Request]:
        """Requests for the lines that are not done; the decoder takes one when a slot is free."""
        seen: set[Id] = set()
        complete = self._output.complete
        for number, raw in read_lines(self._source):
            id: Id = line_id(number)
            try:
                line = parse_line(raw, number, self._defaults)
                if line.id in seen:
                    # Under its id it would be told apart from the first one by nobody.
                    raise LineError(f"id {line.id!r} is that of an earlier line: give it another")
                seen.add(line.id)
                id = line.id
                if id not in complete:
                    yield self._llm.request(id, line.prompt, line.params)
                    continue
            except RequestError as error:
                if isinstance(error, LineError) and error.id is not None and error.id not in seen:
                    seen.add(error.id)
                    id = error.id
                if id not in complete:
                    self._fail(id, str(error))
                    continue
            self.summary.skipped += 1
            self.summary.skipped_failed += complete[id]

    def _take(self, chunk: Chunk) -> None:
        summary = self.summary
        if chunk.key in self._begun:
            summary.steps += bool(chunk.token_ids)
            summary.step_tokens += len(chunk.token_ids)
        self._begun.add(chunk.key)  # the first token comes from the prefill, not from a step
        summary.tokens += len(chunk.token_ids)
        if chunk.output is not None:
            self._begun.discard(chunk.key)
            self._finish(chunk.output)
        summary.running, summary.prefill = len(self._begun), None
        self._report()

    def _finish(self, output: RequestOutput) -> None:
        if output.finish_reason == "error":
            self._fail(output.key, output.error or "unknown error")
            return
        self._output.append({
            "id": output.key,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stats": output.stats.as_dict() | self._setting(),
        })  # fmt: skip
        self.summary.done += 1

    def _fail(self, id: Id, message: str) -> None:
        self._output.append({"id": id, "error": " ".join(message.split())})
        self.summary.failed += 1
        self._report()

    def _setting(self) -> dict[str, Any]:
        """How it was decoded; None where a setting plays no part."""
        decoder = self._llm.decoder
        return {
            "policy": decoder.policy.name,
            "budget": None if decoder.policy.name == "dense" else self._llm.config.budget,
            "gamma": None if isinstance(decoder.drafter, NoDrafter) else decoder.gamma,
        }

    def _prefill(self, request: Request, done: int) -> None:
        self.summary.prefill = (done, len(request.prompt))
        self._report()

    def _report(self) -> None:
        self.summary.run = self._llm.stats
        self.summary.seconds = time.perf_counter() - self._started
        if self._progress:
            self._progress(self.summary)
