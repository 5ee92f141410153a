"""A calibration recipe: which pair, which texts, which limits; and the texts it names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dustin_trt.calibration.samples import AGES
from dustin_trt.config import ConfigError, one_line
from dustin_trt.evaluation import assets, texts
from dustin_trt.evaluation.retrieval import QUESTIONS


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Texts(_Part):
    """Long texts to look at windows of.

    texts : files, relative to the recipe's folder, or `books:NAME` and `austen:NAME`, which the
        demo fetches
    context : history tokens before the first window of each text
    windows, stride : windows a text and context, and tokens from one to the next
    """

    texts: tuple[str, ...] = Field(min_length=1)
    context: tuple[Annotated[int, Field(gt=max(AGES))], ...] = Field(min_length=1)
    windows: int = Field(default=8, ge=1)
    stride: int = Field(default=64, ge=32)


class Prompts(_Part):
    """Questions whose answer stands in a long text (`evaluation.retrieval`).

    texts : haystacks, taking turns
    length : tokens a prompt
    count : prompts; 0 for none
    kinds : of `QUESTIONS`
    """

    texts: tuple[str, ...] = Field(min_length=1)
    length: int = Field(ge=128)
    count: int = Field(ge=0)
    kinds: tuple[str, ...] = Field(default=tuple(QUESTIONS), min_length=1)

    @model_validator(mode="after")
    def _kinds_exist(self) -> Prompts:
        if unknown := sorted(set(self.kinds) - set(QUESTIONS)):
            raise ValueError(
                f"unknown kinds {', '.join(unknown)}; there are {', '.join(QUESTIONS)}"
            )
        return self


class Search(_Part):
    """What is searched, how far.

    budgets : k at which selections are valued, equally
    candidates : KV heads of each model that may be chosen, by semantic-retrieval-head score
    max_target_kv_heads, max_draft_kv_heads : KV heads scored at most
    min_gain : a KV head must add this much to the value to be taken
    recall_weight : of the answer's recall against the windowed attention recovery rate
    trials : of Optuna
    tolerance : how much value may be given up for speed
    max_gamma : longest draft that is tried
    sinks, windows : what is tried for the first and last tokens
    """

    budgets: tuple[PositiveInt, ...] = Field(default=(512, 128), min_length=1)
    candidates: int = Field(default=32, ge=1)
    max_target_kv_heads: int = Field(default=12, ge=1)
    max_draft_kv_heads: int = Field(default=4, ge=0)
    min_gain: float = Field(default=0.001, gt=0)
    recall_weight: float = Field(default=1.0, ge=0)
    trials: int = Field(default=100, ge=1)
    tolerance: float = Field(default=0.005, ge=0)
    max_gamma: int = Field(default=6, ge=1, le=16)
    sinks: tuple[NonNegativeInt, ...] = Field(default=(1, 2, 4, 8, 16), min_length=1)
    windows: tuple[NonNegativeInt, ...] = Field(default=(8, 16, 32, 64), min_length=1)


class Serving(_Part):
    """What the speed of a choice is predicted for: bytes read by a step of `batch` rows.

    batch : rows a step
    context : history tokens a row
    """

    batch: int = Field(default=8, ge=1)
    context: int = Field(default=8000, ge=1)


class Check(_Part):
    """What is looked at in the end, on texts the search never saw.

    texts : as in the search
    pass_keys : pass-key prompts to answer in the real loop; None for none
    budgets : k of the curves
    fidelity_budgets : k at which logits are compared
    answer_budgets : k at which pass keys are looked for
    """

    texts: Texts
    pass_keys: Prompts | None = None
    budgets: tuple[int, ...] = (64, 128, 256, 512, 1024)
    fidelity_budgets: tuple[int, ...] = (128, 256, 512)
    answer_budgets: tuple[int, ...] = (128, 256, 512)


class Limits(_Part):
    """When a run stops (everything saved) or refuses to start.

    minutes : of one run; None for no limit
    memory_gib : what weights, caches and profile may take by estimate; None for no limit
    """

    minutes: float | None = Field(default=None, gt=0)
    memory_gib: float | None = Field(default=None, gt=0)


class Recipe(_Part):
    """One pair and how it is calibrated; `calibration/recipes/*.yaml`.

    name : of the pair
    target, draft : checkpoint folders, relative to the recipe's own; `assets:smollm2` is the demo's
        model, and a draft may be `skip:LAYERS`
    dtype : as `LLM` takes it; a calibration runs on the CPU
    seed : of everything random
    budget : k of the configuration that is written
    draft_window : history tokens the draft itself reads, 0 for all
    guard_share : share of the searched windows that the guard would verify densely
    head_scores : prompts for the semantic-retrieval-head scores
    texts, prompts : what the search is done on
    """

    name: str = Field(min_length=1)
    target: str
    draft: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = 0
    budget: int = Field(default=512, ge=1)
    draft_window: int = Field(default=512, ge=0)
    guard_share: float = Field(default=0.02, ge=0, le=1)
    head_scores: Prompts
    texts: Texts
    prompts: Prompts
    search: Search = Search()
    serving: Serving = Serving()
    check: Check
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _is_fair(self) -> Recipe:
        seen = {*self.texts.texts, *self.prompts.texts, *self.head_scores.texts}
        judged = {*self.check.texts.texts}
        if self.check.pass_keys:
            judged.update(self.check.pass_keys.texts)
        if shared := sorted(seen & judged):
            raise ValueError(
                f"{', '.join(shared)} is both searched and checked: what judges a choice must not "
                "have made it"
            )
        if not self.head_scores.count:
            raise ValueError("head_scores.count must be at least 1: candidates come from them")
        always = max(self.search.sinks) + max(self.search.windows)
        if (least := min(self.budget, *self.check.answer_budgets)) <= always:
            raise ValueError(
                f"search.sinks and search.windows can take {always} tokens, and a budget is {least}"
            )
        looked_at = {self.budget, *self.check.fidelity_budgets}
        if missing := sorted(looked_at - {*self.check.budgets}):
            raise ValueError(
                f"check.budgets must list {missing} too, which are looked at more closely"
            )
        return self

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read a recipe.

        Raises
        ------
        ConfigError
            Missing file, malformed YAML, unknown field, wrong value; names the field.
        """
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"recipe {path} is not YAML: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(f"recipe {path} is not a mapping of fields")
        _place_all(fields, path.parent)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"recipe {path}: {one_line(error)}") from error

    def fingerprint(self) -> str:
        """SHA-256 of everything in it that decides the result; the models have their own."""
        fields = self.model_dump(mode="json", exclude={"limits", "target", "draft"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


_WORDS = ("assets", "skip", *texts.WORDS)


def _place_all(fields: Any, folder: Path) -> None:
    """Make every file and folder that a recipe names findable from anywhere, in place."""
    if isinstance(fields, dict):
        for name, value in fields.items():
            if name in ("target", "draft") and isinstance(value, str):
                fields[name] = _place(value, folder)
            elif name == "texts" and isinstance(value, list):
                fields[name] = [_place(v, folder) if isinstance(v, str) else v for v in value]
            else:
                _place_all(value, folder)


def _place(name: str, folder: Path) -> str:
    """A path relative to the recipe's folder; what begins with one of the words stays."""
    if name.partition(":")[0] in _WORDS:
        return name
    return str((folder / Path(name).expanduser()).resolve())


def find_model(model: str) -> str:
    """The folder that a recipe's `assets:NAME` means, fetched if need be; others as they are.

    Raises
    ------
    ConfigError
        An asset that does not exist.
    """
    word, _, name = model.partition(":")
    if word != "assets":
        return model
    found = {"smollm2": assets.smollm2}.get(name)
    if not found:
        raise ConfigError(f"there is no asset {name!r}; there is smollm2")
    return str(found())
