# SPDX-License-Identifier: Apache-2.0
"""Data parallelism, the process group, and communication that overlaps with computation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megatron.core.distributed import (
    DistributedDataParallelConfig as CoreDistributedDataParallelConfig,
)

from megatron.bridge.training.config.blocks.core_ranges import DDP_RANGES
from megatron.bridge.utils.config.ranges import MINUTES, Range


@dataclass
class DistributedDataParallelConfig(CoreDistributedDataParallelConfig):
    """Megatron-Core's data-parallel settings. The fields below that are None are derived."""

    INHERITED_RANGES: ClassVar[dict[str, Range]] = DDP_RANGES

    grad_reduce_in_fp32: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Reduce gradients in fp32. None follows ``mixed_precision``."""
    use_distributed_optimizer: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """None shards the optimizer state if there is more than one data-parallel rank."""
    data_parallel_sharding_strategy: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """What ``use_megatron_fsdp`` shards: ``optim``, ``optim_grads``, or ``optim_grads_params``, which None means.
    """

    def finalize(self) -> None:
        """Replace each None with the value of a model that is built outside of a run, and check the rest.

        Gradients are reduced in their own dtype and the optimizer state is whole, as in Megatron-Core; with
        ``use_megatron_fsdp`` the optimizer state and all weights are sharded.
        """
        from megatron.bridge.backends.fsdp import megatron_fsdp

        sharded = bool(self.use_megatron_fsdp)
        derived = {
            "grad_reduce_in_fp32": False,
            "use_distributed_optimizer": sharded,
            "data_parallel_sharding_strategy": megatron_fsdp.SHARD_WEIGHTS
            if sharded
            else megatron_fsdp.NO_SHARD,
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__()


@dataclass
class DistributedInitConfig:
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """None means ``nccl`` with CUDA, and ``gloo`` without."""
    distributed_timeout_minutes: Annotated[int, MINUTES] = 10
    """Minutes after which a collective that has not finished ends the run."""
    hang_timeout_minutes: Annotated[float | None, MINUTES] = None
    """Minutes without progress after which the run names the rank that the others wait for, dumps stacks, and ends
    with exit code 76. Set it longer than an evaluation batch and than a save. None turns the detection off.
    """
    use_gloo_process_groups: bool = False
    """Also make gloo groups, for collectives on CPU tensors. No part of this package uses them."""
    external_gpu_device_mapping: bool = False
    """The program has chosen this process's GPU itself; it is not chosen by ``LOCAL_RANK``."""
    align_grad_reduce: bool = False
    """With ``ddp.overlap_grad_reduce`` and virtual stages, let all stages reduce gradients at the same time."""
    use_torch_fsdp2: bool = False
    """Use PyTorch's FSDP2 instead of Megatron-Core's data parallelism: weights, gradients and optimizer state are
    sharded over the data-parallel ranks. See docs/optimizers.md.
    """


@dataclass
class CommOverlapConfig:
    """Communication that overlaps with computation. A field that is None is derived from the layout.

    The block owns no switch: each is a field of ``model``, ``ddp`` or ``optimizer``, and a switch that is on there
    stays on. Without the block nothing is derived.
    """

    tp_comm_overlap: bool | None = None
    """Split matrix products and send each part while the next is computed, with Transformer Engine. None is off,
    because it needs user buffers, which cost memory and set-up time.
    """
    tp_comm_overlap_cfg: str | None = None
    """YAML file with Transformer Engine's settings for each matrix product."""
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = "nccl"
    """Backend that sets up the user buffers."""
    overlap_p2p_comm: bool | None = None
    """Overlap the messages between pipeline stages. None is on with virtual stages."""
    batch_p2p_comm: bool | None = None
    """Batch the messages to both neighbors. None is on if the messages are not overlapped."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients bucket by bucket during the backward pass. None is on if more than one rank holds the same
    weights.
    """
    overlap_param_gather: bool | None = None
    """Gather weights bucket by bucket during the forward pass. None is on with a sharded optimizer."""
    align_param_gather: bool | None = None
    """Make all pipeline stages gather at the same time. None is on with virtual stages."""
    bucket_size: int | None = None
    """Parameters per bucket. None leaves it to Megatron-Core."""
    overlap_moe_expert_parallel_comm: bool | None = None
    """Overlap the all-to-all of experts with the computation of another microbatch. None is off, because it keeps
    the activations of two microbatches.
    """
    delay_wgrad_compute: bool | None = None
    """Delay weight gradients to overlap with the all-to-all of experts. None is off."""
    defer_embedding_wgrad_compute: bool | None = None
    """Defer the weight gradient of the output layer until the pipeline drains. None is off."""
    wgrad_deferral_limit: int = 0
    """Number of microbatches whose gradient is deferred; 0 means all."""
