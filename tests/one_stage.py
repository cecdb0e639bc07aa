# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage in Megatron-Core's real schedules, in this process; its neighbors' tensors are made up."""

from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection


class Group:
    """Size and rank, which is all that the schedules ask of a group."""

    def __init__(self, size, rank=0):
        self.size, self.rank = lambda: size, lambda: rank


class NoNeighbors(P2PCommunicator):
    """Sends nothing, and receives zeros that need a gradient."""

    def __init__(self, group, config):
        self.pp_group, self.config = group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _communicate(self, *, recv_prev, recv_next, tensor_shape, wait_on_reqs=True, **_):
        dtype = self.config.pipeline_dtype or torch.float32
        before = torch.zeros(tensor_shape, dtype=dtype, requires_grad=True) if recv_prev else None
        after = torch.zeros(tensor_shape, dtype=dtype) if recv_next else None
        done = SimpleNamespace(wait=lambda: None)
        names = {"recv_prev": recv_prev, "recv_next": recv_next}
        return (
            before,
            after,
            None if wait_on_reqs else {name: done for name, asked in names.items() if asked},
        )


def run_stage(step, chunks, config, stages, stage, microbatches, sequence, forward_only=False):
    """Run ``step(iterator, chunk)`` over all passes of ``stage``.

    Args:
        step: As Megatron-Core's ``forward_step_func``; its iterator is the index of the chunk.
        chunks: The stage's modules.
        config: Their Megatron-Core config.
        stages: Pipeline ranks.
        stage: The one to run.
        microbatches: Of the step, of one sample each.
        sequence: Tokens of a sample.
        forward_only: Run no backward pass.
    """
    groups = ProcessGroupCollection(tp=Group(1), cp=Group(1), pp=Group(stages, stage))
    config.virtual_pipeline_model_parallel_size = len(chunks) if len(chunks) > 1 else None
    function = schedules.get_forward_backward_func(
        stages, config.virtual_pipeline_model_parallel_size
    )
    extra = {"p2p_communicator": NoNeighbors(groups.pp, config)} if stages > 1 else {}
    function(
        forward_step_func=step,
        data_iterator=[*range(len(chunks))] if len(chunks) > 1 else 0,
        model=chunks,
        num_microbatches=microbatches,
        seq_length=sequence,
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups,
        **extra,
    )
