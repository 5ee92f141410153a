"""Every op at every shape of the test grid against the torch reference, and what one call costs.

    python benchmarks/grid.py [FILE.json]

Prints the shapes at which the native kernels gain least, and the fixed cost of a call: the smallest
call there is (one row, one head of 64, one token), fastest of many.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dustin_trt import ops
from dustin_trt.evaluation import machine
from dustin_trt.ops import (
    dense_attention,
    kv_append,
    native,
    select_tokens,
    sparse_attention,
    srh_score,
)

REFERENCES = {name: sys.modules[f"dustin_trt.ops.{name}"].reference for name in ops.__all__}
HEADS = [(4, 4), (4, 2), (9, 3), (8, 2), (5, 1), (6, 1), (28, 4), (8, 1)]
DIMS = [64, 80, 96, 128, 256]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAGES = [None, 1, 7, 16]
WINDOWS = [1, 5, 33]
ROUNDS = 7


def calls(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, page_size: int | None, w: int,
    lengths: list[int], budget: int,
) -> dict[str, tuple]:  # fmt: skip
    """Arguments of each op for one shape, with random contents."""
    rows, tokens = len(lengths), max(lengths) + w
    page_size = page_size or tokens
    per_row = -(-tokens // page_size)
    table = torch.randperm(rows * per_row).view(rows, per_row).int()
    cache = [torch.randn(rows * per_row, heads[1], page_size, dim).to(dtype) for _ in range(2)]
    n = torch.tensor(lengths, dtype=torch.int32)
    q, new = (torch.randn(rows, w, h, dim).to(dtype) for h in heads)
    scores = torch.rand(2, rows, tokens)
    indices, counts = REFERENCES["select_tokens"](*scores, n, budget, budget // 4, 1, 2)
    group = heads[0] // heads[1]
    return {
        "kv_append": (new, new, *cache, table, n),
        "srh_score": (q, [h // group for h in range(heads[0])], cache[0], table, n, 0.1, scores[0]),
        "select_tokens": (*scores, n, budget, budget // 4, 1, 2),
        "sparse_attention": (q, *cache, table, n, indices, counts, 0.1),
        "dense_attention": (q, *cache, table, n, 0.1),
    }


def seconds(run: Callable, arguments: tuple, repeats: int = 1) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(repeats):
        run(*arguments)
    return (time.perf_counter() - start) / repeats


def gains() -> list[dict]:
    """How many times faster than the reference each op is at each shape, least first."""
    native_ops = {
        "kv_append": kv_append, "srh_score": srh_score, "select_tokens": select_tokens,
        "sparse_attention": sparse_attention, "dense_attention": dense_attention,
    }  # fmt: skip
    found = []
    short = [([11, 0, 4], 6), ([40, 0, 17, 1], 12)]
    shapes = list(itertools.product(HEADS, DIMS, DTYPES, PAGES, WINDOWS, short))
    for heads, dim, dtype, page_size, w, (lengths, budget) in shapes:
        arguments = calls(heads, dim, dtype, page_size, w, lengths, budget)
        for name, op in native_ops.items():
            ratios = [
                seconds(REFERENCES[name], arguments[name]) / seconds(op, arguments[name])
                for _ in range(ROUNDS)
            ]
            found.append({
                "op": name, "heads": heads, "head_dim": dim, "dtype": str(dtype)[6:],
                "page_size": page_size, "w": w, "lengths": lengths,
                "speedup": statistics.median(ratios),
            })  # fmt: skip
    return sorted(found, key=lambda row: row["speedup"])


def fixed_cost() -> dict[str, float]:
    """Microseconds of the smallest call of each op."""
    arguments = calls((1, 1), 64, torch.float32, None, 1, [1], 1)
    arguments["select_tokens"] = (*arguments["select_tokens"][:3], 1, 0, 0, 0)
    return {
        name: 1e6 * min(seconds(getattr(ops, name), arguments[name], 100) for _ in range(100))
        for name in ops.__all__
    }


def main() -> None:
    """Measure, print, and write to the file named on the command line, if any."""
    with torch.inference_mode():
        costs, rows = fixed_cost(), gains()
    print("microseconds of the smallest call:", {k: round(v, 1) for k, v in costs.items()})
    for name in ops.__all__:
        mine = [row for row in rows if row["op"] == name]
        middle = statistics.median(row["speedup"] for row in mine)
        print(
            f"{name:17} least {mine[0]['speedup']:.2f}×, median {middle:.1f}×; least at {mine[0]}"
        )
    if len(sys.argv) > 1:
        record = {"machine": machine.describe(), "kernels": native.isa(), "call_us": costs}
        record["least"] = [next(r for r in rows if r["op"] == name) for name in ops.__all__]
        Path(sys.argv[1]).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
