# SPDX-License-Identifier: Apache-2.0
"""Rules on settings that need or exclude each other."""

import dataclasses
from collections.abc import Iterator

from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig

EXCLUSIONS: dict[tuple[str, str], str] = {
    ("model.bf16", "model.fp16"): "switch one off, or set mixed_precision",
    ("model.overlap_p2p_comm", "model.batch_p2p_comm"): "set model.batch_p2p_comm=false",
    # gradients are divided by the number of tokens at the end, so the collective must sum
    ("model.calculate_per_token_loss", "ddp.average_in_collective"): "switch the second off",
    ("model.cpu_offloading", "model.fine_grained_activation_offloading"): "switch one off",
    ("ddp.bucket_size", "ddp.num_buckets"): "remove one, because both set the size of a bucket",
    ("dist.use_torch_fsdp2", "ddp.use_megatron_fsdp"): "remove one of them",
    ("scheduler.lr_decay_samples", "scheduler.lr_decay_iters"): "remove one",
    ("scheduler.lr_warmup_samples", "scheduler.lr_warmup_iters"): "remove one",
    ("scheduler.lr_wsd_decay_samples", "scheduler.lr_wsd_decay_iters"): "remove one",
    ("scheduler.lr_warmup_fraction", "scheduler.lr_warmup_iters"): "remove one",
    ("scheduler.lr_warmup_fraction", "scheduler.lr_warmup_samples"): "remove one",
    ("scheduler.use_checkpoint_opt_param_scheduler", "scheduler.override_opt_param_scheduler"): "switch one off",
}
"""Two settings of which one must be off or unset -> the way out."""


def settings_do_not_exclude_each_other(config: RunConfig, world_size: int) -> Iterator[str]:
    """Of some pairs of settings, such as ``model.bf16`` and ``model.fp16``, at most one may be set."""
    for keys, way_out in EXCLUSIONS.items():
        values = [value_of(config, key) for key in keys]
        # a fraction or a number of samples counts as given even if it is 0
        if values[1] and values[0] is not None and values[0] is not False:
            first, second = (f"{key}={value}" for key, value in zip(keys, values, strict=True))
            yield f"{first} and {second} exclude each other: {way_out}"


# what must be set, or have this value -> settings that have no effect without it
_SETTINGS_OF = {
    "tokenizer.tokenizer_type=HuggingFaceTokenizer": "tokenizer.tokenizer_model tokenizer.trust_remote_code",
    "model.rope_scaling": "model.rope_scaling_factor",
    "model.query_scaling_beta": "model.query_scaling_length",
    "model.window_size": "model.chunked_attention",
    "model.local_rope_parameters": "model.global_kv_channels",
    "model.num_moe_experts": "model.experts_beside_mlp",
    "model.value_norm": "model.attention_k_eq_v model.shared_kv_layers",
    "model.shared_kv_layers": "model.shared_kv_wide_mlp",
    "model.hidden_size_per_layer_input": "model.vocab_size_per_layer_input",
    "model.position_embedding_type=learned_absolute": "model.position_offset",
    "scheduler.lr_decay_style=WSD": (
        "scheduler.lr_wsd_decay_style scheduler.lr_wsd_decay_iters scheduler.lr_wsd_decay_samples"
    ),
    "optimizer.decoupled_lr": "optimizer.decoupled_min_lr",
    "ddp.overlap_param_gather": "ddp.align_param_gather",
    "comm_overlap.tp_comm_overlap": "comm_overlap.tp_comm_overlap_cfg comm_overlap.tp_comm_bootstrap_backend",
    "comm_overlap.defer_embedding_wgrad_compute": "comm_overlap.wgrad_deferral_limit",
    # the batches to skip, the timeouts of the next start and that a fault has happened are noted there
    "checkpoint.save": (
        "checkpoint.save_interval checkpoint.async_save rerun_state_machine.when_persistent ft.calc_ft_timeouts "
        "ft.simulate_fault"
    ),
    "checkpoint.async_save": "checkpoint.async_strategy",
    "logger.timing_log_level": "logger.timing_log_option",
    "logger.sample_prompts": "logger.sample_interval logger.sample_max_new_tokens",
    "logger.wandb_project": "logger.wandb_entity logger.wandb_exp_name logger.wandb_save_dir",
    "logger.mlflow_experiment": "logger.mlflow_run_name logger.mlflow_tracking_uri",
    "logger.prometheus_port": "logger.prometheus_host",
    "profiling.record_memory_history": "profiling.memory_snapshot_path",
    "rerun_state_machine.check_for_spiky_loss": (
        "rerun_state_machine.spiky_loss_factor rerun_state_machine.spiky_loss_samples"
    ),
    "ft.simulate_fault": "ft.simulated_fault_type ft.simulated_fault_rank ft.simulated_fault_base_delay",
}
NEEDS = {key: needed for needed, keys in _SETTINGS_OF.items() for key in keys.split()}

