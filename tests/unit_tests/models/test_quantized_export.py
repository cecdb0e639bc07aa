# SPDX-License-Identifier: Apache-2.0
"""Exports with quantized weights: the nearest numbers, as transformers reads them, and as the source has them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import model_io
from megatron.bridge.cli.main import main
from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM
from megatron.bridge.utils.errors import UserError
from tests.quantize import E2M1, fp8_config, rewrite, store_in_fp8, store_in_mxfp4, to_fp8
from tests.toy_models import make_llama, tokens
from tests.unit_tests.models.test_quantization_formats import int32_words

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FLOAT8 = FLOAT8[FLOAT8.isfinite()]

# name of a format -> (ending of its scales, the numbers that its codes stand for, rows and columns of a block)
GRIDS = {
    "fp8-block": ("weight_scale_inv", FLOAT8, (32, 32)),
    "fp8-tensor": ("weight_scale", FLOAT8, (4096, 4096)),
    "int8": ("weight_scale", torch.arange(-128.0, 128.0), (1, 4096)),
    "mxfp8": ("weight_scale", FLOAT8, (1, 32)),
    "mxfp4": ("weight_scale", torch.tensor(E2M1), (1, 32)),
    "nvfp4": ("weight_scale", torch.tensor(E2M1), (1, 16)),
    "int4": ("weight_scale", torch.arange(-8.0, 8.0), (1, 32)),
}
FORMATS = [*GRIDS, "int4-awq"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model in bfloat16 and the Megatron checkpoint of it."""
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder / "hf", dtype=torch.bfloat16, shard_size="1GB", **SIZES, **HEADS)
    AutoBridge.import_ckpt(folder / "hf", folder / "megatron", show_progress=False)
    return folder


def export(model, out, quantize, **options):
    sized = quantize in ("fp8-block", "int4", "int4-awq") and "group_size" not in options
    AutoBridge.from_hf_pretrained(model / "hf").export_ckpt(
        model / "megatron",
        out,
        show_progress=False,
        quantize=quantize,
        **({"group_size": 32} if sized else {}),
        **options,
    )
    return out


def scales_of(stored, name, quantize):
    end, _, block = GRIDS[quantize]
    scales = stored[name.replace("weight", end)]
    if scales.dtype is torch.uint8:
        scales = torch.exp2(scales.float() - 127)
    if quantize == "nvfp4":
        scales = scales.float() / stored[name.replace("weight", "weight_global_scale")]
    return scales.float().reshape(1, 1) if scales.numel() == 1 else scales.float(), block


@pytest.mark.parametrize("quantize", GRIDS)
def test_numbers_are_the_nearest_of_the_grid(model, tmp_path, quantize):
    out = export(model, tmp_path / "out", quantize)
    stored = load_file(out / "model.safetensors")
    read = PreTrainedCausalLM(out, dtype=torch.float32).state
    full = load_file(model / "hf" / "model.safetensors")
    assert set(read) == set(full)
    for name, weight in full.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(stored[name], weight)
            continue
        scales, (height, width) = scales_of(stored, name, quantize)
        rows = torch.arange(weight.shape[0]) // height
        columns = torch.arange(weight.shape[1]) // width
        grid = scales[rows][:, columns].unsqueeze(-1) * GRIDS[quantize][1]
        values = torch.empty(weight.shape)
        read.copy(name, (), values)
        distances = (grid - weight.float().unsqueeze(-1)).abs()
        assert torch.equal((grid == values.unsqueeze(-1)).any(dim=-1), torch.ones(weight.shape) > 0)
        # products of float32 are rounded
        excess = (values - weight.float()).abs() - distances.amin(dim=-1)
        assert excess.max() <= 1e-6 * weight.abs().max()


