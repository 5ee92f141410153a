"""The loop on recorded steps equals the loop itself; a `tape` records on a CPU."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dustin_trt import LLM, SamplingParams
from dustin_trt.config import Head
from dustin_trt.engines import graphs, torch_engine
from dustin_trt.engines.base import Dense, Dustin, Window
from dustin_trt.engines.graphs import StepGraphs
from dustin_trt.engines.torch_engine import TorchEngine
from dustin_trt.ops import cuda
from tests.emulated import emulated_library
from tests.runtime.drafts import good_draft, llm
from tests.runtime.tape import RefusedError, TapeRecorder, recording, visible_ops
from tests.tiny import ids, make, prompt

LENGTHS = (33, 5, 77, 130, 64, 100, 2)
PROMPTS = ids(*map(prompt, LENGTHS))
OTHERS = ids(*(prompt(length, seed=1) for length in (90, 12, 41, 120, 7)))
SMALL = {"budget": 26, "max_batch_size": 3, "record_selections": True}
"""More requests than slots: rows finish at different steps, and others take their place."""
MODES = {
    "none, dense": ("none", {"policy": "dense"}),
    "none, history": ("none", {"policy": "dustin"}),
    "lookup, dense": ("lookup", {"policy": "dense"}),
    "lookup, history, guarded": ("lookup", {"policy": "dustin", "guard": 0.5}),
    "model, dense": ("good", {"policy": "dense"}),
    "model, streaming": ("good", {"policy": "streaming"}),
    "model, oracle": ("good", {"policy": "oracle"}),
    "model, split": ("good", {"policy": "dustin", "join": "split"}),
    "model, sum": ("good", {"policy": "dustin", "join": "sum"}),
    "model, sum, guarded": ("good", {"policy": "dustin", "join": "sum", "guard": 0.5}),
    "model, lookahead": ("good", {"policy": "dustin", "signal": "lookahead"}),
    "model, all guarded": ("good", {"policy": "dustin", "guard": 1.0}),
    "model, every head": ("good", {"policy": "dustin", "heads": "all"}),
    "model, pages": ("good", {"policy": "dustin", "page_size": 7, "guard": 0.5}),
    "windowed model, split": ("windowed", {"policy": "dustin"}),
    "skip, dense": ("skip:1", {"policy": "dense"}),
    "skip, split, guarded": ("skip:1", {"policy": "dustin", "guard": 0.5}),
    "skip, sum, pages": ("skip:1", {"policy": "dustin", "join": "sum", "page_size": 16}),
    "skip, history": ("skip:1", {"policy": "dustin", "signal": "history"}),
}


@pytest.fixture(autouse=True)
def seen():
    with visible_ops():
        yield


def params(sampled: bool) -> list[SamplingParams]:
    kinds = [{}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 20}, {"top_p": 0.8}]
    return [
        SamplingParams(max_tokens=(17, 9, 24, 5, 12, 1, 8)[i], seed=i, **kinds[i % 4 * sampled])
        for i in range(len(LENGTHS))
    ]


def outcome(output) -> tuple:
    """All that a row's own run decides, what it read included."""
    stats = output.stats
    chosen = [None if read is None else read.tolist() for read in output.selections]
    return (
        output.token_ids, output.finish_reason, stats.steps, stats.drafted, stats.accepted,
        stats.history_read, stats.history, stats.guarded_steps, chosen,
    )  # fmt: skip


def run(model, prompts=PROMPTS, *, sampled=False) -> list[tuple]:
    return [outcome(output) for output in model.generate(prompts, params(sampled)[: len(prompts)])]


def recorded(mode: str, recorder: TapeRecorder):
    draft, options = MODES[mode]
    with recording(recorder):
        return llm(draft, **{**SMALL, **options})


