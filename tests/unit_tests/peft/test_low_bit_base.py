# SPDX-License-Identifier: Apache-2.0
"""QLoRA: adapters on a base in few bits, against peft over the same numbers in full."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.backends.low_bit.formats import FORMATS, NF4
from megatron.bridge.backends.low_bit.weight import LowBitWeight, stored_bytes
from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.main import main
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA, LoRAMerge
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import (
    adapted,
    batch,
    exported,
    make,
    make_gpt_oss_mxfp4,
    reference_train,
    saved_by_peft,
    shake,
    share_factors,
    train,
)
from tests.unit_tests.peft.test_runs import STEPS, config_of, is_adapter, tune
from tests.workers import forget_model_parallel

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-5


def rounded(matrix, name):
    codes, scales = FORMATS[name].quantize(matrix)
    return FORMATS[name].dequantize(codes, scales, matrix.dtype)


@torch.no_grad()
def round_base(model, name):
    """Replace the matrices of transformers' model, one by one, by what a format holds of them."""
    count = 0
    for path, parameter in model.named_parameters():
        if path.split(".")[-2] in TARGETS:
            parameter.copy_(rounded(parameter, name))
            count += 1
        elif path.rpartition(".")[2] in ("gate_up_proj", "down_proj"):
            for expert in parameter:
                expert.copy_(rounded(expert, name))
                count += 1
    return model, count


