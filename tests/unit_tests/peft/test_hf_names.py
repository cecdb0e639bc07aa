# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's names of modules select what the peft library selects under these names."""

import warnings

import pytest
import torch

from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.engine import stored_provider
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.config.serialize import from_plain, to_plain
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import adapted, batch, exported, make, reference, shake

RANK, ALPHA = 4, 8


def peft_shapes(kind, **config):
    """Shapes of the adapter that the peft library makes, by name."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM", **config}
        model = get_peft_model(make(kind), LoraConfig(**settings))
        state = get_peft_model_state_dict(model)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def shapes(bridge, model):
    # files of Nemotron-H say backbone, which transformers reads as model
    return {
        name.replace(".backbone.", ".model."): tuple(tensor.shape)
        for name, tensor in exported(bridge, model).items()
    }


NAMES = {
    "part": ("llama", ["q_proj"]),
    "parts": ("llama", ["q_proj", "v_proj"]),
    "all": (
        "llama",
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "all-linear": ("llama", ["all-linear"]),
    "with its parent": ("llama", ["self_attn.v_proj", "model.layers.1.mlp.up_proj"]),
    "queries and keys": ("gemma4", ["q_proj", "k_proj", "down_proj"]),
    "mixers": ("bamba", ["q_proj", "out_proj", "gate_proj"]),
    "backbone": ("nemotron_h", ["q_proj", "up_proj", "o_proj"]),
    "attention among experts": ("mixtral", ["q_proj", "o_proj"]),
}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("method", [LoRA, CanonicalLoRA])
def test_names_select_the_modules_of_peft(models, case, method):
    kind, names = NAMES[case]
    bridge, model = adapted(
        models(kind), method(target_modules=names, dim=RANK, alpha=ALPHA), ddp=False
    )
    # the peft library takes "all-linear" as a text
    asked = "all-linear" if names == ["all-linear"] else names
    assert shapes(bridge, model) == peft_shapes(kind, target_modules=asked)


def test_parts_compute_what_peft_computes(models, tmp_path):
    method = LoRA(target_modules=["q_proj", "v_proj", "up_proj"], dim=RANK, alpha=ALPHA)
    bridge, model = adapted(models("llama"), method, ddp=False)
    shake(bridge, model, tmp_path)
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
        expected = reference("llama", tmp_path, share=False).eval()(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert {"q_proj", "v_proj", "linear_qkv"} <= set(method.notes()[0].replace(",", "").split())


def test_other_settings_take_the_names_too(models):
    method = LoRA(
        target_modules=["all-linear"],
        exclude_modules=["o_proj", "linear_fc2"],
        dim=RANK,
        alpha=ALPHA,
        dim_by_module={"k_proj": 2},
        modules_to_save=["embed_tokens", "lm_head"],
    )
    bridge, model = adapted(models("llama"), method, ddp=False)
    found = shapes(bridge, model)
    whole = {name for name in chunk_info(model[0]).trained if ".adapter." not in name}
    assert whole == {"embedding.word_embeddings.weight", "output_layer.weight"}
    expected = peft_shapes(
        "llama",
        target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        rank_pattern={"k_proj": 2},
    )
    assert {name: shape for name, shape in found.items() if "lora" in name} == expected


def test_a_model_of_a_checkpoint_has_the_names_of_its_family(models):
    """The provider that a checkpoint stores does not know its Hugging Face config."""
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(models("mixtral")).to_megatron_provider(
        load_weights=False
    )
    again = from_plain(to_plain(stored_provider.provider_of([provider.meta_model()[0]])))
    assert again.hf_config is None
    again.register_pre_wrap_hook(LoRA(target_modules=["w1", "q_proj"], dim=RANK))
    chunk = again.provide_distributed_model(wrap_with_ddp=False)[0]
    layer = chunk.decoder.layers[0]
    assert list(layer.mlp.experts.linear_fc1.adapter) == ["gate"]
    assert list(layer.self_attention.linear_qkv.adapter) == ["q"]


REFUSED = {
    "twice": (
        LoRA(target_modules=["linear_qkv", "q_proj"]),
        ["linear_qkv", "q_proj", "leave one out"],
    ),
    "part of DoRA": (DoRA(target_modules=["q_proj"]), ["q_proj", "linear_qkv", "peft=LoRA"]),
    "DoRA of all": (DoRA(target_modules=["all-linear"]), ["linear_qkv", "peft=LoRA"]),
    "misspelled": (LoRA(target_modules=["q_porj"]), ["q_porj", "q_proj"]),
    "of no family": (LoRA(target_modules=["xyz"]), ["xyz", "linear_qkv", "q_proj", "down_proj"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(models, case):
    method, words = REFUSED[case]
    with pytest.raises(UserError) as caught:
        adapted(models("llama"), method, ddp=False)
    for word in words:
        assert word in str(caught.value)
