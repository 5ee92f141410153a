"""`TensorRTSession` over a TensorRT of Python, as strict as the real one."""

from __future__ import annotations

import sys

import pytest
import torch

from dustin_trt.config import Head, ModelSpec
from dustin_trt.engines import plugin_library, tensorrt_device, tensorrt_runtime
from dustin_trt.engines.step_graph import PHASES, Reading, StepGraph
from dustin_trt.engines.tensorrt import TensorRTError, TensorRTSession, check_device
from tests.engines import fake_tensorrt as fake

MODEL = ModelSpec("Tiny", 2, 4, 2, 8, 32, 19, 64)
GRAPH = StepGraph(
    role="target", model=MODEL, dtype="float32", page_size=4, max_pages=3, max_batch=3,
    max_window=4, chunk=6, heads=(Head(0, 1), Head(1, 3)),
    reading=Reading(budget=5, sink=1, history=True, lookahead_scores=True, lookahead=2),
)  # fmt: skip
DRAFT = GRAPH.model_copy(
    update={"role": "draft", "reading": Reading(budget=5, sink=1), "dtype": "bfloat16"}
)


@pytest.fixture
def world(tmp_path):
    with fake.installed(tmp_path) as found:
        yield found


@pytest.fixture
def folder(world, tmp_path):
    return tmp_path


def session(folder, graph=GRAPH, *, progress=None, module="tensorrt", **engine):
    path = fake.write_engine(folder / "target.engine", graph, **engine)
    return TensorRTSession(
        path, graph, plugins=plugin_library.require_plugins(), module=module, device=fake.CPU,
        progress=progress,
    )  # fmt: skip


def caches(graph=GRAPH, pages=9, seed=0):
    torch.manual_seed(seed)
    made = {
        name: torch.rand(pages, *kind.shape[1:]).to(graph.torch_dtype)
        for name, kind in graph.inputs.items()
        if name[:8] in ("k_cache.", "v_cache.")
    }
    return made | {
        name: made[name.replace("history", "cache")]
        for name in graph.inputs
        if name.startswith("k_history.")
    }


def inputs(bound, graph=GRAPH, *, batch=2, window=4, columns=None, read=5, seed=0):
    sizes = {"batch": batch, "window": window, "columns": columns or window, "read": read}
    torch.manual_seed(100 + seed)
    made = {}
    for name, (dtype, shape) in graph.inputs.items():
        if "." not in name:
            size = [sizes.get(part, part) for part in shape]
            made[name] = (5 * torch.rand(size)).to(getattr(torch, dtype))
    return made | bound


def right(phase, given, graph=GRAPH):
    """What the arithmetic gives on copies of the inputs, and the caches that it leaves."""
    given = {name: x.clone() for name, x in given.items()}
    outputs = fake.arithmetic(graph)(phase, given)
    return outputs, {name: x for name, x in given.items() if "cache." in name}


def check(runner, phase, given, graph=GRAPH):
    wanted, written = right(phase, given, graph)
    outputs = runner.run(phase, given)
    assert outputs.keys() == wanted.keys()
    for name, x in wanted.items():
        assert outputs[name].dtype == x.dtype and torch.equal(outputs[name], x), name
    for name, x in written.items():
        assert torch.equal(given[name], x), name
    return outputs


# ---- passes ------------------------------------------------------------------------------------


def test_passes_of_any_size_in_any_order(folder, world):
    runner, bound = session(folder), caches()
    for step, (batch, window, columns, read) in enumerate(
        [(2, 4, 4, 5), (2, 4, 4, 5), (3, 4, 1, 12), (1, 1, 1, 5), (2, 4, 4, 5), (2, 2, 1, 7),
         (3, 3, 3, 12), (2, 4, 4, 5), (3, 4, 1, 12)]
    ):  # fmt: skip
        sizes = {"batch": batch, "window": window, "columns": columns, "read": read}
        check(runner, "generation", inputs(bound, seed=step, **sizes))
        if step % 2:
            check(runner, "context", inputs(bound, batch=1, window=1 + step % 6, columns=1))
    # What is asked for again finds its context as it was left.
    assert len({number for number, *_ in world.passes}) <= 5
    assert set(world.called("set_optimization_profile_async")) == {0, 1}


