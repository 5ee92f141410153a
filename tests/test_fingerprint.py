from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dustin_trt.fingerprint import weights_fingerprint
from tests.tiny import make

PARTS = ["embeddings", "layer 0", "layer 1", "layer 2", "norm", "head"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make().save_pretrained(path)
    return path


def _changed(folder: Path, to: Path, **tensors: torch.Tensor) -> list[str]:
    """Parts whose fingerprint changes with some tensors of `folder` (`model_norm_weight=…`)."""
    whole = load_file(folder / "model.safetensors")
    names = {name.replace(".", "_"): name for name in whole}
    save_file(
        whole | {names[name]: tensor for name, tensor in tensors.items()}, to / "model.safetensors"
    )
    before, after = weights_fingerprint(folder), weights_fingerprint(to)
    assert list(after) == list(before)
    return [part for part in before if before[part] != after[part]]


def _tensor(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name].clone()


def test_every_part_has_one_in_the_order_of_a_forward_pass(folder):
    parts = weights_fingerprint(folder)
    assert list(parts) == PARTS
    assert all(re.fullmatch("[0-9a-f]{12}", digits) for digits in parts.values())
    assert len(set(parts.values())) == len(parts)
    assert weights_fingerprint(str(folder)) == parts


def test_layers_are_in_the_order_of_their_numbers(tmp_path):
    make(num_hidden_layers=12).save_pretrained(tmp_path)
    layers = [f"layer {layer}" for layer in range(12)]
    assert list(weights_fingerprint(tmp_path)) == ["embeddings", *layers, "norm", "head"]


def test_tied_weights_have_no_head_of_their_own(tmp_path):
    make("qwen2-tied").save_pretrained(tmp_path)
    assert list(weights_fingerprint(tmp_path)) == PARTS[:-1]


def test_the_same_weights_saved_again_have_the_same(folder, tmp_path):
    make().save_pretrained(tmp_path)
    assert weights_fingerprint(tmp_path) == weights_fingerprint(folder)
    assert _changed(folder, tmp_path) == []


def test_other_weights_of_the_same_shape_have_other_ones(folder, tmp_path):
    make(seed=1).save_pretrained(tmp_path)
    before, after = weights_fingerprint(folder), weights_fingerprint(tmp_path)
    # The norms are 1 in both.
    assert [part for part in PARTS if before[part] == after[part]] == ["norm"]


def test_shards_have_the_fingerprint_of_the_whole(folder, tmp_path):
    make().save_pretrained(tmp_path, max_shard_size="100KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert weights_fingerprint(tmp_path) == weights_fingerprint(folder)


def test_another_dtype_is_another_fingerprint(folder, tmp_path):
    make().bfloat16().save_pretrained(tmp_path)
    before, after = weights_fingerprint(folder), weights_fingerprint(tmp_path)
    assert list(after) == PARTS
    assert all(before[part] != after[part] for part in PARTS)


def test_equal_bytes_of_another_dtype_or_shape_are_another_fingerprint(folder, tmp_path):
    norm = _tensor(folder, "model.norm.weight")
    assert _changed(folder, tmp_path, model_norm_weight=norm.view(torch.int32)) == ["norm"]
    assert _changed(folder, tmp_path, model_norm_weight=norm.reshape(2, -1)) == ["norm"]


@pytest.mark.parametrize("element", (0, 41, 95))
def test_one_element_of_a_small_tensor_is_seen(folder, tmp_path, element):
    norm = _tensor(folder, "model.layers.1.input_layernorm.weight")
    norm[element] += 1e-6
    assert _changed(folder, tmp_path, model_layers_1_input_layernorm_weight=norm) == ["layer 1"]


def test_a_change_all_over_a_large_tensor_is_seen(folder, tmp_path):
    for name, part in (
        ("model.layers.2.mlp.down_proj.weight", "layer 2"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "head"),
    ):
        changed = _tensor(folder, name)
        assert changed.numel() > 4096
        changed *= 1.001
        assert _changed(folder, tmp_path, **{name.replace(".", "_"): changed}) == [part]


@pytest.mark.parametrize("shape", ((1024, 64), (640, 512), (4033, 64), (5000,)), ids=str)
def test_a_change_of_a_large_part_of_a_tensor_is_seen(tmp_path, shape):
    """Its beginning, its end, half of its columns."""
    (tmp_path / "new").mkdir()
    same = torch.zeros(shape)
    save_file({"lm_head.weight": same}, tmp_path / "model.safetensors")
    rows, half = shape[0], shape[-1] // 2
    for place in (
        slice(0, rows // 16), slice(rows - rows // 16, rows), (..., slice(0, half)),
        (..., slice(half, None)),
    ):  # fmt: skip
        changed = same.clone()
        changed[place] = 1
        assert _changed(tmp_path, tmp_path / "new", lm_head_weight=changed) == ["head"]


def test_the_sample_is_64_runs_of_64_elements(tmp_path):
    """64,064 elements are 64 pieces of 1001; of their 937 places to begin, piece i takes that which
    is 937 (39 i mod 64) / 63 from its first: 0 of piece 0, 580 of 1, 208 of 2, 371 of the last."""
    (tmp_path / "new").mkdir()
    same = torch.zeros(64_064)
    save_file({"lm_head.weight": same}, tmp_path / "model.safetensors")
    for begin in (0, 1001 + 580, 2002 + 208, 63 * 1001 + 371):
        for element, seen in ((begin - 1, False), (begin, True), (begin + 63, True),
                              (begin + 64, False)):  # fmt: skip
            if element >= 0:
                changed = same.clone()
                changed[element] = 1
                parts = _changed(tmp_path, tmp_path / "new", lm_head_weight=changed)
                assert parts == (["head"] if seen else []), element


def test_all_of_4096_elements_is_seen(tmp_path):
    (tmp_path / "new").mkdir()
    same = torch.zeros(64, 64)
    save_file({"model.norm.weight": same}, tmp_path / "model.safetensors")
    for element in (0, 64, 65, 2048, 4095):
        changed = same.clone()
        changed.view(-1)[element] = 1
        assert _changed(tmp_path, tmp_path / "new", model_norm_weight=changed) == ["norm"]


def test_a_renamed_tensor_is_seen(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.p_proj.weight"] = tensors.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    save_file(tensors, tmp_path / "model.safetensors")
    before, after = weights_fingerprint(folder), weights_fingerprint(tmp_path)
    assert [part for part in PARTS if before[part] != after[part]] == ["layer 0"]


def test_tensors_of_other_names_scalars_and_empty_ones_count(tmp_path):
    path = tmp_path / "model.safetensors"
    seen = set()
    for scalar in (1.0, 2.0):
        save_file({"scale": torch.tensor(scalar), "none": torch.zeros(0, 3)}, path)
        assert list(weights_fingerprint(tmp_path)) == ["other"]
        seen.add(weights_fingerprint(tmp_path)["other"])
    assert len(seen) == 2


def test_a_folder_without_safetensors_has_none(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert weights_fingerprint(tmp_path) == {}
    assert weights_fingerprint(tmp_path / "nowhere") == {}


def test_the_single_file_counts_where_there_are_shards_too(folder, tmp_path):
    make(seed=1).save_pretrained(tmp_path, max_shard_size="100KB")
    shutil.copy(folder / "model.safetensors", tmp_path)
    assert weights_fingerprint(tmp_path) == weights_fingerprint(folder)


@pytest.mark.parametrize("length", (0, 7, 100, -1))
def test_a_damaged_file_is_named(folder, tmp_path, length):
    content = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:length])
    with pytest.raises(
        ValueError, match=r"cannot read the weights in .*model\.safetensors"
    ) as error:
        weights_fingerprint(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_named(tmp_path):
    make().save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"cannot read the weights in .*{lost.name}"):
        weights_fingerprint(tmp_path)


@pytest.mark.parametrize(
    "index", ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\x80")
)
def test_a_damaged_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is not an index"):
        weights_fingerprint(tmp_path)


def test_a_good_index_of_no_shards_has_none(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert weights_fingerprint(tmp_path) == {}


def test_a_large_file_is_not_read_whole(tmp_path):
    """Of a sparse file of 1 GB, by the pages that had to be brought in for it."""
    size = 1 << 30
    tensor = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    header = json.dumps({"lm_head.weight": tensor}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    before = _page_faults()
    assert list(weights_fingerprint(tmp_path)) == ["head"]
    assert _page_faults() - before < 2000  # all of it takes 16,384, at 64 KiB a time


def _page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt
