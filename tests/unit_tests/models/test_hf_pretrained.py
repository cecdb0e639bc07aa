# SPDX-License-Identifier: Apache-2.0
"""Reading and writing safetensors files, and finding models."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.safetensors_files import INDEX, SafetensorsCheckpoint
from megatron.bridge.models.hf_pretrained.safetensors_writer import (
    Writer,
    create,
    new_output_files,
    output_files_like,
    write_index,
)
from megatron.bridge.utils.errors import UserError
from tests import hub_cache
from tests.refusals import refused
from tests.toy_models import make_llama
from tests.toy_run import save_llama

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b": torch.randn(7).bfloat16(),
    "c": torch.tensor(3.5),
    "d": torch.empty(0, 3),
    "e": torch.arange(5, dtype=torch.int8),
    "f": torch.randn(3, 2).half(),
}


def shapes(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def written(directory, layouts, tensors):
    create(directory, layouts)
    with Writer(directory, layouts) as writer:
        for name, tensor in tensors.items():
            writer.write(name, 0, tensor)


def test_views_equal_what_safetensors_reads(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint[name], tensor)
        assert checkpoint[name].dtype is tensor.dtype


def test_misaligned_tensors_are_read(tmp_path):
    data = torch.randn(3)
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data.numpy().tobytes())
    assert torch.equal(SafetensorsCheckpoint(tmp_path)["x"], data)


@pytest.mark.parametrize(
    "header",
    ["[]", '{"x": 5}', '{"x": {"shape": [1]}}', '{"x": {"dtype": "F32", "shape": 1}}', "{"],
)
def test_a_damaged_header_is_refused(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode()
    )
    with pytest.raises(
        UserError, match=r"model.safetensors has a damaged header: download it again"
    ):
        SafetensorsCheckpoint(tmp_path).files  # noqa: B018


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            ([-8, 4], [4, 16]),
            "a is not behind the tensor before it",
        ),  # a part of the header would be numbers
        (([0, 12], [8, 20]), "b is not behind the tensor before it"),
        (([0, 12], [16, 28]), "b is not behind the tensor before it"),
        (([0, 12], [12, 24]), "has 4 bytes behind its last tensor"),
    ],
)
def test_every_byte_is_of_one_tensor(tmp_path, places, message):
    tensors = {
        name: {"dtype": "F32", "shape": [3], "data_offsets": at}
        for name, at in zip("ab", places, strict=True)
    }
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(28)
    )
    with pytest.raises(UserError, match=message):
        SafetensorsCheckpoint(tmp_path).files  # noqa: B018


@pytest.mark.parametrize("index", ['{"weight_map": []}', '{"weight_map": {"a": 5}}', "[]", ""])
def test_a_damaged_index_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        UserError, match=r"model.safetensors.index.json is damaged: download it again"
    ):
        SafetensorsCheckpoint(tmp_path).files  # noqa: B018


def test_copy_takes_ranges_into_any_target_and_counts_bytes(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    target = torch.zeros(6, 4, dtype=torch.float64).T[:, 1:3]
    checkpoint.copy("a", (slice(None), slice(2, 4)), target)
    assert torch.equal(target.float(), TENSORS["a"][:, 2:4])
    assert checkpoint.bytes_read == 8 * 4
    checkpoint.release("a")
    assert torch.equal(checkpoint["a"], TENSORS["a"])


def test_written_files_are_read_by_safetensors(tmp_path):
    layouts = new_output_files(shapes(TENSORS), shard_bytes=64)
    assert len(layouts) > 1
    written(tmp_path, layouts, TENSORS)
    write_index(tmp_path, layouts, None)
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for name, tensor in TENSORS.items():
        with safe_open(tmp_path / where[name], "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
    assert set(SafetensorsCheckpoint(tmp_path)) == set(TENSORS)


def test_rows_may_come_in_any_order_and_dtype(tmp_path):
    layouts = new_output_files(shapes(TENSORS))
    create(tmp_path, layouts)
    with Writer(tmp_path, layouts) as writer:
        writer.write("a", 2, TENSORS["a"][2:].double())
        writer.write("a", 0, TENSORS["a"].T.contiguous().T[:2])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], TENSORS["a"])


def test_layout_of_a_source_keeps_its_files_and_headers(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    parts = [{"a": TENSORS["a"], "c": TENSORS["c"]}, {"b": TENSORS["b"]}]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file(part, source / name, metadata={"format": "pt", "note": "kept"})
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (source / INDEX).write_text(json.dumps({"metadata": {"other": 1}, "weight_map": weight_map}))
    checkpoint = SafetensorsCheckpoint(source)

    layouts = output_files_like(checkpoint, shapes({**parts[0], **parts[1]}))
    written(out, layouts, {**parts[0], **parts[1]})
    write_index(out, layouts, checkpoint)

    for name in (*names, INDEX):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_layout_of_a_source_takes_other_shapes_and_surplus_tensors(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wanted = {"a": torch.randn(2, 2), "new": torch.randn(3)}
    layouts = output_files_like(SafetensorsCheckpoint(tmp_path), shapes(wanted))
    assert [layout.name for layout in layouts] == ["model.safetensors"]
    out = tmp_path / "out"
    out.mkdir()
    written(out, layouts, wanted)
    write_index(out, layouts, SafetensorsCheckpoint(tmp_path))
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in SafetensorsCheckpoint(out).items()
    )


def test_a_hub_id_is_found_in_the_cache(tmp_path):
    make_llama(hub_cache.snapshot_folder(tmp_path, "someone/tiny"), num_hidden_layers=1)
    bridge = AutoBridge.from_hf_pretrained("someone/tiny", cache_dir=str(tmp_path))
    assert bridge.hf_config.hidden_size == 48
    assert "lm_head.weight" in bridge.hf_pretrained.state
    with pytest.raises(UserError, match="someone/absent is neither a local directory nor"):
        AutoBridge.from_hf_pretrained("someone/absent", cache_dir=str(tmp_path))


def test_side_files_are_neither_weights_nor_of_a_run(tmp_path):
    make_llama(tmp_path, num_hidden_layers=1)
    weights = ("pytorch_model.bin", "original/consolidated.00.pth")
    of_runs = (
        "loss.png",
        "run_config.yaml",
        "runs/a/events.out.tfevents.1",
        "checkpoint-5/config.json",
    )
    for name in ("LICENSE", "original/params.json", ".git/x", *weights, *of_runs):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    found = [str(path) for path in PreTrainedCausalLM(tmp_path).side_files()]
    assert found == [
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "original/params.json",
    ]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M*Q", ("does not know 'Q'", "hybrid_override_pattern='M*Q'")),
        ("M|*", ("does not know '|'", "hybrid_override_pattern='M|*'")),
    ],
)
def test_a_value_that_transformers_does_not_know_is_named_with_its_key(tmp_path, pattern, words):
    config = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    text = json.dumps({**config, "hybrid_override_pattern": pattern, "num_hidden_layers": 3})
    (tmp_path / "config.json").write_text(text)
    with refused(f"transformers refuses {tmp_path / 'config.json'}", *words):
        _ = PreTrainedCausalLM(tmp_path).config


def test_an_epsilon_that_is_not_finite_is_refused(tmp_path):
    save_llama(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": math.inf}))
    with refused("layernorm_epsilon=inf: must be a finite number"):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider().finalize()
