# SPDX-License-Identifier: Apache-2.0
"""Who shards the optimizer state, and what Megatron-FSDP shards."""

from megatron.bridge.backends.fsdp import megatron_fsdp
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig


def derive_sharding(config: RunConfig, world_size: int, findings: Findings) -> None:
    """Choose the distributed optimizer and the strategy of Megatron-FSDP."""
    optimizer, ddp, name = config.optimizer, config.ddp, "use_distributed_optimizer"
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
    findings.agree(config.optimizer, "optimizer", name, config.ddp.overlap_param_gather, f"ddp.{name}")


def _uses_distributed_optimizer(config: RunConfig, world_size: int) -> bool:
    for chosen in (config.ddp.use_distributed_optimizer, config.optimizer.use_distributed_optimizer):
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