@cache
def eager(mode: str, sampled: bool = False) -> tuple[list[tuple], list[tuple]]:
    """Outcomes of `PROMPTS` and then of `OTHERS` without graphs."""
    draft, options = MODES[mode]
    model = llm(draft, **{**SMALL, **options})
    return run(model, sampled=sampled), run(model, OTHERS, sampled=sampled)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "mixed with sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_recorded_steps_change_nothing(mode, sampled):
    recorder = TapeRecorder()
    model = recorded(mode, recorder)
    first, second = eager(mode, sampled)
    assert run(model, sampled=sampled) == first
    assert sum(tape.replays for tape in recorder.tapes) > 2 * len(recorder.tapes)
    # On the same graphs, in slots that other prompts have used.
    assert run(model, OTHERS, sampled=sampled) == second


def test_modes_do_what_they_are_named_for():
    outcomes = {mode: eager(mode)[0] for mode in MODES}
    guarded = {mode: sum(row[7] for row in rows) for mode, rows in outcomes.items()}
    for mode, steps in guarded.items():
        assert (steps > 0) == ("guarded" in mode or mode == "model, pages"), mode
    all_steps = sum(row[2] for row in outcomes["model, sum, guarded"])
    assert 0 < guarded["model, sum, guarded"] < all_steps  # rows of one step are parted
    accepted = sum(row[4] for row in outcomes["model, split"])
    assert 0 < accepted < sum(row[3] for row in outcomes["model, split"])


