"""The least time an op or a decoding step can take on a GPU: bytes, matrix products, launches.

    python benchmarks/model.py                             # ops and decoding of two bench shapes
    python benchmarks/model.py --shape qwen2.5-72b --context 16384 --batch 8
    python benchmarks/model.py --bandwidth 4.8 --rate 989  # an H200 by its data sheet

A floor is `max(bytes / bandwidth, operations / rate, launches * launch)`. Bytes are those that have
to cross the memory bus: history keys and values, weights, scores, appended rows. Queries, outputs
and index lists stand apart as *near*: the kernel before has just written them or the next one reads
them, so that a few megabytes of them stay in the L2 cache. A floor is a bound and no forecast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dustin_trt.evaluation.bench.shapes import SHAPES, Shape, small_draft

SCORE = 4
"""Bytes of a score, fp32; an index, int32, takes as many."""


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at most.

    bandwidth : bytes a second to and from device memory, reads plus writes
    rate : operations a second of matrix products in 16 bits (a multiply-add is two)
    launch : seconds from the start of one kernel of a CUDA graph to that of the next, at least
    """

    bandwidth: float = 4.3e12
    rate: float = 780e12
    launch: float = 1e-6


H200_COPY = Ceilings()
"""What a large copy and a large bf16 product are known to reach on an H200: an assumption until
`make gpu` measures its own. The launch is an assumption of the same kind."""
H200_DATASHEET = Ceilings(bandwidth=4.8e12, rate=989e12)


@dataclass(frozen=True)
class Work:
    """What a call must do.

    memory : bytes that cross the memory bus
    near : bytes of activations and lists besides, which L2 may hold
    operations : of matrix products
    launches : kernels that run one after the other
    """

    memory: float
    near: float = 0.0
    operations: float = 0.0
    launches: int = 1

    def __add__(self, other: Work) -> Work:
        return Work(
            self.memory + other.memory,
            self.near + other.near,
            self.operations + other.operations,
            self.launches + other.launches,
        )

    def times(self, count: int) -> Work:
        """The same work `count` times, one after the other."""
        return Work(
            count * self.memory, count * self.near, count * self.operations, count * self.launches
        )

    def seconds(self, ceilings: Ceilings) -> float:
        """`max(memory / bandwidth, operations / rate, launches * launch)`."""
        return max(
            self.memory / ceilings.bandwidth,
            self.operations / ceilings.rate,
            self.launches * ceilings.launch,
        )

    def bound(self, ceilings: Ceilings) -> str:
        """Which of the three it is: "bytes", "products" or "launches"."""
        parts = {
            "bytes": self.memory / ceilings.bandwidth,
            "products": self.operations / ceilings.rate,
            "launches": self.launches * ceilings.launch,
        }
        return max(parts, key=lambda name: parts[name])


# ---- ops ---------------------------------------------------------------------------------------


