# SPDX-License-Identifier: Apache-2.0
"""Shared random factors with trained vectors, against those of the ``peft`` library."""

import pytest
import torch

from megatron.bridge.cli.main import main
from megatron.bridge.peft.lora import LoRAMerge, subtract
from megatron.bridge.peft.vera import VeRA, draw_projections
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import (
    adapted,
    batch,
    exported,
    gradients,
    make,
    reference_loss,
    reference_train,
    train,
)
from tests.unit_tests.peft.test_runs import tune

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, KEY = 16, 3
ROLES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "gate_proj", "up": "up_proj"}
LAYERS = {"linear_proj": "o_proj", "linear_fc2": "down_proj"}


def vera(**settings):
    return VeRA(**{"target_modules": LEAVES, "dim": RANK, "projection_prng_key": KEY, **settings})


def peft_model(**settings):
    from peft import VeraConfig, get_peft_model

    config = VeraConfig(r=RANK, target_modules=LEAVES, projection_prng_key=KEY, **settings)
    return get_peft_model(make("llama"), config)


def vectors_of(model):
    """(layer, module, ``d`` or ``b``) -> the parameter of Megatron's model."""
    found = {}
    for name, parameter in model[0].module.named_parameters():
        parts = name.split(".")
        if "adapter" in parts:
            role_or_layer = parts[-2] if parts[-2] != "adapter" else parts[-3]
            leaf = ROLES.get(role_or_layer) or LAYERS[role_or_layer]
            found[int(parts[2]), leaf, {"d": "d", "scale": "b"}[parts[-1]]] = parameter
    return found


def vectors_of_peft(model):
    found = {}
    for name, parameter in model.named_parameters():
        if "vera_lambda" in name:
            parts = name.split(".")
            found[int(parts[4]), parts[-3], parts[-2][-1]] = parameter
    return found


@torch.no_grad()
def shake_both(model, theirs):
    """Other values than those at the start, where b is zero and d has no gradient."""
    of_peft = vectors_of_peft(theirs)
    vectors = vectors_of(model)
    assert vectors.keys() == of_peft.keys()
    generator = torch.Generator().manual_seed(0)
    for key, vector in vectors.items():
        vector.copy_(torch.randn(vector.shape, generator=generator))
        of_peft[key].copy_(vector)


def test_projections_are_those_of_peft():
    a, b = draw_projections(RANK, inputs=64, outputs=64, key=KEY)
    theirs = peft_model().base_model
    assert torch.equal(a, theirs.vera_A["default"])
    assert torch.equal(b, theirs.vera_B["default"])


def test_outputs_and_gradients(models):
    _, model = adapted(models("llama"), vera())
    theirs = peft_model()
    shake_both(model, theirs)
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](ids, positions, None)
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=2e-5)
    gradients(model)
    reference_loss(theirs).backward()
    of_peft = vectors_of_peft(theirs)
    for key, vector in vectors_of(model).items():
        torch.testing.assert_close(vector.main_grad, of_peft[key].grad, rtol=1e-4, atol=1e-5)


def test_ten_steps_from_the_first_values(models):
    _, model = adapted(models("llama"), vera(d_initial=0.3))
    losses = train(model, 10)
    assert losses == pytest.approx(reference_train(peft_model(d_initial=0.3), 10), abs=1e-5)


@pytest.mark.parametrize("targets", [LEAVES, ["linear_qkv", "linear_fc1", "linear_fc2"]])
def test_export_merge_and_removal(models, tmp_path, targets):
    from peft import PeftModel

    bridge, model = adapted(models("llama"), vera(target_modules=targets))
    train(model, 3)
    bridge.save_hf_adapter(model, tmp_path, show_progress=False)
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](ids, positions, None)
        theirs = PeftModel.from_pretrained(make("llama"), tmp_path)
        torch.testing.assert_close(theirs(ids).logits, logits, rtol=1e-5, atol=1e-5)
        before = {name: tensor.clone() for name, tensor in exported(bridge, model).items()}
        subtract(model)
        for name, tensor in exported(bridge, model).items():
            assert torch.equal(tensor, -before[name] if "lora_B" in name else before[name])
        subtract(model)
        LoRAMerge()(model)
        torch.testing.assert_close(model[0](ids, positions, None), logits, rtol=1e-5, atol=1e-5)


def test_a_run_resumes_bit_for_bit_and_holds_only_vectors(models, tmp_path):
    method = vera(target_modules=["linear_qkv", "down_proj"])
    weights = tune(models("llama"), tmp_path / "run", method)
    tune(models("llama"), tmp_path / "resumed", method, stop=2)
    resumed = tune(models("llama"), tmp_path / "resumed", method)
    assert {name.rpartition(".")[2] for name in weights if ".adapter." in name} == {"d", "scale"}
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name
    target = str(tmp_path / "adapter")
    arguments = ["adapter", "export", "--adapter", str(tmp_path / "run"), "--hf-path", target]
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 8}, r"peft\.alpha=8 has no effect on VeRA"),
        ({"use_rslora": True}, r"peft\.use_rslora=True has no effect"),
        ({"dim_by_module": {"q_proj": 4}}, r"peft\.dim_by_module=.* share their factors"),
        ({"init_lora_weights": "pissa"}, r"peft\.init_lora_weights=pissa has no effect"),
    ],
)
def test_refusals(models, settings, message):
    with pytest.raises(UserError, match=message):
        adapted(models("llama"), vera(**settings), ddp=False)
