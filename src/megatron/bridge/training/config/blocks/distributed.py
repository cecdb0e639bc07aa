# SPDX-License-Identifier: Apache-2.0
"""Data parallelism and the process group."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.distributed import DistributedDataParallelConfig as CoreDistributedDataParallelConfig


@dataclass
class DistributedDataParallelConfig(CoreDistributedDataParallelConfig):
    """Megatron-Core's data-parallel settings. The fields below that are None are derived."""

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
            "data_parallel_sharding_strategy": megatron_fsdp.SHARD_WEIGHTS if sharded else megatron_fsdp.NO_SHARD,
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__()


@dataclass
class DistributedInitConfig:
    """The process group."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """None means ``nccl`` with CUDA, and ``gloo`` without."""
    distributed_timeout_minutes: int = 10
    """Minutes after which a collective that has not finished ends the run."""
    hang_timeout_minutes: float | None = None
    """Minutes without progress after which the run names the rank that the others wait for, dumps stacks, and ends
    with exit code 76. Set it longer than an evaluation batch and than a save. None turns the detection off.
    """
    use_gloo_process_groups: bool = False
    """Make gloo groups beside those of NCCL, for collectives on CPU tensors. No part of this package uses them."""
    external_gpu_device_mapping: bool = False
    """The program has chosen this process's GPU itself; it is not chosen by ``LOCAL_RANK``."""
    align_grad_reduce: bool = False
    """With ``ddp.overlap_grad_reduce`` and virtual stages, let all stages reduce gradients at the same time."""
    use_torch_fsdp2: bool = False
    """Use PyTorch's FSDP2 instead of Megatron-Core's data parallelism: weights, gradients and optimizer state are
    sharded over the data-parallel ranks. See docs/optimizers.md.
    """
