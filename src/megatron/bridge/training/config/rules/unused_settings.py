# SPDX-License-Identifier: Apache-2.0
"""The rule on settings of features that are off."""

import dataclasses
from collections.abc import Iterator

from megatron.bridge.training.config.rules.lookup import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig

WSD, FAULT = "scheduler.lr_decay_style=WSD", "ft.simulate_fault"
HF_TOKENIZER = "tokenizer.tokenizer_type=HuggingFaceTokenizer"

# setting -> what must be set, or have this value, for it to have an effect
NEEDS = {
    "tokenizer.tokenizer_model": HF_TOKENIZER,
    "tokenizer.trust_remote_code": HF_TOKENIZER,
    "model.rope_scaling_factor": "model.rope_scaling",
    "model.query_scaling_length": "model.query_scaling_beta",
    "model.chunked_attention": "model.window_size",
    "model.global_kv_channels": "model.local_rope_parameters",
    "model.experts_beside_mlp": "model.num_moe_experts",
    "model.attention_k_eq_v": "model.value_norm",
    "model.shared_kv_layers": "model.value_norm",
    "model.shared_kv_wide_mlp": "model.shared_kv_layers",
    "model.vocab_size_per_layer_input": "model.hidden_size_per_layer_input",
    "model.position_offset": "model.position_embedding_type=learned_absolute",
    "scheduler.lr_wsd_decay_style": WSD,
    "scheduler.lr_wsd_decay_iters": WSD,
    "scheduler.lr_wsd_decay_samples": WSD,
    "optimizer.decoupled_min_lr": "optimizer.decoupled_lr",
    "ddp.align_param_gather": "ddp.overlap_param_gather",
    "comm_overlap.tp_comm_overlap_cfg": "comm_overlap.tp_comm_overlap",
    "comm_overlap.tp_comm_bootstrap_backend": "comm_overlap.tp_comm_overlap",
    "comm_overlap.wgrad_deferral_limit": "comm_overlap.defer_embedding_wgrad_compute",
    "checkpoint.save_interval": "checkpoint.save",
    "checkpoint.async_save": "checkpoint.save",
    "checkpoint.async_strategy": "checkpoint.async_save",
    "logger.timing_log_option": "logger.timing_log_level",
    "logger.sample_interval": "logger.sample_prompts",
    "logger.sample_max_new_tokens": "logger.sample_prompts",
    "logger.wandb_entity": "logger.wandb_project",
    "logger.wandb_exp_name": "logger.wandb_project",
    "logger.wandb_save_dir": "logger.wandb_project",
    "logger.mlflow_run_name": "logger.mlflow_experiment",
    "logger.mlflow_tracking_uri": "logger.mlflow_experiment",
    "logger.prometheus_host": "logger.prometheus_port",
    "profiling.memory_snapshot_path": "profiling.record_memory_history",
    "rerun_state_machine.spiky_loss_factor": "rerun_state_machine.check_for_spiky_loss",
    "rerun_state_machine.spiky_loss_samples": "rerun_state_machine.check_for_spiky_loss",
    "rerun_state_machine.when_persistent": "checkpoint.save",  # the batches to skip are noted there
    "ft.calc_ft_timeouts": "checkpoint.save",  # they are for the next start
    "ft.simulate_fault": "checkpoint.save",  # that it has happened is noted there, or no start would reach the end
    "ft.simulated_fault_type": FAULT,
    "ft.simulated_fault_rank": FAULT,
    "ft.simulated_fault_base_delay": FAULT,
}


# families of hybrid models have the same routing whether a model has experts or not
_EXPERTS = "model.num_moe_experts or model.hybrid_override_pattern or model.mamba_layers"
_MAMBA = "model.hybrid_override_pattern or model.mamba_layers or model.mamba_beside_attention"
_RECOMPUTE, _OFFLOAD = "model.recompute_granularity", "model.fine_grained_activation_offloading"
_VARIANT, _FLEX = "model.experimental_attention_variant", "model.moe_token_dispatcher_type=flex"
_DELTA = f"{_VARIANT}=gated_delta_net or model.kda_layers"
_FP16, _CPU_OPTIMIZER = "optimizer.fp16", "optimizer.optimizer_cpu_offload"
_PRECISE = "optimizer.use_precision_aware_optimizer"

