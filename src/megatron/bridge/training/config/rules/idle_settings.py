# SPDX-License-Identifier: Apache-2.0
"""The rule on settings of features that are off. To add a feature, or a setting of one, add a row.

Features of layers (``models.features``) declare their settings themselves.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.bridge.models.features import registry as layer_features
from megatron.bridge.training.config.blocks.reinforcement import CLIPPED_LOSSES
from megatron.bridge.training.config.rules.conditions import (
    AnyOf,
    Condition,
    Equals,
    Exceeds,
    KeyCondition,
    On,
)
from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig


@dataclass(frozen=True)
class Feature:
    """A feature and its settings, which have no effect while it is off.

    Attributes:
        is_on: What must be set, or have this value.
        settings: Dotted keys.
        prefixes: Beginnings of dotted keys. Of two that fit a key, the longer one counts.
    """

    is_on: Condition
    settings: list[str] = field(default_factory=list[str])
    prefixes: list[str] = field(default_factory=list[str])


FEATURES = [
    Feature(
        Equals("tokenizer.tokenizer_type", "HuggingFaceTokenizer"),
        settings=["tokenizer.tokenizer_model", "tokenizer.trust_remote_code"],
    ),
    Feature(On("model.rope_scaling"), settings=["model.rope_scaling_factor"]),
    Feature(On("model.window_size"), settings=["model.chunked_attention"]),
    Feature(
        Exceeds("model.pipeline_model_parallel_size", 1),
        settings=[
            "model.num_layers_in_first_pipeline_stage",
            "model.num_layers_in_last_pipeline_stage",
            "model.account_for_embedding_in_pipeline_split",
            "model.account_for_loss_in_pipeline_split",
            "model.pipeline_model_parallel_layout",
        ],
    ),
    Feature(
        On("model.num_moe_experts"),
        settings=["model.expert_tensor_parallel_size"],
    ),
    Feature(
        Equals("model.position_embedding_type", "learned_absolute"),
        settings=["model.position_offset"],
    ),
    Feature(
        Equals("scheduler.lr_decay_style", "WSD"),
        settings=[
            "scheduler.lr_wsd_decay_style",
            "scheduler.lr_wsd_decay_iters",
            "scheduler.lr_wsd_decay_samples",
        ],
    ),
    Feature(On("optimizer.decoupled_lr"), settings=["optimizer.decoupled_min_lr"]),
    Feature(On("ddp.overlap_param_gather"), settings=["ddp.align_param_gather"]),
    Feature(
        On("comm_overlap.tp_comm_overlap"),
        settings=["comm_overlap.tp_comm_overlap_cfg", "comm_overlap.tp_comm_bootstrap_backend"],
    ),
    Feature(
        On("comm_overlap.defer_embedding_wgrad_compute"),
        settings=["comm_overlap.wgrad_deferral_limit"],
    ),
    # the batches to skip, the timeouts of the next start and that a fault has happened are noted there
    Feature(
        On("checkpoint.save"),
        settings=[
            "checkpoint.save_interval",
            "checkpoint.async_save",
            "rerun_state_machine.when_persistent",
            "ft.calc_ft_timeouts",
            "ft.simulate_fault",
        ],
    ),
    Feature(On("checkpoint.async_save"), settings=["checkpoint.async_strategy"]),
    Feature(On("logger.timing_log_level"), settings=["logger.timing_log_option"]),
    Feature(
        On("logger.sample_prompts"),
        settings=["logger.sample_interval", "logger.sample_max_new_tokens"],
    ),
    Feature(
        On("logger.wandb_project"),
        settings=["logger.wandb_entity", "logger.wandb_exp_name", "logger.wandb_save_dir"],
    ),
    Feature(
        On("logger.mlflow_experiment"),
        settings=["logger.mlflow_run_name", "logger.mlflow_tracking_uri"],
    ),
    Feature(
        On("logger.comet_project"),
        settings=["logger.comet_workspace", "logger.comet_experiment_name"],
    ),
    Feature(
        On("logger.swanlab_project"),
        settings=["logger.swanlab_workspace", "logger.swanlab_exp_name"],
    ),
    Feature(On("logger.prometheus_port"), settings=["logger.prometheus_host"]),
    Feature(On("profiling.record_memory_history"), settings=["profiling.memory_snapshot_path"]),
    Feature(
        AnyOf(On("profiling.use_pytorch_profiler"), On("profiling.use_nsys_profiler")),
        settings=["profiling.record_shapes"],
    ),
    Feature(
        Equals("checkpoint.non_persistent_ckpt_type", "global"),
        settings=["checkpoint.non_persistent_global_ckpt_dir"],
    ),
    Feature(
        Equals("checkpoint.non_persistent_ckpt_type", "local"),
        settings=["checkpoint.non_persistent_local_ckpt_dir"],
    ),
    Feature(
        AnyOf(*(Equals("dpo.loss_type", name) for name in ("sigmoid", "cpo", "simpo"))),
        settings=["dpo.label_smoothing"],
    ),
    Feature(Equals("dpo.loss_type", "simpo"), settings=["dpo.simpo_gamma"]),
    Feature(
        AnyOf(*(Equals("dpo.loss_type", name) for name in ("sigmoid", "ipo", "hinge", "kto"))),
        settings=["dpo.reference", "dpo.trust_remote_code"],
    ),
    Feature(
        Equals("dpo.loss_type", "kto"), settings=["dpo.desirable_weight", "dpo.undesirable_weight"]
    ),
    Feature(
        On("grpo.beta"),
        settings=[
            "grpo.kl_estimator",
            "grpo.use_bias_correction_kl",
            "grpo.reference",
            "grpo.trust_remote_code",
        ],
    ),
    Feature(
        AnyOf(*(Equals("grpo.loss_type", loss_type) for loss_type in CLIPPED_LOSSES)),
        settings=["grpo.epsilon", "grpo.delta"],
    ),
    Feature(
        AnyOf(*(Equals("grpo.loss_type", loss_type) for loss_type in (*CLIPPED_LOSSES, "cispo"))),
        settings=["grpo.epsilon_high"],
    ),
    Feature(
        Equals("grpo.loss_type", "sapo"),
        settings=["grpo.sapo_temperature_neg", "grpo.sapo_temperature_pos"],
    ),
    Feature(
        Equals("grpo.loss_type", "vespo"),
        settings=[
            "grpo.vespo_k_pos",
            "grpo.vespo_lambda_pos",
            "grpo.vespo_k_neg",
            "grpo.vespo_lambda_neg",
        ],
    ),
    Feature(Equals("grpo.advantage_estimator", "group"), settings=["grpo.scale_rewards"]),
    Feature(Equals("grpo.advantage_estimator", "gae"), settings=["grpo.critic"]),
    Feature(On("grpo.dynamic_sampling"), settings=["grpo.dynamic_sampling_rounds"]),
    Feature(On("validation.eval_iters"), settings=["grpo.num_generations_eval"]),
    Feature(
        On("grpo.importance_sampling_correction"),
        settings=[
            "grpo.importance_sampling_mode",
            "grpo.importance_sampling_clip_max",
            "grpo.importance_sampling_clip_min",
        ],
    ),
    Feature(
        On("rerun_state_machine.check_for_spiky_loss"),
        settings=[
            "rerun_state_machine.spiky_loss_factor",
            "rerun_state_machine.spiky_loss_samples",
        ],
    ),
    Feature(
        On("ft.simulate_fault"),
        settings=[
            "ft.simulated_fault_type",
            "ft.simulated_fault_rank",
            "ft.simulated_fault_base_delay",
        ],
    ),
    Feature(
        On("distill.on_policy_fraction"),
        settings=[
            "distill.max_completion_length",
            "distill.completion_temperature",
            "distill.kv_memory",
            "distill.max_requests",
        ],
    ),
    # features whose settings have names with the same beginning
    #
    Feature(
        Equals("model.moe_token_dispatcher_type", "flex"),
        prefixes=[
            "model.moe_flex_dispatcher_",
            "model.moe_hybridep_",
            "model.moe_deepep_",
            "model.moe_ncclep_",
            "model.moe_permute_fusion_into_hybridep",
        ],
    ),
    Feature(On("model.moe_paged_stash"), prefixes=["model.moe_paged_stash_"]),
    Feature(On("model.use_mup"), prefixes=["model.mup_"]),
    Feature(On("model.qk_clip"), prefixes=["model.qk_clip_"]),
    Feature(
        On("model.fp8"),
        prefixes=["model.fp8_", "model.tp_only_amax_red", "model.activation_func_fp8_"],
    ),
    Feature(On("model.fp4"), prefixes=["model.fp4_"]),
    Feature(On("model.first_last_layers_bf16"), prefixes=["model.num_layers_at_"]),
    Feature(On("model.tp_comm_overlap"), prefixes=["model.tp_comm_"]),
    Feature(On("model.cuda_graph_impl"), prefixes=["model.cuda_graph_"]),
    Feature(
        On("model.overlap_moe_expert_parallel_comm"),
        prefixes=["model.high_priority_a2a_", "model.ep_overlap_"],
    ),
    Feature(On("model.hybrid_override_pattern"), prefixes=["model.use_mamba_"]),
    Feature(On("model.defer_embedding_wgrad_compute"), prefixes=["model.wgrad_deferral_limit"]),
    Feature(On("model.use_kitchen"), prefixes=["model.use_kitchen_", "model.kitchen_"]),
    Feature(
        On("model.recompute_granularity"),
        prefixes=[
            "model.distribute_saved_activations",
            "model.recompute_m",
            "model.recompute_num_layers",
        ],
    ),
    Feature(On("model.hybrid_context_parallel"), prefixes=["model.max_seqlen_per_dp_cp_rank"]),
    Feature(On("model.cpu_offloading"), prefixes=["model.cpu_offloading_"]),
    Feature(
        On("model.fine_grained_activation_offloading"),
        prefixes=[
            "model.offload_modules",
            "model.min_offloaded_",
            "model.delay_offload_",
            "model.delta_offload_",
            "model.activation_offload_",
            "model.fine_grained_offloading_",
        ],
    ),
    Feature(On("model.cross_entropy_loss_fusion"), prefixes=["model.cross_entropy_fusion_impl"]),
    Feature(
        On("optimizer.fp16"),
        prefixes=[
            "optimizer.initial_loss_scale",
            "optimizer.loss_scale",
            "optimizer.min_loss_scale",
            "optimizer.hysteresis",
        ],
    ),
    Feature(
        On("optimizer.optimizer_cpu_offload"),
        prefixes=[
            "optimizer.optimizer_offload_",
            "optimizer.pin_cpu_",
            "optimizer.overlap_cpu_optimizer_",
        ],
    ),
    Feature(
        On("optimizer.use_precision_aware_optimizer"),
        prefixes=[
            "optimizer.exp_avg_",
            "optimizer.store_param_remainders",
            "optimizer.main_params_dtype",
        ],
    ),
    Feature(On("model.fp8_param"), prefixes=["ddp.fp8_param_gather"]),
    Feature(On("model.fp4_param"), prefixes=["ddp.fp4_param_gather"]),
    Feature(On("ddp.fp8_param_gather"), prefixes=["ddp.reuse_grad_buf_for_mxfp8_param_ag"]),
    Feature(
        On("ddp.use_megatron_fsdp"),
        prefixes=[
            "ddp.fsdp_",
            "ddp.megatron_fsdp_",
            "ddp.gradient_reduce_div_fusion",
            "ddp.outer_dp_sharding_strategy",
            "ddp.suggested_communication_unit_size",
            "ddp.keep_fp8_transpose_cache",
        ],
    ),
    Feature(On("ddp.nccl_ub"), prefixes=["ddp.disable_symmetric_registration"]),
]

# Beginnings of names -> what each of several makes effective. Layer features add themselves.
_SHARED_PREFIXES: dict[str, list[KeyCondition]] = {
    "moe_": [On("model.num_moe_experts"), On("model.hybrid_override_pattern")],
    "use_grouped_gemm_for_shared_expert": [
        On("model.num_moe_experts"),
        On("model.hybrid_override_pattern"),
    ],
    # Megatron-Core asks for it with variable lengths, too
    "moe_token_dispatcher_type": [
        On("model.num_moe_experts"),
        On("model.hybrid_override_pattern"),
        On("model.variable_seq_lengths"),
    ],
    "mamba_": [On("model.hybrid_override_pattern")],
}


def _rows_of_layer_features() -> Iterator[Feature]:
    """Yield the rows that the features of layers declare."""
    conditions = {prefix: list(shared) for prefix, shared in _SHARED_PREFIXES.items()}
    for feature in layer_features.FEATURES:
        for setting, needed in feature.needs.items():
            yield Feature(On(f"model.{needed}"), settings=[f"model.{setting}"])
        key = f"model.{feature.prefix_switch}"
        has_value = feature.prefix_value is not None
        switch = Equals(key, feature.prefix_value) if has_value else On(key)
        for prefix in feature.prefixes:
            conditions.setdefault(prefix, []).append(switch)
    for prefix, alternatives in conditions.items():
        condition = alternatives[0] if len(alternatives) == 1 else AnyOf(*alternatives)
        yield Feature(condition, prefixes=[f"model.{prefix}"])


_ROWS = [*FEATURES, *_rows_of_layer_features()]
NEEDS = {key: feature.is_on for feature in _ROWS for key in feature.settings}
NEEDS_BY_PREFIX = {prefix: feature.is_on for feature in _ROWS for prefix in feature.prefixes}
BLOCKS_WITH_PREFIXES = ("model", "optimizer", "ddp")


def settings_have_effect(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a feature that is off would be ignored."""
    for key, condition in (*NEEDS.items(), *_needs_by_prefix(config)):
        value = value_of(config, key)
        if value != default_of(config, key) and not condition.is_met(config):
            yield f"{key}={value} has no effect without {condition}: set that, too, or remove it"


def _needs_by_prefix(config: RunConfig) -> Iterator[tuple[str, Condition]]:
    """Yield the settings of ``NEEDS_BY_PREFIX``, each with the feature of its longest prefix."""
    for block in BLOCKS_WITH_PREFIXES:
        for entry in dataclasses.fields(getattr(config, block)):
            key = f"{block}.{entry.name}"
            condition = feature_of(key)
            if condition is not None:
                yield key, condition


def feature_of(key: str) -> Condition | None:
    """Return the condition of the feature whose prefix ``key`` has; None for the switch of the feature itself."""
    prefixes = [prefix for prefix in NEEDS_BY_PREFIX if key.startswith(prefix)]
    if not prefixes:
        return None
    condition = NEEDS_BY_PREFIX[max(prefixes, key=len)]
    is_switch = [alternative.key for alternative in condition.alternatives] == [key]
    return None if is_switch else condition
