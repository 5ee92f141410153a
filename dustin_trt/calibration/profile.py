"""Profile a pair: where its heads look, teacher-forced, at windows of long texts and prompts.

Scores are collected head by head, layer by layer, so that what is held besides the models is O(N) a
head; what is kept is the candidates' scores and sums over all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dustin_trt.calibration.pair import PREFILL_CHUNK, SLOT, Pair
from dustin_trt.calibration.samples import AGES, SCALE, Samples, Window, columns
from dustin_trt.config import Head
from dustin_trt.engines.base import Dense, Engine
from dustin_trt.evaluation.retrieval import RetrievalPrompt
from dustin_trt.metrics import acceptance_length

Tell = Callable[[int], None]
"""Called with tokens that were dealt with since the last call."""


def _silent(tokens: int) -> None:
    pass


@torch.inference_mode()
def head_scores(
    engine: Engine,
    prompts: Sequence[RetrievalPrompt],
    layers: Sequence[int] | None = None,
    tell: Tell = _silent,
) -> Tensor:
    """Semantic-retrieval-head score of every head of a model (CompressKV, arXiv 2508.02401).

    `SR(l, h) = mean_t Σ_{j ∈ A} A[t, l, h, j]` over the steps t that generate the answer's tokens,
    all of them in the answer span A, the answer teacher-forced. The paper normalises within a
    layer, which ranks the heads of one layer; here heads of all layers are ranked together, and a
    layer without retrieval heads must not look like one with them, so the mass itself is returned.

    Parameters
    ----------
    engine : a model with a cache of one slot; whatever that holds is forgotten
    prompts : questions with answers
    layers : the layers it has; None means all

    Returns
    -------
    Tensor `[L, Hq]` fp64 in [0, 1]; 0 in layers it does not have
    """
    heads = engine.spec.all_heads(layers)
    total = torch.zeros(engine.spec.num_layers, engine.spec.num_heads, dtype=torch.float64)
    steps = 0
    for prompt in prompts:
        tokens = prompt.tokens + prompt.answer[:-1]
        first = len(prompt.tokens) - 1
        cache_history(engine, tokens[:first], len(tokens), tell)
        run = engine.verify(SLOT, torch.tensor([tokens[first:]]), Dense(), heads)
        for t in range(len(prompt.answer)):
            engine.cache.lengths[0] = first + t + 1  # a query sees its own token
            each = scores_by_head(engine, run.srh_queries[:, t], heads)[0]
            for head, score in zip(heads, each[:, prompt.span].sum(1).tolist(), strict=True):
                total[head] += score
        steps += len(prompt.answer)
        tell(len(tokens) - first)
    return total / max(1, steps)


@torch.inference_mode()
def profile(
    pair: Pair,
    tokens: list[int],
    windows: Sequence[Window],
    *,
    gamma: int,
    target_heads: tuple[Head, ...],
    draft_heads: tuple[Head, ...],
    layered: int = 0,
    tell: Tell = _silent,
) -> Samples:
    """Look at windows of one sequence.

    Parameters
    ----------
    pair : the models; their caches are left with this sequence
    tokens : the sequence, at least `gamma + 1` tokens past the last window
    windows : ascending, more than `gamma` tokens apart, `AGES` tokens of history at least
    gamma : Γ, draft steps to look at
    target_heads, draft_heads : candidates whose own scores are kept
    layered : keep each layer's attention too, mean over so many tokens of the window
    """
    target, longest = pair.target, windows[-1].at
    queries = _queries_at_windows(pair, tokens, windows, gamma, tell)
    if pair.draft.cache is not target.cache:
        pair.draft.cache.forget(0)  # an earlier sequence's windows wrote their drafts into it
    pair.drafter.admit(0, tokens[:longest], longest + gamma + 1)
    parts: dict[str, list[Tensor]] = {}
    accepted: list[int] = []

    def keep(name: str, value: Tensor) -> None:
        parts.setdefault(name, []).append(_widened(value, longest))

    # The last window first: what a draft and its verification write after a window's history would
    # lie inside the next one's.
    every_head = target.spec.all_heads()
    for window in reversed(windows):
        at = window.at
        target.cache.lengths[0] = at
        rows = torch.stack([queries[at + step] for step in range(gamma + 1)])
        keep("truth", scores_by_row(target, rows, every_head))
        keep("by_layer", _by_layer(target, rows[:layered]) if layered else torch.empty(0, at))
        keep("ages", torch.cat([_older(target, queries[at - a], at, a) for a in AGES]))
        keep("history", _candidates(target, queries[at - 1][None], every_head, target_heads)[0])
        drafts, asked = pair.roll_out(tokens, at, gamma)
        every = pair.draft.srh_heads
        pair.draft.cache.lengths[0] = at
        keep("lookahead_all", scores_by_row(pair.draft, asked, every))
        keep("lookahead", _candidates(pair.draft, asked, every, draft_heads))
        target.cache.lengths[0] = at
        step = torch.cat([torch.tensor([tokens[at]]), drafts])
        verified = target.verify(SLOT, step[None], Dense()).logits.argmax(-1)
        accepted.append(int(acceptance_length(drafts[None], verified[:, :-1])))
        span = torch.zeros(at, dtype=torch.bool)
        span[list(window.span)] = True
        keep("span", span)
        tell(gamma + 1)
    stacked = {name: torch.stack(values[::-1]) for name, values in parts.items()}
    return Samples(
        lengths=torch.tensor([window.at for window in windows], dtype=torch.int32),
        accepted=torch.tensor(accepted[::-1], dtype=torch.int32),
        target_heads=target_heads,
        draft_heads=draft_heads,
        **stacked,
    )


def scores_by_row(engine: Engine, queries: Tensor, heads: tuple[Head, ...]) -> Tensor:
    """Attention of each row on the history in slot 0, summed over heads.

    Parameters
    ----------
    queries : Tensor `[R, P, D]`

    Returns
    -------
    Tensor `[R, N]` fp32
    """
    return engine.attention_scores(SLOT.expand(len(queries)), queries[:, None], heads=heads)


def scores_by_head(engine: Engine, queries: Tensor, heads: tuple[Head, ...]) -> Tensor:
    """Attention of each row and head on the history in slot 0.

    Parameters
    ----------
    queries : Tensor `[R, P, D]`

    Returns
    -------
    Tensor `[R, P, N]` fp32
    """
    each = [scores_by_row(engine, queries[:, [p]], (head,)) for p, head in enumerate(heads)]
    return torch.stack(each, 1)


def _candidates(
    engine: Engine, queries: Tensor, every: tuple[Head, ...], heads: tuple[Head, ...]
) -> Tensor:
    """Scores `[R, C, N]` of some of the heads whose queries `[R, P, D]` these are, fp16."""
    if not heads:
        return torch.empty(len(queries), 0, int(engine.cache.lengths[0]), dtype=torch.float16)
    return (scores_by_head(engine, queries[:, columns(every, heads)], heads) * SCALE).half()


def _older(engine: Engine, query: Tensor, at: int, age: int) -> Tensor:
    """Scores `[1, at]` of every head's query `[P, D]` so many tokens back; it sees no later one."""
    engine.cache.lengths[0] = at - age + 1
    scores = scores_by_row(engine, query[None], engine.spec.all_heads())
    engine.cache.lengths[0] = at
    return _widened(scores, at)


