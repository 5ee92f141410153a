"""TensorRT-RTX, which builds without a GPU, registers the plugins and builds engines with them."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from dustin_trt.build.build import Options, build_engines, export_graphs, plan
from dustin_trt.build.tensorrt import CompileError, compile_graph
from dustin_trt.engines.manifest import Manifest
from dustin_trt.engines.plugin_library import fingerprint, plugin_library
from tests.build import rtx
from tests.build.pair import SIZES, configuration, save_pair

LAYERS = 3
DRAFT = Path(__file__).parents[2] / "calibration" / "results" / "smollm2"
SMOLLM2_LAYERS = {"target": 30, "draft": 3}
LIBRARIES = importlib.util.find_spec("tensorrt_rtx_libs")
PLUGINS = plugin_library()

pytestmark = [
    pytest.mark.skipif(
        LIBRARIES is None, reason="TensorRT-RTX is missing: pip install 'dustin-trt[tensorrt-rtx]'"
    ),
    pytest.mark.skipif(PLUGINS is None, reason="the TensorRT plugins are not built: make plugins"),
]


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(
        backend="tensorrt-rtx", compute_capability="8.9", keep_graphs=True, plugins=PLUGINS, **SIZES
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory, options):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), head_dim=64)
    with plan(target, draft, configuration(target, draft), options) as made:
        yield made


@pytest.fixture(scope="module")
def graphs(work, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    export_graphs(work, folder)
    return folder


def ask(folder: Path, *files: Path, **options):
    [libraries] = LIBRARIES.submodule_search_locations
    [library] = Path(libraries).glob("libtensorrt_rtx.so*")
    return rtx.ask(PLUGINS, library, folder, *files, **options)


def test_a_real_registry_takes_the_plugins(tmp_path):
    found = ask(tmp_path)["creators"]
    whole = {"pool_layer": "INT32"}
    attention = {"scale": "FLOAT32", **whole}
    assert {tuple(creator): fields for creator, fields in found} == {
        ("DustinKvAppend", "1"): whole,
        ("DustinSrhScore", "1"): {
            "kv_heads": "INT32",
            "heads_per_cache": "INT32",
            "scale": "FLOAT32",
            "accumulate": "INT32",
            "pool_layers": "INT32",
        },
        ("DustinSelectTokens", "1"): dict.fromkeys(
            ("budget", "lookahead", "sink", "window"), "INT32"
        ),
        ("DustinSparseAttention", "1"): attention,
        ("DustinDenseAttention", "1"): attention,
    }


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
def test_plugins_are_made_in_both_phases(phase):
    import tensorrt_rtx as trt

    registry = trt.get_plugin_registry()
    if registry.get_creator("DustinKvAppend", "1", "dustin") is None:
        registry.load_library(str(PLUGINS))
    creator = registry.get_creator("DustinKvAppend", "1", "dustin")
    made = creator.create_plugin(
        "node", trt.PluginFieldCollection([]), getattr(trt.TensorRTPhase, phase)
    )
    core = made.get_capability_interface(trt.PluginCapabilityType.CORE)
    assert (core.plugin_name, core.plugin_version, core.plugin_namespace) == (
        "DustinKvAppend",
        "1",
        "dustin",
    )


def test_networks_hold_the_plugins_with_their_shapes(graphs, work):
    found = ask(graphs, graphs / "target.onnx", graphs / "draft.onnx")["files"]
    target, draft = ([tuple(layer) for layer in each["plugins"]] for each in found)
    assert all(each["built"] and not each["errors"] for each in found)
    # 3 layers; score and select once, before them; the draft scores after them.
    layer = ["DustinKvAppend", "DustinSparseAttention"]
    assert [name for name, _ in target] == ["DustinSrhScore", "DustinSelectTokens", *layer * LAYERS]
    assert [name for name, _ in draft] == ["DustinSelectTokens", *layer * LAYERS, "DustinSrhScore"]
    shapes = [[(shape, dtype) for _, shape, dtype in outputs] for _, outputs in target]
    capacity = 16 * 14  # whole pages for 200 tokens and the longest draft
    cache = ([-1, 2, 16, 64], "BF16")
    assert shapes == [
        [([-1, capacity], "FLOAT")],
        [([-1, 26], "INT32"), ([-1], "INT32")],
        *[[cache, cache], [([-1, -1, 6, 64], "BF16")]] * LAYERS,
    ]
    assert [n for _, outputs in target for n, _, _ in outputs if n.startswith("new_")] == [
        f"new_{part}_cache.{i}" for i in range(LAYERS) for part in "kv"
    ]


def test_caches_are_written_in_place(graphs):
    """TensorRT knows it of the plugin: it refuses where it may not let a plugin do so."""
    [found] = ask(graphs, graphs / "target.onnx", alias=False)["files"]
    assert not found["built"]
    assert "Aliased I/O used by plugin node_DustinKvAppend" in found["errors"][0]


def _set(op: str, name: str, value):
    def change(graph) -> None:
        node = next(node for node in graph.node if node.op_type == op)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(onnx.helper.make_attribute(name, value))

    return change


def _input(name: str, dtype: int | None = None, shape: dict[int, int] | None = None):
    def change(graph) -> None:
        [tensor] = [x.type.tensor_type for x in graph.input if x.name == name]
        if dtype is not None:
            tensor.elem_type = dtype
        for axis, size in (shape or {}).items():
            tensor.shape.dim[axis].dim_value = size

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            _set("DustinSrhScore", "kv_heads", [0] * 11 + [2]),
            "'kv_heads' has 2, the caches have 2",
        ),
        (_set("DustinSrhScore", "scale", None), "field 'scale' is missing"),
        (
            _set("DustinSrhScore", "heads_per_cache", [0, 12]),
            "'heads_per_cache' has 0: write 1",
        ),
        (_set("DustinSelectTokens", "budget", 0), "field 'budget' is 0: write more than"),
        (_set("DustinSelectTokens", "sink", [1, 2]), "field 'sink' has 2 numbers: write one int32"),
        (_set("DustinSparseAttention", "scale", 2), "field 'scale' has another type"),
        (_input("page_table", TensorProto.FLOAT), "page_table should be INT32"),
        (_input("k_cache.0", TensorProto.FLOAT), "k_cache should be HALF or BF16"),
        (_input("k_cache.0", shape={1: 3}), "Hkv is 2 in k and 3 in k_cache"),
        (_input("k_cache.0", shape={3: 48}), "D is 64 in k and 48 in k_cache"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path, graphs, work, change, said):
    model = onnx.load(graphs / "target.onnx", load_external_data=False)
    change(model.graph)
    shutil.copy(graphs / "target.weights", tmp_path / "target.weights")
    onnx.save(model, tmp_path / "target.onnx")
    step, output = work.targets[0], tmp_path / "engine"
    options = {"backend": "tensorrt-rtx", "plugins": PLUGINS, "compute_capability": "8.9"}
    with pytest.raises(CompileError) as refused:
        compile_graph(tmp_path / "target.onnx", step, output, **options)
    assert said in str(refused.value)
    assert not output.exists()


def test_progress_is_shown_to_the_end(tmp_path, graphs, work):
    seen = []
    step = work.draft_step
    made = compile_graph(
        graphs / "draft.onnx", step, tmp_path / "engine", backend="tensorrt-rtx", plugins=PLUGINS,
        compute_capability="8.9", progress=lambda *args: seen.append(args),
    )  # fmt: skip
    assert made.bytes == (tmp_path / "engine").stat().st_size
    assert made.compute_capability == "8.9"
    last = {name: (done, total) for name, done, total in seen}
    assert last
    assert all(done == total for done, total in last.values())


def test_unknown_capability_names_those_there_are(work, graphs, tmp_path):
    with pytest.raises(ValueError, match=r"compute capability 3\.0; it builds for .*SM89"):
        compile_graph(
            graphs / "draft.onnx", work.draft_step, tmp_path / "engine", backend="tensorrt-rtx",
            plugins=PLUGINS, compute_capability="3.0",
        )  # fmt: skip


def test_a_library_that_is_none(work, graphs, tmp_path):
    (tmp_path / "plugins.so").write_bytes(b"not a library")
    with pytest.raises(CompileError, match=r"cannot load the plugins .*plugins\.so"):
        compile_graph(
            graphs / "draft.onnx", work.draft_step, tmp_path / "engine", backend="tensorrt-rtx",
            plugins=tmp_path / "plugins.so", compute_capability="8.9",
        )  # fmt: skip


@pytest.mark.model
def test_smollm2_becomes_engines(tmp_path, options):
    from dataclasses import replace

    from dustin_trt.evaluation.assets import smollm2

    options = replace(options, max_context=8192, page_size=64, chunk=512)
    target, draft = smollm2(), DRAFT / "draft"
    manifest = build_engines(target, draft, DRAFT / "dustin.json", tmp_path / "made", options)
    assert Manifest.load(tmp_path / "made") == manifest
    assert manifest.plugins == fingerprint(PLUGINS)
    assert manifest.compute_capability == "8.9"
    assert manifest.versions["tensorrt-rtx"]
    for name, layers in SMOLLM2_LAYERS.items():
        graph = onnx.load(tmp_path / "made" / f"{name}.onnx", load_external_data=False).graph
        ops = Counter(node.op_type for node in graph.node if node.domain == "dustin")
        assert ops["DustinSparseAttention"] == ops["DustinKvAppend"] == layers
        weights = (tmp_path / "made" / f"{name}.weights").stat().st_size
        engine = (tmp_path / "made" / f"{name}.engine").stat().st_size
        # One copy of the weights and, of every layer in two profiles, its code: about 3 MB.
        assert weights < engine < weights + layers * 3.2e6