class TestGraphs:
    def test_a_second_run_records_nothing(self):
        recorder = TapeRecorder()
        model = recorded("model, split", recorder)
        first = run(model)
        count = len(recorder.tapes)
        assert run(model) == first
        assert len(recorder.tapes) == count

    @pytest.mark.parametrize("mode", ["none, dense", "model, split", "skip, split, guarded"])
    def test_greedy_steps_are_one_graph_of_drafts_and_one_of_verification(self, mode):
        recorder = TapeRecorder()
        model = recorded(mode, recorder)
        run(model)
        verifying, drafting = model.decoder.target.graphs, 0
        sizes = SMALL["max_batch_size"]
        assert len(verifying.recordings) <= sizes
        if mode != "none, dense":
            drafting = len(model.decoder.drafter.engine.graphs.recordings)
            # With all rows' drafts looking ahead, and with some that are near their limit.
            assert drafting <= 2 * sizes
        assert len(recorder.tapes) == len(verifying.recordings) + drafting

    def test_what_a_pass_returned_stays_as_it_was(self):
        with recording(TapeRecorder()):
            model = llm("none", policy="dustin", budget=26, max_batch_size=4)
        engine = model.decoder.target
        for slot, length in enumerate((40, 90)):
            engine.cache.reserve(slot, length + 8)
            engine.prefill(slot, prompt(length), chunk=32)
        slots, generator = torch.tensor([1, 0]), torch.Generator().manual_seed(0)
        shape = (2, 2, len(engine.srh_heads), engine.spec.head_dim)
        queries = torch.randn(shape, generator=generator)
        windows = torch.tensor([prompt(5, 1), prompt(5, 2)]), torch.tensor([prompt(5, 3)] * 2)

        def verify(i):
            selection = Dustin(queries[i], None, 26, 0, 4, 16, guard=0.4)
            return engine.verify(slots, windows[i], selection)

        first = verify(0)
        kept = {name: x.clone() for name, x in vars(first).items() if torch.is_tensor(x)}
        second = verify(1)
        assert len(engine.graphs.recordings) == 1
        assert not torch.equal(first.logits, second.logits)
        assert not torch.equal(first.indices, second.indices)
        for name, x in kept.items():
            assert torch.equal(getattr(first, name), x), name

    def test_every_selection_has_its_own_graph(self):
        """One engine, asked for one thing and another in turns, beside an engine without graphs."""
        model = llm("none", policy="dustin", budget=26, max_batch_size=4)
        plain = model.decoder.target
        for slot, length in enumerate((40, 90, 65)):
            plain.cache.reserve(slot, length + 8)
            plain.prefill(slot, prompt(length), chunk=32)
        heads = tuple(Head(layer, head) for layer, head in ((2, 5), (0, 1), (1, 0), (0, 4)))
        plain = TorchEngine(plain.model, plain.cache, heads)
        engine = TorchEngine(plain.model, plain.cache, heads, TapeRecorder())
        generator = torch.Generator().manual_seed(0)
        queries = torch.randn(2, len(heads), plain.spec.head_dim, generator=generator)
        ahead = torch.rand(2, plain.cache.capacity, generator=generator)
        ahead[:, 40:] = 0  # as past the history of the shortest row
        selections = [
            Dense(),
            Dustin(queries, None, 26, 0, 4, 16),
            Dustin(queries, None, 30, 0, 4, 16),
            Dustin(queries, None, 30, 0, 4, 16, guard=0.6),
            Dustin(queries, None, 30, 0, 4, 16, guard=1.0),
            Dustin(queries, ahead, 30, 3, 4, 16),
            Dustin(queries, ahead, 30, 8, 4, 16),
            Dustin(queries, ahead, 30, 8, 4, 16, join="sum"),
            Dustin(queries, ahead[:, :100], 30, 8, 4, 16, join="sum"),  # another cache's width
            Dustin(queries, ahead, 30, 8, 4, 16, join="sum", lookahead_weight=0.9),
            Dustin(None, ahead, 30, 8, 4, 16),
            Window(30, 4),
            Window(30, 2),
        ]
        for turn in range(2):
            slots = torch.tensor([(1, 0), (2, 1)][turn])
            window = torch.tensor([prompt(5, 2 * turn), prompt(5, 2 * turn + 1)])
            for selection in selections:
                for asked in (None, heads[::-1]):
                    right, found = (e.verify(slots, window, selection, asked)
                                    for e in (plain, engine))  # fmt: skip
                    for name in ("logits", "srh_queries", "guarded", "counts", "indices"):
                        a, b = getattr(right, name), getattr(found, name)
                        assert (a is None and b is None) or torch.equal(a, b), (selection, name)
                    torch.testing.assert_close(found.coverage, right.coverage, equal_nan=True)
            for offset in (0, 1):
                for selection in (Dense(), Window(30, 4), Window(30, 2)):
                    logits, queries = [], []
                    for each in (plain, engine):
                        asked = each.look_ahead(slots)
                        logits.append(each.propose_step(slots, window, offset, selection, asked))
                        queries.append(asked.queries[0])
                    assert torch.equal(*logits) and torch.equal(*queries)
        assert len(engine.graphs.recordings) == 2 * len(selections) + 6

    def test_queries_come_in_the_order_of_their_heads(self):
        engine = llm("none", policy="dustin", budget=26, max_batch_size=4).decoder.target
        engine.cache.reserve(0, 48)
        engine.prefill(0, prompt(40), chunk=32)
        heads = tuple(Head(layer, head) for layer, head in ((2, 5), (0, 1), (1, 0), (0, 4)))
        slots, window = torch.tensor([0]), torch.tensor([prompt(5)])
        together = engine.verify(slots, window, Dense(), heads).srh_queries
        for column, head in enumerate(heads):
            alone = engine.verify(slots, window, Dense(), (head,)).srh_queries
            assert torch.equal(together[:, :, column], alone[:, :, 0])

    def test_a_batch_of_another_size_has_its_own_graph(self):
        tapes = TapeRecorder()
        steps = StepGraphs(tapes)
        for rows in (3, 1, 2, 3, 1):
            x = torch.arange(rows).float()
            (doubled,) = steps.run("double", lambda x: (2 * x,), {"x": x})
            assert torch.equal(doubled, 2 * x)
        assert len(steps.recordings) == len(tapes.tapes) == 3

    def test_bodies_inside_bodies_are_parts_of_one_graph(self):
        steps = StepGraphs(TapeRecorder())

        def outer(x):
            (inner,) = steps.run("inner", lambda x: (x + 1,), {"x": x})
            return (2 * inner,)

        for value in (1.0, 5.0):
            x = torch.tensor([value])
            assert steps.run("outer", outer, {"x": x})[0].item() == 2 * (value + 1)
        assert len(steps.recordings) == 1


class TestNoGraphs:
    """Where nothing can be recorded, nothing is."""

    @pytest.mark.parametrize("cuda_graphs", [True, False])
    def test_on_a_cpu(self, cuda_graphs):
        model = llm("skip:1", cuda_graphs=cuda_graphs)
        assert not model.decoder.target.graphs.fixed
        assert not model.decoder.drafter.engine.graphs.fixed

    def test_where_they_are_not_wanted(self):
        with recording(TapeRecorder()):
            model = llm("skip:1", cuda_graphs=False)
            twin = model.variant(cuda_graphs=True)
        assert not model.decoder.target.graphs.fixed
        assert twin.decoder.target.graphs.fixed