# families of hybrid models have the same routing whether a model has experts or not
_EXPERTS = "model.num_moe_experts or model.hybrid_override_pattern or model.mamba_layers"
_MAMBA = "model.hybrid_override_pattern or model.mamba_layers or model.mamba_beside_attention"
_DELTA = "model.experimental_attention_variant=gated_delta_net or model.kda_layers"

# the same by the beginnings of the names of a feature's settings
_PREFIXES_OF = {
    _EXPERTS: "model.moe_ model.use_grouped_gemm_for_shared_expert",
    # Megatron-Core asks for it with variable lengths, too
    f"{_EXPERTS} or model.variable_seq_lengths": "model.moe_token_dispatcher_type",
    "model.moe_token_dispatcher_type=flex": (
        "model.moe_flex_dispatcher_ model.moe_hybridep_ model.moe_deepep_ model.moe_ncclep_ "
        "model.moe_permute_fusion_into_hybridep"
    ),
    "model.moe_paged_stash": "model.moe_paged_stash_",
    "model.mtp_num_layers": "model.mtp_",
    "model.experimental_attention_variant=dsa": "model.dsa_",
    _DELTA: "model.linear_",
    f"{_DELTA} or model.short_conv_layers": "model.linear_conv_kernel_dim",
    _MAMBA: "model.mamba_",
    "model.use_mup": "model.mup_",
    "model.qk_clip": "model.qk_clip_",
    "model.fp8": "model.fp8_ model.tp_only_amax_red model.activation_func_fp8_",
    "model.fp4": "model.fp4_",
    "model.first_last_layers_bf16": "model.num_layers_at_",
    "model.tp_comm_overlap": "model.tp_comm_",
    "model.cuda_graph_impl": "model.cuda_graph_",
    "model.overlap_moe_expert_parallel_comm": "model.high_priority_a2a_ model.ep_overlap_",
    "model.hybrid_override_pattern": "model.use_mamba_",
    "model.defer_embedding_wgrad_compute": "model.wgrad_deferral_limit",
    "model.use_kitchen": "model.use_kitchen_ model.kitchen_",
    "model.recompute_granularity": "model.distribute_saved_activations model.recompute_m model.recompute_num_layers",
    "model.hybrid_context_parallel": "model.max_seqlen_per_dp_cp_rank",
    "model.cpu_offloading": "model.cpu_offloading_",
    "model.fine_grained_activation_offloading": (
        "model.offload_modules model.min_offloaded_ model.delay_offload_ model.delta_offload_ "
        "model.activation_offload_ model.fine_grained_offloading_"
    ),
    "model.head": "model.num_labels model.label_names model.pooling model.contrastive_temperature",
    "model.cross_entropy_loss_fusion": "model.cross_entropy_fusion_impl",
    "optimizer.fp16": "optimizer.initial_loss_scale optimizer.loss_scale optimizer.min_loss_scale optimizer.hysteresis",
    "optimizer.optimizer_cpu_offload": (
        "optimizer.optimizer_offload_ optimizer.pin_cpu_ optimizer.overlap_cpu_optimizer_"
    ),
    "optimizer.use_precision_aware_optimizer": (
        "optimizer.exp_avg_ optimizer.store_param_remainders optimizer.main_params_dtype"
    ),
    "model.fp8_param": "ddp.fp8_param_gather",
    "model.fp4_param": "ddp.fp4_param_gather",
    "ddp.fp8_param_gather": "ddp.reuse_grad_buf_for_mxfp8_param_ag",
    "ddp.use_megatron_fsdp": (
        "ddp.fsdp_ ddp.megatron_fsdp_ ddp.gradient_reduce_div_fusion ddp.outer_dp_sharding_strategy "
        "ddp.suggested_communication_unit_size ddp.keep_fp8_transpose_cache"
    ),
    "ddp.nccl_ub": "ddp.disable_symmetric_registration",
}
NEEDS_BY_PREFIX = {start: needed for needed, starts in _PREFIXES_OF.items() for start in starts.split()}


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
