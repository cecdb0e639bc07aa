# SPDX-License-Identifier: Apache-2.0
"""What bridges of other programs call: mappings, names, layer specs, and questions about checkpoints."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron.bridge import AutoBridge
from megatron.bridge.models import GPTModelProvider, MambaModelProvider
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import (
    MegatronModelBridge,
    _megatron_local_name_to_global,
)
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    ReplicatedMapping,
)
from megatron.bridge.models.conversion.utils import moe_experts_stored_packed, unwrap_model
from megatron.bridge.models.deepseek.common import get_common_mapping_list
from megatron.bridge.models.gpt_provider import (
    local_layer_spec,
    modelopt_transformer_layer_spec,
    transformer_engine_layer_spec,
)
from megatron.bridge.models.mamba.mamba_provider import (
    modelopt_mamba_stack_spec,
    transformer_engine_mamba_stack_spec,
)
from megatron.bridge.models.nemotron.nemotron_h_bridge import NemotronHBridge as DefinedBridge
from megatron.bridge.models.nemotronh import NemotronHBridge as PackageBridge
from megatron.bridge.models.nemotronh.nemotron_h_bridge import NemotronHBridge
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama
from tests.toy_run import toy_config
from tests.workers import forget_model_parallel

LAYER = "decoder.layers.*"
EXPERTS = "model.layers.*.mlp.experts"


def test_package_under_another_name_is_loaded_once():
    assert NemotronHBridge is PackageBridge is DefinedBridge


def test_fused_experts_are_those_of_the_families():
    """NeMo-RL selects tasks by these classes."""
    registry = MegatronMappingRegistry(
        FusedGatedExpertMapping(
            f"{LAYER}.mlp.experts.linear_fc1.weight*", f"{EXPERTS}.gate_up_proj"
        ),
        FusedExpertMapping(
            f"{LAYER}.mlp.experts.linear_fc2.weight*",
            f"{EXPERTS}.down_proj",
            transpose_on_export=True,
        ),
    )
    first = registry.megatron_to_hf_lookup("decoder.layers.3.mlp.experts.linear_fc1.weight5")
    second = registry.megatron_to_hf_lookup("decoder.layers.3.mlp.experts.linear_fc2.weight5")
    assert (first.hf_param, first.expert) == ("model.layers.3.mlp.experts.gate_up_proj", 5)
    assert (first.transposed, second.transposed) == (False, True)
    assert second.is_grouped_export
    assert second.group_key == "model.layers.3.mlp.experts.down_proj"
    with pytest.raises(UserError, match=r"permute_dims=\(0, 2, 1\).*transpose_on_export"):
        FusedExpertMapping("a", "b", permute_dims=(0, 2, 1))


def test_mapping_that_repeats_another_one_is_left_out():
    router = ("decoder.layers.*.mlp.router.weight", "model.layers.*.mlp.gate.weight")
    registry = MegatronMappingRegistry(ReplicatedMapping(*router), AutoMapping(*router))
    assert [type(mapping) for mapping in registry.get_all_mappings()] == [ReplicatedMapping]
    with pytest.raises(ValueError, match=r"mapped more than once: .*router\.weight"):
        MegatronMappingRegistry(ReplicatedMapping(*router), AutoMapping(router[0], "gate"))


def test_bridge_that_extends_a_family_inherits_its_registration(family_case):
    """miles extends Nemotron-H: its mappings and changes of the provider are used, the provider class is ours."""
    case = family_case("nemotron_h_experts")
    registered = model_bridge.registration_of("NemotronHForCausalLM")
    seen = []

    try:

        @MegatronModelBridge.register_bridge(source="NemotronHForCausalLM", target=HybridModel)
        class ExtendedBridge(NemotronHBridge):
            def provider_bridge(self, hf_pretrained):
                provider = super().provider_bridge(hf_pretrained)
                pattern = provider.hybrid_override_pattern
                provider.moe_layer_freq = [int(symbol == "E") for symbol in pattern]
                return provider

            def mapping_registry(self):
                seen.append(self)
                mappings = super().mapping_registry().get_all_mappings()
                repeated = AutoMapping(
                    f"{LAYER}.mlp.router.weight", "backbone.layers.*.mixer.gate.weight"
                )
                added = AutoMapping(f"{LAYER}.mlp.added.weight", "backbone.layers.*.added.weight")
                return MegatronMappingRegistry(*mappings, repeated, added)

        bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
        assert isinstance(bridge._model_bridge, ExtendedBridge)
        provider = bridge.to_megatron_provider(load_weights=False)
        assert isinstance(provider, MambaModelProvider)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
        assert "decoder.layers.0.mlp.added.weight" not in dict(model[0].named_parameters())
        assert bridge.mapping_registry.megatron_to_hf_lookup("decoder.layers.0.mlp.added.weight")
        bridge.load_hf_weights(model)
        assert seen
    finally:
        model_bridge._REGISTRY["NemotronHForCausalLM"] = registered


def test_names_in_the_full_model(tmp_path):
    make_llama(tmp_path)
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    model = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)
    config = model[0].config
    for task in bridge.get_conversion_tasks(model):
        name = _megatron_local_name_to_global(model, config, task.param_name, task.vp_stage)
        assert name == task.global_param_name


def test_unwrap_model():
    config = toy_config()
    config.model.initialize_model_parallel(seed=1)
    wrapped = config.model.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    chunk = wrapped[0].module
    assert unwrap_model(wrapped) == [chunk]
    assert unwrap_model(wrapped[0]) is chunk
    assert unwrap_model(wrapped[0], (type(wrapped[0]),)) is chunk


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_stored_packed(tmp_path, is_packed):
    from safetensors.torch import save_file

    name = "gate_up_proj" if is_packed else "0.gate_proj.weight"
    save_file({f"model.layers.0.mlp.experts.{name}": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM

    checkpoint = PreTrainedCausalLM(tmp_path)
    assert moe_experts_stored_packed(checkpoint, "model.layers.") is is_packed
    assert moe_experts_stored_packed(checkpoint, "model.language_model.layers.", True)
    assert not moe_experts_stored_packed(object(), "model.layers.")


def test_mappings_of_deepseek():
    registry = MegatronMappingRegistry(*get_common_mapping_list())
    gates = registry.megatron_to_hf_lookup("decoder.layers.2.mlp.experts.linear_fc1.weight7")
    assert isinstance(gates, GatedMLPMapping)
    assert gates.hf_param["up"] == "model.layers.2.mlp.experts.7.up_proj.weight"
    assert registry.megatron_to_hf_lookup("mtp.layers.0.eh_proj.weight") is None


def test_layer_specs_of_other_programs_build_the_same_model():
    """verl sets ``modelopt_transformer_layer_spec`` for quantization-aware training."""
    losses = []
    tokens = torch.arange(32)[None]
    for spec in (None, local_layer_spec, modelopt_transformer_layer_spec):
        provider = toy_config().model
        provider.transformer_layer_spec = spec
        provider.initialize_model_parallel(seed=1)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
        losses.append(model[0](tokens, tokens, None, labels=tokens).mean().item())
        forget_model_parallel()
    assert losses[0] == losses[1] == losses[2]


def test_layer_spec_may_take_the_virtual_stage():
    stages = []

    def spec(config, vp_stage):
        stages.append(vp_stage)
        return local_layer_spec(config, vp_stage)

    provider = toy_config().model
    provider.transformer_layer_spec = spec
    provider.initialize_model_parallel(seed=1)
    provider.provide(vp_stage=None)
    assert stages == [None]


def test_stack_specs_of_hybrid_models():
    sizes = {"hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 8}
    provider = toy_config(model={**sizes, "mamba_state_dim": 16, "mamba_num_groups": 2}).model
    provider.mamba_stack_spec = modelopt_mamba_stack_spec
    assert provider.hybrid_stack_spec is modelopt_mamba_stack_spec
    provider.initialize_model_parallel(seed=1)
    assert isinstance(provider.provide(), HybridModel)
    provider.hybrid_stack_spec = lambda: None
    with pytest.raises(UserError, match=r"hybrid_stack_spec=.*NoneType"):
        provider.provide()
    with pytest.raises(UserError, match=r"call it with the provider"):
        modelopt_mamba_stack_spec()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformer Engine may be there")
def test_layers_of_transformer_engine_are_refused_without_it():
    provider = GPTModelProvider(num_layers=1, hidden_size=8, num_attention_heads=1)
    for call in (
        lambda: transformer_engine_layer_spec(provider),
        transformer_engine_mamba_stack_spec,
    ):
        with pytest.raises(UserError, match=r"Transformer Engine is not installed.*'torch'"):
            call()
