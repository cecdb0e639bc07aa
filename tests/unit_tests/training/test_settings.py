# SPDX-License-Identifier: Apache-2.0
"""Every field of the large config blocks is read, or refused by name; every number is checked.

A new version of Megatron-Core adds fields: each one must be sorted here before it can be set.
"""

import dataclasses
import io
import typing
from contextlib import redirect_stderr, redirect_stdout

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.config.rules import fields, idle_settings
from tests.unit_tests.cli.mistakes.table import RUN

CONFIG = llama32_1b_pretrain_config()

ALWAYS_READ = {
    "model": """
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
context_parallel_size hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size
perform_initialization use_cpu_initialization fp16 bf16 params_dtype timers
finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func deterministic_mode
enable_autocast autocast_dtype gradient_accumulation_fusion tp_comm_overlap cross_entropy_loss_fusion
overlap_moe_expert_parallel_comm delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad
pipeline_dtype variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p
deallocate_pipeline_outputs defer_embedding_wgrad_compute overlap_p2p_comm_warmup_flush
microbatch_group_size_per_vp_stage cpu_offloading barrier_with_L1_time num_layers mtp_num_layers
hidden_size num_attention_heads
attention_backend flash_attention_version softmax_scale softmax_type num_query_groups ffn_hidden_size
kv_channels hidden_dropout attention_dropout fp32_residual_connection layernorm_epsilon
layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
activation_func_clamp_value num_moe_experts rotary_interleaved window_size normalization qk_layernorm
qk_l2_norm attention_output_gate window_attn_skip_freq qk_clip test_mode calculate_per_token_loss
multi_latent_attention no_rope_freq experimental_attention_variant
experimental_attention_variant_loss_scale_func init_method output_layer_init_method init_method_std
embedding_init_method embedding_init_method_std init_model_with_meta_device use_mup
apply_query_key_layer_scaling attention_softmax_in_fp32 bias_activation_fusion masked_softmax_fusion
persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion
use_fused_weighted_squared_relu fused_single_qkv_rope fused_residual_rmsnorm use_transformer_engine_op_fuser
recompute_granularity fp8 first_last_layers_bf16 use_kitchen fp4 cp_comm_type cuda_graph_impl
clone_scatter_output_in_embedding disable_parameter_transpose_cache
config_logger_dir batch_invariant_mode use_te_activation_func mrope_section mlp_chunks_for_training
heterogeneous_block_specs hetereogenous_dist_checkpoint quant_recipe transformer_impl
fine_grained_activation_offloading backend hf_config vocab_size seq_length max_position_embeddings
position_embedding_type rotary_base rotary_percent rope_scaling rope_parameters local_rope_parameters
query_scaling_beta seq_len_interpolation_factor share_embeddings_and_output_weights
make_vocab_size_divisible_by should_pad_vocab parallel_output fp16_lm_cross_entropy
scatter_embedding_sequence_parallel norm_placement qk_norm_across_heads qk_norm_by_head qk_norm_after_rope
qkv_clip alibi scores_divided_by_layer qat
layernorm_bias parallel_residual embedding_dropout output_bias embedding_multiplier residual_multiplier
logits_scaling attn_logit_softcapping final_logit_softcapping attention_bias attention_output_bias mlp_bias
short_conv_layers kda_layers make_query_groups_divisible_by head transformer_layer_spec norm_gain embedding_norm
embedding_padding_idx rotary_reversed value_norm global_query_groups hidden_size_per_layer_input layer_scales
""",
    "optimizer": """
lr min_lr decoupled_lr weight_decay apply_wd_to_qk_layernorm fp8_recipe fp16 bf16 use_precision_aware_optimizer
optimizer_cpu_offload use_layer_wise_distributed_optimizer
reuse_grad_buf_for_mxfp8_param_ag params_dtype optimizer adam_beta1 adam_beta2 adam_eps decoupled_weight_decay
sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1
lion_beta2 soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method
adaptive_muon_beta2 adaptive_muon_eps use_distributed_optimizer overlap_param_gather clip_grad
grad_norm_skip_threshold log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir
overrides
""",
    "ddp": """
grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather use_distributed_optimizer
num_distributed_optimizer_instances check_for_nan_in_grad check_for_large_grads bucket_size num_buckets
pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
param_name_patterns_for_fp32_local_accumulation average_in_collective use_megatron_fsdp
data_parallel_sharding_strategy nccl_ub delay_wgrad_compute
""",
}
"""Fields that need no other setting, or for which a rule of their own asks."""


