# SPDX-License-Identifier: Apache-2.0
"""The ``peft`` library and this package from the same adapter: the same outputs, gradients and trained weights."""

import pytest
import torch

from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from tests.toy_adapters import (
    DECODER,
    adapted,
    batch,
    exported,
    gradients,
    make,
    reference,
    reference_loss,
    reference_train,
    saved_by_peft,
    shake,
    share_factors,
    train,
)
from tests.toy_models import make_llama

METHODS = {
    "lora": LoRA(dim=4, alpha=8),
    "rslora": LoRA(dim=4, alpha=8, use_rslora=True),
    "dora": DoRA(dim=4, alpha=8),
    "canonical": CanonicalLoRA(dim=4, alpha=8),
}
ROUTED = LoRA(
    target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"],
    dim=4,
    alpha=8,
)
EXPERTS = [("mixtral", METHODS["lora"]), ("qwen3_moe", METHODS["rslora"]), ("qwen3_moe", ROUTED)]
EXPERT_IDS = ["mixtral", "qwen3_moe with rslora", "qwen3_moe with its router"]
TOLERANCE = 1e-5


def pair(models, kind, name, tmp_path, start=shake):
    bridge, model = adapted(models(kind), METHODS[name])
    start(bridge, model, tmp_path / "adapter")
    return bridge, model, reference(kind, tmp_path / "adapter", share=name != "canonical")


@pytest.mark.parametrize("name", METHODS)
def test_outputs_and_gradients(models, tmp_path, name):
    bridge, model, theirs = pair(models, "llama", name, tmp_path)
    ids, _, positions = batch()
    with torch.no_grad():
        ours = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    gradients(model)
    reference_loss(theirs).backward()
    take_gradients(model, theirs)
    compare(exported(bridge, model), saved_by_peft(theirs))


@pytest.mark.sampled
@pytest.mark.parametrize("name", METHODS)
def test_ten_steps(models, tmp_path, name):
    bridge, model, theirs = pair(models, "llama", name, tmp_path, start=save)
    losses = train(model, 10)
    assert losses == pytest.approx(reference_train(theirs, 10), abs=TOLERANCE)
    compare(exported(bridge, model), saved_by_peft(theirs))


@pytest.mark.parametrize("name", ["lora", "canonical"])
def test_training_starts_from_the_base_bit_for_bit(tmp_path, name):
    """In half precision, too, and of layers that add a bias."""
    make_llama(tmp_path, **DECODER, attention_bias=True, mlp_bias=True, dtype=torch.bfloat16)
    ids, _, positions = batch()
    with torch.no_grad():
        base, adapters = (
            adapted(tmp_path, it, ddp=False)[1][0] for it in (lambda model: model, METHODS[name])
        )
        assert torch.equal(*(model(ids, positions, None) for model in (base, adapters)))


@pytest.mark.parametrize(("kind", "method"), EXPERTS, ids=EXPERT_IDS)
def test_gradients_with_experts(models, tmp_path, kind, method):
    bridge, model = adapted(models(kind), method)
    shake(bridge, model, tmp_path / "adapter")
    theirs = reference_with_experts(kind, method, exported(bridge, model), moe_factors(model))
    gradients(model)
    reference_loss(theirs).backward()
    take_gradients(model, theirs)
    compare_with_experts(exported(bridge, model), moe_factors(model), theirs)


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "method"), EXPERTS, ids=EXPERT_IDS)
def test_ten_steps_with_experts(models, kind, method):
    bridge, model = adapted(models(kind), method)
    theirs = reference_with_experts(kind, method, exported(bridge, model), moe_factors(model))
    losses = train(model, 10)
    assert losses == pytest.approx(reference_train(theirs, 10), abs=TOLERANCE)
    compare_with_experts(exported(bridge, model), moe_factors(model), theirs)


def compare_with_experts(ours, factors, theirs):
    saved = saved_by_peft(theirs)
    attention = [name for name in saved if ".self_attn." in name]
    compare({name: ours[name] for name in attention}, {name: saved[name] for name in attention})
    for (a, b), wrapper in zip(factors, wrappers(theirs), strict=True):
        torch.testing.assert_close(
            a, wrapper.lora_A["default"].weight.data, rtol=TOLERANCE, atol=TOLERANCE
        )
        torch.testing.assert_close(
            b, wrapper.lora_B["default"].weight.data, rtol=TOLERANCE, atol=TOLERANCE
        )


@torch.no_grad()
def take_gradients(model, theirs):
    """Put gradients in the place of weights, so that they can be exported and compared as such."""
    for chunk in model:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.copy_(parameter.grad)


def reference_with_experts(kind, method, tensors, factors):
    """``peft`` adapts the parameters that hold all experts; gate and up share their factor A there, too."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=method.dim,
        lora_alpha=method.alpha,
        use_rslora=method.use_rslora,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=[
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            *(["mlp.gate.weight"] if "router" in method.target_modules else []),
        ],
    )
    theirs = share_factors(get_peft_model(make(kind), config))
    named = {
        name.replace(".default", ""): parameter for name, parameter in theirs.named_parameters()
    }
    with torch.no_grad():
        for name, tensor in tensors.items():
            if ".self_attn." in name:
                named.get(name, tensor).copy_(tensor)
        for (a, b), wrapper in zip(factors, wrappers(theirs), strict=True):
            wrapper.lora_A["default"].weight.copy_(a)
            wrapper.lora_B["default"].weight.copy_(b)
    return theirs


def moe_factors(model):
    """What ``peft`` has for the experts' two parameters, and the router's if it is adapted, layer by layer."""
    return [as_peft(a, b) for a, b in raw_factors(model)]


def raw_factors(model):
    """A and B as they lie on this rank."""
    for layer in model[0].module.decoder.layers:
        for linear in (
            layer.mlp.experts.linear_fc1,
            layer.mlp.experts.linear_fc2,
            layer.mlp.router,
        ):
            if hasattr(linear, "adapter"):
                yield linear.adapter.a.detach().clone(), linear.adapter.b.detach().clone()


def as_peft(a, b):
    """A [experts x rank, in] and B [out, rank x experts]; a router has no experts."""
    if a.ndim == 2:
        return a, b
    rows = b.flatten(1, 2) if b.ndim == 4 else b
    return a.flatten(0, 1).clone(), rows.permute(1, 2, 0).flatten(1).clone()


PARAMETERS = ("gate_up_proj", "down_proj", "weight")


def wrappers(theirs):
    found = [module for module in theirs.modules() if type(module).__name__ == "ParamWrapper"]
    return sorted(
        found, key=lambda one: (_layer(theirs, one), PARAMETERS.index(one.parameter_name))
    )


def _layer(theirs, wanted):
    name = next(name for name, module in theirs.named_modules() if module is wanted)
    return int(name.split(".layers.")[1].split(".")[0])


def save(bridge, model, directory):
    """Start from what the adapters start from."""
    bridge.save_hf_adapter(model, directory, show_progress=False)


def compare(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
