# SPDX-License-Identifier: Apache-2.0
"""Each setting is counted, named as unpriced, or neutral; those that are counted change a prediction."""

import copy
import dataclasses

import pytest
import torch

from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
from megatron.bridge.autotune.predict import predict
from megatron.bridge.autotune.priced import BLOCKS, GROUPS, kind_of, unpriced
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.config.rules import fields
from tests.unit_tests.autotune.models import provider
from tests.unit_tests.autotune.test_memory import configured

RECIPE = llama32_1b_pretrain_config(data_paths=["corpus"])


def keys(block):
    names = [
        entry.name
        for entry in dataclasses.fields(getattr(RECIPE, block))
        if not entry.name.startswith("_")
    ]
    return [f"{block}.{name}" for name in names if f"{block}.{name}" not in fields.UNAVAILABLE]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_setting_has_a_place(block):
    assert [key for key in keys(block) if kind_of(key) is None] == []


def test_a_setting_that_is_not_priced_is_named():
    config = llama32_1b_pretrain_config()
    config.model.attention_backend = "unfused"
    assert list(unpriced(config)) == ["model.attention_backend=unfused"]


TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VP = {**PP, "virtual_pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SHARDED, STRATEGY = {"ddp.use_distributed_optimizer": True}, "ddp.data_parallel_sharding_strategy"
ADAM = {"optimizer.use_precision_aware_optimizer": True}

# setting -> family, settings of the model or, with a block's name, of that block before the change, and the new value
CHANGES = {
    "model.tensor_model_parallel_size": ("llama", {}, 2),
    "model.pipeline_model_parallel_size": ("llama", {}, 2),
    "model.virtual_pipeline_model_parallel_size": ("llama", PP, 2),
    "model.sequence_parallel": ("llama", TP, False),
    "model.context_parallel_size": ("llama", {}, 2),
    "model.expert_model_parallel_size": ("qwen3_moe", {}, 2),
    "model.expert_tensor_parallel_size": ("qwen3_moe", TP, 1),
    "model.fp16": ("llama", {"bf16": False}, True),
    "model.bf16": ("llama", {}, False),
    "model.gradient_accumulation_fusion": ("llama", {"dataset.seq_length": 64}, True),
    "model.tp_comm_overlap": ("llama", TP, True),
    "model.overlap_moe_expert_parallel_comm": ("qwen3_moe", EP, True),
    "model.overlap_p2p_comm": ("llama", VP, True),
    "model.deallocate_pipeline_outputs": ("llama", PP, False),
    "model.microbatch_group_size_per_vp_stage": ("llama", VP, 4),
    "model.num_layers": ("llama", {}, 8),
    "model.mtp_num_layers": ("deepseek_v3", {}, 1),
    "model.num_layers_in_first_pipeline_stage": ("llama", PP, 1),
    "model.num_layers_in_last_pipeline_stage": ("llama", PP, 1),
    "model.pipeline_model_parallel_layout": ("llama", PP, "Ettt|tL"),
    "model.hidden_size": ("llama", {}, 256),
    "model.num_attention_heads": ("llama", {}, 16),
    "model.num_query_groups": ("llama", {}, 8),
    "model.ffn_hidden_size": ("llama", {}, 512),
    "model.kv_channels": ("llama", {}, 32),
    "model.hidden_dropout": ("llama", {}, 0.1),
    "model.cpu_offloading": ("llama", {"cpu_offloading_num_layers": 2}, True),
    "model.cpu_offloading_num_layers": ("llama", {"cpu_offloading": True}, 2),
    "model.layernorm_zero_centered_gamma": ("llama", {}, True),
    "model.gated_linear_unit": ("llama", {"bias_activation_fusion": False}, False),
    "model.attn_logit_softcapping": ("gemma2", {}, None),
    "model.activation_func_clamp_value": ("llama", {"bias_activation_fusion": False}, 7.0),
    "model.num_moe_experts": ("qwen3_moe", {}, 4),
    "model.window_size": ("llama", {}, (64, 0)),
    "model.qk_layernorm": ("llama", {}, True),
    "model.bias_activation_fusion": ("llama", {"bias_activation_fusion": False}, True),
    "model.recompute_granularity": (
        "llama",
        {"recompute_method": "uniform", "recompute_num_layers": 1},
        "full",
    ),
    "model.recompute_method": ("llama", FULL, "uniform"),
    "model.recompute_num_layers": ("llama", FULL, 3),
    "model.recompute_modules": (
        "llama",
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        ["layernorm"],
    ),
    "model.fp8": ("llama", {}, "hybrid"),
    "model.fp4": ("llama", {}, "e2m1"),
    "model.fp8_dot_product_attention": ("llama", {"fp8": "hybrid"}, True),
    "model.fp8_multi_head_attention": ("llama", {"fp8": "hybrid"}, True),
    "model.fp8_param": ("llama", {"fp8": "hybrid"}, True),
    "model.moe_shared_expert_intermediate_size": ("qwen3_moe", {}, 64),
    "model.moe_layer_freq": ("qwen3_moe", {}, [0, 1, 1, 1]),
    "model.moe_ffn_hidden_size": ("qwen3_moe", {}, 64),
    "model.moe_token_dispatcher_type": ("qwen3_moe", EP, "flex"),
    "model.moe_latent_size": ("qwen3_moe", {}, 64),
    "model.moe_router_topk": ("qwen3_moe", {}, 4),
    "model.cp_comm_type": ("llama", {"context_parallel_size": 2}, "a2a"),
    "model.hybrid_context_parallel": ("llama", {"max_seqlen_per_dp_cp_rank": 64}, True),
    "model.max_seqlen_per_dp_cp_rank": (
        "llama",
        {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 128},
        64,
    ),
    "model.vocab_size": ("llama", {}, 2048),
    "model.position_embedding_type": ("llama", {}, "none"),
    "model.share_embeddings_and_output_weights": ("llama", {}, True),
    "model.make_vocab_size_divisible_by": ("llama", {"should_pad_vocab": True}, 4096),
    "ddp.grad_reduce_in_fp32": ("llama", {"ddp.grad_reduce_in_fp32": False}, True),
    "ddp.overlap_grad_reduce": ("llama", {"ddp.bucket_size": 20_000}, True),
    "ddp.overlap_param_gather": ("llama", {**SHARDED, "ddp.bucket_size": 20_000}, True),
    "ddp.bucket_size": ("llama", {**SHARDED, "ddp.overlap_grad_reduce": True}, 20_000),
    "ddp.use_distributed_optimizer": ("llama", SHARDED, False),
    "ddp.num_distributed_optimizer_instances": ("llama", SHARDED, 2),
    "ddp.use_megatron_fsdp": ("llama", {**SHARDED, STRATEGY: "optim_grads_params"}, True),
    "ddp.data_parallel_sharding_strategy": (
        "llama",
        {**SHARDED, "ddp.use_megatron_fsdp": True, STRATEGY: "optim"},
        "optim_grads",
    ),
    "ddp.fp8_param_gather": ("llama", {**SHARDED, "fp8": "hybrid", "fp8_param": True}, True),
    "optimizer.optimizer": ("llama", {}, "sgd"),
    "optimizer.use_precision_aware_optimizer": ("llama", {}, True),
    "optimizer.exp_avg_dtype": ("llama", ADAM, torch.bfloat16),
    "optimizer.exp_avg_sq_dtype": ("llama", ADAM, torch.bfloat16),
    "optimizer.store_param_remainders": (
        "llama",
        {**ADAM, "optimizer.store_param_remainders": False},
        True,
    ),
    "optimizer.optimizer_cpu_offload": (
        "llama",
        {"optimizer.optimizer_offload_fraction": 1.0},
        True,
    ),
    "optimizer.optimizer_offload_fraction": (
        "llama",
        {"optimizer.optimizer_cpu_offload": True},
        0.5,
    ),
    "optimizer.sgd_momentum": (
        "llama",
        {"optimizer.optimizer": "sgd", "optimizer.sgd_momentum": 0.9},
        0.0,
    ),
    "dataset.seq_length": ("llama", {}, 512),
}


def _price(config):
    """Memory and time on four GPUs."""
    return fullest_stage(memory_per_rank(config, 4)).total, predict(config, 4, "H100 80GB").seconds


def _set(config, key, value):
    block, _, name = key.partition(".")
    setattr(getattr(config, block), name, value)


@pytest.fixture(scope="module")
def resolved():
    found = {}

    def make(family):
        if family not in found:
            found[family] = configured(provider(family, layers=4)).resolve(1).config
        return copy.deepcopy(found[family])

    return make


def test_all_that_is_counted_is_tried():
    counted = [group for group in GROUPS if group.treatment == "counted"]
    listed = [
        f"{block}.{name}" for group in counted for block in BLOCKS for name in getattr(group, block)
    ]
    assert sorted(listed) == sorted(CHANGES)


@pytest.mark.parametrize("key", CHANGES)
def test_what_is_counted_changes_the_prediction(resolved, key):
    family, before, value = CHANGES[key]
    config = resolved(family)
    for name, setting in before.items():
        _set(config, name if "." in name else f"model.{name}", setting)
    first = _price(config)
    _set(config, key, value)
    assert _price(config) != first