def own_fields(block):
    return [
        entry.name
        for entry in dataclasses.fields(getattr(CONFIG, block))
        if not entry.name.startswith("_")
    ]


@pytest.mark.parametrize("block", ALWAYS_READ)
def test_every_field_is_sorted(block):
    known = {*ALWAYS_READ[block].split()}
    for name in own_fields(block):
        key = f"{block}.{name}"
        is_needing = key in idle_settings.NEEDS or idle_settings.feature_of(key)
        is_asked_for = key in fields.UNAVAILABLE or is_needing
        assert bool(is_asked_for) != (name in known), key
    assert known <= {*own_fields(block)}


@pytest.mark.parametrize("prefix", idle_settings.NEEDS_BY_PREFIX)
def test_a_setting_of_a_feature_that_is_off_is_refused(prefix):
    config = llama32_1b_pretrain_config()
    block, _, start = prefix.partition(".")
    name = next(
        name
        for name in own_fields(block)
        if name.startswith(start) and idle_settings.feature_of(f"{block}.{name}")
    )
    setattr(getattr(config, block), name, 7)
    needed = idle_settings.feature_of(f"{block}.{name}")
    (sentence,) = idle_settings.settings_have_effect(config, 1)
    assert f"{block}.{name}=7" in sentence
    assert str(needed) in sentence


def test_prefixes_are_of_blocks_that_are_looked_through():
    blocks = {prefix.partition(".")[0] for prefix in idle_settings.NEEDS_BY_PREFIX}
    assert blocks <= {*idle_settings.BLOCKS_WITH_PREFIXES}


# ---------------------------------------------------------------------------------------------- every number

WORDS = ("nan", "inf", "-inf", "1e400", "abc", "true", "''", "\uff11\uff12", "[1]", "{}")
"""No number, or none that means a size, a rate or a time."""
NUMBERS = ("-1", "-0.5", "0", "2.5", "99999999999999999999")

MAY_BE = {
    "train.iterations_to_skip": {"[1]"},
    "optimizer.grad_norm_skip_threshold": {"inf", "1e400"},  # no threshold
    "model.glu_linear_offset": {"-1", "-0.5"},
    "checkpoint.most_recent_k": {"-1"},  # all
}
NAMED_AS = {"train.train_samples": "train.train_"}  # samples become steps


def numeric_fields():
    for block in (entry.name for entry in dataclasses.fields(CONFIG)):
        part = getattr(CONFIG, block)
        hints = typing.get_type_hints(type(part)) if dataclasses.is_dataclass(part) else {}
        for entry in dataclasses.fields(part) if hints else ():
            kinds = [hints[entry.name], *typing.get_args(hints[entry.name])]
            if int in kinds or float in kinds:
                yield f"{block}.{entry.name}", float in kinds


def cases():
    """Each eighth field in every run, all of them among the slow tests."""
    for number, (key, fraction) in enumerate(numeric_fields()):
        yield pytest.param(key, fraction, id=key, marks=() if number % 8 == 0 else pytest.mark.slow)


@pytest.mark.parametrize(("key", "fraction"), cases())
def test_no_number_is_taken_that_means_nothing(key, fraction):
    refused = {*WORDS, "-1", "-0.5"} - MAY_BE.get(key, set())
    for value in (*WORDS, *NUMBERS):
        code, errors = dry_run(f"{key}={value}")
        assert "Traceback" not in errors
        if code == 0:
            assert value not in refused, f"{key}={value} was accepted"
            assert fraction or "." not in value, f"{key}={value} was accepted"
        else:
            assert code in (1, 2)
            name = NAMED_AS.get(key, key.rpartition(".")[2])
            assert any(name in line for line in errors.splitlines() if "error: " in line), (
                value,
                errors,
            )


def dry_run(override):
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        try:
            code = main([*RUN, override, "--dry-run", "--summary", "--world-size", "1"])
        except SystemExit as end:
            code = end.code
    return code, errors.getvalue()
