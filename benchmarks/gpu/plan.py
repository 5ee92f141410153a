"""What a run measures: the sizes of the issue's targets, or tiny ones for a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

from dustin_trt.evaluation.bench.shapes import SHAPES, Shape


@dataclass(frozen=True)
class Decode:
    """Decoding with random weights.

    tau : tokens a step that the coin shall commit on average
    steps : timed steps of each method and round
    """

    target: Shape
    draft: Shape
    context: int
    batch: int
    tau: float = 2.5
    gamma: int = 4
    budget: int = 512
    draft_window: int = 512
    steps: int = 24
    rounds: int = 3


@dataclass(frozen=True)
class Engine:
    """A target with random weights, exported and compiled."""

    shape: Shape
    context: int
    batch: int
    chunk: int
    budget: int
    w: int = 5


@dataclass(frozen=True)
class Plan:
    """Everything that `measure` does.

    layers : (context, batch) of one layer's attention and estimation
    prefill : (history, chunk) of one row
    l2 : bytes of the GPU's L2 cache; None asks it
    copy, product : bytes of the copy, and rows of the square product, that give the ceilings
    """

    target: Shape
    draft: Shape
    layers: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    decode: Decode
    engine: Engine
    budget: int = 512
    gamma: int = 4
    sink: int = 4
    window: int = 16
    page_size: int = 16
    rounds: int = 15
    l2: int | None = None
    copy: int = 4 << 30
    product: int = 8192

    @property
    def w(self) -> int:
        """Tokens of a verification window."""
        return self.gamma + 1


GPU = Plan(
    target=SHAPES["qwen2.5-72b"],
    draft=SHAPES["qwen2.5-0.5b"],
    layers=((16384, 8), (32768, 16)),
    prefill=((0, 4096), (16384, 2048)),
    decode=Decode(SHAPES["qwen2.5-7b"], SHAPES["qwen2.5-0.5b"], context=32768, batch=16),
    engine=Engine(SHAPES["smollm2-135m"], context=4096, batch=8, chunk=512, budget=512),
)


def _tiny(name: str, layers: int, heads: int, kv_heads: int) -> Shape:
    return Shape(
        name, "qwen2", layers, heads, kv_heads, 64, 128, 192, 320, 32768, 1e6, False
    )  # fmt: skip


_TARGET, _DRAFT = _tiny("tiny", 2, 8, 4), _tiny("tinier", 3, 4, 2)
REHEARSAL = Plan(
    target=_TARGET,
    draft=_DRAFT,
    layers=((96, 2), (160, 3)),
    prefill=((0, 48), (64, 32)),
    decode=Decode(
        _TARGET, _DRAFT, context=96, batch=2, budget=40, draft_window=32, steps=3, rounds=1
    ),
    engine=Engine(_TARGET, context=96, batch=2, chunk=32, budget=40),
    budget=40,
    rounds=1,
    l2=1 << 12,
    copy=1 << 16,
    product=64,
)
