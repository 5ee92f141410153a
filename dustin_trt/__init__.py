"""Dustin: long-context LLM decoding by draft-augmented sparse verification.

>>> from dustin_trt import LLM, SamplingParams                          # doctest: +SKIP
>>> llm = LLM("SmolLM2-135M-Instruct", draft="skip:14,17", budget=512)  # doctest: +SKIP
>>> llm.generate(prompts, SamplingParams(max_tokens=64))                # doctest: +SKIP
"""

from dustin_trt.config import DustinConfig, Head
from dustin_trt.runtime.llm import LLM
from dustin_trt.runtime.sampling_params import SamplingParams
from dustin_trt.runtime.sequence import Chunk, RequestOutput

__all__ = ["LLM", "Chunk", "DustinConfig", "Head", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"