def _by_layer(engine: Engine, queries: Tensor) -> Tensor:
    """Mean over rows `[R, P, D]` of each layer's attention, `[L, N]`, all heads summed."""
    spec = engine.spec
    layers = [
        engine.attention_scores(SLOT, part[None], heads=spec.all_heads([layer]))
        for layer, part in enumerate(queries.split(spec.num_heads, 1))
    ]
    return torch.cat(layers) / len(queries)


def cache_history(engine: Engine, tokens: list[int], reserve: int, tell: Tell) -> None:
    """Cache a history in slot 0."""
    engine.cache.release(0)
    engine.cache.reserve(0, reserve)
    done = 0

    def progress(so_far: int) -> None:
        nonlocal done
        tell(so_far - done)
        done = so_far

    engine.prefill(0, tokens, chunk=PREFILL_CHUNK, progress=progress)


def _queries_at_windows(
    pair: Pair, tokens: list[int], windows: Sequence[Window], gamma: int, tell: Tell
) -> dict[int, Tensor]:
    """Run the target over the sequence; every head's query `[P, D]` where a window needs it."""
    engine, heads = pair.target, pair.target.spec.all_heads()
    offsets = [-age for age in AGES] + list(range(gamma + 1))
    wanted = sorted({window.at + offset for window in windows for offset in offsets})
    first, end = wanted[0], wanted[-1] + 1
    if first < 1 or end > len(tokens):
        raise ValueError(f"windows need tokens 1 to {end}, and {len(tokens)} are there")
    cache_history(engine, tokens[:first], end + 1, tell)
    found: dict[int, Tensor] = {}
    for start in range(first, end, _PIECE):
        piece = tokens[start : min(start + _PIECE, end)]
        queries = engine.verify(SLOT, torch.tensor([piece]), Dense(), heads).srh_queries[0]
        engine.commit(SLOT, torch.tensor([len(piece)]))
        for position in wanted:
            if start <= position < start + len(piece):
                found[position] = queries[position - start].clone()
        tell(len(piece))
    return found


_PIECE = 64  # tokens whose queries, of every head, are held at a time


def _widened(value: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(value, (0, length - value.shape[-1]))