def test_a_draft(folder):
    runner, bound = session(folder, DRAFT), caches(DRAFT)
    for seed in range(3):
        given = inputs(bound, DRAFT, window=1 + seed % 2, columns=1, seed=seed)
        outputs = check(runner, "generation", given, DRAFT)
    assert outputs.keys() == {"logits", "new_lookahead_scores"}


def test_outputs_are_the_callers(folder):
    runner, bound = session(folder), caches()
    first = runner.run("generation", inputs(bound, seed=1))
    kept = {name: x.clone() for name, x in first.items()}
    runner.run("generation", inputs(bound, seed=2))
    assert all(torch.equal(x, kept[name]) for name, x in first.items())


def test_only_what_changed_is_set_again(folder, world):
    runner, bound = session(folder), caches()
    given = inputs(bound)
    runner.run("generation", given)
    world.calls.clear()
    runner.run("generation", given)
    assert not world.called("set_input_shape")
    names = {name for name, _ in world.called("set_tensor_address")}
    assert names <= GRAPH.outputs.keys() and not any("." in name for name in names)


def test_other_caches_are_bound_everywhere(folder):
    runner = session(folder)
    mine, others = caches(seed=1), caches(seed=2)
    for bound in (mine, others, mine):
        for window in (4, 1):
            check(runner, "generation", inputs(bound, window=window, columns=1))
        check(runner, "context", inputs(bound, batch=1, window=3, columns=1))


def test_one_other_cache_is_enough(folder):
    runner, bound = session(folder), caches()
    check(runner, "generation", inputs(bound))
    bound["v_cache.1"] = bound["v_cache.1"].clone()
    check(runner, "generation", inputs(bound))


def test_caches_of_another_size(folder):
    runner = session(folder)
    check(runner, "generation", inputs(caches(pages=9)))
    check(runner, "generation", inputs(caches(pages=7)))


def test_inputs_that_begin_anywhere_are_copied(folder):
    runner, bound = session(folder), caches()
    given = inputs(bound, columns=1)
    given["columns"] = torch.arange(4, dtype=torch.int32)[-1:]
    assert given["columns"].data_ptr() % 64
    check(runner, "generation", given)


def test_the_phase_chooses_the_profile(folder, world):
    runner, bound = session(folder), caches()
    given = inputs(bound, batch=1, window=1, columns=1, read=12)
    logits = {phase: check(runner, phase, given)["logits"] for phase in (*PHASES, *PHASES)}
    assert not torch.equal(logits["context"], logits["generation"])


def test_contexts_share_their_memory_and_the_larger_need_decides(folder, world):
    runner, bound = session(folder, activations=(1000, 5000)), caches()
    assert runner.memory.activations == 5000
    check(runner, "generation", inputs(bound))
    check(runner, "context", inputs(bound, batch=1, columns=1))
    assert len(world.buffers) == 1 and fake.guards_hold()


# ---- CUDA graphs -------------------------------------------------------------------------------


def test_captured_passes_read_what_lies_there_at_replay(folder, world):
    runner, bound = session(folder), caches()
    given = inputs(bound, seed=1)
    wider = inputs(bound, batch=3, seed=2)
    with torch.inference_mode():
        recorder = fake.Recorder()

        def record(static):
            def body():
                outputs = runner.run("generation", static)
                return tuple(outputs.values())

            recorder.warm_up(body)
            return recorder.record(body)

        small, large = record(given), record(wider)
        for seed in range(3, 6):
            # Passes in between, of the same sizes and others, disturb no graph.
            check(runner, "generation", inputs(bound, seed=seed))
            check(runner, "generation", inputs(bound, window=1, columns=1, seed=seed))
            check(runner, "context", inputs(bound, batch=1, columns=1))
            for tape, static, sizes in ((small, given, {}), (large, wider, {"batch": 3})):
                for name, x in inputs(bound, seed=seed, **sizes).items():
                    if "." not in name:
                        static[name].copy_(x)
                wanted, written = right("generation", static)
                tape.replay()
                for x, y in zip(tape.outputs, wanted.values(), strict=True):
                    assert torch.equal(x, y)
                assert all(torch.equal(bound[name], x) for name, x in written.items())


