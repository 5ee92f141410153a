"""`LLM`: load a target and a draft, generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from transformers import AutoTokenizer, PreTrainedModel

from dustin_trt.config import (
    ConfigError,
    DustinConfig,
    ModelSpec,
    default_config,
    tokenizer_fingerprint,
)
from dustin_trt.drafting import Drafter, DraftModel, LayerSkipDraft, LookupDrafter, NoDrafter
from dustin_trt.drafting.tokenizers import check_same_tokenizer
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.kv_cache import PagedKVCache
from dustin_trt.models import causal_lm
from dustin_trt.models.causal_lm import CausalLM
from dustin_trt.policies import POLICIES, DustinPolicy, Policy
from dustin_trt.policies.dustin import SIGNALS, Signal
from dustin_trt.runtime.decoder import Decoder
from dustin_trt.runtime.sampling_params import RequestError, SamplingParams
from dustin_trt.runtime.sequence import Chunk, Request, RequestOutput
from dustin_trt.runtime.stats import RunStats

MAX_GAMMA = 16
"""Longest draft; every slot keeps room for a window of it past its last token."""


class TokensPrompt(TypedDict):
    """A prompt that is tokens already."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt


class LLM:
    """A target, a draft and a policy, ready to generate.

    Parameters
    ----------
    target : folder of a Hugging Face checkpoint, or a loaded model
    draft : "none" or None; "lookup" or "lookup:N" (n-grams of up to N tokens); "skip:14,17" (the
        target without these layers, on the target's cache); or a folder of, or a loaded, draft
        model with the target's tokenizer
    config : `dustin.json`, or a DustinConfig; None uses an uncalibrated default
    policy : "dense", "dustin", "streaming" or "oracle"; None is "dustin" with a draft or a
        configuration, else "dense"
    budget, gamma : override the configuration's k and Γ
    signal : for "dustin": "hybrid", "history" or "lookahead"; None is "hybrid", or "history" where
        the draft has no attention to look ahead with
    join : for "dustin": "split" or "sum", overrides the configuration
    heads : for "dustin": "all" scores every head of both models, slow but thorough; None those of
        the configuration
    draft_window : history tokens a draft model itself reads; None reads all
    dtype : of weights and cache; "auto" takes the checkpoint's
    device : "cpu" or a CUDA device
    tokenizer : where target is a loaded model; None then allows token prompts only
    draft_tokenizer : where draft is a loaded model
    max_batch_size : sequences decoded at a time
    max_model_len : prompt and generated tokens of a request at most; None means as many as both
        models have positions for
    page_size : tokens a cache page; None makes one page a slot, which torch reads fastest
    prefill_chunk : prompt tokens a forward pass
    record_selections : keep what each verification pass read in `RequestOutput.selections`

    Raises
    ------
    ValueError
        (and its kinds ConfigError, UnsupportedModelError, TokenizerMismatchError) for what does
        not fit together; FileNotFoundError; MemoryError.

    Examples
    --------
    >>> llm = LLM("SmolLM2-135M-Instruct", draft="skip:14,17")      # doctest: +SKIP
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        target: str | Path | PreTrainedModel,
        draft: str | Path | PreTrainedModel | None = None,
        *,
        config: str | Path | DustinConfig | None = None,
        policy: str | None = None,
        budget: int | None = None,
        gamma: int | None = None,
        signal: Signal | None = None,
        join: Literal["split", "sum"] | None = None,
        heads: Literal["all"] | None = None,
        draft_window: int | None = 512,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        page_size: int | None = None,
        prefill_chunk: int = 512,
        record_selections: bool = False,
        on_prefill: Callable[[Request, int], None] | None = None,
    ) -> None:
        if max_batch_size < 1 or prefill_chunk < 1:
            raise ValueError("max_batch_size and prefill_chunk must be at least 1")
        if isinstance(config, str | Path):  # the cheapest mistakes first
            config = DustinConfig.load(config)
        self._target_model = _model(target, dtype, device)
        self.tokenizer = tokenizer or _tokenizer(target)
        spec = self._target_model.spec
        self._cache = _cache(
            self._target_model, _model_len(max_model_len, spec), max_batch_size, page_size
        )
        self._options: dict[str, Any] = {
            "draft": draft, "config": config, "policy": policy, "budget": budget, "gamma": gamma,
            "signal": signal, "join": join, "heads": heads, "draft_window": draft_window,
            "draft_tokenizer": draft_tokenizer, "dtype": dtype, "device": device,
            "max_batch_size": max_batch_size, "prefill_chunk": prefill_chunk,
            "page_size": page_size, "record_selections": record_selections,
            "on_prefill": on_prefill,
        }  # fmt: skip
        self.eos = _end_tokens(self._target_model, self.tokenizer)
        self._assemble()

    def variant(self, **options: Any) -> LLM:
        """Another way to decode with the same weights and the same cache.

        Takes the keyword arguments of the constructor that do not concern the target. Prompts that
        one variant has cached need no second prefill in another; they must not run at once.

        Examples
        --------
        >>> plain = llm.variant(draft="none", policy="dense")           # doctest: +SKIP
        """
        if unknown := sorted(options.keys() - self._options.keys() - {"draft"}):
            raise TypeError(f"variant() does not take {', '.join(unknown)}")
        if fixed := sorted(options.keys() & {"dtype", "device", "page_size", "max_batch_size"}):
            raise TypeError(f"a variant shares its target's {', '.join(fixed)}")
        twin = object.__new__(LLM)
        twin._target_model, twin.tokenizer = self._target_model, self.tokenizer
        twin._cache, twin.eos = self._cache, self.eos
        if isinstance(options.get("config"), str | Path):
            options["config"] = DustinConfig.load(options["config"])
        twin._options = {**self._options, **options}
        twin._assemble()
        return twin

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the prompts' order.

        Parameters
        ----------
        prompts : one or more texts or `{"prompt_token_ids": [...]}`
        sampling_params : one for all, or one each

        Raises
        ------
        RequestError
            Before any work, for a prompt that cannot be served; the message counts prompts from 0.
            A request that fails later has `finish_reason` "error" and leaves the others alone.
        """
        prompts = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        outputs = {
            chunk.key: chunk.output for chunk in self.stream(prompts, sampling_params)
            if chunk.output
        }  # fmt: skip
        return [outputs[key] for key in range(len(prompts))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Chunk]:
        """The same as `generate`, piece by piece: a Chunk a request and step.

        `Chunk.key` is the prompt's index; the last chunk of a request carries its output.
        """
        prompts = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        params = (
            list(sampling_params)
            if isinstance(sampling_params, Sequence)
            else [sampling_params or SamplingParams()] * len(prompts)
        )
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
        requests = []
        for key, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.request(key, prompt, param))
            except RequestError as error:
                raise RequestError(f"prompt {key}: {error}") from error
        return self.decoder.run(requests)

    def request(self, key: Any, prompt: Prompt, params: SamplingParams) -> Request:
        """Check and tokenize one prompt.

        Raises
        ------
        RequestError
            Empty, too long for the models with what is to be generated, unknown token ids, or text
            without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer: pass prompt_token_ids")
            tokens = list(self.tokenizer(prompt, verbose=False).input_ids)
        elif isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            tokens = list(prompt["prompt_token_ids"])
        else:
            raise RequestError('a prompt is a text or {"prompt_token_ids": [...]}')
        if not tokens:
            raise RequestError("the prompt is empty")
        vocabulary = self._target_model.spec.vocab_size
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(f"token ids are integers, not {token!r}")
            if not 0 <= token < vocabulary:
                raise RequestError(f"token id {token} is not in the vocabulary of {vocabulary}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer: use stop_token_ids")
        total = len(tokens) + params.max_tokens
        if total > self.max_model_len or not self._cache.fits(total + self.gamma):
            raise RequestError(
                f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} are {total}, more "
                f"than the {self.max_model_len} tokens there is room for: shorten the prompt, "
                "lower max_tokens"
                + (" or raise max_model_len" if self.max_model_len < self._position_limit else "")
            )
        return Request(key, tokens, params)

    @property
    def stats(self) -> RunStats:
        """Totals of the last `generate` or `stream`."""
        return self.decoder.stats

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's weights and cache."""
        return self._target_model.dtype

    @property
    def scoring_share(self) -> float:
        """Keys read to score the history in a step, over the target's K and V of a full read."""
        spec = self._target_model.spec
        full = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        read = sum(model.num_kv_heads_of(heads) * model.head_dim for model, heads in self._scored)
        return read / full

    def _assemble(self) -> None:
        """Put draft, configuration and policy together around the target and its cache."""
        options, spec = self._options, self._target_model.spec
        draft_model, kind = self._draft()
        draft_spec = draft_model.spec if draft_model else None
        self._position_limit = min(
            spec.max_positions, draft_spec.max_positions if draft_spec else spec.max_positions
        )
        self.max_model_len = min(self._cache.capacity - MAX_GAMMA, self._position_limit)
        self.config = self._config(spec, draft_model)
        self.gamma = self.config.gamma
        policy = self._policy(kind)
        target_heads = self.config.target_heads if policy.needs_history else ()
        draft_heads = self.config.draft_heads if policy.needs_lookahead else ()
        self._scored = [(spec, target_heads), (draft_spec or spec, draft_heads)]
        target_engine = TorchEngine(self._target_model, self._cache, target_heads)
        drafter = self._drafter(kind, draft_model, draft_heads)
        self.decoder = Decoder(
            target_engine,
            drafter,
            policy,
            gamma=self.gamma,
            tokenizer=self.tokenizer,
            eos=self.eos,
            max_batch_size=options["max_batch_size"],
            prefill_chunk=options["prefill_chunk"],
            record_selections=options["record_selections"],
            on_prefill=options["on_prefill"],
        )

    def _draft(self) -> tuple[CausalLM | None, str]:
        """The draft's model, where it is one, and its kind: none, lookup:N, skip or model."""
        draft = self._options["draft"]
        if draft is None or draft == "none":
            return None, "none"
        if isinstance(draft, str) and draft.partition(":")[0] == "lookup":
            return None, draft
        if isinstance(draft, str) and draft.startswith("skip:"):
            try:
                layers = [int(layer) for layer in draft.removeprefix("skip:").split(",")]
            except ValueError:
                raise ValueError(
                    f"draft {draft!r}: write layer numbers with commas, like skip:14,17"
                ) from None
            return self._target_model.without_layers(layers), "skip"
        if isinstance(draft, str | Path) and not Path(draft).is_dir():
            raise FileNotFoundError(
                f"draft {str(draft)!r} is neither a folder nor one of skip:LAYERS, lookup, none"
            )
        model = _model(draft, self._options["dtype"], self._options["device"])
        tokenizer = self._options["draft_tokenizer"] or _tokenizer(draft)
        if self.tokenizer is not None and tokenizer is None:
            raise ValueError("the draft comes without a tokenizer to compare: pass draft_tokenizer")
        if self.tokenizer is not None:
            check_same_tokenizer(self.tokenizer, tokenizer)
        return model, "model"

    def _config(self, spec: ModelSpec, draft: CausalLM | None) -> DustinConfig:
        options = self._options
        draft_spec = draft.spec if draft else None
        config: DustinConfig = options["config"] or default_config(spec, draft_spec)
        changes = {
            name: value for name in ("budget", "gamma", "join")
            if (value := options[name]) is not None
        }  # fmt: skip
        if options["budget"] is not None and config.lookahead is not None:
            # m was tuned for the configured budget; another budget keeps its share.
            free = max(0, options["budget"] - config.sink - config.window)
            changes["lookahead"] = round(config.lookahead * free / max(1, config.free))
        if options["heads"] == "all":
            changes["target_heads"] = spec.all_heads()
            changes["draft_heads"] = draft_spec.all_heads() if draft_spec else ()
        config = config.replace(**changes)
        if config.gamma > MAX_GAMMA:
            raise ConfigError(f"gamma {config.gamma} is more than {MAX_GAMMA}: lower it")
        fingerprint = tokenizer_fingerprint(self.tokenizer) if self.tokenizer else None
        config.check(spec, draft_spec, fingerprint)
        if draft is not None:  # a layer that is skipped has no queries to score with
            heads = tuple(head for head in config.draft_heads if head.layer in draft.layers)
            config = config.replace(draft_heads=heads)
        return config

    def _policy(self, kind: str) -> Policy:
        options = self._options
        name = options["policy"]
        if name is None:
            name = "dense" if kind == "none" and options["config"] is None else "dustin"
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
        if name != "dustin":
            return POLICIES[name](self.config)
        has_lookahead = kind in ("skip", "model")
        signal: Signal = options["signal"] or ("hybrid" if has_lookahead else "history")
        if signal not in SIGNALS:
            raise ValueError(f"unknown signal {signal!r}; there are {', '.join(SIGNALS)}")
        policy = DustinPolicy(self.config, signal)
        if policy.needs_lookahead and not has_lookahead:
            raise ValueError(
                f"signal {signal!r} needs a draft with attention (a model or skip:LAYERS); with "
                f"draft {kind!r} use signal 'history'"
            )
        if policy.needs_history and not self.config.target_heads:
            raise ConfigError("the configuration names no target_heads to score the history with")
        if policy.needs_lookahead and not self.config.draft_heads:
            raise ConfigError("the configuration names no draft_heads that this draft has")
        return policy

    def _drafter(self, kind: str, model: CausalLM | None, heads: tuple) -> Drafter:
        if kind == "none":
            return NoDrafter()
        if model is None:
            size = kind.partition(":")[2]
            if size and not size.isdecimal():
                raise ValueError(f"draft {kind!r}: write lookup or lookup:N, N an n-gram's length")
            return LookupDrafter(int(size)) if size else LookupDrafter()
        options = self._options
        cache = self._cache
        if kind == "model":
            cache = _cache(model, self.max_model_len, cache.num_slots, options["page_size"])
        return (LayerSkipDraft if kind == "skip" else DraftModel)(
            TorchEngine(model, cache, heads),
            self._target_model.spec.vocab_size,
            cache_window=options["draft_window"],
            prefill_chunk=options["prefill_chunk"],
        )


