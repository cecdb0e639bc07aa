# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: every number against a loop over single numbers and against transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.quantization_configs import check, without_quantization
from megatron.bridge.models.hf_pretrained.quantized_checkpoint import open_checkpoint
from megatron.bridge.utils.errors import UserError
from tests.quantize import (
    fp8_config,
    from_fp8,
    from_mxfp4,
    random_mxfp4,
    rewrite,
    store_in_fp8,
    to_fp8,
)
from tests.toy_models import make_llama, tokens
from tests.unit_tests.models.test_llama import TOLERANCE, difference

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
PARTS = [
    (slice(None), slice(None)),
    (slice(3, 21), slice(None)),
    (slice(0, 37, 2), slice(5, 30)),
    (slice(1, 37, 2), slice(2, 41, 3)),
    (slice(8, 8), slice(None)),
]


def opened(directory, config, dtype=torch.bfloat16, **tensors):
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return open_checkpoint(directory, {"quantization_config": config}, dtype)


@pytest.mark.parametrize("index", PARTS)
@pytest.mark.parametrize("block", [(8, 16), (16, 8), (64, 64), (1, 32), None])
def test_parts_of_float8_matrices(tmp_path, block, index):
    torch.manual_seed(0)
    packed, scale = to_fp8(torch.randn(37, 41), block)  # neither side divides by a block
    checkpoint = opened(
        tmp_path, fp8_config(block and list(block)), w=packed, w_scale_inv=scale, norm=torch.ones(3)
    )
    assert set(checkpoint) == {"norm", "w"}
    expected = from_fp8(packed, scale, block)
    target = torch.empty(expected[index].shape)
    checkpoint.copy("w", index, target)
    assert torch.equal(target, expected[index])
    assert checkpoint.bytes_read == target.numel()
    entry = checkpoint.entries["w"]
    assert (entry.dtype, entry.shape) == (torch.bfloat16, (37, 41))
    assert torch.equal(checkpoint["w"], expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes(tmp_path, dtype):
    packed, scale = to_fp8(torch.randn(32, 32), (16, 16))
    scale = scale.to(dtype)
    checkpoint = opened(
        tmp_path, fp8_config([16, 16], scale_fmt="ue8m0"), w=packed, w_scale_inv=scale
    )
    assert torch.equal(checkpoint["w"], from_fp8(packed, scale, (16, 16)).bfloat16())


def test_float8_as_transformers_computes_it(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed, scale = to_fp8(torch.randn(64, 96), (16, 32))
    checkpoint = opened(tmp_path, fp8_config([16, 32]), w=packed, w_scale_inv=scale)
    expected = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.bfloat16)
    assert torch.equal(checkpoint["w"], expected)


@pytest.mark.parametrize(
    "index",
    [
        (),
        (1,),
        (2, slice(None), slice(0, 11, 2)),
        (0, slice(5, 70), slice(None)),
        (1, slice(33, 95, 2), slice(1, 11, 3)),
        (slice(1, 3), slice(32, 64)),
        (1, slice(32, 32)),
    ],
)
def test_parts_of_mxfp4_matrices(tmp_path, index):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks, scales = random_mxfp4(3, 96, 11)
    checkpoint = opened(tmp_path, MXFP4, e_blocks=blocks, e_scales=scales, e_bias=torch.ones(2))
    assert set(checkpoint) == {"e", "e_bias"}
    assert checkpoint.entries["e"].shape == (3, 96, 11)
    expected = from_mxfp4(blocks, scales)
    assert torch.equal(expected.bfloat16(), convert_moe_packed_tensors(blocks, scales))
    target = torch.empty(expected[index].shape)
    checkpoint.copy("e", index, target)
    assert torch.equal(target, expected[index])
    assert torch.equal(checkpoint["e"], expected.bfloat16())
    checkpoint.release("e")
    checkpoint.release("e", 1)
    assert torch.equal(checkpoint["e"], expected.bfloat16())


def fp8_tensors():
    packed, scale = to_fp8(torch.randn(32, 48), (16, 16))
    return {"m.weight": packed, "m.weight_scale_inv": scale, "norm.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("m.weight_scale_inv"),
            r"m\.weight is float8_e4m3fn.*m\.weight_scale_inv is missing",
        ),
        (
            lambda t: t.pop("m.weight"),
            r"m\.weight_scale_inv scales m\.weight, which is not in the checkpoint",
        ),
        (
            lambda t: t.update({"m.weight": torch.ones(32, 48)}),
            r"scales m\.weight, which is float32",
        ),
        (
            lambda t: t.update({"norm.weight_scale_inv": torch.ones(1)}),
            r"scales norm\.weight, which is float32",
        ),
        (
            lambda t: t.update({"m.weight_scale_inv": t["m.weight_scale_inv"].t()}),
            r"m\.weight_scale_inv has shape \[3, 2\].*shape \[2, 3\]",
        ),
        (
            lambda t: t.update({"m.weight_scale_inv": torch.ones(2, 3).int()}),
            "is int32, not a float",
        ),
        (
            lambda t: t.update({"m.weight": t["m.weight"].flatten()}),
            r"of shape \[1536\], not a matrix",
        ),
        (
            lambda t: [t.pop("m.weight"), t.pop("m.weight_scale_inv")],
            "quantization_config.*remove quantization_config",
        ),
    ],
)
def test_wrong_float8_scales_are_named(tmp_path, change, message):
    tensors = fp8_tensors()
    change(tensors)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, fp8_config([16, 16]), **tensors).entries  # noqa: B018


