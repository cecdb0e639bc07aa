# SPDX-License-Identifier: Apache-2.0
"""How the samples of a run with ``model.hybrid_context_parallel`` are shared out among data-parallel ranks."""

import math

from megatron.bridge.data.finetuning.context_plan import ContextSharing
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
    )


def part_multiple(config: RunConfig) -> int:
    """The divisor of each rank's part of a sample: that of the data, and of sequence parallelism."""
    model = config.model
    ranks = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return math.lcm(ranks, *(part.sequence_multiple for part in tuning_parts(config.dataset)))
