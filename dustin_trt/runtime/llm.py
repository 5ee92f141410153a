"""`LLM`: load a target and a draft, generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from transformers import PreTrainedModel

from dustin_trt.config import (
    ConfigError,
    DustinConfig,
    ModelSpec,
    default_config,
    tokenizer_fingerprint,
)
from dustin_trt.engines.compiled import CompiledModel, EngineFolder
from dustin_trt.engines.manifest import TOKENIZER
from dustin_trt.fingerprint import weights_fingerprint
from dustin_trt.models.causal_lm import CausalLM
from dustin_trt.policies import POLICIES, DustinPolicy, Policy
from dustin_trt.policies.dustin import SIGNALS, Signal
from dustin_trt.runtime.decoder import Decoder
from dustin_trt.runtime.loading import (
    MAX_GAMMA,
    Draft,
    Model,
    end_tokens,
    load_draft,
    load_model,
    load_tokenizer,
    make_cache,
    make_engine,
    make_recorder,
    model_len,
    plain_draft,
)
from dustin_trt.runtime.sampling_params import RequestError, SamplingParams
from dustin_trt.runtime.sequence import Chunk, Request, RequestOutput
from dustin_trt.runtime.stats import RunStats


class TokensPrompt(TypedDict):
    """A prompt that is tokens already."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt


class LLM:
    """A target, a draft and a policy, ready to generate.

    Parameters
    ----------
    target : folder of a Hugging Face checkpoint, or a loaded model; None with `engine_dir`
    draft : "none" or None; "lookup" or "lookup:N" (n-grams of up to N tokens); "skip:14,17" (the
        target without these layers, on the target's cache); or a folder of, or a loaded, draft
        model with the target's tokenizer
    config : `dustin.json`, or a DustinConfig; None uses an uncalibrated default. Refused where
        shapes, tokenizer or weights differ from those it was made for; weights are compared where
        the model comes from a folder, not those of a loaded model.
    policy : "dense", "dustin", "streaming" or "oracle"; None is "dustin" with a draft or a
        configuration, else "dense"
    budget, gamma : override the configuration's k and Γ
    guard : for "dustin", overrides the configuration's: a row whose coverage of the history score
        is below it is verified densely for that step, so that a hard input costs speed and not
        quality; 0 is off, 1 verifies every row densely. Signal "lookahead" scores no history, so
        that nothing is guarded. A configuration's own guard belongs to its heads and budget:
        another `budget` or `heads` turns it off.
    signal : for "dustin": "hybrid", "history" or "lookahead"; None is "hybrid", or "history" where
        the draft has no attention to look ahead with or the configuration no heads for it
    join : for "dustin": "split" or "sum", overrides the configuration
    heads : for "dustin": "all" scores every head of both models, slow but thorough; None those of
        the configuration
    draft_window : history tokens a draft model itself reads, overrides the configuration; 0 reads
        all
    dtype : of weights and cache; "auto" takes the checkpoint's
    device : "cpu" (the default for checkpoints) or a CUDA device (the default for compiled
        engines); a loaded model stays where it is
    cuda_graphs : on a GPU, record the steps as CUDA graphs and replay them, which saves the time to
        queue thousands of launches a step and takes some memory. Without effect on a CPU, and where
        CUDA's kernels do not take the models (fp32, unusual heads), which then run eagerly
    tokenizer : where target is a loaded model; None then allows token prompts only
    draft_tokenizer : where draft is a loaded model
    max_batch_size : sequences decoded at a time; None means 8, or what an engine folder holds
    max_model_len : prompt and generated tokens of a request at most; None means as many as both
        models have positions for
    page_size : tokens a cache page; None makes one page a slot, which torch reads fastest. Fixed in
        an engine folder
    num_pages : pages of the pool; fewer than every slot could fill makes requests wait for room
    prefill_chunk : prompt tokens a forward pass
    record_selections : keep what each verification pass read in `RequestOutput.selections`
    engine_dir : folder that `dustin-trt build` made, in the place of target, draft and
        configuration: the same loop over compiled steps. Its draft is the default; "none" and
        "lookup" do without it. What was compiled in (heads, budget, join, page size, …) cannot
        be changed: asking for other values is refused. `gamma` can be lower, `guard` any.

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
        target: str | Path | PreTrainedModel | None = None,
        draft: str | Path | PreTrainedModel | None = None,
        *,
        engine_dir: str | Path | None = None,
        config: str | Path | DustinConfig | None = None,
        policy: str | None = None,
        budget: int | None = None,
        gamma: int | None = None,
        signal: Signal | None = None,
        join: Literal["split", "sum"] | None = None,
        heads: Literal["all"] | None = None,
        guard: float | None = None,
        draft_window: int | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        cuda_graphs: bool = True,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        max_batch_size: int | None = None,
        max_model_len: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        prefill_chunk: int = 512,
        record_selections: bool = False,
        on_prefill: Callable[[Request, int], None] | None = None,
    ) -> None:
        if (max_batch_size is not None and max_batch_size < 1) or prefill_chunk < 1:
            raise ValueError("max_batch_size and prefill_chunk must be at least 1")
        if isinstance(config, str | Path):  # the cheapest mistakes first
            config = DustinConfig.load(config)
        self._folder: EngineFolder | None = None
        if engine_dir is not None:
            if target is not None or dtype != "auto" or heads is not None or page_size is not None:
                raise ValueError(
                    "engine_dir is in the place of target, dtype, heads and page_size: they are "
                    "compiled in"
                )
            self._folder = EngineFolder.load(engine_dir)
            max_model_len = _within(self._folder, "max_context", max_model_len)
            max_batch_size = _within(self._folder, "max_batch", max_batch_size)
            device = self._folder.device(device)
            self._target_model: Model = self._folder.target(device)
            source: Any = self._folder.path / TOKENIZER
            source = source if source.is_dir() else None
        elif target is None:
            raise ValueError("name a target, or an engine_dir")
        else:
            device = device or "cpu"
            self._target_model = load_model(target, dtype, device)
            source = target
        self.tokenizer = tokenizer or load_tokenizer(source)
        spec = self._target_model.spec
        max_batch_size = max_batch_size or 8
        self._cache = make_cache(
            self._target_model,
            model_len(max_model_len, spec),
            max_batch_size,
            page_size,
            num_pages,
        )
        self._max_model_len = max_model_len
        self._options: dict[str, Any] = {
            "draft": draft, "config": config, "policy": policy, "budget": budget, "gamma": gamma,
            "signal": signal, "join": join, "heads": heads, "guard": guard,
            "draft_window": draft_window, "draft_tokenizer": draft_tokenizer,
            "dtype": dtype, "device": device, "cuda_graphs": cuda_graphs,
            "max_batch_size": max_batch_size, "prefill_chunk": prefill_chunk,
            "page_size": page_size, "record_selections": record_selections,
            "on_prefill": on_prefill,
        }  # fmt: skip
        self._target_source = target
        self._fingerprints: dict[str, dict[str, str]] = {}
        if isinstance(self._target_model, CausalLM):
            generation = getattr(self._target_model.model, "generation_config", None)
            self.eos = end_tokens(generation, self.tokenizer)
        else:
            assert self._folder
            self.eos = frozenset(self._folder.manifest.eos)
        self._draft = self._load_draft()
        self._assemble()

    def variant(self, **options: Any) -> LLM:
        """Another way to decode with the same weights and the same cache.

        Takes the keyword arguments of the constructor that do not concern the target. Prompts that
        one variant has cached need no second prefill in another; they must not run at once.

        Examples
        --------
        >>> plain = llm.variant(draft="none", policy="dense")           # doctest: +SKIP
        """
        if unknown := sorted(options.keys() - self._options.keys()):
            raise TypeError(f"variant() does not take {', '.join(unknown)}")
        if fixed := sorted(options.keys() & {"dtype", "device", "page_size", "max_batch_size"}):
            raise TypeError(f"a variant shares its target's {', '.join(fixed)}")
        twin = object.__new__(LLM)
        twin._target_model, twin.tokenizer = self._target_model, self.tokenizer
        twin._cache, twin.eos = self._cache, self.eos
        twin._folder, twin._max_model_len = self._folder, self._max_model_len
        if isinstance(options.get("config"), str | Path):
            options["config"] = DustinConfig.load(options["config"])
        twin._options = {**self._options, **options}
        same = not options.keys() & {"draft", "draft_tokenizer"}
        twin._draft = self._draft if same else twin._load_draft()
        twin._target_source, twin._fingerprints = self._target_source, self._fingerprints.copy()
        if not same:
            twin._fingerprints.pop("draft", None)
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
            ids = prompt["prompt_token_ids"]
            if not isinstance(ids, Sequence):
                raise RequestError("prompt_token_ids is a list of integers")
            tokens = list(ids)
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

    def _load_draft(self) -> Draft:
        options, target = self._options, self._target_model
        if isinstance(target, CompiledModel):
            return self._compiled_draft(target)
        return load_draft(
            options["draft"],
            target,
            self.tokenizer,
            options["draft_tokenizer"],
            options["dtype"],
            options["device"],
        )

    def _compiled_draft(self, target: CompiledModel) -> Draft:
        """The engine folder's draft, or one that needs no model."""
        draft = self._options["draft"]
        assert self._folder
        if draft is None and (model := self._folder.draft(target.device)):
            return Draft("model", model, own_cache=True)
        plain = plain_draft(draft)
        if plain is None:
            raise ValueError(
                f"draft {str(draft)!r} with an engine folder: leave it out for the folder's own, "
                "or say none or lookup"
            )
        return plain

    def _assemble(self) -> None:
        """Put draft, configuration and policy together around the target and its cache."""
        options, target = self._options, self._target_model
        draft_model = self._draft.model
        positions = [model.spec.max_positions for model in (target, draft_model) if model]
        self._position_limit = min(positions)
        self.max_model_len = min(self._cache.capacity - MAX_GAMMA, self._position_limit)
        if self._max_model_len is not None:
            self.max_model_len = min(self.max_model_len, self._max_model_len)
        self.config = self._config(target.spec, draft_model)
        self.gamma = self.config.gamma
        policy = self._policy()
        target_heads = self.config.target_heads if policy.needs_history else ()
        draft_heads = self.config.draft_heads if policy.needs_lookahead else ()
        self._scored = [(target.spec, target_heads)]
        if draft_model:
            self._scored.append((draft_model.spec, draft_heads))
        recorder = make_recorder(target, draft_model) if options["cuda_graphs"] else None
        drafter = self._draft.drafter(
            target,
            self._cache,
            draft_heads,
            lookahead=policy.needs_lookahead,
            max_model_len=self.max_model_len,
            window=self.config.draft_window or None,
            prefill_chunk=options["prefill_chunk"],
            page_size=options["page_size"],
            recorder=recorder,
        )
        self.decoder = Decoder(
            make_engine(target, self._cache, target_heads, recorder),
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

    def _config(self, spec: ModelSpec, draft: Model | None) -> DustinConfig:
        options = self._options
        draft_spec, layers = (draft.spec, draft.layers) if draft else (None, ())
        built = self._folder.manifest.config if self._folder else None
        config: DustinConfig = (
            options["config"] or built or default_config(spec, draft_spec, layers)
        )
        changes = {
            name: value for name in ("budget", "gamma", "join", "guard", "draft_window")
            if (value := options[name]) is not None
        }  # fmt: skip
        if options["budget"] is not None and config.lookahead is not None:
            # m was tuned for the configured budget; another budget keeps its share.
            free = max(0, options["budget"] - config.sink - config.window)
            changes["lookahead"] = round(config.lookahead * free / max(1, config.free))
        if options["guard"] is None and (
            options["heads"] == "all" or changes.get("budget", config.budget) != config.budget
        ):
            changes["guard"] = None  # a threshold of coverage belongs to its heads and budget
        if options["heads"] == "all":
            changes["target_heads"] = spec.all_heads()
            changes["draft_heads"] = draft_spec.all_heads(layers) if draft_spec else ()
        config = config.replace(**changes)
        if config.gamma > MAX_GAMMA:
            raise ConfigError(f"gamma {config.gamma} is more than {MAX_GAMMA}: lower it")
        if self._folder:
            self._folder.check_config(config)
        fingerprint = tokenizer_fingerprint(self.tokenizer) if self.tokenizer else None
        config.check(
            spec,
            draft_spec,
            fingerprint,
            self._weights("target", self._target_source, config.target_weights),
            self._weights("draft", options["draft"], config.draft_weights),
        )
        if draft and (lost := [head for head in config.draft_heads if head.layer not in layers]):
            raise ConfigError(
                f"draft_heads: this draft skips layer {lost[0].layer}, so nothing scores with it; "
                "use the draft that the configuration was made for"
            )
        return config

    def _weights(
        self, role: str, source: Any, made_for: dict[str, str] | None
    ) -> dict[str, str] | None:
        """Fingerprint of a model's folder, where it has one and there is one to compare with."""
        own = role == "target" or self._draft.own_cache  # else the draft is no model of its own
        if self._folder and made_for and own:
            known: dict[str, str] = getattr(self._folder.manifest, f"{role}_weights")
            return known or None
        if not made_for or not own or not isinstance(source, str | Path):
            return None
        if role not in self._fingerprints:
            self._fingerprints[role] = weights_fingerprint(source)
        return self._fingerprints[role]

    def _policy(self) -> Policy:
        options = self._options
        name = options["policy"]
        if name is None:
            name = "dustin" if self._draft.drafts or options["config"] or self._folder else "dense"
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
        if name != "dustin":
            return POLICIES[name](self.config)
        has_lookahead = self._draft.model is not None
        looks_ahead = has_lookahead and bool(self.config.draft_heads)
        built = self._folder.manifest.signal if self._folder else None
        signal: Signal = options["signal"] or built or ("hybrid" if looks_ahead else "history")
        if built and signal != built:
            raise ConfigError(
                f"this engine folder was built for signal {built!r}, not {signal!r}: leave signal "
                "out, or build it again"
            )
        if built and built != "history" and not has_lookahead:
            raise ConfigError(
                f"this engine folder was built for signal {built!r}, which needs the folder's own "
                "draft: leave draft out, or choose policy 'dense'"
            )
        if signal not in SIGNALS:
            raise ValueError(f"unknown signal {signal!r}; there are {', '.join(SIGNALS)}")
        policy = DustinPolicy(self.config, signal)
        if policy.needs_lookahead and not has_lookahead:
            raise ValueError(
                f"signal {signal!r} needs a draft with attention (a model or skip:LAYERS); with "
                f"draft {self._draft.name!r} use signal 'history'"
            )
        if policy.needs_history and not self.config.target_heads:
            raise ConfigError("the configuration names no target_heads to score the history with")
        if policy.needs_lookahead and not self.config.draft_heads:
            raise ConfigError("the configuration names no draft_heads to look ahead with")
        return policy


def _within(folder: EngineFolder, name: str, wanted: int | None) -> int:
    """A size that an engine folder bounds, checked; None means all there is."""
    most = {
        "max_context": folder.manifest.max_context,
        "max_batch": folder.manifest.target[0].graph.max_batch,
    }[name]
    if wanted is not None and wanted > most:
        raise ValueError(
            f"{wanted} is more than the {name} {most} that {folder.path} was built for: lower it, "
            "or build the engines again"
        )
    return wanted or most
