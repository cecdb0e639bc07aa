# SPDX-License-Identifier: Apache-2.0
"""Rules on how small and how large a number may be."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from megatron.bridge.training.config.rules.values import value_of
from megatron.bridge.training.config.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Range:
    """Legal values of a setting."""

    rule: str  # the range in words, after "must"
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf  # an open lower bound
    below: float = math.inf  # an open upper bound

    def __contains__(self, value: float) -> bool:
        below = value < self.below or math.isinf(self.below)  # infinity itself may mean "no limit"
        return self.least <= value <= self.most and self.above < value and below


ONE_OR_MORE = Range("be at least 1", least=1)
NOT_NEGATIVE = Range("be at least 0", least=0)
POSITIVE = Range("be above 0", above=0)
BELOW_ONE = Range("lie in [0, 1)", least=0, below=1)
# ranks and stages count on from a seed, and numpy's seeds end at 2**32
COUNT = Range("be at least 0 and at most 10000", least=0, most=10_000)
SEED = Range(f"be at least 0 and at most {2**32 - 2**20}", least=0, most=2**32 - 2**20)

_BY_RANGE: dict[Range, str] = {
    ONE_OR_MORE: (
        "model.num_query_groups model.kv_channels model.ffn_hidden_size model.vocab_size "
        "model.make_vocab_size_divisible_by model.recompute_num_layers model.moe_layer_freq "
        "model.moe_ffn_hidden_size model.expert_tensor_parallel_size tokenizer.vocab_size "
        "ddp.suggested_communication_unit_size ddp.bucket_size ddp.num_buckets train.exit_interval "
        "train.iterations_to_skip validation.eval_interval checkpoint.save_interval "
        "checkpoint.non_persistent_save_interval straggler.interval logger.sample_interval "
        "logger.sample_max_new_tokens model.microbatch_group_size_per_vp_stage model.max_position_embeddings "
        "model.num_labels model.query_scaling_length model.global_kv_channels model.global_query_groups "
        "model.hidden_size_per_layer_input model.vocab_size_per_layer_input model.moe_router_num_groups "
        "model.moe_latent_size model.moe_shared_expert_intermediate_size "
        "model.moe_shared_expert_glu_interleave_size model.moe_mlp_glu_interleave_size "
        "model.moe_flex_dispatcher_num_sms model.moe_deepep_num_sms model.moe_hybridep_num_sms "
        "model.moe_hybridep_num_blocks_permute model.moe_hybridep_num_blocks_unpermute "
        "model.moe_hybridep_num_sms_preprocessing model.moe_paged_stash_page_size model.linear_conv_kernel_dim "
        "model.linear_key_head_dim model.linear_value_head_dim model.linear_num_key_heads "
        "model.linear_num_value_heads model.mamba_state_dim model.mamba_head_dim model.mamba_num_groups "
        "model.mamba_num_heads model.fp8_interval model.fp8_amax_history_len model.mlp_chunks_for_training "
        "model.window_attn_skip_freq model.fine_grained_offloading_max_inflight_offloads "
        "optimizer.loss_scale_window optimizer.hysteresis model.mup_base_hidden_size model.mup_base_head_dim"
    ),
    NOT_NEGATIVE: (
        "model.layernorm_epsilon model.init_method_std model.embedding_init_method_std model.moe_aux_loss_coeff "
        "model.moe_z_loss_coeff model.moe_input_jitter_eps model.moe_router_bias_update_rate "
        "model.moe_router_norm_min model.mtp_loss_scaling_factor model.moe_router_sparsemixer_eps "
        "model.position_offset model.query_scaling_beta model.no_rope_freq model.cpu_offloading_num_layers "
        "model.min_offloaded_tensor_size model.cuda_graph_warmup_steps model.delta_offload_bytes_across_pp_ranks "
        "model.moe_paged_stash_buffer_size_factor_cpu model.num_layers_at_start_in_bf16 "
        "model.num_layers_at_end_in_bf16 logger.logging_level optimizer.clip_grad validation.eval_iters "
        "train.manual_gc_interval distill.ce_weight distill.kl_weight distill.hidden_weight "
        "model.wgrad_deferral_limit"
    ),
    # zero is no scale, no base, no time, no epsilon (0 / 0 for a gradient of zero), and blind attention
    POSITIVE: (
        "model.rotary_base model.rope_scaling_factor model.moe_expert_capacity_factor "
        "model.moe_expert_rank_capacity_factor model.moe_router_topk_scaling_factor "
        "model.moe_paged_stash_buffer_size_factor_cuda model.activation_func_clamp_value "
        "model.seq_len_interpolation_factor model.embedding_multiplier model.residual_multiplier "
        "model.logits_scaling model.attn_logit_softcapping model.final_logit_softcapping model.mup_width_mult "
        "model.mup_embedding_mult model.mup_output_mult optimizer.min_loss_scale "
        "optimizer.grad_norm_skip_threshold optimizer.adam_eps model.softmax_scale optimizer.loss_scale "
        "optimizer.initial_loss_scale peft.alpha logger.peak_tflops distill.temperature dpo.beta "
        "dpo.desirable_weight dpo.undesirable_weight"
    ),
    # dropout probabilities, and averages that forget
    BELOW_ONE: (
        "model.hidden_dropout model.attention_dropout optimizer.adam_beta1 optimizer.adam_beta2 "
        "optimizer.sgd_momentum optimizer.muon_momentum model.embedding_dropout "
        "model.moe_router_quantile_balancing_ema"
    ),
    Range("be at least 0 and at most 1", least=0, most=1): (
        "model.rotary_percent model.activation_offload_fraction optimizer.optimizer_offload_fraction"
    ),
    Range("be above 0 and at most 525600, a year", above=0, most=525_600): (
        "train.exit_duration_in_mins dist.distributed_timeout_minutes dist.hang_timeout_minutes"
    ),
    # each is built or planned on its own
    COUNT: "model.num_layers model.num_attention_heads model.num_moe_experts model.mtp_num_layers",
    Range("be at least 0 and at most 1024", least=0, most=1024): "dataset.workers dataset.num_workers",
    Range("be at least 1 and at most 65535", least=1, most=65_535): "logger.prometheus_port",
    SEED: "rng.seed dataset.random_seed dataset.seed",
}
_LARGEST = 2**53  # no size, count or seed is larger, and a float counts no further
ELEMENTWISE = ("train.iterations_to_skip",)
"""Lists of numbers; other lists are patterns, such as ``model.moe_layer_freq``."""
RANGES: dict[str, Range] = {key: found for found, keys in _BY_RANGE.items() for key in keys.split()}


def numbers_are_finite(config: RunConfig, world_size: int) -> Iterator[str]:
    """NaN and infinity would spread to every weight, and tensors count in 64 bits."""
    blocks = ((key, block) for key, block in vars(config).items() if dataclasses.is_dataclass(block))
    numbers = [
        (f"{key}.{entry.name}={value}", value)
        for key, block in blocks
        for entry in dataclasses.fields(block)
        if isinstance(value := getattr(block, entry.name), int | float) and value != entry.default
    ]
    if wrong := [text for text, value in numbers if isinstance(value, float) and not math.isfinite(value)]:
        yield f"{', '.join(wrong)}: must be a finite number"
    if large := [text for text, value in numbers if isinstance(value, int) and abs(value) >= _LARGEST]:
        yield f"{', '.join(large)}: must be below {_LARGEST}"


def sizes_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core, and other rules, would divide by zero or compute NaN."""
    yield from _out_of_range(config, sizes=True)


def numbers_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Intervals, times, probabilities and the optimizer's numbers have legal ranges."""
    yield from _out_of_range(config, sizes=False)


def _out_of_range(config: RunConfig, sizes: bool) -> Iterator[str]:
    for key, allowed in RANGES.items():
        # a size is a number with which other rules compute
        is_size = allowed != BELOW_ONE and key.partition(".")[0] in ("model", "tokenizer", "dataset", "peft", "rng")
        value = value_of(config, key)
        if is_size == sizes and any(number not in allowed for number in _numbers(key, value)):
            yield f"{key}={value}: must {allowed.rule}"


def _numbers(key: str, value: Any) -> list[float]:
    """The numbers of a setting, if it has any; another rule refuses NaN."""
    values = value if key in ELEMENTWISE else [value]
    numbers = [item for item in values if isinstance(item, int | float) and not isinstance(item, bool)]
    return [number for number in numbers if not math.isnan(number)]