def test_awq_is_within_half_a_step(model, tmp_path):
    out = export(model, tmp_path / "out", "int4-awq")
    stored = load_file(out / "model.safetensors")
    read = PreTrainedCausalLM(out, dtype=torch.float32).state
    for name, weight in load_file(model / "hf" / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scales = stored[name.replace("weight", "scales")].float().t()
            values = torch.empty(weight.shape)
            read.copy(name, (), values)
            steps = (values - weight.float()).abs() / scales.repeat_interleave(32, dim=1)
            assert steps.max() <= 1.05  # the zero and the number are rounded by half a step each


@pytest.mark.parametrize("quantize", FORMATS)
def test_reading_and_converting_what_was_written(model, tmp_path, quantize):
    out = export(model, tmp_path / "out", quantize)
    bridge = AutoBridge.from_hf_pretrained(out)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    weights = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    state = bridge.hf_pretrained.state
    assert weights.keys() == set(state)
    for name, weight in weights.items():
        assert torch.equal(weight, state[name])


@pytest.mark.parametrize("quantize", FORMATS)
def test_verify_proves_what_was_quantized(model, tmp_path, quantize, capsys):
    out = export(model, tmp_path / "out", quantize)
    certificate = tmp_path / "certificate.json"
    words = ["verify", str(out), str(model / "megatron"), "--no-progress"]
    assert main([*words, "--certificate", str(certificate)]) == 0
    assert "7 of 21 tensors are bitwise equal, 14 hold the values of the model rounded" in " ".join(
        capsys.readouterr().err.split()
    )
    proofs = json.loads(certificate.read_text())["tensors"]
    for name, proof in proofs.items():
        assert proof["quantized"] == name.endswith("_proj.weight") != proof["equal"]

    tensors = load_file(out / "model.safetensors")
    codes = next(
        name
        for name, tensor in tensors.items()
        if "layers.1.mlp.down_proj" in name and tensor.ndim == 2 and tensor.itemsize in (1, 4)
        if not name.endswith("scale")
    )
    tensors[codes].view(torch.uint8)[5, 7] ^= 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert main([*words, "--skip-logits"]) == 1
    assert "tensor model.layers.1.mlp.down_proj.weight differs" in capsys.readouterr().err


def test_verify_compares_logits_of_a_quantized_model(model, tmp_path):
    out = export(model, tmp_path / "out", "int4")
    AutoBridge.import_ckpt(out, tmp_path / "megatron", show_progress=False)
    assert main(["verify", str(out), str(tmp_path / "megatron"), "--no-progress"]) == 0


def logits(folder, **options):
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return loaded.eval()(tokens()[0]).logits


def unquantized_copy(folder, out):
    """The model of ``folder`` in full, as this project reads it."""
    bridge = AutoBridge.from_hf_pretrained(folder)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(chunks, out, show_progress=False)
    return out


def test_transformers_reads_fp8_blocks(model, tmp_path):
    out = export(model, tmp_path / "out", "fp8-block", keep_high=["*.layers.0.mlp.down_proj.*"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config == fp8_config(
        [32, 32],
        modules_to_not_convert=["model.embed_tokens", "model.layers.0.mlp.down_proj", "lm_head"],
    )
    assert torch.equal(logits(out), logits(unquantized_copy(out, tmp_path / "full")))


@pytest.mark.parametrize("quantize", [name for name in GRIDS if name != "fp8-block"])
def test_transformers_reads_compressed_tensors(model, tmp_path, quantize):
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    out = export(model, tmp_path / "out", quantize)
    dequantized = logits(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(dequantized, logits(unquantized_copy(out, tmp_path / "full")))


def test_projections_of_one_matrix_share_their_scale(model, tmp_path):
    """vLLM joins q, k and v, and the gate and up projections, and has one scale for each of the two."""
    stored = load_file(export(model, tmp_path / "out", "nvfp4") / "model.safetensors")
    second = {
        name.removesuffix(".weight_global_scale"): scale
        for name, scale in stored.items()
        if name.endswith("_global_scale")
    }
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for names in (
            [f"{attention}{name}_proj" for name in "qkv"],
            [f"{mlp}gate_proj", f"{mlp}up_proj"],
        ):
            assert len({second[name].item() for name in names}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "fp8"}, "quantize='fp8' is not one of fp8-block.*source"),
        ({"quantize": "source"}, "the source is not quantized"),
        ({"quantize": "mxfp4", "group_size": 64}, "group_size=64.*the format has its own"),
        ({"quantize": None, "group_size": 64}, "group_size=64 has no effect"),
        (
            {"quantize": "int4", "group_size": 128},
            r"of shape \[\d+, \d+\].*groups of 128.*group-size",
        ),
        (
            {"quantize": "int8", "keep_high": ["*.mpl.*"]},
            r"keep_high='\*.mpl.\*' matches no tensor",
        ),
        ({"quantize": "int8", "keep_high": ["*_proj*"]}, "finds no matrix to quantize"),
    ],
)
def test_what_cannot_be_quantized_is_refused(model, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        export(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_nan_are_not_quantized(model, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(model / "hf")
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with torch.no_grad():
        model_io.unwrap(chunks[0]).get_parameter(name)[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj\.weight has values.*NaN"):
        bridge.save_hf_pretrained(chunks, tmp_path, show_progress=False, quantize="int8")


def quantize_fp8(folder):
    store_in_fp8(folder, activation_scheme="static")

    def add_activations(name, tensor):
        scale = {name.replace("weight_scale_inv", "activation_scale"): torch.tensor(0.5)}
        return {name: tensor} | (scale if name.endswith("_scale_inv") else {})

    rewrite(folder, add_activations)


def requantize(name):
    """What writes a model again in a format of ``--quantize``."""

    def run(folder):
        bridge = AutoBridge.from_hf_pretrained(folder)
        chunks = bridge.to_megatron_model(wrap_with_ddp=False)
        bridge.save_hf_pretrained(
            chunks,
            folder.parent / "quantized",
            show_progress=False,
            quantize=name,
            group_size=32 if name.startswith("int4") else None,
        )
        for path in (folder.parent / "quantized").iterdir():
            path.rename(folder / path.name)

    return run


SOURCES = {"fp8 by block": quantize_fp8} | {
    name: requantize(name) for name in FORMATS if name != "fp8-block"
}


@pytest.mark.parametrize("store", SOURCES.values(), ids=SOURCES)
def test_what_was_not_trained_is_as_in_the_source(tmp_path, store, capsys):
    source = tmp_path / "hf"
    make_llama(source, dtype=torch.bfloat16, shard_size="1GB", **SIZES, **HEADS)
    store(source)
    bridge = AutoBridge.from_hf_pretrained(source)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(chunks, tmp_path / "same", quantize="source")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (source / name).read_bytes()
    assert "(14 quantized tensors bitwise as in the source, 0 quantized anew" in " ".join(
        capsys.readouterr().err.split()
    )

    name = "model.layers.1.mlp.down_proj"
    with torch.no_grad():
        model_io.unwrap(chunks[0]).get_parameter("decoder.layers.1.mlp.linear_fc2.weight").add_(
            0.05
        )
    trained = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    bridge.save_hf_pretrained(chunks, tmp_path / "trained", quantize="source")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "trained")
    )
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert all(key.startswith(f"{name}.") for key in changed)
    read = PreTrainedCausalLM(tmp_path / "trained").state[f"{name}.weight"]
    weight = trained[f"{name}.weight"]
    assert (read - weight).norm() <= 0.15 * weight.norm()
    assert "13 quantized tensors bitwise as in the source, 1 quantized anew" in " ".join(
        capsys.readouterr().err.split()
    )


def make_gpt_oss(folder):
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=64,
        dtype="bfloat16",
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def test_experts_of_gpt_oss(tmp_path):
    make_gpt_oss(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(chunks, tmp_path / "out", show_progress=False, quantize="mxfp4")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    experts = "model.layers.0.mlp.experts."
    assert stored[f"{experts}down_proj_blocks"].shape == (4, 64, 2, 16)
    assert stored[f"{experts}gate_up_proj_scales"].shape == (4, 128, 2)
    full = unquantized_copy(tmp_path / "out", tmp_path / "full")
    assert torch.equal(logits(tmp_path / "out"), logits(full))

    bridge = AutoBridge.from_hf_pretrained(tmp_path / "out")
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(chunks, tmp_path / "same", show_progress=False, quantize="source")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    for name in ("fp8-block", "int8", "nvfp4"):
        with pytest.raises(UserError, match=r"experts.*holds all experts.*keep-high"):
            bridge.save_hf_pretrained(chunks, tmp_path / name, quantize=name)


def test_random_bits_of_gpt_oss_go_back(tmp_path):
    make_gpt_oss(tmp_path / "hf")
    store_in_mxfp4(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(chunks, tmp_path / "same", show_progress=False, quantize="source")
    name = "model.safetensors"
    assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_a_function_of_the_caller_quantizes(model):
    """The call with which RL frameworks send FP8 weights to an engine."""
    bridge = AutoBridge.from_hf_pretrained(model / "hf")
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    weights = dict(
        bridge.export_hf_weights_quant(
            chunks,
            lambda name: ".linear_fc" in name and "norm" not in name,
            to_fp8,
            (32, 32),
            cpu=True,
            show_progress=False,
        )
    )
    full = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    quantized = {name for name in full if ".mlp." in name}
    assert weights.keys() == full.keys() | {f"{name}_scale_inv" for name in quantized}
    for name, weight in full.items():
        if name not in quantized:
            assert torch.equal(weights[name], weight)
            continue
        codes, scales = to_fp8(weight, (32, 32))
        assert torch.equal(weights[name].float(), codes.float())
        assert torch.equal(weights[f"{name}_scale_inv"], scales)


def store_like_kimi(folder):
    """Experts in packed integers and all else in full, as Kimi K2 Thinking is published; returns all values."""
    values = {}

    def change(name, tensor):
        values[name] = tensor
        if ".mlp.experts." not in name:
            return {name: tensor}
        groups = tensor.float().unflatten(1, (-1, 32))
        scales = (groups.abs().amax(dim=-1) / 7.5).bfloat16()
        codes = (groups / scales.unsqueeze(-1).float()).round().clamp(-8, 7)
        values[name] = (codes * scales.unsqueeze(-1).float()).flatten(1).to(tensor.dtype)
        base = name.removesuffix("weight")
        return {
            f"{base}weight_packed": int32_words((codes + 8).int().flatten(1), 4),
            f"{base}weight_scale": scales,
            f"{base}weight_shape": torch.tensor(tensor.shape, dtype=torch.int32),
        }

    patterns = ["self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*"]
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    config = {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", *(f"re:.*{pattern}" for pattern in patterns)],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    rewrite(folder, change, config)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2"}))
    return values


def test_a_model_like_kimi_k2_thinking(tmp_path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        v_head_dim=16,
        qk_nope_head_dim=16,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        num_nextn_predict_layers=0,
    )
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    values = store_like_kimi(tmp_path / "hf")
    megatron = str(tmp_path / "megatron")
    words = ["--hf-model", str(tmp_path / "hf"), "--megatron-path", megatron, "--no-progress"]
    assert main(["convert", *words]) == 0
    weights = dict(AutoBridge.from_hf_pretrained(tmp_path / "hf").export_stored_weights(megatron))
    assert weights.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(weights[name], value), name
    out = str(tmp_path / "out")
    assert main(["export", *words, "--hf-path", out, "--quantize", "source"]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_a_model_without_a_source(tmp_path):
    """Weights of a run from scratch: the config is transformers' own."""
    from transformers import AutoConfig

    make_llama(tmp_path / "hf", dtype=torch.bfloat16, shard_size="1GB", **SIZES, **HEADS)
    chunks = AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron_model(wrap_with_ddp=False)
    bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(tmp_path / "hf"))
    for quantize in ("fp8-block", "nvfp4"):
        for name, source in (
            ("out", bridge),
            ("same", AutoBridge.from_hf_pretrained(tmp_path / "hf")),
        ):
            source.save_hf_pretrained(
                chunks, tmp_path / name, show_progress=False, quantize=quantize
            )
        out, same = (tmp_path / name for name in ("out", "same"))
        written, expected = (load_file(folder / "model.safetensors") for folder in (out, same))
        assert written.keys() == expected.keys()
        for name, tensor in written.items():
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
        configs = [json.loads((folder / "config.json").read_text()) for folder in (out, same)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_biases_of_zero_beside_gptq(tmp_path):
    """Tools of GPTQ store a bias for every layer; that of a layer with a bias is its own."""
    source = tmp_path / "hf"
    make_llama(source, dtype=torch.float16, shard_size="1GB", attention_bias=True, **SIZES, **HEADS)

    def change(name, tensor):
        if not name.endswith("_proj.weight"):
            return {name: torch.zeros_like(tensor) if name.endswith("q_proj.bias") else tensor}
        rows, columns = tensor.shape
        base = name.removesuffix("weight")
        codes = torch.randint(0, 16, (columns, rows))
        bias = {f"{base}bias": torch.zeros(rows, dtype=tensor.dtype)}
        return (bias if ".mlp." in name else {}) | {
            f"{base}qweight": int32_words(codes.t(), 4).t().contiguous(),
            f"{base}qzeros": int32_words(torch.full((columns // 32, rows), 7), 4),
            f"{base}scales": torch.full((columns // 32, rows), 0.03, dtype=torch.float16),
            f"{base}g_idx": torch.arange(columns, dtype=torch.int32) // 32,
        }

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    torch.manual_seed(0)
    rewrite(source, change, config)
    declared = json.loads((source / "config.json").read_text())
    del declared["dtype"]  # it is then that of the stored tensors
    (source / "config.json").write_text(json.dumps(declared))
    bridge = AutoBridge.from_hf_pretrained(source)
    chunks = bridge.to_megatron_model(wrap_with_ddp=False)
    full = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    assert "model.layers.0.self_attn.q_proj.bias" in full
    assert "model.layers.0.mlp.up_proj.bias" not in full
    bridge.save_hf_pretrained(chunks, tmp_path / "same", show_progress=False, quantize="source")
    name = "model.safetensors"
    assert (tmp_path / "same" / name).read_bytes() == (source / name).read_bytes()
    bridge.save_hf_pretrained(chunks, tmp_path / "full", show_progress=False)
    assert load_file(tmp_path / "full" / name).keys() == full.keys()
