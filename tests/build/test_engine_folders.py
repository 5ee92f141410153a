"""Engine folders: the exported graphs drive the whole loop, and bad input leaves nothing behind."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from dustin_trt import LLM, SamplingParams
from dustin_trt.build.build import Options, build_engines
from dustin_trt.config import ConfigError
from dustin_trt.engines.base import Dense, Dustin, Indices
from dustin_trt.engines.manifest import Manifest, ManifestError
from dustin_trt.models.causal_lm import UnsupportedModelError
from tests import tokenizer
from tests.build.pair import SIZES, build, configuration, save_pair
from tests.tiny import FAMILIES, ids, prompt

PROMPTS = ids(*(prompt(n, n) for n in (90, 40, 17, 120, 60)))
GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engines(pair, tmp_path_factory) -> Path:
    return build(*pair, tmp_path_factory.mktemp("engines") / "made")


def torch_llm(target, draft, config, **options) -> LLM:
    return LLM(target, draft, config=config, max_batch_size=3, prefill_chunk=32, **options)


def same(engine: LLM, reference: LLM, params: SamplingParams) -> bool:
    outputs = zip(engine.generate(PROMPTS, params), reference.generate(PROMPTS, params),
                  strict=True)  # fmt: skip
    return all(
        a.token_ids == b.token_ids
        and a.stats.accepted == b.stats.accepted
        and a.stats.history_read == b.stats.history_read
        and a.stats.coverage == pytest.approx(b.stats.coverage, abs=1e-4, nan_ok=True)
        for a, b in outputs
    )


class TestWholeLoop:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_is_the_torch_engines(self, tmp_path, family):
        target, draft = save_pair(tmp_path, family)
        config = configuration(target, draft, guard=0.5)
        made = LLM(engine_dir=build(target, draft, tmp_path / "made", config))
        reference = torch_llm(target, draft, config)
        assert same(made, reference, GREEDY)
        assert same(made, reference, SAMPLED)

    @pytest.mark.parametrize(
        ("changes", "options"),
        [
            ({"join": "sum"}, {}),
            ({"guard": 0.7, "join": "sum", "lookahead_weight": 0.8}, {}),
            ({"lookahead": 3}, {}),
            ({}, {"signal": "history"}),
            ({}, {"signal": "lookahead"}),
            ({"draft_window": 0}, {}),
            ({}, {"page_size": 300}),
            ({"gamma": 1}, {}),
        ],
    )
    def test_with_every_way_to_choose(self, tmp_path, pair, changes, options):
        config = configuration(*pair, **changes)
        made = LLM(engine_dir=build(*pair, tmp_path / "made", config, **options))
        signal = options.get("signal")
        assert same(made, torch_llm(*pair, config, signal=signal), GREEDY)

    @pytest.mark.parametrize("draft", ["none", "lookup"])
    def test_without_its_draft(self, tmp_path, pair, draft):
        config = configuration(pair[0], None)
        folder = build(pair[0], None, tmp_path / "made", config)
        reference = torch_llm(pair[0], draft, config, policy="dustin")
        assert same(LLM(engine_dir=folder, draft=draft), reference, GREEDY)

    def test_reading_everything(self, engines, pair):
        config = configuration(*pair)
        made = LLM(engine_dir=engines, policy="dense")
        assert same(made, torch_llm(*pair, config, policy="dense"), SAMPLED)

    def test_one_guarded_dense_pass_is_the_unguarded_one(self, engines):
        guarded = LLM(engine_dir=engines, guard=1.0).generate(PROMPTS, GREEDY)
        dense = LLM(engine_dir=engines, policy="dense").generate(PROMPTS, GREEDY)
        assert [a.token_ids for a in guarded] == [b.token_ids for b in dense]
        assert all(output.stats.guarded_steps for output in guarded)

    def test_a_variant_shares_weights_and_prompts(self, engines):
        model = LLM(engine_dir=engines)
        model.generate(PROMPTS[:1], GREEDY)
        output = model.variant(draft="none", policy="dense").generate(PROMPTS[:1], GREEDY)[0]
        assert output.stats.cached_prompt_tokens == 89

    def test_text_comes_from_the_folders_own_tokenizer(self, engines, pair):
        made = LLM(engine_dir=engines).generate("the world and the", GREEDY)[0]
        reference = torch_llm(*pair, configuration(*pair)).generate("the world and the", GREEDY)[0]
        assert made.text == reference.text

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_is_near(self, tmp_path, pair, dtype):
        config = configuration(*pair)
        folder = build(*pair, tmp_path / "made", config, dtype=dtype)
        engine = LLM(engine_dir=folder).decoder.target
        assert engine.cache.k[0].dtype == getattr(torch, dtype)
        reference = torch_llm(*pair, config).decoder.target
        logits = []
        for each in (engine, reference):
            each.cache.reserve(0, 100)
            logits.append(each.prefill(0, prompt(70), chunk=32).logits)
        spread = float(logits[1].std())
        assert (logits[0] - logits[1]).abs().mean() < 0.05 * spread


class TestShards:
    """Ranks in threads, with collectives that wait for one another."""

    def test_together_are_the_whole(self, tmp_path, pair):
        import threading

        from onnx.reference.op_run import OpRun

        from dustin_trt.engines.graph_engine import GraphEngine
        from dustin_trt.engines.onnx_session import OnnxSession
        from dustin_trt.kv_cache import PagedKVCache

        config = configuration(pair[0], None)
        whole = LLM(engine_dir=build(pair[0], None, tmp_path / "whole", config)).decoder.target
        folder = build(pair[0], None, tmp_path / "cut", config, tensor_parallel=2)
        steps = Manifest.load(folder).target
        barrier, given = threading.Barrier(2, timeout=60), {}

        def collectives(rank: int) -> list:
            def exchanged(x) -> list:
                given[rank] = x
                barrier.wait()
                parts = [given[0], given[1]]
                barrier.wait()
                return parts

            class AllReduce(OpRun):
                op_domain = "com.microsoft"

                def _run(self, x):
                    a, b = exchanged(x)
                    return (a + b,)

            class AllGather(OpRun):
                op_domain = "com.microsoft"

                def _run(self, x, group_size=None, axis=None):
                    import numpy as np

                    assert group_size == 2
                    return (np.concatenate(exchanged(x), axis),)

            return [AllReduce, AllGather]

        def engine(rank: int) -> GraphEngine:
            graph = steps[rank].graph
            session = OnnxSession(folder / steps[rank].files[0].name, graph, collectives(rank))
            cache = PagedKVCache(
                num_layers=3, num_kv_heads=graph.num_kv_heads, head_dim=graph.model.head_dim,
                num_slots=1, capacity=graph.capacity, page_size=graph.page_size,
            )  # fmt: skip
            return GraphEngine(session, graph, cache)

        def work(each: GraphEngine, found: dict, rank: int) -> None:
            each.cache.reserve(0, 120)
            asked = each.prefill(0, prompt(90), chunk=32).srh_queries[None]
            window = torch.tensor([prompt(4, 1)])
            found[rank] = each.verify(
                torch.tensor([0]), window, Dustin(asked, None, 26, 0, config.sink, 8)
            )

        found: dict = {}
        threads = [threading.Thread(target=work, args=(engine(r), found, r)) for r in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        work(whole, found, 2)
        for rank in (0, 1):
            assert torch.equal(found[rank].indices, found[2].indices)
            torch.testing.assert_close(found[rank].logits, found[2].logits, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(found[rank].coverage, found[2].coverage)
        heads = [part.srh_queries.shape[2] for part in (found[0], found[1], found[2])]
        assert heads[0] + heads[1] == heads[2]

    def test_are_not_run_by_one_process(self, tmp_path, pair):
        folder = build(pair[0], None, tmp_path / "cut", tensor_parallel=2)
        with pytest.raises(ManifestError, match="2 shards of a tensor-parallel model"):
            LLM(engine_dir=folder)

    def test_must_be_equal(self, tmp_path, pair):
        with pytest.raises(ConfigError, match="2 KV heads cannot be cut into 3 equal shards"):
            build(pair[0], None, tmp_path / "cut", tensor_parallel=3)


class TestRefusals:
    def nothing_left(self, folder: Path) -> bool:
        return [path for path in folder.iterdir() if "made" in path.name] == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_context": 4000}, "max_context 4000 is not in 1–512"),
            ({"max_context": 20}, "budget 26 is more than max_context 20"),
            ({"backend": "tvm"}, "unknown backend 'tvm'"),
            ({"dtype": "int8"}, "unknown dtype 'int8'"),
            ({"backend": "tensorrt"}, "float32 is for onnx"),
            ({"backend": "tensorrt", "dtype": "float16"}, "head size 16 is not supported"),
            ({"gamma": 40}, "gamma 40 is not in 1–16"),
            ({"max_batch": 0}, "max_batch must be at least 1"),
            ({"tensor_parallel": 2, "backend": "tensorrt", "dtype": "float16"}, "tensor_parallel"),
        ],
    )
    def test_of_options(self, tmp_path, pair, options, message):
        with pytest.raises((ValueError, UnsupportedModelError), match=message):
            build(*pair, tmp_path / "made", **options)
        assert self.nothing_left(tmp_path)

    def test_of_signals_without_heads(self, tmp_path, pair):
        config = configuration(*pair, draft_heads=())
        with pytest.raises(ConfigError, match="needs a draft, and draft_heads"):
            build(*pair, tmp_path / "made", config, signal="hybrid")

    def test_of_a_configuration_for_other_models(self, tmp_path, pair):
        config = configuration(*pair, target_weights={"head": "0" * 12})
        with pytest.raises(ConfigError, match="other target weights"):
            build(*pair, tmp_path / "made", config)

    def test_of_damaged_weights(self, tmp_path, pair):
        target, draft = save_pair(tmp_path)
        path = target / "model.safetensors"
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(ValueError, match="cannot read the weights"):
            build(target, draft, tmp_path / "made")
        assert self.nothing_left(tmp_path)

    def test_of_weights_that_do_not_fit(self, tmp_path):
        target, draft = save_pair(tmp_path)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
        with pytest.raises(ValueError, match=r"joint.weight is .* by its config.json"):
            build(target, draft, tmp_path / "made")
        assert self.nothing_left(tmp_path)

    def test_of_a_folder_that_exists(self, tmp_path, pair):
        (tmp_path / "made").mkdir()
        with pytest.raises(FileExistsError, match="exists already"):
            build(*pair, tmp_path / "made")

    def test_of_a_full_disk(self, tmp_path, pair):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(OSError):
                build(*pair, tmp_path / "made")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert self.nothing_left(tmp_path)
        assert not (tmp_path / ".made.partial").exists()

    def test_leftovers_of_a_killed_build_do_not_matter(self, tmp_path, pair):
        (tmp_path / ".made.partial").mkdir()
        (tmp_path / ".made.partial" / "target.onnx").write_text("half")
        assert Manifest.load(build(*pair, tmp_path / "made")).draft


class TestFolders:
    def copy(self, engines: Path, tmp_path: Path) -> Path:
        import shutil

        return Path(shutil.copytree(engines, tmp_path / "copy"))

    def test_damage_is_named(self, tmp_path, engines):
        folder = self.copy(engines, tmp_path)
        path = folder / "draft.weights"
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
        with pytest.raises(ManifestError, match=r"draft.weights is not what was built"):
            LLM(engine_dir=folder)
        path.write_bytes(content[:-1])
        with pytest.raises(ManifestError, match="it was cut off or changed"):
            LLM(engine_dir=folder)
        path.unlink()
        with pytest.raises(ManifestError, match="is missing"):
            LLM(engine_dir=folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: "{", "cannot be used"),
            (lambda m: json.dumps({**m, "format_version": 2}), "format_version"),
            (lambda m: json.dumps({**m, "max_context": 10_000}), "more than the 224 tokens"),
            (lambda m: json.dumps({**m, "extra": 1}), "extra"),
            (lambda m: json.dumps(m).replace("target.onnx", "../target.onnx"), "is not a name"),
        ],
    )
    def test_a_wrong_manifest_is_one_line(self, tmp_path, engines, change, message):
        folder = self.copy(engines, tmp_path)
        path = folder / "manifest.json"
        path.write_text(change(json.loads(path.read_text())))
        with pytest.raises(ManifestError, match=message) as caught:
            LLM(engine_dir=folder)
        assert "\n" not in str(caught.value)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="is no engine folder"):
            LLM(engine_dir=tmp_path)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"budget": 30}, "another budget: 26, not 30"),
            ({"join": "sum"}, "another join: split, not sum"),
            ({"draft_window": 20}, "another draft_window: 12, not 20"),
            ({"gamma": 4}, "gamma 4 is more than the 3"),
            ({"signal": "history"}, "built for signal 'hybrid', not 'history'"),
            ({"draft": "lookup"}, "needs the folder's own draft"),
            ({"draft": "skip:1"}, "with an engine folder"),
            ({"max_batch_size": 4}, "4 is more than the max_batch 3"),
            ({"max_model_len": 201}, "201 is more than the max_context 200"),
            ({"device": "cuda"}, "cannot run on cuda"),
            ({"target": "somewhere"}, "in the place of target"),
            ({"page_size": 16}, "in the place of target"),
        ],
    )
    def test_what_is_compiled_in_stays(self, engines, options, message):
        with pytest.raises(ValueError, match=message):
            LLM(engine_dir=engines, **options)

    def test_another_dustin_json_is_refused(self, engines, pair):
        other = configuration(*pair, target_heads=((0, 0),))
        with pytest.raises(ConfigError, match="another target_heads"):
            LLM(engine_dir=engines, config=other)

    def test_other_selections_are_refused(self, engines):
        engine = LLM(engine_dir=engines).decoder.target
        slots, window = torch.tensor([0]), torch.tensor([prompt(3)])
        engine.cache.reserve(0, 60)
        engine.prefill(0, prompt(40), chunk=32)
        empty = torch.zeros(1, 2, dtype=torch.int32)
        with pytest.raises(ConfigError, match="what it was built to read"):
            engine.verify(slots, window, Indices(empty, empty[:, 0]))
        with pytest.raises(ConfigError, match="heads it was built with"):
            engine.verify(slots, window, Dense(), heads=())

    def test_a_pass_that_does_not_fit_names_its_input(self, engines):
        engine = LLM(engine_dir=engines).decoder.target
        with pytest.raises(ValueError, match=r"input_ids is .* window of 1–4 in the generation"):
            engine.verify(torch.tensor([0]), torch.tensor([prompt(9)]), Dense())


def test_sizes_of_both_phases():
    from dustin_trt.config import ModelSpec
    from dustin_trt.engines.step_graph import Reading, StepGraph

    spec = ModelSpec("LlamaForCausalLM", 2, 4, 2, 16, 64, 99, 512)
    graph = StepGraph(
        role="target", model=spec, dtype="float16", page_size=16, max_pages=4, max_batch=3,
        max_window=5, chunk=32, reading=Reading(budget=20),
    )  # fmt: skip
    context, generation = graph.sizes("context"), graph.sizes("generation")
    assert context["window"] == (1, 32, 32) and generation["window"] == (1, 5, 5)
    assert context["columns"] == (1, 1, 1) and generation["columns"] == (1, 5, 5)
    assert generation["read"] == (20, 20, 64) and context["read"] == (20, 64, 64)
    assert generation["batch"] == (1, 3, 3) and generation["pages"] == (1, 12, 12)


def test_the_command_builds_and_generates(tmp_path, pair, capsys):
    from dustin_trt.cli import main

    (tmp_path / "dustin.json").write_text(configuration(*pair).model_dump_json())
    out = tmp_path / "made"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = ["build", "--target", str(pair[0]), "--draft", str(pair[1]), "--backend", "onnx",
               "--config", str(tmp_path / "dustin.json"), "--output", str(out), *sizes]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "built for onnx" in said and "up to 3 rows of 200 tokens" in said
    assert main(command) == 2 and "exists already" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt_token_ids": prompt(30)}) + "\n")
    generate = ["generate", "--engine-dir", str(out), "--input", str(tmp_path / "in.jsonl"),
                "--output", str(tmp_path / "out.jsonl"), "--max-new-tokens=5"]  # fmt: skip
    assert main(generate) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text())
    reference = torch_llm(*pair, configuration(*pair)).generate(
        ids(prompt(30)), SamplingParams(max_tokens=5)
    )[0]
    assert line["token_ids"] == reference.token_ids


@pytest.mark.model
def test_some_steps_of_smollm2(tmp_path):
    from dustin_trt.evaluation import assets

    shipped = Path(__file__).parents[2] / "calibration/results/smollm2"
    pair = assets.smollm2(), shipped / "draft"
    options = Options(backend="onnx", dtype="float32", max_batch=2, max_context=1024)
    build_engines(*pair, shipped / "dustin.json", tmp_path / "made", options)
    book = next(iter(assets.books().values())).read_text()[2000:]
    made = LLM(engine_dir=tmp_path / "made")
    tokens = made.tokenizer(book[:9000]).input_ids
    prompts = ids(tokens[:560], tokens[1000:1700])
    params = SamplingParams(max_tokens=8)
    reference = LLM(*pair, config=shipped / "dustin.json", dtype="float32", max_batch_size=2)
    for a, b in zip(
        made.generate(prompts, params), reference.generate(prompts, params), strict=True
    ):
        assert a.token_ids == b.token_ids
        assert a.stats.history_read == b.stats.history_read < b.stats.history


def test_tokenizers_must_agree(tmp_path):
    target, draft = save_pair(tmp_path)
    tokenizer.make(("a b",)).save_pretrained(draft)
    with pytest.raises(ValueError, match="tokenizer"):
        build(target, draft, tmp_path / "made")