def test_scales_by_block_where_one_is_declared(tmp_path):
    with pytest.raises(UserError, match=r"weight_block_size=.*one number"):
        opened(tmp_path, fp8_config(None), **fp8_tensors()).entries  # noqa: B018


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("e_scales"), r"e_blocks is uint8, but its scale e_scales is missing"),
        (lambda t: t.pop("e_blocks"), r"e_scales scales e_blocks, which is not in the checkpoint"),
        (
            lambda t: t.update({"e": torch.ones(1)}),
            r"tensor e is in the checkpoint both in full and as",
        ),
        (lambda t: t.update({"e_scales": t["e_scales"][:, :, :1]}), r"are not MXFP4"),
        (
            lambda t: t.update({"e_scales": t["e_scales"].float()}),
            r"e_scales \(float32 .* are not MXFP4",
        ),
    ],
)
def test_wrong_mxfp4_parts_are_named(tmp_path, change, message):
    tensors = dict(zip(("e_blocks", "e_scales"), random_mxfp4(3, 96, 11), strict=True))
    change(tensors)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, MXFP4, **tensors).entries  # noqa: B018


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quant_method='hqq'.*fp8.*mxfp4.*awq.*convert"),
        ({"load_in_4bit": True}, "quant_method=None"),
        (fp8_config([128, 128], fmt="e5m2"), "quantization_config.fmt='e5m2'"),
        (fp8_config([128, 128], expert_dtype="fp4"), "expert_dtype='fp4'"),
        (fp8_config([128]), r"weight_block_size=\[128\]"),
        (
            fp8_config([128, 128], rotation="hadamard"),
            "quantization_config.rotation='hadamard' is not known",
        ),
        (fp8_config([128, 128], weight_blok_size=None), "did you mean weight_block_size"),
    ],
)
def test_other_ways_of_quantising_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        check(config)
    with pytest.raises(UserError, match=message):
        without_quantization({"quantization_config": config})


