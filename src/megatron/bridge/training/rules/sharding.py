# SPDX-License-Identifier: Apache-2.0
"""Rules on fully sharded data parallelism: what was not shown to learn what one process learns is refused."""

import dataclasses
from typing import Any

from megatron.bridge.backends.layer_specs import resolve_backend
from megatron.bridge.training.config import ConfigContainer

_KEY = "dist.use_torch_fsdp2=True"
# derived settings of Megatron-Core's own data parallelism that say what this one does
_HOLDS = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": False}


def no_megatron_fsdp(config: ConfigContainer, world_size: int) -> str | None:
    """It makes its device from a CUDA index, and its optimizer is described to one other format only."""
    names = [name for name in ("use_megatron_fsdp", "use_custom_fsdp") if getattr(config.ddp, name)]
    if not names:
        return None
    return (
        f"ddp.{names[0]}=True is not available: it runs on CUDA devices alone, and saves only in a format "
        "(fsdp_dtensor) that other layouts cannot read: use dist.use_torch_fsdp2=true or "
        "ddp.use_distributed_optimizer=true"
    )


def fsdp2_cuts_dense_models(config: ConfigContainer, world_size: int) -> str | None:
    """Pipelines, experts and adapters gather and reduce otherwise; the rest was not compared with one process."""
    model = config.model
    wrong: dict[str, tuple[Any, str]] = {
        "model.pipeline_model_parallel_size": (model.pipeline_model_parallel_size > 1, "1"),
        "model.num_moe_experts": (model.num_moe_experts, "null"),
        "model.mtp_num_layers": (model.mtp_num_layers, "null"),
        "model.hybrid_override_pattern": (getattr(model, "hybrid_override_pattern", None), "null"),
        "model.experimental_attention_variant": (model.experimental_attention_variant, "null"),
        "model.heterogeneous_block_specs": (model.heterogeneous_block_specs, "false"),
        "model.fp16": (model.fp16, "false (mixed_precision=bf16_mixed)"),
        "model.fp8": (model.fp8, "null"),
        "model.fp4": (model.fp4, "null"),
        "model.gradient_accumulation_fusion": (model.gradient_accumulation_fusion, "false"),
        "model.cpu_offloading": (model.cpu_offloading, "false"),
        "rng.data_parallel_random_init": (config.rng.data_parallel_random_init, "false"),
        "train.frozen": (config.train.frozen, "[]"),
        "peft": (config.peft, "null"),
        "distill": (config.distill, "null"),
        "inprocess_restart": (config.inprocess_restart and config.inprocess_restart.enabled, "null"),
    }
    why = [f"{key} must be {value}" for key, (found, value) in wrong.items() if found]
    if resolve_backend() == "transformer_engine":  # its optimizer is used by layers of torch, too
        why.append("it was not shown with Transformer Engine, which is installed here")
    return _refused(config, why)


def fsdp2_replaces_data_parallelism(config: ConfigContainer, world_size: int) -> str | None:
    """Settings of Megatron-Core's own would be ignored; weights, state and gradients are cut already."""
    wrong = [
        f"ddp.{field.name}={value} has no effect, set it to {_HOLDS.get(field.name, field.default)}"
        for field in dataclasses.fields(config.ddp)
        if (value := getattr(config.ddp, field.name)) not in (field.default, _HOLDS.get(field.name, False))
    ]
    if config.optimizer.optimizer == "muon":
        wrong.append("optimizer.optimizer=muon must be adam or sgd, which need no whole matrices")
    return _refused(config, wrong)


def _refused(config: ConfigContainer, why: list[str]) -> str | None:
    if not (config.dist.use_torch_fsdp2 and why):
        return None
    return f"{_KEY}: {'; '.join(why)}; or use ddp.use_distributed_optimizer=true instead"