def test_several_passes_in_one_graph_share_a_context(folder, world):
    runner, bound = session(folder), caches()
    first, second = (inputs(bound, seed=seed) for seed in (1, 2))
    recorder = fake.Recorder()

    def body():
        return (
            runner.run("generation", first)["logits"],
            runner.run("generation", second)["logits"],
        )

    with torch.inference_mode():
        recorder.warm_up(body)
        tape = recorder.record(body)
        made = len({number for number, *_ in world.passes})
        wanted = right("generation", first)[0]["logits"]
        tape.replay()
    assert torch.equal(tape.outputs[0], wanted) and made == 1


def test_nothing_is_captured_unprepared(folder, world):
    runner, bound = session(folder), caches()
    runner.run("generation", inputs(bound))
    with pytest.raises(TensorRTError, match="run once before a CUDA graph"):
        fake.Recorder().record(lambda: tuple(runner.run("generation", inputs(bound, batch=3))))


# ---- what a pass does not take -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.pop("guard"), "guard"),
        (lambda x: x.update(extra=x["guard"]), "extra"),
        (lambda x: x.update(input_ids=x["input_ids"].long()), "input_ids must be .* int32"),
        (lambda x: x.update(lengths=x["lengths"].double()), "lengths must be"),
        (lambda x: x.update(lengths=x["lengths"][:1]), "lengths is .* where batch is 2"),
        (lambda x: x.update(page_table=x["page_table"].T.contiguous().T), "page_table is not"),
        (lambda x: x.update(read_bound=x["read_bound"][:4]), "read_bound is .* read of 5–12"),
        (lambda x: x.update({"k_cache.1": x["k_cache.1"].double()}), "k_cache.1 must be"),
        (lambda x: x.update({"k_cache.1": x["k_cache.1"][:4]}), "k_cache.1 is .* where pages"),
        (lambda x: x.update({"k_history.1": x["k_cache.0"]}), "k_history.1 must be the memory"),
        (lambda x: x.update(guard=torch.empty(1, device="meta")), "guard is on meta"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_named_also_after_right_ones(folder, world, change, says):
    runner, bound = session(folder), caches()
    given = inputs(bound)
    runner.run("generation", given)
    passes = len(world.passes)
    wrong = dict(given)
    change(wrong)
    with pytest.raises(ValueError, match=says):
        runner.run("generation", wrong)
    assert len(world.passes) == passes
    check(runner, "generation", given)


def test_a_size_out_of_the_phase_is_refused(folder):
    runner, bound = session(folder), caches()
    with pytest.raises(ValueError, match="columns of 1–1 in the context phase"):
        runner.run("context", inputs(bound, columns=2))
    with pytest.raises(ValueError, match="window of 1–4 in the generation phase"):
        runner.run("generation", inputs(bound, window=5, columns=4))


def test_a_cache_inside_of_another_tensor_is_refused(folder):
    runner, bound = session(folder), caches()
    whole = torch.zeros(bound["v_cache.0"].numel() + 1)
    bound["v_cache.0"] = whole[1:].view_as(bound["v_cache.0"])
    with pytest.raises(ValueError, match=r"v_cache\.0 begins at no multiple of 64 bytes"):
        runner.run("generation", inputs(bound))


# ---- engines that are not what they should be --------------------------------------------------


def spoil(name, **changes):
    return lambda content: content["tensors"][name].update(changes)


def renamed(content):
    content["tensors"]["hidden"] = content["tensors"].pop("logits")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["tensors"].pop("coverage"), "lacks coverage"),
        (lambda c: c["tensors"].update(debug=c["tensors"]["guard"]), "unknown debug"),
        (renamed, "unknown hidden"),
        (spoil("guard", mode="OUTPUT"), "guard is no input"),
        (spoil("logits", mode="INPUT"), "logits is no output"),
        (spoil("k_cache.1", dtype="float16"), "k_cache.1 is no float32"),
        (spoil("guarded", dtype="int32"), "guarded is no bool"),
        (spoil("read_bound", location="HOST"), "read_bound is not on the GPU"),
        (spoil("page_table", shape=[-1, 4]), r"page_table is \[-1, 4\], not \['batch', 3\]"),
        (spoil("logits", shape=[-1, -1]), "logits is"),
        (spoil("indices", shape=[2, 5]), "indices is"),
        (lambda c: c.update(num_profiles=1), "1 optimisation profiles"),
        (lambda c: c["tensors"]["input_ids"]["profiles"].reverse(), "input_ids can be"),
        (lambda c: c["tensors"]["read_bound"]["profiles"][1].reverse(), "read_bound can"),
    ],
)  # fmt: skip
def test_a_foreign_engine_is_refused_by_tensor(folder, change, says):
    with pytest.raises(ValueError, match=f"target.engine.*{says}.*build it again"):
        session(folder, change=change)