class TestTheTape:
    """What CUDA would refuse or do otherwise, the imitation must."""

    def record(self, body, **inputs):
        with torch.inference_mode():
            return StepGraphs(TapeRecorder()).run("body", body, inputs)

    @pytest.mark.parametrize(
        "body",
        [
            lambda x: (x * int(x.max()),),
            lambda x: (x * x.sum().item(),),
            lambda x: (x if x.any() else -x,),
            lambda x: (x * len(x.tolist()),),
            lambda x: (x * float(x.numpy()[0]),),
            lambda x: (x.cpu(),),
            lambda x: (x[x > 1],),
            lambda x: (x.nonzero(),),
            lambda x: (x.masked_select(x > 1),),
            lambda x: (x.unique(),),
            lambda x: (x + torch.tensor([1.0, 2.0, 3.0]),),
            lambda x: (x[[0, 2]],),
            lambda x: (torch.where(x > 1)[0],),
        ],
    )
    def test_looking_at_data_is_refused(self, body):
        with pytest.raises(RefusedError):
            self.record(body, x=torch.tensor([1.0, 2.0, 3.0]))

    def test_recording_runs_nothing(self):
        outside, tapes = torch.zeros(3), TapeRecorder()
        seen = []

        def body(x):
            outside.add_(x)
            seen.append((2 * x).clone())
            return (outside + x,)

        warm = torch.ones(3)
        tapes.warm_up(lambda: body(warm))
        assert outside.tolist() == [1, 1, 1]
        tape = tapes.record(lambda: body(warm))
        assert outside.tolist() == [1, 1, 1]
        assert seen[1].tolist() == [0, 0, 0]
        warm.fill_(4)
        tape.replay()
        assert outside.tolist() == [5, 5, 5]
        assert tape.outputs[0].tolist() == [9, 9, 9]


class TestMistakes:
    """The tests above notice what people get wrong with CUDA graphs."""

    def differs(self, model, mode) -> bool:
        right, _ = eager(mode)
        try:
            return run(model) != right
        except (RuntimeError, IndexError, ValueError):  # a stale index may lead out of the cache
            return True

    @pytest.mark.parametrize("stale", ["lengths", "page_table"])
    @pytest.mark.parametrize("mode", ["none, dense", "model, pages", "skip, sum, pages"])
    def test_stale_caches(self, mode, stale):
        if stale == "page_table" and mode == "none, dense":
            pytest.skip("a page a slot stays where it is")
        places: list[int] = []
        recorder = TapeRecorder(lambda x: x.data_ptr() in places)
        model = recorded(mode, recorder)
        places.append(getattr(model.decoder.target.cache, stale).data_ptr())
        assert self.differs(model, mode)

    @pytest.mark.parametrize(
        ("mode", "right", "wrong"),
        [
            ("none, dense", "graph.inputs[name].copy_(x)", "pass"),
            ("model, split", "graph.inputs[name].copy_(x)", "pass"),
            *(
                ("model, split", "graph.inputs[name].copy_(x)",
                 f"name == '{name}' or graph.inputs[name].copy_(x)")
                for name in ("slots", "tokens", "last", "previous", "history_queries",
                             "lookahead_scores", "rows")
            ),
            ("model, split", "x.clone() for x in graph", "x for x in graph"),
            ("model, split", "if self._recording:", "if False:"),
            ("model, split", "        graph.recording.replay()\n", ""),
            ("model, split", "(key, *((name, x.shape, x.dtype)", "(key, *((name,)"),
        ],
    )  # fmt: skip
    def test_spoilt_replays(self, monkeypatch, mode, right, wrong):
        source = inspect.getsource(graphs)
        assert source.count(right) == 1
        spoilt = ModuleType("spoilt")
        monkeypatch.setitem(sys.modules, "spoilt", spoilt)
        exec(compile(source.replace(right, wrong), "spoilt", "exec"), vars(spoilt))
        monkeypatch.setattr(torch_engine, "StepGraphs", spoilt.StepGraphs)
        assert self.differs(recorded(mode, TapeRecorder()), mode)


