"""A request on its way through the loop."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dustin_trt.runtime.sampling_params import SamplingParams
from dustin_trt.runtime.stats import RequestStats
from dustin_trt.runtime.text import TextStream

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Request:
    """A checked request.

    key : whatever the caller tells requests apart by
    prompt : token ids, at least one
    params : how to sample
    """

    key: Any
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes
    ----------
    key : the request's
    text : generated text, without special tokens and stop string
    token_ids : generated tokens, an ending end-of-sequence token included
    finish_reason : "stop" (end-of-sequence token or stop string), "length" or "error"
    stats : what it cost
    error : why it failed, where it did
    selections : what each verification pass read, `[count]` int32 a step, where asked for; None
        stands for everything
    """

    key: Any
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    error: str | None = None
    selections: list[torch.Tensor | None] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Chunk:
    """A piece of a request's output as a step commits it; `output` is set on the last one."""

    key: Any
    text: str
    token_ids: list[int]
    output: RequestOutput | None = None


class Sequence:
    """A request in a slot: its tokens, its randomness, its end.

    Parameters
    ----------
    request : what was asked
    slot : where its cache is
    tokenizer : for text and stop strings; may be None
    eos : end-of-sequence tokens of the model
    """

    def __init__(self, request: Request, slot: int, tokenizer: Any, eos: frozenset[int]) -> None:
        params = request.params
        self.request = request
        self.slot = slot
        self.tokens = list(request.prompt)
        self.stats = RequestStats(prompt_tokens=len(request.prompt))
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.selections: list[torch.Tensor | None] = []
        self.history_queries = torch.empty(0)
        self._text = TextStream(tokenizer, params.stop)
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._given = len(self.tokens)
        self._first_token_at = 0.0

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens until the length limit."""
        return self.request.params.max_tokens - (len(self.tokens) - len(self.request.prompt))

    def uniforms(self, count: int) -> torch.Tensor:
        """`[count]` fp64 in [0, 1), from this request's own generator."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def commit(self, tokens: SequenceOf[int]) -> int:
        """Append tokens until one ends the sequence; how many were kept.

        A token that ends the text and reaches the length limit counts as a stop.
        """
        if not self._first_token_at:
            self._first_token_at = time.perf_counter()
        for kept, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if self._text.push(token) or token in self._ends:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return kept
        return len(tokens)

    def fail(self, message: str) -> None:
        """End with an error; the other sequences go on."""
        self.finish_reason, self.error = "error", message

    def chunk(self) -> Chunk:
        """What has not been given out yet."""
        done = self.finish_reason is not None
        if done:
            self._text.finish()
        tokens, self._given = self.tokens[self._given :], len(self.tokens)
        output = self._output() if done else None
        return Chunk(self.request.key, self._text.take(final=done), tokens, output)

    def _output(self) -> RequestOutput:
        assert self.finish_reason
        self.stats.generated_tokens = len(self.generated)
        if self._first_token_at:
            self.stats.decode_seconds = time.perf_counter() - self._first_token_at
        return RequestOutput(
            self.request.key,
            self._text.text,
            self.generated,
            self.finish_reason,
            self.stats,
            self.error,
            self.selections,
        )