def test_sizes_that_are_not_open_may_be_numbers(folder):
    draft = DRAFT.model_copy(update={"max_pages": 3})
    check(
        session(folder, draft, change=spoil("logits", shape=[-1, 1, 19])),
        "generation", inputs(caches(draft), draft, columns=1), draft,
    )  # fmt: skip


def test_an_output_of_another_size_is_noticed(folder):
    def foreign(content):
        content["tensors"]["srh_queries"]["names"][1] = "batch"

    runner = session(folder, change=foreign)
    with pytest.raises(TensorRTError, match=r"srh_queries would be \[2, 2, 2, 8\], not \[2, 4,"):
        runner.run("generation", inputs(caches()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version="10.13.0.35"), "expecting library version .* got 10.13"),
        (lambda c: c.update(capability="8.9"), "expecting compute 9.0 got compute 8.9"),
    ],
)
def test_an_engine_of_another_tensorrt_or_gpu(folder, change, says):
    with pytest.raises(ValueError, match=f"TensorRT 10.14.1.48.*TensorRT says: .*{says}"):
        session(folder, change=change)


@pytest.mark.parametrize("cut", [0, 1, 5, 40, 200, -4200])
def test_a_damaged_file(folder, world, cut):
    path = fake.write_engine(folder / "x.engine", GRAPH)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"x\.engine"):
        TensorRTSession(path, GRAPH, plugins=plugin_library.require_plugins(), device=fake.CPU)


def test_a_changed_file_and_its_first_error(folder):
    path = fake.write_engine(folder / "x.engine", GRAPH)
    path.write_bytes(path.read_bytes().replace(b'"max_batch": 3', b'"max_batch": 4'))
    with pytest.raises(ValueError, match=r"says: Checksum of the engine does not match$"):
        TensorRTSession(path, GRAPH, plugins=plugin_library.require_plugins(), device=fake.CPU)


def test_a_missing_file(folder):
    with pytest.raises(FileNotFoundError, match=r"no engine .*absent\.engine"):
        TensorRTSession(
            folder / "absent.engine", GRAPH, plugins=plugin_library.require_plugins(),
            device=fake.CPU,
        )  # fmt: skip


def test_large_files_are_read_in_pieces(folder, world, monkeypatch):
    monkeypatch.setattr(tensorrt_runtime, "_CHUNK", 1000)
    session(folder, weights=10_000)
    assert max(world.reads) == 1000 and sum(world.reads) > 10_000