def _model(source: str | Path | PreTrainedModel, dtype: Any, device: Any) -> CausalLM:
    if isinstance(source, str | Path):
        return causal_lm.load(source, dtype=_dtype(dtype), device=_device(device))
    return CausalLM(source)


def _dtype(name: torch.dtype | str) -> torch.dtype | str:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(name, torch.dtype) or name == "auto":
        return name
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; there are auto, {', '.join(known)}")
    return known[name]


def _device(name: torch.device | str) -> torch.device:
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


def _tokenizer(source: Any) -> Any:
    if not isinstance(source, str | Path):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise FileNotFoundError(f"{source} has no tokenizer that can be read: {first}") from error


def _model_len(wanted: int | None, spec: ModelSpec) -> int:
    if wanted is not None and not 1 <= wanted <= spec.max_positions:
        raise ValueError(
            f"max_model_len {wanted} is not in 1–{spec.max_positions}, the positions of the target"
        )
    return wanted or spec.max_positions


def _cache(model: CausalLM, length: int, slots: int, page_size: int | None) -> PagedKVCache:
    spec = model.spec
    return PagedKVCache(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_slots=slots,
        capacity=length + MAX_GAMMA,
        page_size=page_size,
        dtype=model.dtype,
        device=model.device,
    )


def _end_tokens(model: CausalLM, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the checkpoint's generation settings, or else of the tokenizer."""
    generation = getattr(model.model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