def kv_append(*, batch: int, w: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> Work:
    """`2 B w Hkv D` elements written to the cache; the new rows are near."""
    rows = 2 * batch * w * kv_heads * head_dim * itemsize
    return Work(memory=rows, near=rows)


def srh_score(
    *, batch: int, history: int, kv_heads: int, query_heads: int, rows: int, head_dim: int,
    itemsize: int = 2,
) -> Work:  # fmt: skip
    """Keys of `kv_heads` heads read once, `B N Hs D` elements, and `B N` scores written.

    Parameters
    ----------
    kv_heads : KV heads that are read, Hs, whatever the number of query heads on them
    query_heads, rows : P and R; `2 B R P D N` operations
    """
    keys = batch * history * kv_heads * head_dim * itemsize
    return Work(
        memory=keys + SCORE * batch * history,
        # The scores so far, and the queries.
        near=SCORE * batch * history + batch * rows * query_heads * head_dim * itemsize,
        operations=2 * batch * rows * query_heads * head_dim * history,
        # Softmax over a whole history that is spread over blocks takes a second pass over logits.
        launches=2,
    )


def select_tokens(*, batch: int, history: int, budget: int, signals: int = 2) -> Work:
    """`B N` fp32 scores a signal (1 or 2) read once; `B k` indices are near."""
    return Work(memory=SCORE * batch * history * signals, near=SCORE * batch * budget)


def sparse_attention(
    *, batch: int, budget: int, w: int, heads: int, kv_heads: int, head_dim: int, itemsize: int = 2
) -> Work:
    """`2 B k Hkv D` elements of history read, wherever they lie; see `dense_attention`."""
    attention = dense_attention(
        batch=batch, history=budget, w=w, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        itemsize=itemsize,
    )  # fmt: skip
    return attention + Work(memory=0, near=SCORE * batch * budget, launches=0)


def dense_attention(
    *, batch: int, history: int, w: int, heads: int, kv_heads: int, head_dim: int, itemsize: int = 2
) -> Work:
    """`2 B N Hkv D` elements of history read, for decoding and for a chunk of a prefill alike.

    The w new tokens' own keys and values, the queries and the outputs are near. Query i reads
    `N + i + 1` tokens, with `4 D` operations a token and head: `4 B Hq D w (N + (w + 1) / 2)`.
    """
    history_bytes = 2 * batch * history * kv_heads * head_dim * itemsize
    new = 2 * batch * w * (kv_heads + heads) * head_dim * itemsize
    pairs = w * history + w * (w + 1) / 2
    return Work(
        memory=history_bytes,
        near=new + SCORE * batch * w * heads,
        operations=4 * batch * heads * head_dim * pairs,
    )


# ---- a step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimation:
    """Who scores the history in a step.

    layers, heads : query heads in each of so many layers
    rows : queries a head, R: one for the target, Γ for the draft
    kv_heads : KV heads that the heads of a layer read; None spreads them as far as can be, which
        costs most
    """

    layers: int
    heads: int
    rows: int
    kv_heads: int | None = None

    def work(self, shape: Shape, batch: int, history: int) -> Work:
        """Of one step."""
        spread = {shape.kv_head(head) for head in shape.spread_heads(self.heads)}
        return srh_score(
            batch=batch, history=history, kv_heads=self.kv_heads or len(spread),
            query_heads=self.heads, rows=self.rows, head_dim=shape.head_dim,
        ).times(self.layers)  # fmt: skip


HISTORY = Estimation(layers=1, heads=4, rows=1)
LOOKAHEAD = Estimation(layers=3, heads=4, rows=4)
"""What the paper's search found for Qwen2.5-72B and its 0.5B draft, Γ = 4."""


def layer_attention(shape: Shape, batch: int, read: int, w: int) -> Work:
    """One layer's attention of w tokens over `read` history tokens."""
    return dense_attention(
        batch=batch, history=read, w=w, heads=shape.num_heads, kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )  # fmt: skip


def pass_weights(shape: Shape, itemsize: int = 2) -> int:
    """Bytes of the weights a forward pass reads: the layers and the output matrix.

    Of an embedding that is not the output matrix too, a pass reads a few rows.
    """
    unread = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return (shape.parameters - unread) * itemsize


MATRICES, GLUE = 4, 4
"""Kernels a layer besides attention and append: products (qkv, out, gate and up, down), and norms,
rotation and activation between them. Fewer would be another model of a layer."""


def forward(shape: Shape, *, batch: int, w: int, read: int) -> dict[str, Work]:
    """A pass over w tokens a row that reads `read` history tokens in every layer.

    Returns
    -------
    dict
        "weights": matrix products, `2 * weights * B * w` operations; "attention", with what is
        appended; "glue": launches alone
    """
    weights = pass_weights(shape)
    layers = shape.num_layers
    append = kv_append(
        batch=batch, w=w, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
    )  # fmt: skip
    return {
        "weights": Work(
            memory=weights, operations=weights * batch * w, launches=MATRICES * layers + 1
        ),
        "attention": (layer_attention(shape, batch, read, w) + append).times(layers),
        "glue": Work(memory=0, launches=GLUE * layers + 1),
    }


@dataclass(frozen=True)
class Step:
    """Floors of one decoding step.

    seconds : by part
    tokens : committed a step, over the batch
    """

    seconds: dict[str, float]
    tokens: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Over the batch."""
        return self.tokens / self.total


def vanilla_step(shape: Shape, ceilings: Ceilings, *, batch: int, history: int) -> Step:
    """One token a row, the whole cache read."""
    parts = forward(shape, batch=batch, w=1, read=history)
    return Step({name: work.seconds(ceilings) for name, work in parts.items()}, batch)


def dustin_step(
    shape: Shape, draft: Shape, ceilings: Ceilings, *, batch: int, history: int, tau: float,
    budget: int = 512, gamma: int = 4, draft_window: int = 512,
    scored: Estimation = HISTORY, lookahead: Estimation = LOOKAHEAD,
) -> Step:  # fmt: skip
    """Γ passes of the draft, scoring by both models, selection, one pass over `budget` tokens.

    Parameters
    ----------
    tau : tokens committed a row and step, a given
    draft_window : history tokens the draft reads
    """
    drafting = forward(draft, batch=batch, w=1, read=min(draft_window, history))
    verifying = forward(shape, batch=batch, w=gamma + 1, read=min(budget, history))
    scoring = (scored.work(shape, batch, history), lookahead.work(draft, batch, history))
    choosing = select_tokens(batch=batch, history=history, budget=budget)
    return Step(
        {
            "draft": gamma * sum(work.seconds(ceilings) for work in drafting.values()),
            "score": sum(work.seconds(ceilings) for work in scoring),
            "select": choosing.seconds(ceilings),
            **{f"verify {name}": work.seconds(ceilings) for name, work in verifying.items()},
        },
        batch * tau,
    )


def verification_speedup(
    shape: Shape, draft: Shape, ceilings: Ceilings, *, batch: int, history: int, budget: int = 512,
    w: int = 5,
) -> tuple[float, float]:  # fmt: skip
    """Bounds of full attention over Dustin's, estimation included, and of estimation's share.

    Returns
    -------
    speedup : `full / (sparse + (scoring + selection) / L)`, all at their floors, L layers
    share : scoring over `L * full`
    """
    full = layer_attention(shape, batch, history, w).seconds(ceilings)
    sparse = layer_attention(shape, batch, budget, w).seconds(ceilings)
    scoring = HISTORY.work(shape, batch, history).seconds(ceilings)
    scoring += LOOKAHEAD.work(draft, batch, history).seconds(ceilings)
    chosen = select_tokens(batch=batch, history=history, budget=budget).seconds(ceilings)
    once = (scoring + chosen) / shape.num_layers
    return full / (sparse + once), scoring / (shape.num_layers * full)


# ---- the table ---------------------------------------------------------------------------------


def op_works(
    shape: Shape, draft: Shape | None, *, batch: int, history: int, budget: int, w: int, chunk: int
) -> dict[str, Work]:
    """The ops of one layer at these sizes, by name."""
    one = {"batch": batch, "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    works = {
        "kv_append": kv_append(w=w, **one),
        "srh_score, history": HISTORY.work(shape, batch, history),
        "select_tokens": select_tokens(batch=batch, history=history, budget=budget),
        "sparse_attention": sparse_attention(budget=budget, w=w, heads=shape.num_heads, **one),
        "dense_attention, w=1": layer_attention(shape, batch, history, 1),
        f"dense_attention, w={w}": layer_attention(shape, batch, history, w),
        f"dense_attention, chunk {chunk}, 1 row": layer_attention(shape, 1, history, chunk),
    }
    if draft:
        rows = Estimation(LOOKAHEAD.layers, LOOKAHEAD.heads, w - 1)
        works["srh_score, lookahead"] = rows.work(draft, batch, history)
    return works


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the floors."""
    options = _parser().parse_args(arguments)
    ceilings = Ceilings(options.bandwidth * 1e12, options.rate * 1e12, options.launch * 1e-6)
    print(
        f"Floors from {options.bandwidth:g} TB/s, {options.rate:g} TFLOP/s and {options.launch:g} "
        "µs a launch; 16-bit. Nothing here is measured."
    )
    for name in options.shape:
        shape = SHAPES[name]
        draft = SHAPES[options.draft_shape] if options.draft_shape else small_draft(shape)
        for context in options.context:
            for batch in options.batch:
                sizes = {"batch": batch, "history": context, "budget": options.budget}
                print(f"\n{name}, {context} tokens × {batch}, k={options.budget}, w={options.w}")
                _print_ops(op_works(shape, draft, w=options.w, chunk=512, **sizes), ceilings)
                if draft:
                    _print_step(shape, draft, ceilings, options.tau, options.w, sizes)
    return 0


def _print_ops(works: dict[str, Work], ceilings: Ceilings) -> None:
    print(f"  {'op, one layer':<34} {'floor, µs':>10} {'MB':>9} {'near MB':>8}  bound by")
    for name, work in works.items():
        print(
            f"  {name:<34} {1e6 * work.seconds(ceilings):>10.1f} {work.memory / 1e6:>9.1f} "
            f"{work.near / 1e6:>8.1f}  {work.bound(ceilings)}"
        )


def _print_step(
    shape: Shape, draft: Shape, ceilings: Ceilings, tau: float, w: int, sizes: dict[str, int]
) -> None:
    batch, history = sizes["batch"], sizes["history"]
    speedup, share = verification_speedup(shape, draft, ceilings, w=w, **sizes)
    print(
        f"  verification attention: at most {speedup:.1f}×, estimation {share:.2%} of full "
        f"attention over {shape.num_layers} layers, at equal shares of bandwidth"
    )
    vanilla = vanilla_step(shape, ceilings, batch=batch, history=history)
    ours = dustin_step(shape, draft, ceilings, tau=tau, gamma=w - 1, **sizes)
    print(
        f"  decoding: vanilla {1e3 * vanilla.total:.2f} ms a step ({vanilla.tokens_per_second:.0f} "
        f"tokens/s), Dustin with {draft.name} {1e3 * ours.total:.2f} ms "
        f"({ours.tokens_per_second:.0f} tokens/s at τ={tau:g}): at most "
        f"{ours.tokens_per_second / vanilla.tokens_per_second:.1f}×"
    )
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in ours.seconds.items())
    print(f"  Dustin's step, ms: {parts}")


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python benchmarks/model.py", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    shapes = ["qwen2.5-72b", "qwen2.5-7b"]
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=shapes, metavar="NAME",
        help=f"of {', '.join(SHAPES)}")  # fmt: skip
    add("--draft-shape", choices=SHAPES, metavar="NAME", help="default: smallest of the family")
    add("--context", nargs="+", type=_size, default=[16384, 32768], help="history tokens N")
    add("--batch", nargs="+", type=_size, default=[8, 16])
    add("--budget", type=_size, default=512, help="history tokens k that verification reads")
    add("--w", type=_window, default=5, help="window: drafts and the last token, at least 2")
    add("--tau", type=float, default=2.5, help="tokens committed a row and step")
    copy = H200_COPY
    add("--bandwidth", type=_positive, default=copy.bandwidth / 1e12, help="TB/s (an H200's copy)")
    add("--rate", type=_positive, default=copy.rate / 1e12, help="TFLOP/s of bf16 products")
    add("--launch", type=_positive, default=copy.launch * 1e6, help="µs a kernel of a CUDA graph")
    return parser


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _window(text: str) -> int:
    if _size(text) < 2:
        raise argparse.ArgumentTypeError("a window holds the last token and at least one draft")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