def test_a_file_that_cannot_be_read(folder, world, monkeypatch):
    path = fake.write_engine(folder / "x.engine", GRAPH)
    plugins = plugin_library.require_plugins()
    runtime = tensorrt_runtime.runtime("tensorrt", plugins)

    def broken(reader, size):
        import os

        os.close(reader._file.fileno())
        return b"" if reader.read(size, 0) == b"" else b"?"

    monkeypatch.setattr(fake, "_read", broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        runtime.deserialize(path)


def test_a_tensorrt_without_stream_readers(folder, world, monkeypatch):
    monkeypatch.delattr(fake, "IStreamReaderV2")
    whole = []

    class Plain:
        ready = True

        def __init__(self, data):
            whole.append(len(data))
            self.data = bytes(data)
            self.at = 0

        def read(self, size, stream):
            self.at += size
            return self.data[self.at - size : self.at]

        def seek(self, offset, where):
            self.at = offset if where is fake.SeekPosition.SET else self.at + offset
            return True

    inner = fake.Runtime.deserialize_cuda_engine
    monkeypatch.setattr(
        fake.Runtime, "deserialize_cuda_engine", lambda self, data: inner(self, Plain(data))
    )
    check(session(folder), "generation", inputs(caches()))
    assert whole == [(folder / "target.engine").stat().st_size]


# ---- memory ------------------------------------------------------------------------------------


def test_memory_is_announced_before_it_is_taken(folder, world):
    lines = []
    weights = 300 << 20
    runner = session(
        folder, weights=weights, activations=(5 << 20, 1 << 20),
        progress=lambda line: lines.append((line, world.free)),
    )  # fmt: skip
    (first, before), (second, between) = lines
    assert (
        before == 1 << 30 and "0.29 GiB of weights onto cpu" in first and "1.00 GiB free" in first
    )
    assert between < before and second == "target.engine: 5.0 MiB for activations"
    assert world.free == between - (5 << 20)
    assert runner.memory.weights == (folder / "target.engine").stat().st_size


def test_weights_that_do_not_fit(folder, world):
    world.free = 1 << 20
    with pytest.raises(
        MemoryError, match=r"needs 3\.\d MiB for its weights.*only 1\.0 MiB of 1\.00"
    ):
        session(folder, weights=3 << 20)
    assert world.free == 1 << 20


def test_activations_that_do_not_fit(folder, world):
    world.free = 4 << 20
    with pytest.raises(
        MemoryError, match=r"needs 9\.0 MiB for activations beside 3\.\d MiB.*has only 1\.0 MiB"
    ):
        session(folder, weights=3 << 20, activations=(9 << 20, 1))


def test_running_out_of_memory_while_weights_are_loaded(folder, world, monkeypatch):
    monkeypatch.setattr(fake.FakeGpu, "free", lambda self: (1 << 40, 1 << 40))
    world.free = 1 << 20
    with pytest.raises(MemoryError, match=r"no memory left for .*target\.engine.*OutOfMemory"):
        session(folder, weights=3 << 20)


def test_no_memory_for_a_context(folder):
    runner = session(folder, change=lambda content: content.update(no_context=True))
    with pytest.raises(MemoryError, match=r"no execution context can be made; .*OutOfMemory"):
        runner.run("generation", inputs(caches()))


def test_a_pass_that_fails(folder):
    runner = session(folder, change=lambda content: content.update(fails=True))
    for _ in range(2):
        with pytest.raises(TensorRTError, match=r"pass of the generation phase .* illegal memory"):
            runner.run("generation", inputs(caches()))
    runner._engine.content["fails"] = False
    check(runner, "generation", inputs(caches()))


# ---- what is missing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "says"),
    [("tensorrt", "install TensorRT 10.14"), ("tensorrt_rtx", "pip install tensorrt-rtx")],
)
def test_no_module(folder, monkeypatch, module, says):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"no Python module {module}: {says}"):
        session(folder, module=module)


def test_a_module_without_its_libraries(folder, monkeypatch, tmp_path):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open')")
    monkeypatch.delitem(sys.modules, "tensorrt")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"tensorrt cannot be imported \(libnvinfer.*\): install"):
        session(folder)


def test_a_tensorrt_that_does_not_start(folder, world):
    world.starts = False
    with pytest.raises(TensorRTError, match="tensorrt does not start: CUDA initialization"):
        session(folder)


def test_rtx_is_the_same(folder):
    check(session(folder, module="tensorrt_rtx"), "generation", inputs(caches()))


def test_plugins_are_loaded_once(folder, world, monkeypatch):
    loaded = []
    load = fake.Registry.load_library
    monkeypatch.setattr(
        fake.Registry, "load_library", lambda self, path: loaded.append(path) or load(self, path)
    )
    session(folder)
    session(folder)
    tensorrt_runtime.runtime.cache_clear()  # a builder has loaded them before
    session(folder)
    assert len(loaded) == 1


def test_plugins_that_cannot_be_loaded(folder, world):
    library = plugin_library.require_plugins()
    library.write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(TensorRTError, match=r"fake_plugins\.so cannot be loaded: Unable to load"):
        session(folder)
    library.unlink()
    path = fake.write_engine(folder / "x.engine", GRAPH)
    with pytest.raises(TensorRTError, match="no plugin library"):
        TensorRTSession(path, GRAPH, plugins=library, device=fake.CPU)


