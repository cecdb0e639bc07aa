# SPDX-License-Identifier: Apache-2.0
"""Configs for models that another program trains."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.training.config import DistributedDataParallelConfig

_MEGATRON_FSDP = {
    "use_megatron_fsdp": True,
    "use_distributed_optimizer": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "check_for_nan_in_grad": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


def create_ddp_config(
    wrap_with_ddp: bool = True,
    use_distributed_optimizer: bool = True,
    use_megatron_fsdp: bool = False,
    overrides: Mapping[str, Any] | None = None,
    finalize: bool = True,
) -> DistributedDataParallelConfig | None:
    """The data-parallel settings for ``provide_distributed_model``; without ``wrap_with_ddp``, None.

    Megatron-FSDP shards the weights, too, and always the optimizer's state. ``overrides`` win over the other
    arguments, and ``finalize`` fills in the fields that are None.
    """
    if not wrap_with_ddp:
        return None
    values: dict[str, Any] = {"use_distributed_optimizer": use_distributed_optimizer}
    values |= _MEGATRON_FSDP if use_megatron_fsdp else {}
    config = DistributedDataParallelConfig(**{**values, **(overrides or {})})
    if finalize:
        config.finalize()
    return config
