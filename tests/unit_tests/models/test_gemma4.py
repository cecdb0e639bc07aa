# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: what layers get from each other, packed and recomputed; what parts them is refused."""

import pytest
import torch
from transformers import Gemma4TextConfig

from megatron.bridge import AutoBridge
from megatron.bridge.backends.specs.kv_sharing import SharedKVAttention, connect_shared_kv
from megatron.bridge.models.conversion.declare.gemma4_fields import (
    _read_experts,
    _read_full_layers,
    _sharing_pattern,
)
from megatron.bridge.utils.errors import UserError
from tests.families import configs, harness
from tests.families.rows import ROWS
from tests.unit_tests.models.test_query_scaling import packed

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


def provider(name, **changes):
    config = harness.hf_model(ROWS[name]).config
    config.architectures = [ROWS[name].model]
    found = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for key, value in changes.items():
        setattr(found, key, value)
    return found


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma4", {"pipeline_model_parallel_size": 2}, "hidden_size_per_layer_input=10"),
        ("gemma4", FULL, "hidden_size_per_layer_input=10: layers computed again"),
        ("gemma4", {"hidden_size_per_layer_input": None, **FULL}, "shared_kv_layers"),
        ("gemma4", {"cuda_graph_impl": "local"}, "use 'full_iteration'"),
        ("gemma4_keys_are_values", {"cuda_graph_impl": "local"}, "layer_scales=True"),
        ("gemma4_experts", {"overlap_moe_expert_parallel_comm": True}, "switch it off"),
        ("gemma4", {"fused_single_qkv_rope": True}, "value_norm=True"),
        ("gemma4_experts", {"recompute_modules": ["moe"]}, "recompute_modules=['moe']"),
        ("gemma4", {"make_query_groups_divisible_by": 2}, "model.make_query_groups_divisible_by=1"),
        ("gemma4", {"tensor_model_parallel_size": 3}, "divide the 2 key heads"),
        ("gemma4_keys_are_values", {"tensor_model_parallel_size": 3}, "divide the 2 key heads"),
    ],
)
def test_refusals(name, changes, said):
    found = provider(name, **changes)
    with pytest.raises(UserError) as refused:
        found.derive()
    assert said in str(refused.value)


def test_other_norms_of_keys_are_refused():
    with pytest.raises(UserError, match="value_norm=True excludes"):
        provider("gemma4", qk_norm_after_rope=True).meta_model()


def test_keys_of_another_stage_are_refused():
    found = provider("gemma4")
    (model,) = found.meta_model()
    with pytest.raises(UserError, match="another pipeline stage"):
        connect_shared_kv(model.decoder.layers[3:], found)


def test_sharded_parameters_of_layers_that_differ_are_refused():
    found = provider("gemma4_keys_are_values")
    found.derive()
    assert found.heterogeneous_block_specs  # which rules/sharding.py refuses


@pytest.mark.parametrize(
    ("read", "value", "said"),
    [
        (_sharing_pattern, 3, "num_kv_shared_layers=3"),
        (_read_full_layers, {"0": {"head_dim": 8}}, "per_layer_config"),
        (_read_full_layers, {"1": {"head_dim": 8}, "3": {"head_dim": 9}}, "per_layer_config"),
        (_read_full_layers, {"1": {"hidden_size": 8}, "3": {"hidden_size": 8}}, "per_layer_config"),
        (_read_experts, True, "num_experts"),
    ],
)
def test_configs_that_cannot_be_meant(read, value, said):
    config = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    with pytest.raises(UserError) as refused:
        read(value, config)
    assert said in str(refused.value)


@pytest.mark.parametrize("layers", [12, 120])
def test_configs_of_many_layers_come_back(layers):
    """Transformers pads the numbers of layers in its file."""
    sizes = {"num_hidden_layers": layers, "layer_types": None, "num_global_key_value_heads": 1}
    config = Gemma4TextConfig(**{**ROWS["gemma4_keys_are_values"].config, **sizes})
    config.architectures = ["Gemma4ForCausalLM"]
    found = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    assert (found.global_kv_channels, found.global_query_groups) == (12, 1)
    assert not configs.round_trip(config)


def test_more_experts_than_there_are():
    with pytest.raises(UserError, match="top_k_experts=5"):
        _read_experts(True, {"num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8})


def test_attention_both_ways_is_refused():
    config = harness.hf_model(ROWS["gemma4_keys_are_values"]).config
    config.architectures, config.use_bidirectional_attention = ["Gemma4ForCausalLM"], "all"
    with pytest.raises(UserError, match="use_bidirectional_attention"):
        AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


def logits(model, ids, segments=None):
    places = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        return model(
            input_ids=ids, position_ids=places, attention_mask=None, packed_seq_params=segments
        )


@pytest.mark.parametrize("name", ["gemma4", "gemma4_biases", "gemma4_experts", "nanochat"])
def test_packed_sequences_do_not_see_each_other(family_case, name):
    case = family_case(name)
    _, (model,) = harness.build(case, "one")
    ids = case.batch[0][:1]
    together = logits(model, ids, packed(17, 23))
    apart = torch.cat([logits(model, part) for part in (ids[:, :17], ids[:, 17:])], dim=1)
    assert not harness.different_logits(apart, together)
    assert harness.different_logits(logits(model, ids), together)


@pytest.mark.parametrize(
    ("name", "recompute"), [("gemma4", SELECTIVE), ("gemma4_keys_are_values", FULL)]
)
def test_recomputed_parts_have_the_same_gradients(family_case, name, recompute):
    case = family_case(name)
    gradients = []
    for changes in ({}, recompute):
        found = AutoBridge.from_hf_pretrained(case.checkpoint).to_megatron_provider()
        for key, value in changes.items():
            setattr(found, key, value)
        (model,) = found.provide_distributed_model(wrap_with_ddp=False)
        places = torch.arange(40)[None].expand(2, -1)
        ids, labels = case.batch
        model.train()(
            input_ids=ids, position_ids=places, attention_mask=None, labels=labels
        ).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, atol=0.0, rtol=0.0)


def test_a_pass_leaves_nothing_behind(family_case):
    _, (model,) = harness.build(family_case("gemma4"), "one")
    logits(model, torch.arange(12)[None])
    layers = model.decoder.layers
    assert [layer.own_input for layer in layers] == [None] * len(layers)
    assert all(it.kept is None for it in model.modules() if isinstance(it, SharedKVAttention))
    widths = [layer.self_attention.hidden_size_per_attention_head for layer in layers]
    assert widths == [8, 12] * 3
