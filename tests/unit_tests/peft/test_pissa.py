# SPDX-License-Identifier: Apache-2.0
"""Adapters that start as the principal part of the weights, against those of the ``peft`` library."""

import json
import warnings

import pytest
import torch

from megatron.bridge.cli.from_trainer import translate
from megatron.bridge.cli.main import main
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.hf_adapter import peft_for
from megatron.bridge.peft.lora import LoRA, LoRAMerge, subtract
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import (
    DECODER,
    adapted,
    batch,
    exported,
    gradients,
    make,
    reference_loss,
    reference_train,
    saved_by_peft,
    train,
)
from tests.toy_models import make_llama
from tests.unit_tests.peft.test_runs import tune

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 4, 8
TOLERANCE = 1e-5


def pissa(method=LoRA, init="pissa", **settings):
    return method(
        **{"target_modules": LEAVES, "dim": RANK, "alpha": ALPHA, **settings},
        init_lora_weights=init,
    )


def peft_model(init="pissa", **settings):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, init_lora_weights=init, target_modules=LEAVES, **settings
    )
    return get_peft_model(make("llama"), config)


def products(tensors):
    """Module -> (product of the trained factors, of the frozen ones) of exported adapters."""
    of_module = {}
    for name, a in tensors.items():
        if "lora_A" in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            first, second = b[:, :RANK] @ a[:RANK], b[:, RANK:] @ a[RANK:]
            of_module[name.removesuffix(".lora_A.weight")] = first, second
    return of_module


@pytest.mark.parametrize("use_rslora", [False, True])
def test_start_gradients_and_ten_steps(models, use_rslora):
    bridge, model = adapted(models("llama"), pissa(use_rslora=use_rslora))
    theirs = peft_model(use_rslora=use_rslora)
    saved = saved_by_peft(theirs)
    for module, (trained, frozen) in products(exported(bridge, model)).items():
        product = saved[f"{module}.lora_B.weight"] @ saved[f"{module}.lora_A.weight"]
        torch.testing.assert_close(trained, product, rtol=0, atol=1e-6)
        torch.testing.assert_close(frozen, -product, rtol=0, atol=1e-6)
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](ids, positions, None)
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    gradients(model)
    reference_loss(theirs).backward()
    for ours, of_peft in zip(squared_gradients(model), norms_of_peft(theirs), strict=True):
        assert ours == pytest.approx(of_peft, rel=1e-4)
    theirs.zero_grad()
    losses = train(model, 10)
    assert losses == pytest.approx(reference_train(theirs, 10), abs=TOLERANCE)


def squared_gradients(model):
    """Norms of the gradients, which do not depend on the signs of singular vectors, in order of size."""
    trained = (one for one in model[0].parameters() if one.requires_grad)
    return sorted(float(one.main_grad.norm()) for one in trained)


def norms_of_peft(model):
    return sorted(float(one.grad.norm()) for one in model.parameters() if one.requires_grad)


def test_the_approximation_is_that_of_peft(models):
    bridge, model = adapted(models("llama"), pissa(init="pissa_niter_500"), ddp=False)
    saved = saved_by_peft(peft_model("pissa_niter_500"))
    for module, (trained, _) in products(exported(bridge, model)).items():
        product = saved[f"{module}.lora_B.weight"] @ saved[f"{module}.lora_A.weight"]
        torch.testing.assert_close(trained, product, rtol=0, atol=2e-3)


@pytest.mark.parametrize("method", [pissa(target_modules=["linear_qkv", "linear_fc1"]), pissa()])
def test_training_starts_from_the_base_bit_for_bit(tmp_path, method):
    make_llama(tmp_path, **DECODER, attention_bias=True, mlp_bias=True, dtype=torch.bfloat16)
    ids, _, positions = batch()
    with torch.no_grad():
        base = adapted(tmp_path, lambda model: model, ddp=False)[1][0]
        model = adapted(tmp_path, method, ddp=False)[1][0]
        assert torch.equal(base(ids, positions, None), model(ids, positions, None))


