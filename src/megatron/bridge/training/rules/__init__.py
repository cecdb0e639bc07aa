# SPDX-License-Identifier: Apache-2.0
"""Cross-field rules: what cannot work is refused before anything is built, all problems together.

A rule is a small function of the config and the number of processes; it returns None, or one sentence with the
key, its value, the rule and the nearest legal values.
"""

from collections.abc import Callable, Iterable

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.rules import (
    data,
    distill,
    experts,
    faults,
    fields,
    layout,
    loggers,
    numbers,
    optimizers,
    overlap,
    profiling,
    schedule,
    settings,
    sharding,
    stages,
    values,
)

Rule = Callable[[ConfigContainer, int], str | None]

# Everything after these divides by sizes.
SIZES: tuple[Rule, ...] = (
    layout.sizes_are_positive,
    layout.world_holds_the_layout,
    values.future_blocks_are_unset,
    schedule.ramp_comes_out_even,
)
RULES: tuple[Rule, ...] = (
    fields.attributes_are_fields,
    fields.words_are_known,
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
    stages.stages_are_described_once,
    stages.first_and_last_stage_leave_even_ones,
    stages.counted_ends_come_out_even,
    stages.layout_holds_every_layer,
    layout.vp_fits_microbatches,
    layout.p2p_is_batched_or_overlapped,
    layout.cp_divides_sequence,
    layout.cp_a2a_divides_heads,
    layout.cp_kind_exists,
    layout.ep_divides_experts,
    layout.tp_with_experts_needs_sp,
    experts.expert_ranks_fill_the_world,
    experts.expert_tensor_ranks_need_experts,
    experts.expert_tensor_ranks_divide_experts,
    experts.tp_divides_shared_experts,
    experts.tokens_choose_few_experts,
    experts.expert_groups_are_even,
    experts.own_layers_know_where_experts_are,
    numbers.heads_divide_width,
    numbers.exact_gelu_is_not_fused,
    optimizers.optimizer_is_known,
    optimizers.only_adam_is_sharded,
    optimizers.state_can_be_saved,
    optimizers.half_precision_fits_optimizer,
    optimizers.muon_sees_whole_matrices,
    optimizers.settings_are_of_this_optimizer,
    optimizers.clipping_is_a_norm,
    optimizers.momentum_is_below_one,
    optimizers.optimizer_instances_divide_replicas,
    optimizers.optimizer_instances_divide_expert_replicas,
    optimizers.optimizer_instances_share_state,
    layout.replicas_divide_batch,
    schedule.ramp_fits_replicas,
    schedule.ramp_fits_virtual_stages,
    schedule.ramp_draws_in_order,
    values.adapters_can_be,
    values.adapters_have_a_base,
    distill.distillation_can_be,
    values.sequence_fits_model,
    values.one_half_precision,
    schedule.learning_rates_are_ordered,
    schedule.lengths_have_one_unit,
    schedule.warmup_ends_before_decay,
    schedule.wsd_has_a_decay,
    schedule.weight_decay_grows,
    schedule.resumed_schedule_has_one_source,
    schedule.overrides_say_something,
    schedule.overrides_are_ordered,
    overlap.param_gather_overlap_fits,
    overlap.gathers_are_beside_the_forward_pass,
    overlap.p2p_overlap_needs_virtual_stages,
    overlap.tensor_overlap_needs_sequence_parallelism,
    overlap.expert_overlap_fits,
    overlap.delayed_gradients_fill_messages,
    overlap.deferred_embedding_fits,
    overlap.buckets_hold_something,
    overlap.offloading_fits,
    overlap.deterministic_layers_read_one_sample,
    values.per_token_loss_is_summed,
    layout.cp_with_masks_counts_tokens,
    data.packed_rows_come_alone,
    data.samples_can_be_cut,
    data.readers_divide_batches,
    profiling.profiles_are_of_something,
    profiling.profilers_exclude_each_other,
    profiling.profiles_are_written,
    profiling.peaks_are_positive,
    values.no_partial_checkpointing,
    sharding.no_megatron_fsdp,
    sharding.fsdp2_cuts_dense_models,
    sharding.fsdp2_replaces_data_parallelism,
    values.dropouts_are_probabilities,
    values.intervals_are_positive,
    values.time_limits_are_positive,
    values.one_checkpoint_is_kept,
    values.finetuning_has_a_folder_of_its_own,
    values.background_has_a_writer,
    faults.non_persistent_is_whole,
    faults.memory_outlives_the_run,
    faults.scores_are_asked_for,
    faults.restarts_have_their_times,
    faults.simulated_faults_have_a_rank,
    settings.settings_have_an_effect,
)

# What this machine must have; not asked of a config that is validated for another one.
HERE: tuple[Rule, ...] = (
    loggers.trackers_are_installed,
    faults.kernels_are_timed_on_gpus,
    profiling.gpus_are_measured_where_they_are,
)


def violations(rules: Iterable[Rule], config: ConfigContainer, world_size: int) -> list[str]:
    """The sentences of all broken rules."""
    return [sentence for rule in rules if (sentence := rule(config, world_size)) is not None]
