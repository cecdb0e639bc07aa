# SPDX-License-Identifier: Apache-2.0
"""How many hardware queues a process has on its GPU, which decides what overlaps."""

import os
from collections.abc import MutableMapping

from megatron.bridge.training.config import ConfigContainer

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MANY_STREAMS = (10, 0)  # from this compute capability on, Megatron-Core asks for no single queue


def needs_one_queue(config: ConfigContainer, capability: tuple[int, int]) -> bool:
    """Whether communication overlaps with computation only if kernels start in the order of their launches.

    Megatron-Core queues the communication of tensor and context parallelism first and counts on that order. Fully
    sharded parallelism and overlapped expert parallelism need several queues.
    """
    model = config.model
    shards = config.dist.use_torch_fsdp2 or bool(config.ddp.use_megatron_fsdp)
    splits = model.tensor_model_parallel_size > 1 or model.context_parallel_size > 1
    return splits and not shards and not model.overlap_moe_expert_parallel_comm and capability < _MANY_STREAMS


def set_connections(
    config: ConfigContainer, capability: tuple[int, int], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS`` for the layout, unless the user did; CUDA reads it when it starts."""
    if needs_one_queue(config, capability):
        environment.setdefault(VARIABLE, "1")
