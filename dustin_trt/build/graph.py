"""A decoder and what Dustin does in it as an ONNX graph: `StepGraph` with weights.

Standard operators of opset 20 but for the five ops, which are nodes named as the TensorRT plugins
are (docs/tensorrt.md), and the collectives of a shard, which are those of ONNX Runtime. Arithmetic
follows transformers' modules: norms and softmax in fp32, the rest in the model's type, strongly
typed. Weights are read, cut and cast one by one while the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tape
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from dustin_trt.build.checkpoint import Checkpoint
from dustin_trt.engines.step_graph import Reading, StepGraph, TensorType

OPSET = 20
PLUGIN_NAMESPACE = "dustin"
PLUGIN_VERSION = "1"
COLLECTIVES = "com.microsoft"

_TYPES = {
    "bool": ir.DataType.BOOL,
    "int32": ir.DataType.INT32,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_TINY = float(torch.finfo(torch.float32).tiny)

Progress = Callable[[int, int], None]
"""Called with the weights written so far and their number."""


def export(
    checkpoint: Checkpoint, graph: StepGraph, path: Path, progress: Progress | None = None
) -> None:
    """Write a model's step as ONNX.

    Parameters
    ----------
    checkpoint : of the model
    graph : what to write; of a shard, its share of the weights
    path : of the ONNX file; weights lie beside it, in `<stem>.weights`
    progress : see `Progress`

    Raises
    ------
    ValueError
        Weights that do not fit the configuration or cannot be cut into equal shards.
    OSError
        A full disk, for one.
    """
    _Writer(checkpoint, graph).write(path, progress)


class _Writer:
    """One export."""

    def __init__(self, checkpoint: Checkpoint, graph: StepGraph) -> None:
        self._checkpoint = checkpoint
        self._graph = graph
        self._type = _TYPES[graph.dtype]
        self._tape = tape.Tape()
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._initializers: list[ir.Value] = []
        self._inputs = {name: _value(name, kind) for name, kind in graph.inputs.items()}
        self._outputs: dict[str, ir.Value] = {}
        self._stash: list[ir.Value] = []

    def write(self, path: Path, progress: Progress | None) -> None:
        self._build()
        made = ir.Graph(
            list(self._inputs.values()),
            [self._outputs[name] for name in self._graph.outputs],
            nodes=self._tape.nodes,
            initializers=self._initializers,
            opset_imports={"": OPSET, PLUGIN_NAMESPACE: 1, COLLECTIVES: 1},
            name=self._graph.role,
        )
        model = ir.Model(made, ir_version=10, producer_name="dustin-trt")

        def written(_: Any, info: Any) -> None:
            if progress:
                progress(info.index + 1, info.total)

        # One worker: each writer holds a whole weight in memory.
        weights = f"{path.stem}.weights"
        ir.save(model, path, external_data=weights, callback=written, max_workers=1)

    # ---- The step -----------------------------------------------------------------------------

    def _build(self) -> None:
        graph = self._graph
        indices, counts = self._select() if graph.reading else (None, None)
        embeddings = self._weight("model.embed_tokens.weight")
        x = self._op("Gather", [embeddings, self._in("input_ids")], axis=0)
        cos, sin = self._rotation()
        for layer in range(graph.model.num_layers):
            x = self._layer(layer, x, cos, sin, indices, counts)
        x = self._op("Gather", [x, self._in("columns")], axis=1)
        x = self._norm(x, "model.norm.weight")
        self._out("logits", self._logits(x, embeddings))
        if not self._stash:
            return
        queries = self._op("Concat", self._stash, axis=2)
        if graph.role == "target":
            self._out("srh_queries", queries)
        else:
            scores = self._scores(queries, self._in("score_lengths"), "lookahead_scores")
            self._out("new_lookahead_scores", scores)

    def _layer(
        self,
        layer: int,
        x: ir.Value,
        cos: ir.Value,
        sin: ir.Value,
        indices: ir.Value | None,
        counts: ir.Value | None,
    ) -> ir.Value:
        graph, name = self._graph, f"model.layers.{layer}"
        heads, kv_heads, dim = graph.num_heads, graph.num_kv_heads, graph.model.head_dim
        normed = self._norm(x, f"{name}.input_layernorm.weight")
        parts = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        qkv = self._linear(normed, *parts, axis=0)
        qkv = self._op("Reshape", [qkv, self._ints(0, 0, heads + 2 * kv_heads, dim)])
        q, k, v = self._split(qkv, [heads, kv_heads, kv_heads], axis=2)
        if self._checkpoint.has(f"{name}.self_attn.q_norm.weight"):
            q = self._norm(q, f"{name}.self_attn.q_norm.weight")
            k = self._norm(k, f"{name}.self_attn.k_norm.weight")
        q, k = (self._rotate(rows, cos, sin) for rows in (q, k))

        table, lengths = self._in("page_table"), self._in("lengths")
        before = [self._in(f"{kind}_cache.{layer}") for kind in "kv"]
        caches = self._plugin("KvAppend", [k, v, *before, table, lengths], 2)
        for kind, cache in zip("kv", caches, strict=True):
            self._out(f"new_{kind}_cache.{layer}", cache)
        self._stash_queries(layer, q)
        scale = dim**-0.5
        if indices is None or counts is None:
            where = [q, *caches, table, lengths]
            (attended,) = self._plugin("DenseAttention", where, scale=scale)
        else:
            where = [q, *caches, table, lengths, indices, counts, self._in("read_bound")]
            (attended,) = self._plugin("SparseAttention", where, scale=scale)
        attended = self._op("Reshape", [attended, self._ints(0, 0, heads * dim)])
        x = self._op("Add", [x, self._linear(attended, f"{name}.self_attn.o_proj", axis=1)])

        normed = self._norm(x, f"{name}.post_attention_layernorm.weight")
        parts = [f"{name}.mlp.{part}_proj" for part in ("gate", "up")]
        inner = self._checkpoint.config.intermediate_size // graph.shard.size
        gate, up = self._split(self._linear(normed, *parts, axis=0), [inner, inner], axis=2)
        gate = self._op("Mul", [gate, self._op("Sigmoid", [gate])])
        inner_x = self._op("Mul", [gate, up])
        return self._op("Add", [x, self._linear(inner_x, f"{name}.mlp.down_proj", axis=1)])

    def _logits(self, x: ir.Value, embeddings: ir.Value) -> ir.Value:
        """fp32 logits `[B, L, V]`; tokens that the model cannot propose have -inf."""
        shard, tokens = self._graph.shard, self._checkpoint.output_tokens
        rows = self._graph.model.vocab_size if tokens is None else len(tokens)
        # Cut where it can be cut evenly: gathering logits is cheap beside reading the whole head.
        cut = shard.size > 1 and rows % shard.size == 0 and not self._checkpoint.tied
        if self._checkpoint.tied:  # one copy in the file
            logits = self._op("MatMul", [x, self._op("Transpose", [embeddings], perm=[1, 0])])
        else:
            logits = self._linear(x, "lm_head", axis=0 if cut else None)
        logits = self._cast(logits, "float32")
        if cut:
            logits = self._op(
                "AllGather", [logits], domain=COLLECTIVES, name="all_gather.logits",
                group_size=shard.size, axis=2,
            )  # fmt: skip
        if tokens is None:
            return logits
        # A column of -inf behind the head's, which every token that has no row is sent to.
        places = torch.full((self._graph.model.vocab_size,), rows, dtype=torch.int32)
        places[tokens] = torch.arange(rows, dtype=torch.int32)
        shape = self._op("Shape", [logits], end=2)
        shape = self._op("Concat", [shape, self._ints(1)], axis=0)
        never = self._op("Expand", [self._floats(float("-inf")), shape])
        logits = self._op("Concat", [logits, never], axis=2)
        return self._op("Gather", [logits, self._stored("output_places", places, "int32")], axis=2)

    # ---- Selection ----------------------------------------------------------------------------

    def _select(self) -> tuple[ir.Value, ir.Value]:
        """What the pass reads: indices `[B, k]` and counts `[B]`, of guarded rows all they have."""
        reading, lengths, guard = self._graph.reading, self._in("lengths"), self._in("guard")
        assert reading
        scores: ir.Value | None = None
        signals: list[ir.Value] = []
        if reading.history:
            # Above 1 everything is read whatever its score, so nothing is scored.
            unscored = self._op("Greater", [guard, self._floats(1.0)])
            scored = self._op("Where", [unscored, self._ints32(0), lengths])
            scores = self._history_scores(scored)
            signals.append(scores)
        if reading.lookahead_scores:
            signals.append(self._in("lookahead_scores"))
        if len(signals) == 2 and reading.join == "sum":
            signals = [self._sum(signals, reading)]
        indices, counts = self._plugin(
            "SelectTokens", [lengths, *signals], 2, budget=reading.budget, sink=reading.sink,
            window=reading.window, lookahead=reading.lookahead if len(signals) == 2 else 0,
        )  # fmt: skip
        whole = self._op("Equal", [counts, lengths])
        guarded = self._op("GreaterOrEqual", [guard, self._floats(1.0)])
        if scores is not None:
            coverage = self._op(
                "Where", [whole, self._floats(1.0), self._coverage(scores, indices)]
            )
            self._out("coverage", coverage)
            guarded = self._op("Or", [guarded, self._op("Less", [coverage, guard])])
        guarded = self._op("And", [guarded, self._op("Not", [whole])])
        counts = self._op("Where", [guarded, lengths, counts])
        rows = self._op("Unsqueeze", [guarded, self._ints(1)])
        indices = self._op("Where", [rows, self._ints32(-1), indices])
        if self._graph.role == "target":
            self._out("guarded", guarded)
            self._out("indices", indices)
            self._out("counts", counts)
        return indices, counts

    def _history_scores(self, lengths: ir.Value) -> ir.Value:
        if not self._graph.scored_layers:  # another shard has the heads
            return self._scores(None, lengths, None)
        asked = self._op("Unsqueeze", [self._in("history_queries"), self._ints(1)])
        return self._scores(asked, lengths, None)

    def _scores(
        self, queries: ir.Value | None, lengths: ir.Value, added_to: str | None
    ) -> ir.Value:
        """Scores `[B, N]` of `queries [B, R, P, D]`, all shards' together."""
        graph = self._graph
        table, shared = self._in("page_table"), graph.shard.size > 1
        if queries is None:
            batch = self._op("Shape", [lengths])
            shape = self._op("Concat", [batch, self._ints(graph.capacity)], axis=0)
            scores = self._op("Expand", [self._floats(0.0), shape])
        else:
            heads = graph.local_heads
            group = graph.num_heads // graph.num_kv_heads
            layers = [layer for layer, _ in heads]
            accumulate = [self._in(added_to)] if added_to and not shared else []
            keys = [self._in(f"k_history.{layer}") for layer in graph.scored_layers]
            (scores,) = self._plugin(
                "SrhScore", [queries, table, lengths, *accumulate, *keys],
                kv_heads=[head // group for _, head in heads],
                heads_per_cache=[layers.count(layer) for layer in graph.scored_layers],
                scale=graph.model.head_dim**-0.5,
                accumulate=len(accumulate),
            )  # fmt: skip
        if shared:
            scores = self._all_reduce(scores, f"scores.{added_to or 'history'}")
            if added_to:
                scores = self._op("Add", [self._in(added_to), scores])
        return scores

    def _coverage(self, scores: ir.Value, indices: ir.Value) -> ir.Value:
        """The share of the scores that is chosen, 1 where there are none (`metrics`)."""
        zero = self._ints32(0)
        chosen = self._op("GreaterOrEqual", [indices, zero])
        places = self._op("Unsqueeze", [self._op("Max", [indices, zero]), self._ints(2)])
        # ONNX's own reference gets GatherElements of one row wrong.
        kept = self._op("GatherND", [scores, places], batch_dims=1)
        kept = self._op("Where", [chosen, kept, self._floats(0.0)])
        kept, total = (
            self._op("ReduceSum", [part, self._ints(1)], keepdims=0) for part in (kept, scores)
        )
        some = self._op("Greater", [total, self._floats(0.0)])
        share = self._op("Div", [kept, self._op("Max", [total, self._floats(_TINY)])])
        return self._op("Where", [some, share, self._floats(1.0)])

    def _sum(self, signals: Sequence[ir.Value], reading: Reading) -> ir.Value:
        """The weighted sum of both signals, each normalised to mass 1."""
        weights = (1 - reading.lookahead_weight, reading.lookahead_weight)
        parts = []
        for scores, weight in zip(signals, weights, strict=True):
            total = self._op("ReduceSum", [scores, self._ints(1)], keepdims=1)
            total = self._op("Max", [total, self._floats(_TINY)])
            share = self._op("Div", [scores, total])
            parts.append(self._op("Mul", [share, self._floats(weight)]))
        return self._op("Add", parts)

    # ---- Parts of a layer ---------------------------------------------------------------------

    def _rotation(self) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines `[B, w, 1, D/2]` at the windows' positions."""
        rows = min(self._graph.model.max_positions, self._graph.capacity)
        tables = self._checkpoint.rotary(rows)
        found = []
        for name, values in zip(("cos", "sin"), tables, strict=True):
            table = self._stored(f"rotary.{name}", values, self._graph.dtype)
            at = self._op("Gather", [table, self._in("positions")], axis=0)
            found.append(self._op("Unsqueeze", [at, self._ints(2)]))
        return found[0], found[1]

    def _rotate(self, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        half = self._graph.model.head_dim // 2
        a, b = self._split(x, [half, half], axis=3)

        def times(left: ir.Value, right: ir.Value) -> ir.Value:
            return self._op("Mul", [left, right])

        first = self._op("Sub", [times(a, cos), times(b, sin)])
        second = self._op("Add", [times(b, cos), times(a, sin)])
        return self._op("Concat", [first, second], axis=3)

    def _norm(self, x: ir.Value, name: str) -> ir.Value:
        eps = float(self._checkpoint.config.rms_norm_eps)
        wide = self._cast(x, "float32")
        square = self._op("Mul", [wide, wide])
        mean = self._op("ReduceMean", [square, self._ints(-1)], keepdims=1)
        root = self._op("Sqrt", [self._op("Add", [mean, self._floats(eps)])])
        return self._op("Mul", [self._cast(self._op("Div", [wide, root])), self._weight(name)])

    def _linear(self, x: ir.Value, *names: str, axis: int | None) -> ir.Value:
        """Projections of one input as a single product.

        `axis` is that of the weights `[out, in]` along which shards divide them, or None. Cut along
        the inputs, what the shards have is a part of a sum.
        """
        checkpoint, shard = self._checkpoint, self._graph.shard

        def part(name: str, axis: int | None) -> Tensor:
            whole = checkpoint.tensor(name)
            if axis is None or shard.size == 1:
                return whole
            if whole.shape[axis] % shard.size:
                raise ValueError(
                    f"{name} {[*whole.shape]} cannot be cut into {shard.size} equal shards"
                )
            return whole.chunk(shard.size, axis)[shard.rank]

        def joint() -> Tensor:
            return torch.cat([part(f"{name}.weight", axis) for name in names]).T

        shape = self._shape_of(names, axis)
        label = names[0] if len(names) == 1 else f"{names[0].rpartition('.')[0]}.joint"
        weight = self._initializer(f"{label}.weight", shape, self._graph.dtype, joint)
        y = self._op("MatMul", [x, weight])
        if axis == 1 and shard.size > 1:
            y = self._all_reduce(y, label)
        biased = [name for name in names if checkpoint.has(f"{name}.bias")]
        if not biased:
            return y

        def bias() -> Tensor:
            # Of a sum over shards the bias is added once, behind it.
            cut = 0 if axis == 0 else None
            return torch.cat(
                [
                    part(f"{name}.bias", cut)
                    if name in biased
                    else torch.zeros(self._shape_of([name], axis)[1])
                    for name in names
                ]
            )

        added = self._initializer(f"{label}.bias", shape[1:], self._graph.dtype, bias)
        return self._op("Add", [y, added])

    def _shape_of(self, names: Sequence[str], axis: int | None) -> tuple[int, int]:
        """`[in, out]` of a joint product in this shard."""
        config, graph = self._checkpoint.config, self._graph
        model, dim = graph.model, graph.model.head_dim
        tokens = self._checkpoint.output_tokens
        vocabulary = model.vocab_size if tokens is None else len(tokens)
        shape = {  # [out, in]
            "q_proj": (model.num_heads * dim, model.hidden_size),
            "k_proj": (model.num_kv_heads * dim, model.hidden_size),
            "v_proj": (model.num_kv_heads * dim, model.hidden_size),
            "o_proj": (model.hidden_size, model.num_heads * dim),
            "gate_proj": (config.intermediate_size, model.hidden_size),
            "up_proj": (config.intermediate_size, model.hidden_size),
            "down_proj": (model.hidden_size, config.intermediate_size),
            "lm_head": (vocabulary, model.hidden_size),
        }
        shapes = [shape[name.rpartition(".")[2]] for name in names]
        outputs, inputs = sum(out for out, _ in shapes), shapes[0][1]
        size = graph.shard.size
        return (
            inputs // size if axis == 1 else inputs,
            outputs // size if axis == 0 else outputs,
        )

    def _stash_queries(self, layer: int, q: ir.Value) -> None:
        numbers = [head for at, head in self._graph.local_heads if at == layer]
        if numbers:
            rows = self._op("Gather", [q, self._in("columns")], axis=1)
            self._stash.append(self._op("Gather", [rows, self._ints32(*numbers)], axis=2))

    # ---- Nodes --------------------------------------------------------------------------------

    def _op(
        self, kind: str, inputs: Sequence[ir.Value], *, domain: str = "", name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:  # fmt: skip
        return self._tape.op(kind, inputs, attributes, domain=domain, name=name)

    def _plugin(
        self, kind: str, inputs: Sequence[ir.Value], outputs: int = 1, **fields: Any
    ) -> Sequence[ir.Value]:
        named = {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
        return self._tape.op_multi_out(
            f"Dustin{kind}", inputs, {**named, **fields}, num_outputs=outputs,
            domain=PLUGIN_NAMESPACE,
        )  # fmt: skip

    def _split(self, x: ir.Value, sizes: list[int], axis: int) -> Sequence[ir.Value]:
        return self._tape.op_multi_out(
            "Split", [x, self._ints(*sizes)], {"axis": axis}, num_outputs=len(sizes)
        )

    def _all_reduce(self, x: ir.Value, name: str) -> ir.Value:
        return self._op("AllReduce", [x], domain=COLLECTIVES, name=f"all_reduce.{name}")

    def _cast(self, x: ir.Value, dtype: str | None = None) -> ir.Value:
        if self._graph.dtype == "float32":
            return x
        return self._op("Cast", [x], to=_TYPES[dtype or self._graph.dtype])

    def _in(self, name: str) -> ir.Value:
        return self._inputs[name]

    def _out(self, name: str, value: ir.Value) -> None:
        kind = self._graph.outputs[name]
        value.name = name
        value.dtype, value.shape = _TYPES[kind.dtype], ir.Shape(kind.shape)
        self._outputs[name] = value

    def _weight(self, name: str) -> ir.Value:
        shape = self._checkpoint.shape(name)
        return self._initializer(
            name, shape, self._graph.dtype, lambda: self._checkpoint.tensor(name)
        )

    def _stored(self, name: str, tensor: Tensor, dtype: str) -> ir.Value:
        return self._initializer(name, tensor.shape, dtype, lambda: tensor)

    def _initializer(
        self, name: str, shape: Sequence[int], dtype: str, read: Callable[[], Tensor]
    ) -> ir.Value:
        wanted = tuple(shape)
        torch_dtype = getattr(torch, dtype)

        def made() -> TorchTensor:
            tensor = read()
            if tensor.shape != wanted:
                raise ValueError(
                    f"{name} is {[*tensor.shape]} in {self._checkpoint.folder}, "
                    f"{[*wanted]} by its config.json"
                )
            return TorchTensor(tensor.to(torch_dtype).contiguous(), name)

        lazy = ir.LazyTensor(made, _TYPES[dtype], ir.Shape(wanted), name=name)
        value = ir.Value(
            name=name, shape=lazy.shape, type=ir.TensorType(lazy.dtype), const_value=lazy
        )
        self._initializers.append(value)
        return value

    def _ints(self, *numbers: int) -> ir.Value:
        return self._constant(ir.DataType.INT64, numbers)

    def _ints32(self, *numbers: int) -> ir.Value:
        return self._constant(ir.DataType.INT32, numbers)

    def _floats(self, *numbers: float) -> ir.Value:
        return self._constant(ir.DataType.FLOAT, numbers)

    def _constant(self, dtype: ir.DataType, numbers: tuple[float, ...]) -> ir.Value:
        key = (dtype, *numbers)
        if key not in self._constants:
            label = f"constant.{len(self._constants)}"
            tensor = ir.tensor(list(numbers), dtype, name=label)
            value = ir.Value(
                name=label,
                shape=ir.Shape([len(numbers)]),
                type=ir.TensorType(dtype),
                const_value=tensor,
            )
            self._initializers.append(value)
            self._constants[key] = value
        return self._constants[key]


def _value(name: str, kind: TensorType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(kind.shape), type=ir.TensorType(_TYPES[kind.dtype]))
