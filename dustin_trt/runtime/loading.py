"""From what a person names to models, tokenizers, caches and drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from dustin_trt.config import Head, ModelSpec
from dustin_trt.drafting import Drafter, DraftModel, LayerSkipDraft, LookupDrafter, NoDrafter
from dustin_trt.drafting.tokenizers import check_same_tokenizer
from dustin_trt.engines.base import Engine
from dustin_trt.engines.compiled import CompiledModel
from dustin_trt.engines.graph_engine import GraphEngine
from dustin_trt.engines.graphs import CudaRecorder, Recorder
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.kv_cache import PagedKVCache
from dustin_trt.models import causal_lm
from dustin_trt.models.causal_lm import CausalLM
from dustin_trt.models.shared_draft import is_shared_draft, load_shared_draft
from dustin_trt.ops import cuda

MAX_GAMMA = 16
"""Longest draft; every slot keeps room for a window of it past its last token."""

Model = CausalLM | CompiledModel
"""What runs: a checkpoint by torch, or an engine folder's step."""


@dataclass
class Draft:
    """What `draft=` names, loaded.

    name : as it was given
    model : of drafts that are models
    max_ngram : of prompt lookup, 0 where it is none
    own_cache : whether the model needs a cache of its own
    cache : that cache, made when it is first needed
    """

    name: str
    model: Model | None = None
    max_ngram: int = 0
    own_cache: bool = False
    cache: PagedKVCache | None = None

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.model is not None or self.max_ngram > 0

    def drafter(
        self,
        target: Model,
        target_cache: PagedKVCache,
        heads: tuple[Head, ...],
        *,
        lookahead: bool,
        max_model_len: int,
        window: int | None,
        prefill_chunk: int,
        page_size: int | None,
        recorder: Recorder | None = None,
    ) -> Drafter:
        """The drafter, scoring the history with `heads` (see `DraftModel` for the rest)."""
        if self.model is None:
            return LookupDrafter(self.max_ngram) if self.max_ngram else NoDrafter()
        if self.own_cache and self.cache is None:
            slots, taken = target_cache.num_slots, target_cache.nbytes
            self.cache = make_cache(self.model, max_model_len, slots, page_size, beside=taken)
        return (DraftModel if self.own_cache else LayerSkipDraft)(
            make_engine(self.model, self.cache or target_cache, heads, recorder),
            target.spec.vocab_size,
            lookahead=lookahead,
            cache_window=window,
            prefill_chunk=prefill_chunk,
        )


def plain_draft(draft: Any) -> Draft | None:
    """What `draft=` names where that is no model: "none" or "lookup:N"; else None.

    Raises
    ------
    ValueError
        A lookup of no tokens.
    """
    if draft is None or draft == "none":
        return Draft("none")
    word, _, rest = draft.partition(":") if isinstance(draft, str) else ("", "", "")
    if word != "lookup":
        return None
    if rest and (not rest.isdecimal() or int(rest) < 1):
        raise ValueError(f"draft {draft!r}: write lookup or lookup:N, N at least 1 token")
    return Draft(word, max_ngram=int(rest or 3))


def load_draft(
    draft: str | Path | PreTrainedModel | None,
    target: CausalLM,
    target_tokenizer: Any,
    draft_tokenizer: Any,
    dtype: Any,
    device: Any,
) -> Draft:
    """Load what `draft=` names.

    Raises
    ------
    ValueError
        A draft that cannot be read, layers the target does not have, another tokenizer.
    FileNotFoundError
        Neither a folder nor one of the words.
    """
    if plain := plain_draft(draft):
        return plain
    word, _, rest = draft.partition(":") if isinstance(draft, str) else ("", "", "")
    if word == "skip":
        try:
            layers = [int(layer) for layer in rest.split(",")]
        except ValueError:
            raise ValueError(
                f"draft {draft!r}: write layer numbers with commas, like skip:14,17"
            ) from None
        return Draft(word, target.without_layers(layers))
    if isinstance(draft, str | Path) and not Path(draft).is_dir():
        raise FileNotFoundError(
            f"draft {str(draft)!r} is neither a folder nor one of skip:LAYERS, lookup, none"
        )
    # Its tokens are the target's own, whatever text they stand for.
    if isinstance(draft, str | Path) and is_shared_draft(draft):
        return Draft("model", load_shared_draft(draft, target), own_cache=True)
    assert draft is not None
    model = load_model(draft, dtype, device)
    if target_tokenizer is not None:
        draft_tokenizer = draft_tokenizer or load_tokenizer(draft)
        if draft_tokenizer is None:
            raise ValueError("the draft comes without a tokenizer to compare: pass draft_tokenizer")
        check_same_tokenizer(target_tokenizer, draft_tokenizer)
    return Draft("model", model, own_cache=True)


