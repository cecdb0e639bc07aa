# SPDX-License-Identifier: Apache-2.0
"""What gets an adapter, what is trained, and what is refused."""

from dataclasses import dataclass

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.meta_model import as_stage, stage_chunks
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA, LoRAMerge
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import adapted, batch, gradients


def adapted_layers(model):
    chunk = model[0]
    return [
        name.removesuffix(".adapter")
        for name, _ in chunk.named_modules()
        if name.endswith(".adapter")
    ]


CHOSEN = {
    "name": (
        LoRA(target_modules=["linear_qkv"]),
        ["0.self_attention.linear_qkv", "1.self_attention.linear_qkv"],
    ),
    "one layer": (LoRA(target_modules=["*.layers.1.*.linear_fc2"]), ["1.mlp.linear_fc2"]),
    "excluded": (
        LoRA(
            target_modules=["linear_fc1", "linear_fc2"],
            exclude_modules=["*.layers.0.*", "linear_fc1"],
        ),
        ["1.mlp.linear_fc2"],
    ),
    "parts": (
        CanonicalLoRA(target_modules=["linear_k", "*.layers.0.mlp.linear_fc1_up"]),
        ["0.self_attention.linear_qkv", "0.mlp.linear_fc1", "1.self_attention.linear_qkv"],
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_targets(models, case):
    method, expected = CHOSEN[case]
    _, model = adapted(models("llama"), method, ddp=False)
    assert sorted(adapted_layers(model)) == sorted(f"decoder.layers.{name}" for name in expected)
    trained = {name for name, parameter in model[0].named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".adapter." in name for name in trained)


def test_parts_that_are_no_targets_have_no_factors(models):
    _, model = adapted(models("llama"), CanonicalLoRA(target_modules=["linear_k"]), ddp=False)
    assert list(model[0].decoder.layers[0].self_attention.linear_qkv.adapter) == ["k"]


def test_ranks_and_scalings_by_module(models):
    method = LoRA(
        dim=4, alpha=8, dim_by_module={"linear_fc2": 2}, alpha_by_module={"*.layers.0.*": 1}
    )
    _, model = adapted(models("llama"), method, ddp=False)
    first, second = model[0].decoder.layers
    assert (first.mlp.linear_fc2.adapter.a.shape[0], first.mlp.linear_fc1.adapter.a.shape[0]) == (
        2,
        4,
    )
    assert (
        first.mlp.linear_fc2.adapter.shape.scaling,
        second.mlp.linear_fc2.adapter.shape.scaling,
    ) == (0.5, 4.0)


def test_rslora_divides_by_the_root(models):
    _, model = adapted(models("llama"), LoRA(dim=4, alpha=8, use_rslora=True), ddp=False)
    assert model[0].decoder.layers[0].mlp.linear_fc2.adapter.shape.scaling == 4.0


REFUSED = {
    "unknown": (
        LoRA(target_modules=["linear_qvk"]),
        r"'linear_qvk' matches no layer.*did you mean linear_qkv",
    ),
    "one of two": (
        LoRA(target_modules=["linear_qkv", "gate"]),
        r"peft\.target_modules: 'gate' matches no layer",
    ),
    "unknown layer": (
        LoRA(target_modules=["*.layers.7.*"]),
        r"'\*\.layers\.7\.\*' matches no layer",
    ),
    "nothing excluded": (
        LoRA(target_modules=["linear_qkv"], exclude_modules=["linear_fc1"]),
        r"peft\.exclude_modules: 'linear_fc1' matches no layer",
    ),
    "all excluded": (LoRA(exclude_modules=["*"]), r"peft\.exclude_modules leaves no layer"),
    "unknown rank": (
        LoRA(dim_by_module={"linear_q": 2}),
        r"peft\.dim_by_module: 'linear_q' matches no layer",
    ),
    "fused name": (CanonicalLoRA(target_modules=["linear_qkv"]), r"'linear_qkv' matches no layer"),
    "no rank": (LoRA(dim=0), r"peft\.dim=0: a rank is at least 1"),
    "both random": (LoRA(lora_B_init_method="normal"), "both random"),
    "both zero": (LoRA(lora_A_init_method="zero"), "both zero"),
    "dropout": (DoRA(dropout=1.0), r"peft\.dropout=1\.0"),
    "whole": (
        LoRA(modules_to_save=["lm_haed"]),
        r"peft\.modules_to_save: 'lm_haed' matches no layer.*lm_head",
    ),
    "text": (
        LoRA(target_modules="all-linear"),
        r"peft\.target_modules='all-linear' must be a list",
    ),
    "nothing": (PEFT(), "adds nothing to this model that could be trained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(models, case):
    method, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        adapted(models("llama"), method, ddp=False)


def test_tied_output_is_refused(tmp_path):
    from tests.toy_adapters import DECODER
    from tests.toy_models import make_llama

    make_llama(tmp_path, **DECODER, tie_word_embeddings=True)
    with pytest.raises(UserError, match="output_layer shares its weight with the embedding"):
        adapted(tmp_path, LoRA(target_modules=["output_layer"]), ddp=False)
    with pytest.raises(UserError, match=r"'output_layer' matches no layer.*name word_embeddings"):
        adapted(tmp_path, LoRA(modules_to_save=["output_layer"]), ddp=False)


def test_parts_of_a_cut_group_of_heads_are_refused(models):
    provider = AutoBridge.from_hf_pretrained(models("llama")).to_megatron_provider(
        load_weights=False
    )
    provider.tensor_model_parallel_size = 4
    (chunks,) = stage_chunks(provider)
    with (
        as_stage(provider, stage=0),
        torch.device("meta"),
        pytest.raises(
            UserError,
            match=r"tensor_model_parallel_size=4 cuts the 2 groups of heads of .*: name linear_qkv",
        ),
    ):
        CanonicalLoRA(dim=2)(chunks)


def test_output_layer(models):
    _, model = adapted(models("llama"), LoRA(target_modules=["output_layer"], dim=2), ddp=False)
    assert adapted_layers(model) == ["output_layer"]


def test_twice_is_refused(models):
    _, model = adapted(models("llama"), LoRA(dim=2), ddp=False)
    with pytest.raises(UserError, match="has adapters already"):
        LoRA(dim=2)(model)


def test_modules_to_save_are_trained_whole(models):
    method = LoRA(
        target_modules=["linear_qkv"], dim=2, modules_to_save=["output_layer", "final_layernorm"]
    )
    _, model = adapted(models("llama"), method, ddp=False)
    trained = [
        name
        for name, one in model[0].named_parameters()
        if one.requires_grad and ".adapter." not in name
    ]
    assert trained == ["decoder.final_layernorm.weight", "output_layer.weight"]


@dataclass
class TrainNorms(PEFT):
    def transform(self, module, name="", prefix=""):
        if name == "input_layernorm" and prefix == "decoder.layers.1":
            module.requires_grad_(True)
        return module


def test_method_of_a_user(models):
    _, model = adapted(models("llama"), TrainNorms())
    gradients(model)
    trained = {name: one for name, one in model[0].module.named_parameters() if one.requires_grad}
    assert list(trained) == ["decoder.layers.1.input_layernorm.weight"]
    assert all(one.main_grad.abs().sum() > 0 for one in trained.values())


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_gradients_reach_recomputed_layers(models, granularity):
    settings = {"recompute_granularity": granularity}
    if granularity == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        settings["recompute_modules"] = ["mlp"]
    _, model = adapted(models("llama"), LoRA(target_modules=["linear_fc1"], dim=2), **settings)
    gradients(model)
    layers = model[0].module.decoder.layers
    assert all(layer.mlp.linear_fc1.adapter.b.main_grad.abs().sum() > 0 for layer in layers)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_acts_in_training_only(models, position):
    _, model = adapted(
        models("llama"), LoRA(dim=2, dropout=0.5, dropout_position=position), ddp=False
    )
    adapter = model[0].decoder.layers[0].mlp.linear_fc2.adapter
    with torch.no_grad():
        adapter.b.normal_()
    x = torch.randn(5, 1, 48)
    assert not torch.equal(adapter.path(x, None), adapter.path(x, None))
    adapter.eval()
    assert torch.equal(adapter.path(x, None), adapter.path(x, None))
    dropped = (adapter.train().path(x, None) == 0).float().mean()
    assert dropped == 0 if position == "pre" else 0.3 < dropped < 0.7


@pytest.mark.parametrize(
    "method", [LoRA(dim=2, alpha=4), DoRA(dim=2, alpha=4), CanonicalLoRA(dim=2, alpha=4)]
)
def test_merge_leaves_a_plain_model(models, method):
    ids, _, positions = batch()
    _, model = adapted(models("llama"), method, ddp=False)
    plain = type(model[0].decoder.layers[0].mlp.linear_fc1).__bases__[0]
    with torch.no_grad():
        for parameter in model[0].parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        before = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
        LoRAMerge()(model)
        after = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert type(model[0].decoder.layers[0].mlp.linear_fc1) is plain
    assert not any(".adapter." in name for name, _ in model[0].named_parameters())


@pytest.mark.parametrize("target", ["linear_qkv", "linear_fc1", "linear_fc2"])
def test_biases_are_not_scaled_by_magnitudes(family_case, target):
    """Of experts neither, some of which add their biases themselves."""
    _, model = adapted(
        family_case("gpt_oss").checkpoint, DoRA(target_modules=[target], dim=2), ddp=False
    )
    ids, _, positions = batch()
    ids = ids % model[0].config.vocab_size
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            if name.endswith("magnitude"):
                parameter.mul_(1.5)
        before = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
        LoRAMerge()(model)
        after = model[0](input_ids=ids, position_ids=positions, attention_mask=None)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


class FusedNorm(torch.nn.Module):
    """A layer like Transformer Engine's that norms its inputs itself and returns them if asked to."""

    return_layernorm_output = False

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(x, (4,))
        out = normed @ self.weight.T
        return ((out, normed) if self.return_layernorm_output else out), None


def test_fused_norm_shows_what_the_matrix_sees(models):
    from megatron.bridge.peft import layers
    from megatron.bridge.peft.lora import LoRAAdapter
    from megatron.bridge.peft.low_rank import LoRAShape
    from megatron.bridge.peft.targets import Site

    _, model = adapted(models("llama"), LoRA(dim=2), ddp=False)
    layer = FusedNorm(model[0].config)
    site = Site("layer", layer, "column", None, 1)
    layers.attach(site, LoRAAdapter(site, LoRAShape(2, 4)))
    x = torch.randn(3, 4)
    with torch.no_grad():
        layer.adapter.b.normal_()
        out, bias = layer(x)
        merged = layer.merged_weight(layer.weight)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (4,)) @ merged.T)
    assert bias is None