# beginning of the names of a feature's settings -> what must be set, as above
NEEDS_BY_PREFIX = {
    "model.moe_": _EXPERTS,
    "model.moe_token_dispatcher_type": f"{_EXPERTS} or model.variable_seq_lengths",  # Megatron-Core asks for it
    "model.moe_flex_dispatcher_": _FLEX,
    "model.moe_hybridep_": _FLEX,
    "model.moe_deepep_": _FLEX,
    "model.moe_ncclep_": _FLEX,
    "model.moe_permute_fusion_into_hybridep": _FLEX,
    "model.moe_paged_stash_": "model.moe_paged_stash",
    "model.mtp_": "model.mtp_num_layers",
    "model.dsa_": f"{_VARIANT}=dsa",
    "model.linear_": _DELTA,
    "model.linear_conv_kernel_dim": f"{_DELTA} or model.short_conv_layers",
    "model.mamba_": _MAMBA,
    "model.mup_": "model.use_mup",
    "model.qk_clip_": "model.qk_clip",
    "model.fp8_": "model.fp8",
    "model.fp4_": "model.fp4",
    "model.num_layers_at_": "model.first_last_layers_bf16",
    "model.tp_only_amax_red": "model.fp8",
    "model.activation_func_fp8_": "model.fp8",
    "model.tp_comm_": "model.tp_comm_overlap",
    "model.cuda_graph_": "model.cuda_graph_impl",
    "model.high_priority_a2a_": "model.overlap_moe_expert_parallel_comm",
    "model.ep_overlap_": "model.overlap_moe_expert_parallel_comm",
    "model.use_grouped_gemm_for_shared_expert": _EXPERTS,
    "model.use_mamba_": "model.hybrid_override_pattern",
    "model.wgrad_deferral_limit": "model.defer_embedding_wgrad_compute",
    "model.use_kitchen_": "model.use_kitchen",
    "model.distribute_saved_activations": _RECOMPUTE,
    "model.max_seqlen_per_dp_cp_rank": "model.hybrid_context_parallel",
    "model.cpu_offloading_": "model.cpu_offloading",
    "model.offload_modules": _OFFLOAD,
    "model.min_offloaded_": _OFFLOAD,
    "model.delay_offload_": _OFFLOAD,
    "model.delta_offload_": _OFFLOAD,
    "model.activation_offload_": _OFFLOAD,
    "model.fine_grained_offloading_": _OFFLOAD,
    "model.recompute_m": _RECOMPUTE,
    "model.recompute_num_layers": _RECOMPUTE,
    "model.kitchen_": "model.use_kitchen",
    "model.num_labels": "model.head",
    "model.label_names": "model.head",
    "model.pooling": "model.head",
    "model.contrastive_temperature": "model.head",
    "model.cross_entropy_fusion_impl": "model.cross_entropy_loss_fusion",
    "optimizer.initial_loss_scale": _FP16,
    "optimizer.loss_scale": _FP16,
    "optimizer.min_loss_scale": _FP16,
    "optimizer.hysteresis": _FP16,
    "optimizer.optimizer_offload_": _CPU_OPTIMIZER,
    "optimizer.pin_cpu_": _CPU_OPTIMIZER,
    "optimizer.overlap_cpu_optimizer_": _CPU_OPTIMIZER,
    "optimizer.exp_avg_": _PRECISE,
    "optimizer.store_param_remainders": _PRECISE,
    "optimizer.main_params_dtype": _PRECISE,
    "ddp.fp8_param_gather": "model.fp8_param",
    "ddp.fp4_param_gather": "model.fp4_param",
    "ddp.reuse_grad_buf_for_mxfp8_param_ag": "ddp.fp8_param_gather",
    "ddp.fsdp_": "ddp.use_megatron_fsdp",
    "ddp.megatron_fsdp_": "ddp.use_megatron_fsdp",
    "ddp.gradient_reduce_div_fusion": "ddp.use_megatron_fsdp",
    "ddp.outer_dp_sharding_strategy": "ddp.use_megatron_fsdp",
    "ddp.suggested_communication_unit_size": "ddp.use_megatron_fsdp",
    "ddp.keep_fp8_transpose_cache": "ddp.use_megatron_fsdp",
    "ddp.disable_symmetric_registration": "ddp.nccl_ub",
}


def settings_have_effect(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a feature that is off would be ignored."""
    for key, needed in (*NEEDS.items(), *_of_features(config)):
        if value_of(config, key) != default_of(config, key) and not any(
            _has(config, choice) for choice in needed.split(" or ")
        ):
            yield f"{key}={value_of(config, key)} has no effect without {needed}: set that, too, or remove it"


def _of_features(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The settings of ``NEEDS_BY_PREFIX``, each by its longest prefix."""
    for block in ("model", "optimizer", "ddp"):
        for entry in dataclasses.fields(getattr(config, block)):
            key = f"{block}.{entry.name}"
            prefix = max((start for start in NEEDS_BY_PREFIX if key.startswith(start)), key=len, default=None)
            if prefix is not None and key != NEEDS_BY_PREFIX[prefix].partition("=")[0]:
                yield key, NEEDS_BY_PREFIX[prefix]


def _has(config: RunConfig, needed: str) -> bool:
    key, _, wanted = needed.partition("=")
    found = value_of(config, key)
    return found == wanted if wanted else bool(found) and found != "none"