def load_model(source: str | Path | PreTrainedModel, dtype: Any, device: Any) -> CausalLM:
    """A checkpoint folder, or a model that is loaded already."""
    if isinstance(source, str | Path):
        return causal_lm.load(source, dtype=torch_dtype(dtype), device=torch_device(device))
    return CausalLM(source)


def torch_dtype(name: torch.dtype | str) -> torch.dtype | str:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(name, torch.dtype) or name == "auto":
        return name
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; there are auto, {', '.join(known)}")
    return known[name]


def torch_device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; there are cpu, cuda, cuda:1, …") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(name)!r} is not there: torch finds {torch.cuda.device_count()} CUDA "
            "devices; use cpu, or see dustin-trt doctor"
        )
    return device


def load_tokenizer(source: Any) -> Any:
    """The tokenizer of a checkpoint folder; None for a loaded model."""
    if not isinstance(source, str | Path):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise FileNotFoundError(f"{source} has no tokenizer that can be read: {first}") from error


def model_len(wanted: int | None, spec: ModelSpec) -> int:
    """`max_model_len`, checked; None means all positions."""
    if wanted is not None and not 1 <= wanted <= spec.max_positions:
        raise ValueError(
            f"max_model_len {wanted} is not in 1–{spec.max_positions}, the positions of the target"
        )
    return wanted or spec.max_positions


def make_engine(
    model: Model, cache: PagedKVCache, heads: tuple[Head, ...], recorder: Recorder | None = None
) -> Engine:
    """The engine that runs a model; a compiled one has the heads it was built with."""
    if isinstance(model, CompiledModel):
        return GraphEngine(model.session, model.graph, cache, recorder)
    return TorchEngine(model, cache, heads, recorder)


def make_cache(
    model: Model,
    length: int,
    slots: int,
    page_size: int | None,
    num_pages: int | None = None,
    beside: int = 0,
) -> PagedKVCache:
    """A cache for `slots` sequences of `length` tokens and a window past them.

    A compiled model's has the page size and the capacity it was built for.
    """
    spec, capacity = model.spec, length + MAX_GAMMA
    if isinstance(model, CompiledModel):
        page_size, capacity = model.graph.page_size, model.graph.capacity
    return PagedKVCache(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_slots=slots,
        capacity=capacity,
        page_size=page_size,
        num_pages=num_pages,
        beside=beside,
        dtype=model.dtype,
        device=model.device,
    )


def make_recorder(target: Model, draft: Model | None) -> Recorder | None:
    """What records the steps of a target and its draft; None where they cannot be recorded.

    That is on a CPU, and where CUDA's kernels do not take a model: torch stands in for them then,
    in ways that look at the data.
    """
    models = [model for model in (target, draft) if model]
    if any(model.device != target.device or not _kernels_take(model) for model in models):
        return None
    return CudaRecorder(target.device)


def _kernels_take(model: Model) -> bool:
    if isinstance(model, CompiledModel):
        return model.device.type == "cuda"
    spec = model.spec
    shape = (0, spec.num_kv_heads, 1, spec.head_dim)
    if model.device.type != "cuda":
        return False
    return cuda.takes(torch.empty(shape, dtype=model.dtype, device=model.device), spec.num_heads)


def end_tokens(generation: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of a checkpoint's generation settings, or else of the tokenizer."""
    ids = getattr(generation, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