class TestEmulatedKernels:
    """The whole loop in recorded steps on the CUDA kernels, as their emulator runs them."""

    pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")

    @pytest.fixture(autouse=True)
    def kernels(self):
        from tests.ops.test_cuda_binding import OPS

        with cuda.using(emulated_library()), torch.library._scoped_library("dustin", "IMPL") as lib:
            for name, module in OPS.items():
                lib.impl(name, module._cuda, "CPU", allow_override=True)
            yield

    @pytest.mark.parametrize("draft", ["good", "skip:1"])
    def test_recorded_steps_change_nothing(self, draft):
        def small(model):
            return model.to(torch.bfloat16)

        def built(recorder=None):
            changes = {"head_dim": 64, "num_hidden_layers": 2, "initializer_range": 0.1}
            target = small(make(**changes))
            draft_model = small(good_draft(**changes)) if draft == "good" else draft
            options = {"policy": "dustin", "budget": 26, "guard": 0.5, "max_batch_size": 2}
            with recording(recorder) if recorder else visible_ops():
                return LLM(target, draft_model, gamma=2, prefill_chunk=64, **options)

        requests = ids(*map(prompt, (40, 9, 33)))
        asked = [SamplingParams(max_tokens=n) for n in (7, 4, 5)]
        plain, recorder = built(), TapeRecorder()
        expected = [outcome(output) for output in plain.generate(requests, asked)]
        found = [outcome(output) for output in built(recorder).generate(requests, asked)]
        assert found == expected
        assert recorder.tapes


def test_cuda_is_asked_for_graphs_as_torch_documents(monkeypatch):
    """Without a GPU: the calls, their order, one pool and one stream."""
    calls: list[str] = []

    class Context:
        def __init__(self, *names, **options):
            self.name = " ".join(map(str, (*names, *options.items())))

        def __enter__(self):
            calls.append(f"enter {self.name}")

        def __exit__(self, *_):
            calls.append(f"leave {self.name}")

    class Stream:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return self.name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    fake = SimpleNamespace(
        graph_pool_handle=lambda: "pool",
        Stream=lambda device: Stream("side"),
        current_stream=lambda: Stream("main"),
        device=lambda device: Context("device"),
        stream=lambda stream: Context("stream", stream),
        CUDAGraph=lambda **options: SimpleNamespace(replay=lambda: calls.append("replay")),
        graph=lambda graph, *, pool, stream: Context("graph in", pool, "on", stream),
    )
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    recorder = graphs.CudaRecorder(torch.device("cpu"))
    steps = StepGraphs(recorder)
    for value in (1, 2):
        steps.run("body", lambda x: (calls.append("body"), (x + 1,))[1], {"x": torch.tensor(value)})
    assert calls == [
        "enter device", "side waits for main", "enter stream side", "body", "leave stream side",
        "main waits for side", "leave device",
        "enter device", "enter graph in pool on side", "body", "leave graph in pool on side",
        "leave device", "replay", "replay",
    ]  # fmt: skip


def test_reading_everything_stays_dense():
    """A budget of the history, recorded: the logits of a dense pass to the last bit."""
    with recording(TapeRecorder()):
        model = llm("none", policy="dustin", budget=200, max_batch_size=2)
    engine = model.decoder.target
    for slot, length in enumerate((40, 90)):
        engine.cache.reserve(slot, length + 8)
        engine.prefill(slot, prompt(length), chunk=32)
    slots, window = torch.tensor([1, 0]), torch.tensor([prompt(5, 1), prompt(5, 2)])
    queries = torch.randn(2, len(engine.srh_heads), engine.spec.head_dim)
    dense = engine.verify(slots, window, Dense())
    sparse = engine.verify(slots, window, Dustin(queries, None, 200, 0, 4, 16))
    assert torch.equal(dense.logits, sparse.logits)
    assert sparse.coverage.tolist() == [1, 1]
