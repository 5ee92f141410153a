"""`dustin-trt calibrate`: profile, search, tune, check, report, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dustin_trt.calibration import check, check_results
from dustin_trt.calibration.answers import ROWS, answer_pass_keys
from dustin_trt.calibration.check import POLICIES, Policies
from dustin_trt.calibration.cost import CostModel
from dustin_trt.calibration.pair import Pair, load_pair
from dustin_trt.calibration.profile import head_scores, profile
from dustin_trt.calibration.recipe import Recipe, find_model
from dustin_trt.calibration.results import (
    configuration,
    greedy_path,
    joins_tried,
    trials_tried,
    write_results,
)
from dustin_trt.calibration.samples import AGES, Samples
from dustin_trt.calibration.search import Role, candidate_heads, search_heads
from dustin_trt.calibration.sequences import (
    Passage,
    longest,
    pass_keys,
    question_passages,
    questions,
    text_passages,
)
from dustin_trt.calibration.tune import pick, settle_join, tune
from dustin_trt.calibration.value import Choice, Judge
from dustin_trt.calibration.work import Progress, Quiet, Work
from dustin_trt.config import ConfigError, DustinConfig, Head
from dustin_trt.fingerprint import weights_fingerprint

Heads = dict[Role, tuple[Head, ...]]


def calibrate(
    recipe: Recipe, output: Path, *, resume: bool = False, progress: Progress | None = None
) -> DustinConfig:
    """Calibrate a pair and write `dustin.json`, `results.json` and the report into `output`.

    Every step's result lies in `output/work` as soon as it is there, so that a run that was killed
    goes on with `resume`. The same recipe, models and seed give the same `dustin.json` on one
    machine.

    Raises
    ------
    ConfigError
        A recipe that does not fit the models or the texts; work of another recipe in `output`.
    CalibrationError
        Work that is there already, a full disk, the recipe's limits.
    """
    return _Calibration(recipe, output, resume, progress or Quiet()).run()


class _Calibration:
    """One run; its methods are the steps, in order."""

    def __init__(self, recipe: Recipe, output: Path, resume: bool, progress: Progress) -> None:
        self.recipe = recipe
        self.output = output
        self.progress = progress
        self.target, self.draft = find_model(recipe.target), find_model(recipe.draft)
        self.weights = {
            role: weights_fingerprint(Path(folder)) if Path(folder).is_dir() else {}
            for role, folder in (("target", self.target), ("draft", self.draft))
        }
        made_with = {
            "recipe": recipe.fingerprint(),
            "target weights": self.weights["target"],
            "draft weights": self.weights["draft"],
        }
        self.work = Work(output / "work", made_with, resume, recipe.limits.minutes, progress)

    def run(self) -> DustinConfig:
        recipe, tokenizer, gamma = self.recipe, self.pair.tokenizer, self.recipe.search.max_gamma
        texts = text_passages(tokenizer, recipe.texts, "text", gamma)
        judged = text_passages(tokenizer, recipe.check.texts, "check", gamma)
        asked = questions(tokenizer, recipe.prompts, recipe.seed + 1)
        searched = [*texts, *question_passages(asked, gamma)]
        self._refuse_too_much([*searched, *judged])
        if recipe.check.pass_keys:
            pass_keys(tokenizer, recipe.check.pass_keys, recipe.seed)  # refused now or never
        self.work.begin()

        scores = self._head_scores()
        candidates = self._candidates(scores)
        samples = self._profile(searched, "profile", candidates)
        judge = Judge(samples, recipe.search.budgets, recipe.search.recall_weight)
        greedy = self._search(judge, candidates)
        tuned = self._tune(judge, _choice(greedy[-1]["choice"]), samples)
        choice = _choice(tuned["choice"])
        coverage = torch.cat(
            [
                Policies(some, choice).coverage(recipe.budget)[some.lengths > recipe.budget]
                for some in samples
            ]
        )
        threshold = check.guard_threshold(coverage, recipe.guard_share)
        checked = self._check(judged, choice, threshold)
        config = configuration(recipe, choice, checked, threshold, self.pair, self.weights)
        cost = self.cost
        # What comes loads both models again, with caches for several prompts.
        del judge, samples, self.pair
        checked["pass_keys"] = self._pass_keys(config)
        results = {
            "head_scores": scores,
            "greedy": greedy,
            "trials": tuned["trials"],
            "joins": tuned["joins"],
            "check": checked,
        }
        self.progress.begin("report", 1)
        write_results(
            self.output, recipe, config, cost, self.work.seconds(),
            (Path(self.target).name, Path(self.draft).name), results,
        )  # fmt: skip
        self.progress.advance(1)
        return config

    @cached_property
    def pair(self) -> Pair:
        """Both models."""
        recipe = self.recipe
        return load_pair(
            self.target, self.draft, dtype=recipe.dtype,
            draft_window=recipe.draft_window, length=longest(recipe),
        )  # fmt: skip

    @cached_property
    def cost(self) -> CostModel:
        """Bytes, by the recipe's serving."""
        recipe, pair = self.recipe, self.pair
        element = pair.target.cache.k[0].element_size()
        target, draft = pair.specs
        return CostModel(
            target,
            # A draft may be the target without some of its layers.
            replace(draft, num_layers=len(pair.draft.model.layers)),
            target_weights=pair.target.model.pass_weights * element,
            draft_weights=pair.draft.model.pass_weights * element,
            element=element,
            batch=recipe.serving.batch,
            context=recipe.serving.context,
            draft_window=recipe.draft_window,
        )

    def _refuse_too_much(self, passages: Sequence[Passage]) -> None:
        """Refuse what would not fit the recipe's memory, by estimate."""
        limit, search, pair = self.recipe.limits.memory_gib, self.recipe.search, self.pair
        target, draft = (
            min(search.candidates, spec.num_layers * spec.num_kv_heads)
            * (spec.num_heads // spec.num_kv_heads)
            for spec in pair.specs
        )
        halves, floats = target + search.max_gamma * draft, 2 * search.max_gamma + 1 + len(AGES)
        per_token = 2 * halves + 4 * floats
        profiled = sum(len(p.windows) * p.windows[-1].at * per_token for p in passages)
        caches = {id(e.cache): e.cache.nbytes for e in (pair.target, pair.draft)}
        models = (pair.target.model.pass_weights + pair.draft.model.pass_weights) * (
            pair.target.cache.k[0].element_size()
        )
        held = sum(caches.values()) + models
        if part := self.recipe.check.pass_keys:  # both models again, and several prompts at a time
            token = (
                sum(2 * s.num_layers * s.num_kv_heads * s.head_dim for s in {*pair.specs})
                * pair.target.cache.k[0].element_size()
            )
            held = max(held, models + min(ROWS, part.count) * part.length * token)
        needed = (profiled + held) / 2**30
        if limit and needed > limit:
            raise ConfigError(
                f"this recipe needs about {needed:.1f} GiB ({profiled / 2**30:.1f} of it for the "
                f"profile), more than its limit of {limit:g}: lower texts.windows, context or "
                "search.candidates, or raise limits.memory_gib"
            )

    def _head_scores(self) -> dict[str, list[list[float]]]:
        def make() -> dict[str, list[list[float]]]:
            pair, tell = self.pair, self.work.tell
            prompts = questions(pair.tokenizer, self.recipe.head_scores, self.recipe.seed)
            self.progress.begin("head scores", 2 * sum(len(p.tokens) for p in prompts))
            return {
                "target": head_scores(pair.target, prompts, None, tell).tolist(),
                "draft": head_scores(pair.draft, prompts, pair.draft.model.layers, tell).tolist(),
            }

        return self.work.once("head_scores", make, "head scores")

    def _candidates(self, scores: dict[str, list[list[float]]]) -> Heads:
        count, pair = self.recipe.search.candidates, self.pair
        target, draft = pair.specs
        layers = pair.draft.model.layers
        return {
            "target": candidate_heads(torch.tensor(scores["target"]), target, count),
            "draft": candidate_heads(torch.tensor(scores["draft"]), draft, count, layers),
        }

    def _profile(
        self,
        passages: Sequence[Passage],
        step: str,
        heads: Heads,
        layered: Callable[[Passage], int] = lambda passage: 0,
    ) -> list[Samples]:
        self.progress.begin(step, sum(passage.work for passage in passages))

        def look(passage: Passage) -> Samples:
            return profile(
                self.pair,
                passage.tokens,
                passage.windows,
                gamma=self.recipe.search.max_gamma,
                target_heads=heads["target"],
                draft_heads=heads["draft"],
                layered=layered(passage),
                tell=self.work.tell,
            )

        return [self.work.samples(f"{step}/{p.name}", look, p, step) for p in passages]

    def _search(self, judge: Judge, candidates: Heads) -> list[dict[str, Any]]:
        search = self.recipe.search
        limits: dict[Role, int] = {
            "target": search.max_target_kv_heads,
            "draft": search.max_draft_kv_heads,
        }

        def make() -> list[dict[str, Any]]:
            self.progress.begin("search", sum(limits.values()))
            start = Choice(gamma=min(4, search.max_gamma))
            steps = search_heads(
                judge, self.cost, start, candidates, limits,
                min_gain=search.min_gain, tell=lambda step: self.work.tell(1),
            )  # fmt: skip
            if not steps:
                raise ConfigError("no target head is worth its cost: lower search.min_gain")
            return greedy_path(steps, self.cost)

        return self.work.once("search", make, "search")

    def _tune(self, judge: Judge, start: Choice, samples: Sequence[Samples]) -> dict[str, Any]:
        recipe = self.recipe
        tau = check.acceptance(samples, start.gamma)["tau_by_gamma"]

        def make() -> dict[str, Any]:
            self.progress.begin("tune", recipe.search.trials)
            trials = tune(
                judge, self.cost, start, recipe.search,
                {int(gamma): value for gamma, value in tau.items()},
                budget=recipe.budget, storage=self.work.folder / "optuna.db", seed=recipe.seed,
                tell=lambda done: self.work.tell(1),
            )  # fmt: skip
            picked = pick(trials, recipe.search.tolerance)
            settled = settle_join(judge, picked.choice)
            best = max(settled, key=lambda one: (one[1].total, one[0].join == "sum"))[0]
            if best.share == 0:  # a lookahead of no weight need not be scored
                best = best.replace(draft_heads=())
            return {
                "trials": trials_tried(trials, picked),
                "joins": joins_tried(settled),
                "choice": asdict(best),
            }

        return self.work.once("tune", make, "tune")

    def _check(
        self, passages: Sequence[Passage], choice: Choice, threshold: float | None
    ) -> dict[str, Any]:
        recipe = self.recipe
        heads: Heads = {"target": choice.target_heads, "draft": choice.draft_heads}
        deepest = max(recipe.check.texts.context)
        samples = self._profile(
            passages, "check", heads, lambda p: (choice.gamma + 1) * (p.context == deepest)
        )
        policies = [Policies(some, choice) for some in samples]
        curves = check_results.curves(recipe, passages, policies)
        measured = self._fidelity(passages, policies)
        return {
            **curves,
            "fidelity": check_results.fidelity_rows(recipe, passages, measured, curves["arr"]),
            "acceptance": check.acceptance(samples, choice.gamma),
            "guard": check_results.guard_trade(recipe, policies, measured, threshold),
        }

    def _fidelity(
        self, passages: Sequence[Passage], policies: Sequence[Policies]
    ) -> list[check_results.Measured]:
        budgets = check_results.fidelity_budgets(self.recipe)
        window = policies[0].choice.gamma + 1
        passes = 1 + len(budgets) * len(POLICIES)
        self.progress.begin(
            "fidelity", sum(p.work + len(p.windows) * window * passes for p in passages)
        )

        def measure(passage: Passage, some: Policies) -> check_results.Measured:
            found = check.fidelity(
                self.pair, passage.tokens, some, POLICIES, budgets, self.work.tell
            )
            return {check_results.key(*way): values for way, values in found.items()}

        return [
            self.work.once(f"fidelity-{p.name}", lambda: measure(p, some), "fidelity")  # noqa: B023
            for p, some in zip(passages, policies, strict=True)
        ]

    def _pass_keys(self, config: DustinConfig) -> dict[str, Any] | None:
        part = self.recipe.check.pass_keys
        if part is None or not part.count:
            return None
        return self.work.once(
            "pass_keys",
            lambda: answer_pass_keys(
                self.target, self.draft, self.recipe, config, self.progress, self.work.tell
            ),
            "pass keys",
        )


def _choice(fields: dict[str, Any]) -> Choice:
    """What `asdict` made of a choice, after JSON."""
    heads = {
        name: tuple(Head(*pair) for pair in fields[name])
        for name in ("target_heads", "draft_heads")
    }
    return Choice(**{**fields, **heads})
