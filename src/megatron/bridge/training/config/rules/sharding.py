# SPDX-License-Identifier: Apache-2.0
"""Rules on fully sharded data parallelism: combinations that were not tested against one process are refused."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.bridge.backends.fsdp import megatron_fsdp
from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.training.config.run_config import RunConfig

# settings of Megatron-Core's own data parallelism that say what PyTorch's does
_TORCH = {
    "grad_reduce_in_fp32": (True,),
    "use_distributed_optimizer": (False,),
    "data_parallel_sharding_strategy": (megatron_fsdp.NO_SHARD,),
}
# and those of Megatron-FSDP with which it was compared
_MEGATRON = {
    "use_megatron_fsdp": (True,),
    "data_parallel_sharding_strategy": megatron_fsdp.STRATEGIES,
    "grad_reduce_in_fp32": (True,),
    "use_distributed_optimizer": (True,),
    "overlap_grad_reduce": (True,),
    "overlap_param_gather": (True,),
}
_INSTANCES = "num_distributed_optimizer_instances"
_SIZES = ("bucket_size", "suggested_communication_unit_size")


def fsdp2_ignores_ddp_settings(config: RunConfig, world_size: int) -> Iterator[str]:
    """FSDP2 would ignore the settings of Megatron-Core's data parallelism."""
    if not config.dist.use_torch_fsdp2:
        return
    unused = _others(
        config.ddp, _TORCH | {_INSTANCES: (getattr(config.ddp, _INSTANCES),)}
    )  # copies of the shards
    wrong = [
        f"ddp.{name}={value} has no effect, set it to {usual}" for name, value, usual in unused
    ]
    name = config.optimizer.optimizer
    if name not in ("adam", "sgd"):
        wrong.append(f"optimizer.optimizer={name} must be adam or sgd, which were tested on shards")
    yield from _refused("dist.use_torch_fsdp2", wrong)


def megatron_fsdp_settings_are_supported(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-FSDP ignores some settings, and others are untested."""
    if not config.ddp.use_megatron_fsdp:
        return
    allowed = _MEGATRON | {name: (getattr(config.ddp, name),) for name in (*_SIZES, _INSTANCES)}
    wrong = [
        f"ddp.{name}={value} must be {usual}" for name, value, usual in _others(config.ddp, allowed)
    ]
    # finalize_model_grads.py:_allreduce_embedding_grad of Megatron-Core 0.19.2 adds up the ``_local_tensor`` of both
    # stages, which have different rows, and assigns it as the gradient of the whole weight
    stages = config.model.pipeline_model_parallel_size
    if stages > 1 and config.model.share_embeddings_and_output_weights:
        wrong.append(
            f"model.pipeline_model_parallel_size={stages} must be 1 with tied embeddings, whose gradients "
            "Megatron-Core cannot add up over stages (dist.use_torch_fsdp2=true can)"
        )
    if stages > 1 and config.model.mtp_num_layers:
        wrong.append(
            f"model.pipeline_model_parallel_size={stages} must be 1 with model.mtp_num_layers, whose embedding's "
            "gradients Megatron-Core cannot add up over stages (dist.use_torch_fsdp2=true can)"
        )
    if config.optimizer.log_num_zeros_in_grad:
        wrong.append(
            "optimizer.log_num_zeros_in_grad must be false (it would count tensor-parallel copies)"
        )
    if config.model.init_model_with_meta_device:
        wrong.append("model.init_model_with_meta_device must be false")
    yield from _refused("ddp.use_megatron_fsdp", wrong)


def _others(ddp: Any, allowed: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any, str]]:
    """Settings that are neither default nor ``allowed``: name, value, and what to set."""
    usual = {
        field.name: allowed.get(field.name, (field.default,)) for field in dataclasses.fields(ddp)
    }
    return [
        (name, getattr(ddp, name), " or ".join(map(str, values)))
        for name, values in usual.items()
        if getattr(ddp, name) not in values
    ]


def _refused(key: str, why: list[str]) -> Iterator[str]:
    if resolve_backend() == "transformer_engine":  # its optimizer is used by layers of torch, too
        why = [*why, "it is untested with Transformer Engine, which is installed"]
    if why:
        yield f"{key}=True: {'; '.join(why)}; or use ddp.use_distributed_optimizer=true instead"