@pytest.mark.parametrize(
    "library", [{"version": "2"}, {"names": plugin_library.PLUGINS[:-1]}], ids=str
)
def test_plugins_of_another_version(folder, library):
    fake.write_plugins(plugin_library.require_plugins(), **library)
    with pytest.raises(ValueError, match=r"has no Dustin\w+, version 1, in namespace dustin"):
        session(folder)


# ---- the plugin library ------------------------------------------------------------------------


def test_the_library_that_the_variable_names(monkeypatch, tmp_path):
    path = tmp_path / "plugins.so"
    monkeypatch.setenv(plugin_library.VARIABLE, str(path))
    with pytest.raises(FileNotFoundError, match=r"DUSTIN_TRT_PLUGINS names .*not a file"):
        plugin_library.plugin_library()
    path.write_bytes(b"abc")
    assert plugin_library.plugin_library() == path.resolve()
    assert plugin_library.fingerprint(path) == "ba7816bf8f01cfea"
    assert plugin_library.require_plugins("ba7816bf8f01cfea") == path.resolve()
    with pytest.raises(ValueError, match=r"built with plugins 0000, .* is ba7816bf8f01cfea"):
        plugin_library.require_plugins("0000")


def test_no_library(monkeypatch):
    monkeypatch.delenv(plugin_library.VARIABLE, raising=False)
    monkeypatch.setattr(plugin_library, "plugin_library", lambda: None)
    with pytest.raises(FileNotFoundError, match="make plugins"):
        plugin_library.require_plugins()


# ---- the device --------------------------------------------------------------------------------


def on_a_gpu(monkeypatch, count=2, capability=(9, 0), cuda="13.0"):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_devices_that_fit(monkeypatch):
    on_a_gpu(monkeypatch)
    for device in ("cuda", "cuda:1"):
        check_device(torch.device(device))
        check_device(torch.device(device), "9.0")


@pytest.mark.parametrize(
    ("device", "machine", "error", "says"),
    [
        ("cpu", {}, ValueError, "not on cpu: use cuda"),
        ("cuda:2", {}, TensorRTError, "no cuda:2: this machine has cuda:0 to cuda:1"),
        ("cuda", {"capability": (8, 6)}, ValueError, "built for .* 9.0, NVIDIA H200 has 8.6"),
        ("cuda", {"count": 0}, TensorRTError, "nvidia-smi"),
        ("cuda", {"count": 0, "cuda": None}, TensorRTError, "built without CUDA"),
    ],
)
def test_devices_that_do_not(monkeypatch, device, machine, error, says):
    on_a_gpu(monkeypatch, **machine)
    with pytest.raises(error, match=says):
        check_device(torch.device(device), "9.0")


def test_without_a_gpu_tensorrt_is_not_even_imported(monkeypatch, tmp_path):
    on_a_gpu(monkeypatch, count=0)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(TensorRTError, match="need an NVIDIA GPU"):
        TensorRTSession(tmp_path / "x", GRAPH, plugins=tmp_path / "y", device=torch.device("cuda"))


class FakeStreams:
    """torch.cuda's streams, as far as `Gpu` goes: who waits for whom."""

    def __init__(self, monkeypatch, current):
        self.events, owner = [], self

        class Stream:
            def __init__(self, device, handle=99):
                self.cuda_stream = handle

            def wait_stream(self, other):
                owner.events.append((self.cuda_stream, "waits for", other.cuda_stream))

        self.current = Stream(None, current)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        from contextlib import nullcontext

        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def test_the_current_stream_is_used(monkeypatch):
    streams = FakeStreams(monkeypatch, 5)
    with tensorrt_device.Gpu(torch.device("cuda")).stream() as handle:
        assert handle == 5
    assert streams.events == []


def test_the_default_stream_is_kept_in_order_with_one_aside(monkeypatch):
    streams = FakeStreams(monkeypatch, 0)
    gpu = tensorrt_device.Gpu(torch.device("cuda"))
    for _ in range(2):
        with gpu.stream() as handle:
            streams.events.append(("pass on", handle))
    assert streams.events == 2 * [(99, "waits for", 0), ("pass on", 99), (0, "waits for", 99)]


def test_torch_has_no_memory_left(monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        tensorrt_device.Gpu(torch.device("cuda")).allocate(8)
