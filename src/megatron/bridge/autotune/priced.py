# SPDX-License-Identifier: Apache-2.0
"""How a prediction treats each setting of a run; a test asks it of every setting."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Literal

from megatron.bridge.models.features.feature import Pricing
from megatron.bridge.models.features.registry import FEATURES
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.rules.values import default_of, value_of

Treatment = Literal["counted", "unpriced", "neutral"]
"""What another value of a setting does to a prediction.

``counted``: it changes the predicted memory or time, as a test shows for each. ``unpriced``: it changes memory or time
of a run, and the prediction does not know it; a dry run says so. ``neutral``: it changes neither, for a reason.
"""


@dataclass(frozen=True)
class SettingGroup:
    """Settings that are treated alike, by the block of the config. A name may end in ``*``."""

    treatment: Treatment
    reason: str = ""
    model: list[str] = field(default_factory=list[str])
    ddp: list[str] = field(default_factory=list[str])
    optimizer: list[str] = field(default_factory=list[str])
    dataset: list[str] = field(default_factory=list[str])

    def has(self, block: str, name: str) -> bool:
        patterns: list[str] = getattr(self, block)
        return any(fnmatchcase(name, pattern) for pattern in patterns)


def _of_layer_features(pricing: Pricing) -> list[str]:
    """Return the settings that features of layers declare with ``pricing``."""
    return [
        name
        for feature in FEATURES
        for name, declared in feature.pricing.items()
        if declared == pricing
    ]


BLOCKS = ("model", "ddp", "optimizer", "dataset")
# The first group that has a setting decides.
GROUPS = [
    SettingGroup(
        "counted",
        model=[
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "sequence_parallel",
            "context_parallel_size",
            "hybrid_context_parallel",
            "max_seqlen_per_dp_cp_rank",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "fp16",
            "bf16",
            "gradient_accumulation_fusion",
            "tp_comm_overlap",
            "overlap_moe_expert_parallel_comm",
            "overlap_p2p_comm",
            "deallocate_pipeline_outputs",
            "microbatch_group_size_per_vp_stage",
            "num_layers",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "pipeline_model_parallel_layout",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "kv_channels",
            "hidden_dropout",
            "layernorm_zero_centered_gamma",
            "moe_token_dispatcher_type",
            "gated_linear_unit",
            "activation_func_clamp_value",
            "num_moe_experts",
            "window_size",
            "qk_layernorm",
            "bias_activation_fusion",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "fp8",
            "fp4",
            "fp8_param",
            "fp8_dot_product_attention",
            "fp8_multi_head_attention",
            "moe_shared_expert_intermediate_size",
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "cp_comm_type",
            "vocab_size",
            "position_embedding_type",
            "share_embeddings_and_output_weights",
            "make_vocab_size_divisible_by",
            *_of_layer_features("counted"),
        ],
        ddp=[
            "grad_reduce_in_fp32",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "use_distributed_optimizer",
            "bucket_size",
            "num_distributed_optimizer_instances",
            "use_megatron_fsdp",
            "data_parallel_sharding_strategy",
            "fp8_param_gather",
        ],
        optimizer=[
            "optimizer",
            "use_precision_aware_optimizer",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "store_param_remainders",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "sgd_momentum",
        ],
        dataset=["seq_length"],
    ),
    SettingGroup(
        "unpriced",
        model=[
            "attention_backend",
            "flash_attention_version",
            "cpu_offloading_activations",
            "cpu_offloading_weights",
            "cpu_offloading_double_buffering",
            "cpu_offloading_retain_pinned_cpu_buffers",
            "fine_grained_activation_offloading",
            "offload_modules",
            "min_offloaded_tensor_size",
            "delay_offload_until_cuda_graph",
            "delta_offload_bytes_across_pp_ranks",
            "activation_offload_fraction",
            "fine_grained_offloading_max_inflight_offloads",
            "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity",
            "moe_expert_rank_capacity_factor",
            "moe_paged_stash*",
            "moe_shared_expert_overlap",
            "moe_flex_dispatcher_*",
            "moe_deepep_*",
            "moe_hybridep_*",
            "moe_ncclep_*",
            "moe_enable_deepep",
            "delay_wgrad_compute",
            "overlap_dispatch_backward_with_experts_wgrad",
            "ep_overlap_early_attn_memory_release",
            "defer_embedding_wgrad_compute",
            "wgrad_deferral_limit",
            "hierarchical_context_parallel_sizes",
            "cuda_graph_*",
            "distribute_saved_activations",
            "use_kitchen*",
            "kitchen_attention_backend",
            "fp8_wgrad",
            "fp8_output_proj",
            "fp4_param",
            "first_last_layers_bf16",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
            "activation_func_fp8_input_store",
            "fp32_residual_connection",
            "tp_comm_overlap_disable_*",
            "use_transformer_engine_op_fuser",
            "quant_recipe",
            "mlp_chunks_for_training",
            "moe_layer_recompute",
            "moe_router_padding_for_*",
            "high_priority_a2a_comm_stream",
            "variable_seq_lengths",
            "qk_clip",
            *_of_layer_features("unpriced"),
        ],
        ddp=[
            "num_buckets",
            "nccl_ub",
            "fsdp_*",
            "outer_dp_sharding_strategy",
            "suggested_communication_unit_size",
            "keep_fp8_transpose_cache",
            "reduce_scatter_with_fp32_accumulation",
            "param_name_patterns_for_fp32_local_accumulation",
            "fp4_param_gather",
            "delay_wgrad_compute",
            "megatron_fsdp_*",
        ],
        optimizer=[
            "muon_*",
            "use_layer_wise_distributed_optimizer",
            "overlap_cpu_optimizer_d2h_h2d",
            "soap_*",
            "adaptive_muon_moment2_method",
            "log_num_zeros_in_grad",
        ],
    ),
    SettingGroup(
        "neutral",
        reason="the modules that a rank builds are counted with it",
        model=[
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "add_bias_linear",
            "add_qkv_bias",
            "layernorm_bias",
            "attention_output_gate",
            "normalization",
            "qk_l2_norm",
            "multi_latent_attention",
            "parallel_residual",
            "norm_placement",
            "norm_gain",
            "qk_norm_across_heads",
            "qk_norm_by_head",
            "moe_shared_expert_gate",
            "moe_router_enable_expert_bias",
            "moe_grouped_gemm",
            "chunked_attention",
            "window_attn_skip_freq",
            "heterogeneous_block_specs",
            "transformer_layer_spec",
            "hf_config",
            "should_pad_vocab",
            "params_dtype",
            "moe_single_grouped_*",
            "use_grouped_gemm_for_shared_expert",
            *_of_layer_features("modules"),
        ],
    ),
    SettingGroup(
        "neutral",
        reason="it changes numbers, not the work",
        model=[
            "softmax_scale",
            "layernorm_epsilon",
            "activation_func",
            "glu_linear_offset",
            "rotary_*",
            "rope_*",
            "local_rope_parameters",
            "seq_len_interpolation_factor",
            "position_offset",
            "no_rope_freq",
            "init_method*",
            "output_layer_init_method",
            "embedding_init_method*",
            "use_mup",
            "mup_*",
            "apply_query_key_layer_scaling",
            "attention_softmax_in_fp32",
            "moe_router_*",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_input_jitter_eps",
            "moe_token_drop_policy",
            "moe_apply_probs_on_input",
            "moe_enable_routing_replay",
            "qk_norm_after_rope",
            "qk_clip_*",
            "calculate_per_token_loss",
            "mrope_section",
            "fp16_lm_cross_entropy",
            "max_position_embeddings",
            "moe_*_glu_interleave_size",
            "perform_initialization",
            *_of_layer_features("numbers"),
        ],
        ddp=[
            "average_in_collective",
            "gradient_reduce_div_fusion",
            "check_for_nan_in_grad",
            "check_for_large_grads",
        ],
        optimizer=[
            "lr",
            "min_lr",
            "decoupled_lr",
            "decoupled_min_lr",
            "weight_decay",
            "apply_wd_to_qk_layernorm",
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "decoupled_weight_decay",
            "lion_*",
            "adaptive_muon_beta2",
            "adaptive_muon_eps",
            "clip_grad",
            "grad_norm_skip_threshold",
            "overrides",
            "main_params_dtype",
        ],
        dataset=["*"],
    ),
    SettingGroup(
        "neutral",
        reason="a choice of kernels that the roofline does not tell apart",
        model=[
            "attention_dropout",
            "deterministic_mode",
            "enable_autocast",
            "autocast_dtype",
            "masked_softmax_fusion",
            "persist_layer_norm",
            "memory_efficient_layer_norm",
            "bias_dropout_fusion",
            "apply_rope_fusion",
            "use_fused_weighted_squared_relu",
            "fused_single_qkv_rope",
            "fused_residual_rmsnorm",
            "moe_permute_fusion*",
            "moe_router_fusion",
            "batch_invariant_mode",
            "transformer_impl",
            "backend",
            "dsa_kernel_backend",
            "fp8_*",
            "fp4_*",
            "tp_only_amax_red",
            "tp_comm_*",
            "batch_p2p_*",
            "use_ring_exchange_p2p",
            "overlap_p2p_comm_warmup_flush",
            "parallel_output",
            "clone_scatter_output_in_embedding",
            "scatter_embedding_sequence_parallel",
            "disable_parameter_transpose_cache",
            "pipeline_dtype",
            "cross_entropy_loss_fusion",
            "cross_entropy_fusion_impl",
        ],
        ddp=[
            "align_param_gather",
            "pad_buckets_for_high_nccl_busbw",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "use_custom_fsdp",
            "disable_symmetric_registration",
        ],
        optimizer=[
            "fp8_recipe",
            "fp16",
            "bf16",
            "params_dtype",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "use_distributed_optimizer",
            "overlap_param_gather",
            "pin_cpu_*",
        ],
    ),
    SettingGroup(
        "neutral",
        reason="it belongs to the set-up, to logging or to the schedules",
        model=[
            "use_cpu_initialization",
            "init_model_with_meta_device",
            "timers",
            "*_func",
            "barrier_with_L1_time",
            "test_mode",
            "config_logger_dir",
            "hetereogenous_dist_checkpoint",
            "seq_length",
        ],
        optimizer=["barrier_with_L1_time", "timers", "config_logger_dir"],
    ),
    SettingGroup(
        "neutral",
        reason="it is counted where Transformer Engine is installed, and needs it",
        model=["use_te_activation_func"],
    ),
]


def kind_of(key: str) -> Treatment | None:
    """Return how a setting is treated; None if no group has it."""
    block, _, name = key.partition(".")
    return next((group.treatment for group in GROUPS if group.has(block, name)), None)


def unpriced(config: ConfigContainer) -> Iterator[str]:
    """Yield ``key=value`` of the settings of a config that affect a run but not its prediction."""
    for block in BLOCKS:
        for entry in fields(getattr(config, block)):
            key = f"{block}.{entry.name}"
            value = value_of(config, key)
            if kind_of(key) == "unpriced" and value != default_of(config, key):
                yield f"{key}={value}"
