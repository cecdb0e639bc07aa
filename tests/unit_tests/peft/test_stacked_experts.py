# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts that transformers holds in one tensor, as peft's ``target_parameters`` stores them."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.adapters.stacked_experts import (
    stack_factors,
    unstack_factors,
)
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.hf_adapter import peft_for
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import DECODER, adapted, batch, shake
from tests.toy_models import randomise
from tests.workers import forget_model_parallel

EXPERTS = 4
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": DECODER["vocab_size"],
}
FC1, FC2 = "*.mlp.experts.linear_fc1", "*.mlp.experts.linear_fc2"
TARGETS = {
    "both layers and attention": ["linear_qkv", "linear_proj", FC1, FC2],
    "the first layer": [FC1],
    "the second layer of one": ["*.layers.1.mlp.experts.linear_fc2"],
}


def make_gpt_oss():
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, intermediate_size=32, num_local_experts=EXPERTS)
    model = GptOssForCausalLM(config)
    randomise(model)
    return model.eval()


def make_qwen():
    torch.manual_seed(0)
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3_5MoeTextConfig(
        **SIZES,
        **linear,
        **experts,
        shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"],
    )
    model = Qwen3_5MoeForCausalLM(config)
    randomise(model)
    return model.eval()


MODELS = {"gpt_oss": make_gpt_oss, "qwen3_5_moe": make_qwen}


def logits_of(model):
    ids, _, positions = batch()
    with torch.no_grad():
        if isinstance(model, list):
            return model[0](input_ids=ids, position_ids=positions, attention_mask=None)
        return model(ids).logits


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("targets", list(TARGETS))
def test_peft_loads_what_is_written(tmp_path, name, targets):
    MODELS[name]().save_pretrained(tmp_path / "base")
    modules = TARGETS[targets]
    if name == "qwen3_5_moe":  # only one of its layers has plain attention
        modules = [one for one in modules if one.startswith("*")]
    method = LoRA(dim=3, alpha=6, target_modules=modules, dropout=0.1)
    bridge, model = adapted(tmp_path / "base", method, ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    model[0].eval()
    expected = logits_of(model)
    of_peft = PeftModel.from_pretrained(MODELS[name](), tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(of_peft), expected, rtol=1e-4, atol=1e-4)
    assert (logits_of(MODELS[name]()) - expected).abs().max() > 0.01
    forget_model_parallel()
    again = AutoBridge.from_hf_pretrained(tmp_path / "base")
    method = peft_for(again, tmp_path / "adapter")
    again, model = adapted(tmp_path / "base", method, ddp=False)
    again.load_hf_adapter(model, tmp_path / "adapter")
    again.save_hf_adapter(model, tmp_path / "again", show_progress=False)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        first, second = ((tmp_path / folder / file).read_bytes() for folder in ("adapter", "again"))
        assert first == second, file


@pytest.mark.parametrize("name", list(MODELS))
def test_what_peft_trains_is_read(tmp_path, name):
    """An adapter of peft's own, with gates and values in one pair of factors and another rank for one layer."""
    base = MODELS[name]()
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"layers.1.mlp.experts.down_proj": 2},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "base")
    method = peft_for(bridge, tmp_path / "adapter")
    bridge, chunks = adapted(tmp_path / "base", method, ddp=False)
    bridge.load_hf_adapter(chunks, tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(chunks), logits_of(model), rtol=1e-4, atol=1e-4)


def test_factors_of_each_expert():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(EXPERTS * 3, 5, generator=generator)
    b = torch.randn(7, 3 * EXPERTS, generator=generator)
    experts = unstack_factors(a, b, 3)
    assert len(experts) == EXPERTS
    for expert, (of_a, of_b) in enumerate(experts):
        for rank in range(3):
            assert torch.equal(of_a[rank], a[expert * 3 + rank])
            assert torch.equal(of_b[:, rank], b[:, rank * EXPERTS + expert])
    stacked_a, stacked_b = stack_factors(experts)
    assert torch.equal(stacked_a, a)
    assert torch.equal(stacked_b, b)


def test_refused(tmp_path):
    make_gpt_oss().save_pretrained(tmp_path / "base")
    bridge, model = adapted(tmp_path / "base", DoRA(dim=2, target_modules=[FC1, FC2]), ddp=False)
    with pytest.raises(UserError, match="no DoRA for experts in one tensor"):
        bridge.save_hf_adapter(model, tmp_path / "dora", show_progress=False)
    forget_model_parallel()
    bridge, model = adapted(tmp_path / "base", LoRA(dim=2, target_modules=[FC1, FC2]), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    file.write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(UserError, match="no factors of rank 3 for each expert"):
        peft_for(bridge, tmp_path / "adapter")
    file.write_text(json.dumps({**config, "target_parameters": "all"}))
    with pytest.raises(UserError, match="target_parameters='all', but it is a list"):
        peft_for(bridge, tmp_path / "adapter")
    file.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    tensors.pop("base_model.model.model.layers.0.mlp.experts.lora_B.weight")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"each expert of .*experts\.down_proj"):
        peft_for(bridge, tmp_path / "adapter")