def of_peft(kind, name, adapter):
    """The base with rounded matrices, and the adapter on it, by the peft library."""
    model, count = round_base(make(kind), name)
    assert count
    return share_factors(PeftModel.from_pretrained(model, adapter, is_trainable=True))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_trains_as_peft_over_the_same_numbers(models, tmp_path, name, method):
    bridge, model = adapted(models("wide_llama"), method(dim=4, alpha=8, base_precision=name))
    shake(bridge, model, tmp_path / "adapter")
    reference = of_peft("wide_llama", name, tmp_path / "adapter")
    losses = train(model, 3)
    assert losses == pytest.approx(reference_train(reference, 3), abs=TOLERANCE)
    saved = saved_by_peft(reference)
    for key, tensor in exported(bridge, model).items():
        np.testing.assert_allclose(tensor, saved[key], rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize("name", list(FORMATS))
def test_experts_compute_with_the_numbers_of_the_format(models, name):
    peft = LoRA(dim=4, alpha=8, base_precision=name, lora_B_init_method="zero")
    _, model = adapted(models("wide_experts"), peft, ddp=False)
    low_bit = [
        path
        for path, weight in model[0].named_parameters()
        if isinstance(weight, LowBitWeight) and ".experts." in path
    ]
    assert len(low_bit) == 2 * 2 * 4
    reference, _ = round_base(make("wide_experts"), name)
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
        expected = reference(ids).logits
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_what_stays_in_full(models):
    peft = LoRA(dim=4, base_precision="nf4", modules_to_save=["*.layers.1.*.linear_fc2"])
    peft.exclude_modules = ["*.layers.1.*.linear_fc2"]
    _, (chunk,) = adapted(models("wide_experts"), peft, ddp=False)
    full = {
        name
        for name, weight in chunk.named_parameters()
        if not is_adapter(name) and weight.dim() == 2 and not isinstance(weight, LowBitWeight)
    }
    kinds = {name.split(".")[-2] for name in full}
    assert kinds == {"word_embeddings", "output_layer", "router", "linear_fc2"}
    assert {name.split(".")[2] for name in full if "linear_fc2" in name} == {"1"}


@pytest.fixture(scope="module")
def tuned(models, tmp_path_factory):
    """A finished run over a base in NF4: its folder and its weights."""
    save = tmp_path_factory.mktemp("run") / "qlora"
    return save, tune(models("wide_llama"), save, LoRA(dim=4, base_precision="nf4"))


def test_resume_is_bitwise_and_the_base_is_not_saved(models, tuned, tmp_path):
    save, weights = tuned
    peft = LoRA(dim=4, base_precision="nf4")
    tune(models("wide_llama"), tmp_path / "run", peft, stop=2)
    again = tune(models("wide_llama"), tmp_path / "run", peft)
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    from tests.functional_tests.checkpoint.runs import tensors_of

    assert all(is_adapter(name) for name in tensors_of(paths.iteration_dir(save, STEPS)))


def test_another_precision_is_another_base(models, tuned):
    save, _ = tuned
    with pytest.raises(UserError, match="whose weights differ"):
        tune(models("wide_llama"), save, LoRA(dim=4, base_precision="fp8"))


def test_a_megatron_checkpoint_gives_the_same_base(models, tuned, tmp_path):
    save, weights = tuned
    bridge = AutoBridge.from_hf_pretrained(models("wide_llama"))
    bridge.save_megatron_model(bridge.to_megatron_model(wrap_with_ddp=False), tmp_path / "megatron")
    forget_model_parallel()
    config = config_of(models("wide_llama"), save, LoRA(dim=4, base_precision="nf4"))
    config.checkpoint.pretrained_checkpoint = str(tmp_path / "megatron")
    run = finetune(config, forward_step)
    for name, weight in run.model[0].module.named_parameters():
        assert torch.equal(weight, weights[name]), name


def logits_of(model):
    ids, _, _ = batch()
    with torch.no_grad():
        return model(ids).logits


def test_merged_and_exported(models, tuned, tmp_path):
    save, _ = tuned
    base = str(models("wide_llama"))
    assert not main(["adapter", "merge", "--adapter", str(save), "--hf-path", f"{tmp_path}/merged"])
    assert not main(["adapter", "export", "--adapter", str(save), "--hf-path", f"{tmp_path}/peft"])
    bridge = AutoBridge.from_hf_pretrained(base)
    reference = of_peft("wide_llama", "nf4", tmp_path / "peft")
    expected = logits_of(reference)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(logits_of(merged), expected, rtol=1e-4, atol=1e-4)
    in_full = AutoModelForCausalLM.from_pretrained(base)
    assert (logits_of(in_full) - expected).abs().max() > 0.01
    _, model = adapted(base, LoRA(dim=4, base_precision="nf4"), ddp=False)
    bridge.load_hf_adapter(model, tmp_path / "peft")
    LoRAMerge()(model)
    bridge.save_hf_pretrained(model, tmp_path / "in_place", show_progress=False)
    ours = load_file(tmp_path / "in_place" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(tensor, ours[name]), name


def test_generates_with_the_numbers_of_training(models, tuned, tmp_path):
    save, _ = tuned
    main(["adapter", "merge", "--adapter", str(save), "--hf-path", f"{tmp_path}/merged"])
    prompts = [[5, 6, 7, 8]]
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    merged = LLM(tmp_path / "merged").generate(prompts, sampling)
    forget_model_parallel()
    on_top = LLM(models("wide_llama"), adapter=save).generate(prompts, sampling)
    assert merged[0][0].tokens == on_top[0][0].tokens


def test_logits_of_peft_over_bitsandbytes(models, tuned, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    save, _ = tuned
    main(["adapter", "export", "--adapter", str(save), "--hf-path", f"{tmp_path}/peft"])
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(
        models("wide_llama"), quantization_config=quantization, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, tmp_path / "peft").train()  # eval computes in bf16
    expected = logits_of(of_peft("wide_llama", "nf4", tmp_path / "peft"))
    np.testing.assert_allclose(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def test_predicted_bytes_are_measured_bytes(models):
    config = config_of(models("wide_experts"), peft=LoRA(dim=4, base_precision="nf4"))
    config.mixed_precision = "bf16_mixed"
    resolved = config.resolve().config
    (predicted,) = memory_per_rank(resolved, 1)
    provider = AutoBridge.from_hf_pretrained(models("wide_experts")).to_megatron_provider()
    provider.bf16 = True
    provider.params_dtype = torch.bfloat16
    provider.register_pre_wrap_hook(LoRA(dim=4, base_precision="nf4"))
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    assert predicted.weights == sum(map(stored_bytes, (*chunk.parameters(), *chunk.buffers())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_precision": "int4"}, r"peft\.base_precision=int4 is not one of nf4, fp8, mxfp4"),
        ({"base_keep_high": ["linear_proj"]}, r"base_keep_high has no effect without"),
        (
            {"base_precision": "mxfp4", "base_keep_high": ["linear_projj"]},
            r"base_keep_high: 'linear_projj' matches no layer",
        ),
        ({"base_precision": "nf4"}, r"groups of 64 numbers in a row, and .* has 32 columns"),
    ],
)
def test_refused(models, change, message):
    with pytest.raises(UserError, match=message):
        adapted(models("llama"), LoRA(dim=4, **change))


@pytest.mark.parametrize(
    ("block", "name", "value"),
    [
        ("model", "backend", "transformer_engine"),
        ("dist", "use_torch_fsdp2", True),
        ("ddp", "use_megatron_fsdp", True),
    ],
)
def test_settings_that_exclude_a_low_bit_base(models, block, name, value):
    config = config_of(models("wide_llama"), peft=LoRA(base_precision="nf4"))
    setattr(getattr(config, block), name, value)
    with pytest.raises(UserError, match=r"peft\.base_precision"):
        config.validate()


def as_published(directory, out, method, pack):
    """A copy of a model whose matrices are stored in another way by ``pack``."""
    shutil.copytree(directory, out)
    stored = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        is_matrix = name.split(".")[-2] in TARGETS
        stored |= pack(name, tensor) if is_matrix else {name: tensor.to(torch.bfloat16)}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config |= {"quantization_config": method, "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def nf4_of_bitsandbytes(name, tensor):
    codes, scales = NF4.quantize(tensor)
    scales = scales * 1.0009  # no bfloat16 number, as scales that were quantized, too
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*tensor.shape]}
    text = json.dumps(state).encode()
    return {
        name: codes.reshape(-1, 1),
        f"{name}.absmax": scales.flatten(),
        f"{name}.quant_map": NF4.decode(torch.arange(16)),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


def fp8_in_blocks(name, tensor):
    scales = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) / 100 + 1e-3
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (tensor / full[: tensor.shape[0], : tensor.shape[1]]).clamp(-448, 448)
    return {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


PUBLISHED = {
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        nf4_of_bitsandbytes,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        fp8_in_blocks,
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_codes_are_kept(models, tmp_path, name):
    source = as_published(models("wide_llama"), tmp_path / "source", *PUBLISHED[name])
    run = finetune(
        config_of(source, tmp_path / "run", LoRA(dim=4, base_precision=name)), forward_step
    )
    (chunk,) = [chunk.module for chunk in run.model]
    weights = [weight for weight in chunk.parameters() if isinstance(weight, LowBitWeight)]
    assert len(weights) == 8
    assert all(weight.has_codes_of_source for weight in weights)
    values = {
        path: weight.dequantized()
        for path, weight in chunk.named_parameters()
        if isinstance(weight, LowBitWeight)
    }
    forget_model_parallel()
    (full,) = AutoBridge.from_hf_pretrained(source).to_megatron_model(wrap_with_ddp=False)
    for path, weight in full.named_parameters():
        if path in values:
            assert torch.equal(values[path].to(torch.bfloat16), weight.to(torch.bfloat16)), path
    forget_model_parallel()
    arguments = ["adapter", "merge", "--adapter", f"{tmp_path}/run", "--hf-path", f"{tmp_path}/out"]
    assert not main(arguments)
    if name != "nf4":  # trained values are not written in the 4 bits of bitsandbytes
        assert not main([*arguments[:-1], f"{tmp_path}/again", "--quantize", "source"])
        merged = load_file(tmp_path / "again" / "model.safetensors")
        stored = load_file(source / "model.safetensors")
        assert {key: one.dtype for key, one in merged.items()} == {
            key: one.dtype for key, one in stored.items()
        }


def test_experts_of_gpt_oss_keep_their_codes(tmp_path):
    make_gpt_oss_mxfp4(tmp_path)
    (full,) = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)
    expected = {name: weight.clone() for name, weight in full.named_parameters()}
    forget_model_parallel()
    provider = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider(load_weights=False)
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    LoRA(base_precision="mxfp4").lower_base([chunk], is_loaded=False)
    AutoBridge.from_hf_pretrained(tmp_path).load_hf_weights([chunk])
    kept = 0
    for name, weight in chunk.named_parameters():
        if isinstance(weight, LowBitWeight) and ".experts." in name:
            assert weight.has_codes_of_source, name
            assert torch.equal(weight.dequantized(), expected[name]), name
            kept += 1
    assert kept == 2 * 2 * 4
