# SPDX-License-Identifier: Apache-2.0
"""Legal ranges of the fields that Megatron-Core's ``TransformerConfig`` declares.

``ModelProvider``, which inherits these fields, has the table as ``INHERITED_RANGES``. It is in a module that imports
no torch, so that the command line can check numbers before it does.
"""

from megatron.bridge.utils.config.ranges import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    BELOW_ONE,
    COUNT,
    FRACTION,
    Range,
)

TRANSFORMER_RANGES: dict[str, Range] = {
    # layers and heads
    "num_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_query_groups": AT_LEAST_ONE,
    "kv_channels": AT_LEAST_ONE,
    "ffn_hidden_size": AT_LEAST_ONE,
    "window_size": Range(least=-1, meaning="which is no limit", of_items=True),
    "window_attn_skip_freq": AT_LEAST_ONE,
    "no_rope_freq": AT_LEAST_ZERO,
    "softmax_scale": ABOVE_ZERO,  # attention without a scale is blind
    "layernorm_epsilon": AT_LEAST_ZERO,
    "hidden_dropout": BELOW_ONE,
    "attention_dropout": BELOW_ONE,
    "activation_func_clamp_value": ABOVE_ZERO,
    "mlp_chunks_for_training": AT_LEAST_ONE,
    "mtp_num_layers": COUNT,
    "mtp_loss_scaling_factor": AT_LEAST_ZERO,
    # initialization
    "init_method_std": AT_LEAST_ZERO,
    "embedding_init_method_std": AT_LEAST_ZERO,
    "mup_base_hidden_size": AT_LEAST_ONE,
    "mup_base_head_dim": AT_LEAST_ONE,
    "mup_width_mult": ABOVE_ZERO,
    "mup_embedding_mult": ABOVE_ZERO,
    "mup_output_mult": ABOVE_ZERO,
    # mixtures of experts
    "num_moe_experts": Range(least=1, most=10_000, meaning="or null without experts"),
    "moe_layer_freq": AT_LEAST_ONE,
    "moe_ffn_hidden_size": AT_LEAST_ONE,
    "moe_latent_size": AT_LEAST_ONE,
    "moe_shared_expert_intermediate_size": AT_LEAST_ONE,
    "moe_shared_expert_glu_interleave_size": AT_LEAST_ONE,
    "moe_mlp_glu_interleave_size": AT_LEAST_ONE,
    "moe_router_num_groups": AT_LEAST_ONE,
    "moe_router_topk_scaling_factor": ABOVE_ZERO,
    "moe_router_bias_update_rate": AT_LEAST_ZERO,
    "moe_router_quantile_balancing_ema": BELOW_ONE,
    "moe_aux_loss_coeff": AT_LEAST_ZERO,
    "moe_z_loss_coeff": AT_LEAST_ZERO,
    "moe_input_jitter_eps": AT_LEAST_ZERO,
    "moe_expert_capacity_factor": ABOVE_ZERO,
    "moe_expert_rank_capacity_factor": ABOVE_ZERO,
    "moe_flex_dispatcher_num_sms": AT_LEAST_ONE,
    "moe_deepep_num_sms": AT_LEAST_ONE,
    "moe_hybridep_num_sms": AT_LEAST_ONE,
    "moe_hybridep_num_blocks_permute": AT_LEAST_ONE,
    "moe_hybridep_num_blocks_unpermute": AT_LEAST_ONE,
    "moe_hybridep_num_sms_preprocessing": AT_LEAST_ONE,
    "moe_paged_stash_page_size": AT_LEAST_ONE,
    "moe_paged_stash_buffer_size_factor_cuda": ABOVE_ZERO,
    "moe_paged_stash_buffer_size_factor_cpu": AT_LEAST_ZERO,
    # linear attention and Mamba
    "linear_conv_kernel_dim": AT_LEAST_ONE,
    "linear_key_head_dim": AT_LEAST_ONE,
    "linear_value_head_dim": AT_LEAST_ONE,
    "linear_num_key_heads": AT_LEAST_ONE,
    "linear_num_value_heads": AT_LEAST_ONE,
    "mamba_state_dim": AT_LEAST_ONE,
    "mamba_head_dim": AT_LEAST_ONE,
    "mamba_num_groups": AT_LEAST_ONE,
    "mamba_num_heads": AT_LEAST_ONE,
    # parallel sizes and schedules
    "expert_tensor_parallel_size": AT_LEAST_ONE,
    "virtual_pipeline_model_parallel_size": Range(least=2),
    "microbatch_group_size_per_vp_stage": AT_LEAST_ONE,
    "wgrad_deferral_limit": AT_LEAST_ZERO,
    "cuda_graph_warmup_steps": AT_LEAST_ZERO,
    # memory and precision
    "recompute_num_layers": AT_LEAST_ONE,
    "cpu_offloading_num_layers": AT_LEAST_ZERO,
    "activation_offload_fraction": FRACTION,
    "min_offloaded_tensor_size": AT_LEAST_ZERO,
    "delta_offload_bytes_across_pp_ranks": AT_LEAST_ZERO,
    "fine_grained_offloading_max_inflight_offloads": AT_LEAST_ONE,
    "fp8_interval": AT_LEAST_ONE,
    "fp8_amax_history_len": AT_LEAST_ONE,
    "num_layers_at_start_in_bf16": AT_LEAST_ZERO,
    "num_layers_at_end_in_bf16": AT_LEAST_ZERO,
}
