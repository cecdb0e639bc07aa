# SPDX-License-Identifier: Apache-2.0
"""Sharding of the optimizer and communication that overlaps with computation, derived from the layout."""

from typing import Any

from megatron.bridge.backends.fsdp import megatron_fsdp
from megatron.bridge.training.config.blocks.distributed import CommOverlapConfig
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig


def derive_sharding(config: RunConfig, world_size: int, findings: Findings) -> None:
    """Choose the distributed optimizer and the strategy of Megatron-FSDP."""
    optimizer = config.optimizer
    ddp = config.ddp
    name = "use_distributed_optimizer"
    chosen = _uses_distributed_optimizer(config, world_size)
    findings.agree(ddp, "ddp", name, chosen, f"optimizer.{name}")
    findings.agree(optimizer, "optimizer", name, chosen, f"ddp.{name}")
    if ddp.use_megatron_fsdp:  # it reduces and gathers while it computes
        ddp.overlap_grad_reduce = ddp.overlap_param_gather = True
    if ddp.data_parallel_sharding_strategy is None:
        ddp.data_parallel_sharding_strategy = (
            megatron_fsdp.SHARD_WEIGHTS if ddp.use_megatron_fsdp else megatron_fsdp.NO_SHARD
        )


def copy_param_gather(config: RunConfig, findings: Findings) -> None:
    """The optimizer has a copy of the switch."""
    name = "overlap_param_gather"
    findings.agree(
        config.optimizer, "optimizer", name, config.ddp.overlap_param_gather, f"ddp.{name}"
    )


def _uses_distributed_optimizer(config: RunConfig, world_size: int) -> bool:
    for chosen in (
        config.ddp.use_distributed_optimizer,
        config.optimizer.use_distributed_optimizer,
    ):
        if chosen is not None:
            return chosen
    if config.optimizer.optimizer != "adam":
        return False  # Megatron-Core shards the state by intervals of elements, which have no shape
    if config.dist.use_torch_fsdp2:
        return False  # FSDP2 shards the state with the weights
    if config.ddp.use_megatron_fsdp:
        return True  # it updates the shards
    # context-parallel ranks hold the same weights, so they share the state like data-parallel ones
    return config.data_parallel_size(world_size) * config.model.context_parallel_size > 1


def derive_overlap(config: RunConfig, world_size: int, findings: Findings) -> None:
    """Fill in the block and the switches that it stands for; the optimizer's sharding must be decided before.

    A switch that is on where the block says off is a problem.
    """
    overlap = config.comm_overlap
    if overlap is None:
        return
    for owner, name, derived in _switches(config, overlap, world_size):
        key = f"{'ddp' if owner is config.ddp else 'model'}.{name}"
        requested = getattr(overlap, name)
        if requested is False and getattr(owner, name):
            findings.problems.append(
                f"comm_overlap.{name}=False contradicts {key}=True: remove one of them"
            )
            continue
        value = (derived or bool(getattr(owner, name))) if requested is None else requested
        setattr(overlap, name, value)
        setattr(owner, name, value)
    if (
        overlap.batch_p2p_comm is None
    ):  # Megatron-Core's schedule takes one of the two, and batches by default
        overlap.batch_p2p_comm = not overlap.overlap_p2p_comm
    config.model.batch_p2p_comm = overlap.batch_p2p_comm
    config.ddp.delay_wgrad_compute = config.model.delay_wgrad_compute
    if overlap.bucket_size is not None:
        config.ddp.bucket_size = overlap.bucket_size
    if overlap.defer_embedding_wgrad_compute:
        config.model.wgrad_deferral_limit = overlap.wgrad_deferral_limit
    if overlap.tp_comm_overlap:
        config.model.tp_comm_bootstrap_backend = overlap.tp_comm_bootstrap_backend


def _switches(
    config: RunConfig, overlap: CommOverlapConfig, world_size: int
) -> list[tuple[Any, str, bool]]:
    """Where each switch is, its name there and in the block, and what follows from the layout."""
    model = config.model
    ddp = config.ddp
    replicas = config.data_parallel_size(world_size) * model.context_parallel_size
    virtual = (
        model.pipeline_model_parallel_size > 1
        and (model.virtual_pipeline_model_parallel_size or 1) > 1
    )
    # a fully sharded model has no buffers to reduce: PyTorch overlaps by itself
    reduces = (
        replicas > 1
        and not config.dist.use_torch_fsdp2
        and overlap.overlap_grad_reduce is not False
    )
    gathers = (
        reduces
        and bool(ddp.use_distributed_optimizer)
        and overlap.overlap_param_gather is not False
    )
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


def overlap_interleaved_messages(config: RunConfig, findings: Findings) -> None:
    """Two stages with virtual pipelining must overlap their messages.

    With two stages the previous and the next rank are one process, and batched sends match receives in the order
    of posting: the wrong activations arrive, without an error (loss off by 3e-3, gradient norm by 5e-2).
    """
    model = config.model
    virtual = (model.virtual_pipeline_model_parallel_size or 1) > 1
    if virtual and model.pipeline_model_parallel_size == 2 and not model.overlap_p2p_comm:
        model.overlap_p2p_comm = True
        model.batch_p2p_comm = False
        findings.notes.append(
            "model.overlap_p2p_comm=True and model.batch_p2p_comm=False are used: batched messages between two "
            "pipeline stages with virtual stages arrive in the wrong order"
        )
