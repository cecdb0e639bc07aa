# SPDX-License-Identifier: Apache-2.0
"""Adapters to the format of ``peft`` and back, and into exported models."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.hf_adapter import peft_for
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import adapted, batch, exported, make, reference, shake


def logits(model):
    ids, _, positions = batch()
    with torch.no_grad():
        return model[0](input_ids=ids, position_ids=positions, attention_mask=None)


CASES = {
    "lora": ("llama", LoRA(dim=4, alpha=8)),
    "dora": ("llama", DoRA(dim=4, alpha=8, use_rslora=True)),
    "canonical": ("llama", CanonicalLoRA(target_modules=["linear_q", "linear_v"], dim=4, alpha=8)),
    "patterns": (
        "llama",
        LoRA(
            target_modules=["*.layers.0.*.linear_qkv", "linear_fc2", "output_layer"],
            dim=4,
            dim_by_module={"*.layers.1.*": 2},
            alpha_by_module={"output_layer": 3},
        ),
    ),
    "mixtral": ("mixtral", LoRA(dim=4, alpha=8)),
    "router": ("qwen3_moe", LoRA(target_modules=["router", "linear_fc1", "linear_fc2"], dim=4, alpha=8)),
    "second layers": ("mixtral", LoRA(target_modules=["linear_fc2"], dim=4, alpha=8)),
    "expert parts": ("qwen3_moe", CanonicalLoRA(dim=4, alpha=8)),
    "mixers": (
        "nemotron_h",
        LoRA(target_modules=["in_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], dim=4, alpha=8),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_it_with_equal_logits(models, tmp_path, case):
    kind, method = CASES[case]
    bridge, model = adapted(models(kind), method, ddp=False)
    shake(bridge, model, tmp_path / "shaken")
    bridge.save_hf_adapter(model, tmp_path / "adapter", method, show_progress=False)
    theirs = reference(kind, tmp_path / "adapter", share=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(batch()[0]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_it_comes_back_bit_for_bit(models, tmp_path, case):
    kind, method = CASES[case]
    bridge, model = adapted(models(kind), method, ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    found = peft_for(bridge, tmp_path / "adapter")
    assert type(found) is type(method)
    again_bridge, again = adapted(models(kind), found, ddp=False)
    again_bridge.load_hf_adapter(again, tmp_path / "adapter")
    ours, theirs = exported(bridge, model), exported(again_bridge, again)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert torch.equal(logits(model), logits(again))


def test_what_peft_made_is_imported(models, tmp_path):
    """Projections that Megatron fuses have factors of their own there."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], init_lora_weights=False
    )
    theirs = get_peft_model(make("llama"), config)
    theirs.save_pretrained(tmp_path)
    bridge, _ = adapted(models("llama"), LoRA(dim=2), ddp=False)
    method = peft_for(bridge, tmp_path)
    assert isinstance(method, CanonicalLoRA)
    bridge, model = adapted(models("llama"), method, ddp=False)
    bridge.load_hf_adapter(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs.eval()(batch()[0]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [LoRA(dim=4, alpha=8), DoRA(dim=4, alpha=8), CanonicalLoRA(dim=4, alpha=8)])
def test_merged_export_is_what_peft_merges(models, tmp_path, method):
    bridge, model = adapted(models("llama"), method, ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = reference("llama", tmp_path / "adapter", share=False).merge_and_unload().state_dict()
    for name, weight in bridge.export_hf_weights(model, show_progress=False):
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6)


def test_merged_model_on_disk_and_base_beside_it(models, tmp_path):
    from transformers import AutoModelForCausalLM

    bridge, model = adapted(models("llama"), LoRA(dim=4, alpha=8), ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    bridge.save_hf_pretrained(model, tmp_path / "merged", show_progress=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), merged(batch()[0]).logits, rtol=1e-5, atol=1e-5)
    bridge.save_hf_pretrained(model, tmp_path / "base", show_progress=False, merge_adapter_weights=False)
    base = make("llama").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict().items():
        assert torch.equal(tensor, base[name])


def test_modules_to_save_are_written_whole(models, tmp_path):
    method = LoRA(target_modules=["linear_qkv"], dim=4, modules_to_save=["output_layer"])
    bridge, model = adapted(models("llama"), method, ddp=False)
    with torch.no_grad():
        model[0].output_layer.weight.mul_(1.5)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]
    theirs = reference("llama", tmp_path / "adapter", share=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(batch()[0]).logits, rtol=1e-5, atol=1e-5)


def test_without_adapters_there_is_nothing_to_write(models, tmp_path):
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(models("llama"))
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match="no adapters to write"):
        bridge.save_hf_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_half_of_an_expert_is_refused(models, tmp_path):
    bridge, model = adapted(models("mixtral"), LoRA(target_modules=["linear_fc1"], dim=4), ddp=False)
    with pytest.raises(UserError, match="the second layer of its expert has none"):
        bridge.save_hf_adapter(model, tmp_path / "adapter")


def test_another_description_is_refused(models, tmp_path):
    bridge, model = adapted(models("llama"), LoRA(dim=4), ddp=False)
    with pytest.raises(UserError, match="is not what the model's adapters were made with"):
        bridge.save_hf_adapter(model, tmp_path / "adapter", LoRA(dim=8))


def _drop(tensors):
    tensors.pop(next(name for name in tensors if "q_proj.lora_B" in name))


def _add(tensors):
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(1)


def _unshare(tensors):
    tensors[next(name for name in tensors if "k_proj.lora_A" in name)] += 1


@pytest.mark.parametrize(
    ("change", "message"), [(_drop, "lacks"), (_add, "also holds"), (_unshare, "use CanonicalLoRA")]
)
def test_other_tensors_are_refused(models, tmp_path, change, message):
    bridge, model = adapted(models("llama"), LoRA(dim=4), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    before = exported(bridge, model)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        bridge.load_hf_adapter(model, tmp_path / "adapter")
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(bridge, model).items())


def test_another_scaling_is_refused(models, tmp_path):
    bridge, model = adapted(models("llama"), LoRA(dim=4, alpha=8), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 9}))
    with pytest.raises(UserError, match=r"rank, alpha and use_rslora \(4, 9, False\)"):
        bridge.load_hf_adapter(model, tmp_path / "adapter")
