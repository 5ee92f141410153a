"""What a request asks for."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dustin_trt.config import one_line


class RequestError(ValueError):
    """A request that cannot be served; the message says what to change."""


class SamplingParams(BaseModel):
    """How one request is sampled and when it ends.

    Attributes
    ----------
    temperature : 0 takes the most likely token
    top_k : sample among the k most likely tokens; 0 means all
    top_p : sample among the fewest tokens whose mass reaches p
    max_tokens : tokens to generate at most
    seed : makes a sampled request repeatable; what else is in its batch changes nothing but the
        rounding of matrix products; None draws one
    stop : strings that end the text; they are not part of it
    stop_token_ids : tokens that end the text, besides the model's own
    ignore_eos : go on past the model's end-of-sequence tokens
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.0, ge=0, le=1e6)  # more would be infinite in fp32
    top_k: int = Field(default=0, ge=0, lt=2**63)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=128, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RequestError(one_line(error)) from error

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        strings = (value,) if isinstance(value, str) else value
        if strings is None:
            return ()
        if isinstance(strings, list | tuple) and "" in strings:
            raise ValueError("a stop string must not be empty")
        return strings

    def replace(self, **fields: Any) -> SamplingParams:
        """A checked copy with other values."""
        return SamplingParams(**{**self.model_dump(), **fields})
