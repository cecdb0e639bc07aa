# SPDX-License-Identifier: Apache-2.0
"""The pipeline schedule of a config."""

from megatron.bridge.autotune.time.schedule import Pipeline
from megatron.bridge.training.config import ConfigContainer


def pipeline_of(config: ConfigContainer, world_size: int) -> Pipeline:
    """The schedule that a step of a config runs, whose layout has been checked."""
    model, train = config.model, config.train
    stages, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    microbatches = train.global_batch_size // (train.micro_batch_size * config.data_parallel_size(world_size))
    return Pipeline(
        stages=stages,
        microbatches=max(microbatches, 1),
        chunks=chunks,
        group=(model.microbatch_group_size_per_vp_stage or stages) if chunks > 1 else 1,
        overlap_experts=bool(model.overlap_moe_expert_parallel_comm),
    )
