"""Shapes of known models, so that a benchmark needs no weights. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """What a decoder's published configuration says of its size.

    `rope_theta`, `max_positions` and `tied` (whether the embedding serves as the output matrix too)
    are what a random-weight model needs besides.
    """

    name: str
    architecture: Literal["llama", "qwen2"]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    tied: bool

    @property
    def parameters(self) -> int:
        """Weights of the matrices; norms and biases are too few to count."""
        width = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (width + 3 * self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings

    def spread_heads(self, count: int) -> list[int]:
        """`count` query heads, as far apart as can be: they share the fewest KV heads.

        The cost of scoring is that of the KV heads read, so this is its worst case.
        """
        return [i * self.num_heads // count for i in range(count)]

    def kv_head(self, head: int) -> int:
        """The KV head that query head `head` reads."""
        return head // (self.num_heads // self.num_kv_heads)


def _qwen(name: str, layers: int, heads: int, kv_heads: int, hidden: int, intermediate: int,
          vocab: int = 152064, dim: int = 128, tied: bool = False) -> Shape:  # fmt: skip
    return Shape(
        name, "qwen2", layers, heads, kv_heads, dim, hidden, intermediate, vocab, 32768, 1e6, tied
    )


def _llama(name: str, layers: int, heads: int, hidden: int, intermediate: int, dim: int = 128,
           tied: bool = False) -> Shape:  # fmt: skip
    return Shape(
        name, "llama", layers, heads, 8, dim, hidden, intermediate, 128256, 131072, 5e5, tied
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen("qwen2.5-0.5b", 24, 14, 2, 896, 4864, vocab=151936, dim=64, tied=True),
        _qwen("qwen2.5-7b", 28, 28, 4, 3584, 18944),
        _qwen("qwen2.5-14b", 48, 40, 8, 5120, 13824),
        _qwen("qwen2.5-32b", 64, 40, 8, 5120, 27648),
        _qwen("qwen2.5-72b", 80, 64, 8, 8192, 29568),
        _llama("llama-3.x-1b", 16, 32, 2048, 8192, dim=64, tied=True),
        _llama("llama-3.x-8b", 32, 32, 4096, 14336),
        _llama("llama-3.x-70b", 80, 64, 8192, 28672),
        Shape("smollm2-135m", "llama", 30, 9, 3, 64, 576, 1536, 49152, 8192, 1e5, True),
    )
}

_DRAFTS = {"qwen2": SHAPES["qwen2.5-0.5b"], "llama": SHAPES["llama-3.x-1b"]}


def small_draft(shape: Shape) -> Shape | None:
    """The smallest model of the same family; None where there is no smaller one."""
    draft = _DRAFTS[shape.architecture]
    return draft if draft.parameters < shape.parameters else None
