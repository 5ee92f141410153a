"""Dustin: long-context LLM decoding by draft-augmented sparse verification.

>>> from dustin_trt import LLM, SamplingParams                          # doctest: +SKIP
>>> llm = LLM("SmolLM2-135M-Instruct", draft="skip:14,17", budget=512)  # doctest: +SKIP
>>> llm.generate(prompts, SamplingParams(max_tokens=64))                # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustin_trt.config import DustinConfig, Head
    from dustin_trt.runtime.llm import LLM
    from dustin_trt.runtime.sampling_params import SamplingParams
    from dustin_trt.runtime.sequence import Chunk, RequestOutput

__all__ = ["LLM", "Chunk", "DustinConfig", "Head", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "DustinConfig": "config",
    "Head": "config",
    "LLM": "runtime.llm",
    "SamplingParams": "runtime.sampling_params",
    "Chunk": "runtime.sequence",
    "RequestOutput": "runtime.sequence",
}


def __getattr__(name: str) -> Any:
    # Imported when first used: torch takes seconds, and `dustin-trt --help` needs none of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