def reference(directory, dtype=torch.float32):
    """transformers' model with the numbers of a quantised checkpoint, read by the loops above."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    block = config.quantization_config["weight_block_size"]
    del config.quantization_config
    stored = load_file(directory / "model.safetensors")
    full = {
        name: from_fp8(tensor, stored[f"{name}_scale_inv"], block)
        if f"{name}_scale_inv" in stored
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
        if not name.endswith("_scale_inv")
    }
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    missing = model.load_state_dict(full, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    return model


@pytest.mark.parametrize("block", [(16, 16), (40, 56), None])
def test_a_float8_model(tmp_path, block, capsys):
    make_llama(tmp_path / "hf", dtype=torch.bfloat16, shard_size="1GB", num_hidden_layers=2)
    store_in_fp8(tmp_path / "hf", block)
    hf = reference(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert difference(hf, model[0], *tokens()) <= TOLERANCE

    bridge.save_hf_pretrained(model, tmp_path / "out")
    assert "unquantized, although its source is stored in fp8" in " ".join(
        capsys.readouterr().err.split()
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: tensor.bfloat16() for name, tensor in hf.state_dict().items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out")
    )
    del before["quantization_config"]
    assert after == before


def test_a_static_scheme_has_scales_of_activations(tmp_path):
    make_llama(tmp_path / "hf", dtype=torch.bfloat16, shard_size="1GB", num_hidden_layers=1)
    store_in_fp8(tmp_path / "hf", None, scale_dtype=torch.bfloat16, activation_scheme="static")

    def change(name, tensor):
        scale = {name.replace("weight_scale_inv", "activation_scale"): torch.tensor(0.5)}
        return {name: tensor} | (scale if name.endswith("_scale_inv") else {})

    rewrite(tmp_path / "hf", change)
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert difference(reference(tmp_path / "hf"), model[0], *tokens()) <= TOLERANCE

    rewrite(tmp_path / "hf", lambda name, tensor: {name: tensor}, fp8_config(None))
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    unread = bridge.plan(bridge.to_megatron_model(wrap_with_ddp=False)).unread
    assert unread
    assert all(name.endswith("activation_scale") for name in unread)


@pytest.mark.parametrize("per_row", [False, True])
def test_scales_as_vllm_names_them(tmp_path, per_row):
    """A scale ``weight_scale`` for a tensor, or for each of its rows, and static scales of activations."""
    make_llama(tmp_path, dtype=torch.bfloat16, shard_size="1GB", num_hidden_layers=1)
    values = {}

    def change(name, tensor):
        values[name] = tensor
        if not name.endswith("_proj.weight"):
            return {name: tensor}
        largest = tensor.float().abs()
        largest = largest.amax(dim=1, keepdim=True) if per_row else largest.max()
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        packed = (tensor.float() / scale).to(torch.float8_e4m3fn)
        values[name] = (packed.float() * scale).to(tensor.dtype)
        return {
            name: packed,
            f"{name}_scale": scale,
            name.replace("weight", "input_scale"): torch.tensor(0.5),
        }

    rewrite(tmp_path, change, fp8_config(None, activation_scheme="static"))
    state = AutoBridge.from_hf_pretrained(tmp_path).hf_pretrained.state
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(state[name], value), name


def test_shards_of_a_quantised_source(tmp_path, monkeypatch):
    from megatron.bridge.models.hf_pretrained import safetensors_writer

    monkeypatch.setattr(safetensors_writer.new_output_files, "__defaults__", (20_000,))
    make_llama(tmp_path / "hf", dtype=torch.bfloat16, shard_size="1GB", num_hidden_layers=2)
    store_in_fp8(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = {
        file: load_file(tmp_path / "out" / file) for file in set(index["weight_map"].values())
    }
    assert len(shards) > 2
    assert {name: file for file, tensors in shards.items() for name in tensors} == index[
        "weight_map"
    ]
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in shards.values()]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert all(
        size <= 20_000 or len(shards[file]) == 1 for file, size in zip(shards, sizes, strict=True)
    )
    again = AutoBridge.from_hf_pretrained(tmp_path / "out").to_megatron_model(wrap_with_ddp=False)
    for one, other in zip(model[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_float8_weights_that_the_config_does_not_declare(tmp_path):
    make_llama(tmp_path, dtype=torch.bfloat16, shard_size="1GB", num_hidden_layers=1)
    store_in_fp8(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="is float8_e4m3fn, which holds quantized values"):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)


def test_a_quantised_config_without_weights(tmp_path):
    from transformers import LlamaConfig

    from tests.toy_models import LLAMA

    config = LlamaConfig(
        **LLAMA, architectures=["LlamaForCausalLM"], quantization_config=fp8_config([128, 128])
    )
    bridge = AutoBridge.from_hf_config(config)
    model = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
