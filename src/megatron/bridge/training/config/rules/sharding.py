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
_SIZES = ("bucket_size", "suggested_communication_unit_size")


def sharding_strategy_needs_megatron_fsdp(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without Megatron-FSDP the strategy would be ignored."""
    strategy = config.ddp.data_parallel_sharding_strategy
    if config.ddp.use_custom_fsdp:
        yield "ddp.use_custom_fsdp=True is the old name of ddp.use_megatron_fsdp: use that"
    elif not config.ddp.use_megatron_fsdp and strategy not in (None, megatron_fsdp.NO_SHARD):
        yield (
            f"ddp.data_parallel_sharding_strategy={strategy} has no effect without ddp.use_megatron_fsdp=true: "
            "set both, or remove it"
        )


def fsdp_needs_supported_model(config: RunConfig, world_size: int) -> Iterator[str]:
    """FSDP has one chunk for each rank. Other features that are refused are untested."""
    model, distill = config.model, config.distill
    wrong: dict[str, tuple[Any, str]] = {
        "model.pipeline_model_parallel_size": (model.pipeline_model_parallel_size > 1, "1"),
        "model.hybrid_override_pattern": (getattr(model, "hybrid_override_pattern", None), "null"),
        "model.experimental_attention_variant": (model.experimental_attention_variant, "null"),
        "model.heterogeneous_block_specs": (model.heterogeneous_block_specs, "false"),
        "model.fp16": (model.fp16, "false (mixed_precision=bf16_mixed)"),
        "model.fp8": (model.fp8, "null"),
        "model.fp4": (model.fp4, "null"),
        "model.gradient_accumulation_fusion": (model.gradient_accumulation_fusion, "false"),
        "model.cpu_offloading": (model.cpu_offloading, "false"),
        "optimizer.optimizer_cpu_offload": (config.optimizer.optimizer_cpu_offload, "false"),
        "optimizer.use_precision_aware_optimizer": (config.optimizer.use_precision_aware_optimizer, "false"),
        # projections to the teacher's width are used outside of the forward pass, where weights are cut
        "distill.hidden_layers": (distill and distill.hidden_layers, "{} (with hidden_weight=0)"),
        "rng.data_parallel_random_init": (config.rng.data_parallel_random_init, "false"),
        "inprocess_restart": (config.inprocess_restart and config.inprocess_restart.enabled, "null"),
    }
    why = [f"{key} must be {value}" for key, (found, value) in wrong.items() if found]
    if resolve_backend() == "transformer_engine":  # its optimizer is used by layers of torch, too
        why.append("it is untested with Transformer Engine, which is installed")
    yield from _refused(config, why)


def fsdp2_ignores_ddp_settings(config: RunConfig, world_size: int) -> Iterator[str]:
    """FSDP2 would ignore the settings of Megatron-Core's data parallelism."""
    if not config.dist.use_torch_fsdp2:
        return
    others = _others(config.ddp, _TORCH)
    wrong = [f"ddp.{name}={value} has no effect, set it to {usual}" for name, value, usual in others]
    if config.optimizer.optimizer == "muon":
        wrong.append("optimizer.optimizer=muon must be adam or sgd, which work on shards")
    yield from _refused(config, wrong)


def megatron_fsdp_settings_are_supported(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-FSDP ignores some settings, and others are untested."""
    if not config.ddp.use_megatron_fsdp:
        return
    allowed = _MEGATRON | {name: (getattr(config.ddp, name),) for name in _SIZES}
    wrong = [f"ddp.{name}={value} must be {usual}" for name, value, usual in _others(config.ddp, allowed)]
    # its buffers have one group of replicas
    wrong += [f"model.{name} must be {value}" for name, value in _split_experts(config)]
    if config.optimizer.log_num_zeros_in_grad:
        wrong.append("optimizer.log_num_zeros_in_grad must be false (it would count tensor-parallel copies)")
    if config.model.init_model_with_meta_device:
        wrong.append("model.init_model_with_meta_device must be false")
    yield from _refused(config, wrong)


def _split_experts(config: RunConfig) -> Iterator[tuple[str, int]]:
    model = config.model
    tensor = model.tensor_model_parallel_size
    if model.num_moe_experts and model.expert_model_parallel_size > 1:
        yield "expert_model_parallel_size", 1
    if model.num_moe_experts and model.expert_tensor_ranks != tensor:
        yield "expert_tensor_parallel_size", tensor


def _others(ddp: Any, allowed: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any, str]]:
    """Settings that are neither default nor ``allowed``: name, value, and what to set."""
    usual = {field.name: allowed.get(field.name, (field.default,)) for field in dataclasses.fields(ddp)}
    return [
        (name, getattr(ddp, name), " or ".join(map(str, values)))
        for name, values in usual.items()
        if getattr(ddp, name) not in values
    ]


def _refused(config: RunConfig, why: list[str]) -> Iterator[str]:
    used = config.dist.use_torch_fsdp2, config.ddp.use_megatron_fsdp
    keys = [key for key, on in zip(("dist.use_torch_fsdp2", "ddp.use_megatron_fsdp"), used, strict=True) if on]
    if keys and why:
        yield f"{', '.join(keys)}=True: {'; '.join(why)}; or use ddp.use_distributed_optimizer=true instead"
