# SPDX-License-Identifier: Apache-2.0
"""Cross-field rules, checked before anything is built. All problems are reported together.

A rule is a small function of the config and the number of processes; it returns None, or one sentence with the
key, its value, the rule and the nearest legal values.
"""

from collections.abc import Callable, Iterable

from megatron.bridge.training.config.rules import (
    checkpoint,
    data,
    distill,
    experts,
    fields,
    layout,
    loggers,
    model,
    optimizers,
    overlap,
    peft,
    profiling,
    ranges,
    resiliency,
    schedule,
    sharding,
    stages,
    unused_settings,
)
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError

Rule = Callable[[RunConfig, int], str | None]

# Everything after these divides by sizes.
SIZE_RULES: tuple[Rule, ...] = (
    layout.sizes_are_positive,
    ranges.numbers_are_finite,
    ranges.sizes_are_in_range,
    layout.world_size_fits_layout,
    fields.unavailable_blocks_are_unset,
    schedule.rampup_reaches_global_batch_size,
)
RULES: tuple[Rule, ...] = (
    ranges.numbers_are_in_range,
    fields.attributes_are_fields,
    fields.literals_are_known,
    layout.groups_divide_heads,
    layout.tp_divides_heads,
    layout.tp_fits_query_groups,
    layout.tp_divides_ffn,
    layout.tp_divides_vocabulary,
    layout.sp_needs_tp,
    layout.sp_divides_sequence,
    layout.pp_divides_layers,
    layout.vp_needs_pp,
    stages.uneven_stages_need_a_pipeline,
    stages.stage_sizes_are_given_once,
    stages.middle_stages_are_even,
    stages.accounted_layers_divide_stages,
    stages.pipeline_layout_has_every_layer,
    layout.vp_fits_microbatches,
    layout.p2p_is_batched_or_overlapped,
    layout.cp_divides_sequence,
    layout.cp_a2a_divides_heads,
    layout.cp_comm_type_is_available,
    layout.ep_divides_experts,
    layout.tp_with_experts_needs_sp,
    experts.expert_ranks_fill_the_world,
    experts.expert_tensor_ranks_need_experts,
    experts.expert_tensor_ranks_divide_experts,
    experts.tp_divides_shared_experts,
    experts.topk_fits_num_experts,
    experts.expert_groups_are_even,
    experts.layer_spec_fits_moe_layer_freq,
    model.heads_divide_width,
    model.rotary_width_is_even,
    model.exact_gelu_is_not_fused,
    optimizers.optimizer_is_known,
    optimizers.only_adam_is_sharded,
    optimizers.optimizer_state_can_be_saved,
    optimizers.muon_needs_bf16,
    optimizers.muon_fits_tensor_parallelism,
    optimizers.optimizer_settings_are_used,
    optimizers.optimizer_instances_divide_replicas,
    optimizers.optimizer_instances_divide_expert_replicas,
    optimizers.optimizer_instances_share_state,
    layout.replicas_divide_batch,
    schedule.rampup_fits_data_parallel_size,
    schedule.rampup_fits_virtual_stages,
    schedule.rampup_needs_sequential_samples,
    peft.peft_settings_are_valid,
    peft.peft_needs_pretrained_checkpoint,
    distill.distill_settings_are_valid,
    model.sequence_fits_model,
    model.one_half_precision,
    schedule.learning_rates_are_ordered,
    schedule.lengths_have_one_unit,
    schedule.warmup_ends_before_decay,
    schedule.wsd_has_a_decay,
    schedule.weight_decay_grows,
    schedule.one_source_of_resumed_schedule,
    schedule.overrides_are_valid,
    schedule.overrides_are_ordered,
    overlap.param_gather_overlap_fits,
    overlap.param_gather_overlaps_forward_only,
    overlap.p2p_overlap_needs_virtual_stages,
    overlap.tensor_overlap_needs_sequence_parallelism,
    overlap.expert_overlap_fits,
    overlap.delayed_wgrad_needs_expert_overlap,
    overlap.deferred_embedding_fits,
    overlap.bucket_size_is_given_once,
    overlap.offloading_fits,
    overlap.deterministic_delta_nets_are_unpacked,
    model.per_token_loss_is_summed,
    layout.cp_with_masks_needs_per_token_loss,
    data.packed_samples_need_micro_batch_of_one,
    data.packed_samples_fit_context_parallel,
    data.energon_readers_fit_batch,
    profiling.profiling_has_tool_steps_and_ranks,
    profiling.one_gpu_profiler_at_a_time,
    profiling.profiles_need_a_folder,
    model.no_partial_checkpointing,
    sharding.one_fsdp_at_a_time,
    sharding.sharding_strategy_needs_megatron_fsdp,
    sharding.fsdp_needs_supported_model,
    sharding.fsdp2_ignores_ddp_settings,
    sharding.megatron_fsdp_settings_are_supported,
    checkpoint.most_recent_k_keeps_one,
    checkpoint.finetune_saves_to_another_folder,
    checkpoint.async_strategy_is_installed,
    checkpoint.non_persistent_settings_are_complete,
    checkpoint.in_memory_needs_inprocess_restart,
    resiliency.nvrx_straggler_compares_something,
    resiliency.inprocess_restart_timeouts_are_ordered,
    resiliency.simulated_fault_rank_exists,
    unused_settings.settings_have_effect,
)

# Rules that read the vocabulary size, which may come from the tokenizer.
VOCABULARY_RULES: tuple[Rule, ...] = (layout.tp_divides_vocabulary, distill.distill_settings_are_valid)

# What this machine must have; not asked of a config that is validated for another one.
LOCAL_RULES: tuple[Rule, ...] = (
    loggers.trackers_are_installed,
    resiliency.nvrx_straggler_needs_a_gpu,
    profiling.gpu_metrics_need_a_gpu,
)


def violations(rules: Iterable[Rule], config: RunConfig, world_size: int) -> list[str]:
    """One sentence for each rule that ``config`` breaks."""
    return [sentence for rule in rules if (sentence := rule(config, world_size)) is not None]


def refuse(problems: list[str]) -> None:
    """Raise a ``UserError`` with a line for each problem, if there is one."""
    if problems:
        raise UserError("\n".join(problems))
