# SPDX-License-Identifier: Apache-2.0
"""How the samples of a run with ``model.hybrid_context_parallel`` are shared out among data-parallel ranks."""

import math

from megatron.bridge.data.finetuning.context_plan import ContextSharing, smallest_group
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config.resolve.data import tuning_parts
from megatron.bridge.training.config.run_config import RunConfig

LINEAR_WORK = 12
"""Work of a token beside attention, in hidden sizes.

A layer with four times as wide an MLP has 12 h^2 weights, so a token takes 24 h^2 operations; to attend to one earlier
token takes 4 h, and a token attends to half of the sequence on average: a sequence of s takes 2 h s (s + 12 h).
"""


def context_sharing(config: RunConfig) -> ContextSharing | None:
    """Return what plans depend on; None if ranks share no samples."""
    model = config.model
    if not model.hybrid_context_parallel:
        return None
    assert model.max_seqlen_per_dp_cp_rank is not None, "a rule asks for it"
    return ContextSharing(
        tokens_per_rank=model.max_seqlen_per_dp_cp_rank,
        linear_work=LINEAR_WORK * model.hidden_size,
        multiple=part_multiple(config),
        microbatch_multiple=_microbatch_multiple(model),
    )


def microbatch_tokens(config: RunConfig) -> int:
    """Return the most tokens of a microbatch that one rank holds, before tensor parallelism splits them."""
    model = config.model
    if model.hybrid_context_parallel and model.max_seqlen_per_dp_cp_rank is not None:
        return model.max_seqlen_per_dp_cp_rank
    return config.train.micro_batch_size * config.dataset.seq_length // model.context_parallel_size


def ranks_of_longest_sample(config: RunConfig) -> int:
    """Return how many ranks share the longest sample that the data may have."""
    model = config.model
    if not model.hybrid_context_parallel:
        return model.context_parallel_size
    return smallest_group(config.dataset.seq_length, microbatch_tokens(config))


def part_multiple(config: RunConfig) -> int:
    """The divisor of each rank's part of a sample: that of the data, and of sequence parallelism."""
    model = config.model
    ranks = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return math.lcm(ranks, *(part.sequence_multiple for part in tuning_parts(config.dataset)))


def _microbatch_multiple(model: GPTModelProvider) -> int:
    """The interleaved schedule takes microbatches in groups, of one for each stage unless it is told otherwise."""
    if model.virtual_pipeline_model_parallel_size is None:
        return 1
    return model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
