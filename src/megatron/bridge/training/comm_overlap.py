# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Communication while something is computed, in one block: what is not set follows from the layout.

The block owns no switch: each is a field of ``model``, ``ddp`` or ``optimizer``, and what was switched on there
stays. Without the block nothing is derived.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


@dataclass
class CommOverlapConfig:
    """Which communication goes on beside computation; None is derived.

    Attributes:
        tp_comm_overlap: Matrix products in parts, each sent while the next is computed, by Transformer Engine;
            None is off, because it takes user buffers, and with them memory and set-up time.
        tp_comm_overlap_cfg: YAML file with Transformer Engine's settings of each product.
        tp_comm_bootstrap_backend: What the user buffers are set up over.
        overlap_p2p_comm: Activations between pipeline stages; None: on with virtual stages.
        batch_p2p_comm: Messages to both neighbours as one; None: where they are not overlapped.
        overlap_grad_reduce: Gradients bucket by bucket during the backward pass; None: on with more than one rank
            that holds the same weights.
        overlap_param_gather: Weights bucket by bucket during the forward pass; None: on with a sharded optimizer.
        align_param_gather: All pipeline stages gather at the same time; None: on with virtual stages.
        bucket_size: Parameters in a bucket; None: Megatron-Core's choice.
        overlap_moe_expert_parallel_comm: Tokens on their way to experts beside the pass of another microbatch;
            None is off, because it keeps activations of two.
        delay_wgrad_compute: Gradients of weights later, to fill the time of those messages; None is off.
        defer_embedding_wgrad_compute: The gradient of the output layer while the pipeline drains; None is off.
        wgrad_deferral_limit: For so many microbatches, 0 for all.
    """

    tp_comm_overlap: bool | None = None
    tp_comm_overlap_cfg: str | None = None
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = "nccl"
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int = 0


def derive_overlap(config: "ConfigContainer", world_size: int) -> list[str]:
    """Fill in the block and the switches that it stands for; nothing without the block.

    The optimizer's sharding must be decided.

    Returns:
        A sentence for each switch that is on where the block says off.
    """
    overlap, problems = config.comm_overlap, list[str]()
    if overlap is None:
        return problems
    for owner, name, derived in _switches(config, overlap, world_size):
        key = f"{'ddp' if owner is config.ddp else 'model'}.{name}"
        wanted = getattr(overlap, name)
        if wanted is False and getattr(owner, name):
            problems.append(f"comm_overlap.{name}=False contradicts {key}=True: remove one of them")
            continue
        value = (derived or bool(getattr(owner, name))) if wanted is None else wanted
        setattr(overlap, name, value)
        setattr(owner, name, value)
    _batched_messages(config, overlap)
    config.ddp.delay_wgrad_compute = config.model.delay_wgrad_compute
    if overlap.bucket_size is not None:
        config.ddp.bucket_size = overlap.bucket_size
    if overlap.defer_embedding_wgrad_compute:
        config.model.wgrad_deferral_limit = overlap.wgrad_deferral_limit
    if overlap.tp_comm_overlap:
        config.model.tp_comm_bootstrap_backend = overlap.tp_comm_bootstrap_backend
    return problems


def _switches(
    config: "ConfigContainer", overlap: CommOverlapConfig, world_size: int
) -> list[tuple[Any, str, bool]]:
    """Where each switch is, its name there and in the block, and what follows from the layout."""
    model, ddp = config.model, config.ddp
    replicas = config.data_parallel_size(world_size) * model.context_parallel_size
    virtual = model.pipeline_model_parallel_size > 1 and (model.virtual_pipeline_model_parallel_size or 1) > 1
    # a fully sharded model has no buffers to reduce: PyTorch overlaps by itself
    reduces = replicas > 1 and not config.dist.use_torch_fsdp2 and overlap.overlap_grad_reduce is not False
    gathers = reduces and bool(ddp.use_distributed_optimizer) and overlap.overlap_param_gather is not False
    return [
        (model, "tp_comm_overlap", False),
        (model, "overlap_p2p_comm", virtual and overlap.batch_p2p_comm is not True),
        (ddp, "overlap_grad_reduce", reduces),
        (ddp, "overlap_param_gather", gathers),
        (ddp, "align_param_gather", gathers and virtual),
        (model, "overlap_moe_expert_parallel_comm", False),
        (model, "delay_wgrad_compute", False),
        (model, "defer_embedding_wgrad_compute", False),
    ]


def _batched_messages(config: "ConfigContainer", overlap: CommOverlapConfig) -> None:
    """Megatron-Core's schedule takes one of the two, and batches by default."""
    if overlap.batch_p2p_comm is None:
        overlap.batch_p2p_comm = not overlap.overlap_p2p_comm
    config.model.batch_p2p_comm = overlap.batch_p2p_comm
