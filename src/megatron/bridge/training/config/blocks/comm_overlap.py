# SPDX-License-Identifier: Apache-2.0
"""Communication that overlaps with computation.

The block owns no switch: each is a field of ``model``, ``ddp`` or ``optimizer``, and a switch that is on there
stays on. Without the block nothing is derived.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass
class CommOverlapConfig:
    """Communication that overlaps with computation. A field that is None is derived from the layout."""

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
