# SPDX-License-Identifier: Apache-2.0
"""Cross-field rules: what cannot work is refused before anything is built, all problems together.

A rule is a small function of the config and the number of processes; it returns None, or one sentence with the
key, its value, the rule and the nearest legal values.
"""

from collections.abc import Callable, Iterable

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.rules import data, distill, experts, faults, layout, loggers, numbers, values

Rule = Callable[[ConfigContainer, int], str | None]

# Everything after these divides by sizes.
SIZES: tuple[Rule, ...] = (
    layout.sizes_are_positive,
    layout.world_holds_the_layout,
    values.future_blocks_are_unset,
)
RULES: tuple[Rule, ...] = (
    layout.groups_divide_heads,
    layout.tp_divides_heads,
    layout.tp_fits_query_groups,
    layout.tp_divides_ffn,
    layout.tp_divides_vocabulary,
    layout.sp_needs_tp,
    layout.sp_divides_sequence,
    layout.pp_divides_layers,
    layout.vp_needs_pp,
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
    numbers.optimizer_is_known,
    numbers.optimizer_instances_divide_replicas,
    layout.replicas_divide_batch,
    values.adapters_can_be,
    values.adapters_have_a_base,
    distill.distillation_can_be,
    values.sequence_fits_model,
    values.one_half_precision,
    values.learning_rates_are_ordered,
    values.warmup_ends_before_decay,
    values.wsd_has_a_decay,
    values.weight_decay_grows,
    values.resumed_schedule_has_one_source,
    values.param_gather_overlap_fits,
    values.per_token_loss_is_summed,
    layout.cp_with_masks_counts_tokens,
    data.packed_rows_come_alone,
    data.samples_can_be_cut,
    data.readers_divide_batches,
    loggers.trackers_can_be,
    values.no_partial_checkpointing,
    values.no_fsdp_yet,
    values.dropouts_are_probabilities,
    values.intervals_are_positive,
    values.time_limits_are_positive,
    values.checkpoints_have_a_folder,
    values.skipping_has_a_folder,
    faults.non_persistent_is_whole,
    faults.memory_outlives_the_run,
    faults.kernels_are_timed_on_gpus,
    faults.scores_are_asked_for,
    faults.restarts_have_their_times,
    faults.simulated_faults_have_a_rank,
    faults.simulated_faults_happen_once,
)


def violations(rules: Iterable[Rule], config: ConfigContainer, world_size: int) -> list[str]:
    """The sentences of all broken rules."""
    return [sentence for rule in rules if (sentence := rule(config, world_size)) is not None]