@pytest.mark.parametrize(
    "method", [pissa(use_rslora=True), pissa(DoRA, target_modules=["linear_qkv", "linear_fc1"])]
)
def test_export_merge_and_removal(models, tmp_path, method):
    from peft import PeftModel

    bridge, model = adapted(models("llama"), method)
    base = {name: one.clone() for name, one in model[0].module.named_parameters()}
    train(model, 3)
    bridge.save_hf_adapter(model, tmp_path, show_progress=False)
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](ids, positions, None)
        theirs = PeftModel.from_pretrained(make("llama"), tmp_path)
        torch.testing.assert_close(theirs(ids).logits, logits, rtol=1e-5, atol=1e-5)
        method_of_file = peft_for(bridge, tmp_path)
        assert (method_of_file.dim, method_of_file.init_lora_weights) == (2 * RANK, None)
        with pytest.raises(UserError, match=r"peft\.init_lora_weights.*peft_for"):
            bridge.load_hf_adapter(model, tmp_path)
        LoRAMerge()(model)
        merged = model[0](ids, positions, None)
        torch.testing.assert_close(merged, logits, rtol=1e-5, atol=1e-5)
    assert all(
        torch.equal(one, base[name])
        for name, one in model[0].module.named_parameters()
        if "linear" not in name
    )


def test_it_is_taken_out_of_a_merged_model(models):
    bridge, model = adapted(models("llama"), pissa(), ddp=False)
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            if name.endswith((".b", ".a")) and parameter.requires_grad:
                parameter.mul_(1.5)
        before = {name: tensor.clone() for name, tensor in exported(bridge, model).items()}
        subtract(model)
    for name, tensor in exported(bridge, model).items():
        assert torch.equal(tensor, -before[name] if "lora_B" in name else before[name])


def test_what_peft_converted_is_read(models, tmp_path):
    theirs = peft_model()
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "start")
    theirs.peft_config["default"].init_lora_weights = "pissa"
    theirs.save_pretrained(tmp_path / "unconverted")
    reference_train(theirs, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(
            tmp_path / "lora", path_initial_model_for_weight_conversion=tmp_path / "start"
        )
    bridge, _ = adapted(models("llama"), lambda model: model, ddp=False)
    with pytest.raises(UserError, match=r"pissa.*path_initial_model_for_weight_conversion"):
        peft_for(bridge, tmp_path / "unconverted")
    model = adapted(models("llama"), peft_for(bridge, tmp_path / "lora"), ddp=False)[1]
    bridge.load_hf_adapter(model, tmp_path / "lora")
    ids, _, positions = batch()
    with torch.no_grad():
        logits = model[0](ids, positions, None)
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_run_resumes_bit_for_bit_and_is_exported(models, tmp_path):
    """By its stored first values, which other hardware would compute in another way."""
    from peft import PeftModel

    method = pissa(target_modules=["linear_qkv", "linear_fc2"], init="pissa_niter_2")
    weights = tune(models("llama"), tmp_path / "run", method)
    tune(models("llama"), tmp_path / "resumed", method, stop=2)
    resumed = tune(
        models("llama"),
        tmp_path / "resumed",
        pissa(target_modules=["linear_qkv", "linear_fc2"], init="pissa_niter_1"),
    )
    assert weights.keys() == resumed.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name
    adapter = tmp_path / "adapter"
    assert (
        main(["adapter", "export", "--adapter", str(tmp_path / "run"), "--hf-path", str(adapter)])
        == 0
    )
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 2 * RANK
    theirs = saved_by_peft(PeftModel.from_pretrained(make("llama"), adapter))
    first = weights["decoder.layers.0.mlp.linear_fc2.adapter.initial.a"]
    saved = theirs["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    assert torch.equal(saved[RANK:], first)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (pissa(init="pisa"), r"peft\.init_lora_weights=pisa: use pissa or pissa_niter_16"),
        (pissa(lora_A_init_method="normal"), r"leave out peft\.lora_A_init_method"),
        (pissa(base_precision="nf4"), r"peft\.base_precision=nf4.*leave one of them out"),
        (pissa(dim=33), r"peft\.dim=33 .* 32 singular values of .*peft\.dim_by_module"),
    ],
)
def test_refusals(models, method, message):
    with pytest.raises(UserError, match=message):
        adapted(models("llama"), method, ddp=False)


@pytest.mark.parametrize(
    ("values", "init"),
    [
        ({"pissa_init": True}, "pissa_niter_16"),
        ({"pissa_init": True, "pissa_iter": -1, "pissa_convert": True}, "pissa"),
        ({"pissa_init": False}, None),
        ({"peft_init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": True}, None),
    ],
)
def test_names_of_other_trainers(values, init):
    lora = {"use_peft": True, "lora_r": 8, "lora_alpha": 16}
    translation = translate({**lora, **values}, ranks=1).translation
    assert translation.settings.get("peft.init_lora_weights") == init
    assert not translation.missing.keys() & values.keys()
