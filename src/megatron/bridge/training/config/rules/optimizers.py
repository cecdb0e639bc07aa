# SPDX-License-Identifier: Apache-2.0
"""Rules on the optimizer and on how its state is sharded."""

import dataclasses
from collections.abc import Iterator

import torch

from megatron.bridge.training.config.blocks.optimizer import STATE_NAMES
from megatron.bridge.training.config.rules.experts import expert_ranks
from megatron.bridge.training.config.rules.values import divisors, near, unmet
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import did_you_mean

MUON_TP_MODES = ("duplicated", "distributed", "blockwise")
_PREFIXES = ("sgd_", "muon_", "lion_", "soap_", "adaptive_muon_")
_IMPOSSIBLE = {
    # emerging_optimizers 0.3.0, adaptive_muon.py, ``_apply_muon_scale``: reads ``self.scale_mode``
    "adaptive_muon": (
        "Megatron-Core 0.19.2's TensorParallelAdaptiveMuon never sets scale_mode, which its step reads, so the first "
        "step fails: use muon"
    ),
    # emerging_optimizers 0.3.0, soap.py, ``_init_group``: L and R are square, Q_L and Q_R their eigenvectors
    "soap": (
        "it preconditions the shard of each tensor-parallel rank by itself, with square matrices of the shard's sides, "
        "which a checkpoint for any parallel sizes cannot hold: use muon"
    ),
}
_OTHER_NAMES = {"adamw": "adam (it is AdamW: weight decay is apart from the gradient)"}


def optimizer_is_known(config: RunConfig, world_size: int) -> Iterator[str]:
    """Checkpoints support the state of these optimizers only."""
    name = str(config.optimizer.optimizer)
    if name in STATE_NAMES:
        return
    if name.removeprefix("dist_") in _IMPOSSIBLE:
        yield f"optimizer.optimizer={name}: {_IMPOSSIBLE[name.removeprefix('dist_')]}"
        return
    if name == "dist_muon":
        yield (
            "optimizer.optimizer=dist_muon: use muon with "
            "optimizer.use_layer_wise_distributed_optimizer=true"
        )
        return
    known_name = _OTHER_NAMES.get(name.lower().replace("_torch", ""))
    hint = f": use {known_name}" if known_name else did_you_mean(name, STATE_NAMES)
    yield f"optimizer.optimizer={name} is not supported{hint or f': use {" or ".join(STATE_NAMES)}'}"


def muon_fits_tensor_parallelism(config: RunConfig, world_size: int) -> Iterator[str]:
    """Muon needs whole matrices, which it gathers over tensor-parallel ranks but not over expert ones."""
    mode = config.optimizer.muon_tp_mode
    size = config.model.expert_tensor_ranks
    if config.optimizer.optimizer != "muon":
        return
    if config.model.num_moe_experts and size > 1:
        yield (
            f"model.expert_tensor_parallel_size={size} with muon: muon does not gather the shards of an expert: "
            "set model.expert_tensor_parallel_size=1"
        )
    if mode not in MUON_TP_MODES:
        yield f"optimizer.muon_tp_mode={mode}: use one of {', '.join(MUON_TP_MODES)}"


def qk_clip_has_whole_groups(config: RunConfig, world_size: int) -> Iterator[str]:
    """QK clipping scales the queries and keys of a group, which one rank has."""
    model = config.model
    tensor = model.tensor_model_parallel_size
    groups = model.padded_heads[1]
    if model.qk_clip and not model.multi_latent_attention and groups % tensor:
        yield (
            f"model.qk_clip=True with model.tensor_model_parallel_size={tensor}, which does not divide "
            f"model.num_query_groups={groups}: use a divisor"
        )


def precise_optimizer_is_stored(config: RunConfig, world_size: int) -> Iterator[str]:
    """Narrower dtypes have a scale for each rank's shard, which a checkpoint for any parallel sizes cannot hold."""
    optimizer = config.optimizer
    # the optimizers of an offloaded state know fp32 only
    dtypes = (
        (torch.float32,) if optimizer.optimizer_cpu_offload else (torch.float32, torch.bfloat16)
    )
    legal = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    needs = {
        f"optimizer.exp_avg_dtype={legal}": optimizer.exp_avg_dtype in dtypes,
        f"optimizer.exp_avg_sq_dtype={legal}": optimizer.exp_avg_sq_dtype in dtypes,
    }
    if optimizer.use_precision_aware_optimizer:
        yield from unmet("optimizer.use_precision_aware_optimizer=True", needs)


def optimizer_settings_are_used(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of another optimizer would be ignored. Adam's are exempt: recipes set them, and Muon uses them."""
    optimizer = config.optimizer
    used = {f"{optimizer.optimizer}_"}
    if optimizer.optimizer == "muon":
        used.add(f"{optimizer.muon_scalar_optimizer}_")
    other_prefixes = tuple(prefix for prefix in _PREFIXES if prefix not in used)
    wrong = [
        f"optimizer.{entry.name}={value}"
        for entry in dataclasses.fields(optimizer)
        if entry.name.startswith(other_prefixes)
        and (value := getattr(optimizer, entry.name)) != entry.default
    ]
    if wrong:
        yield f"{', '.join(wrong)} has no effect with optimizer.optimizer={optimizer.optimizer}: remove it"


def optimizer_instances_divide_replicas(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each instance of the distributed optimizer has the same number of ranks, also where experts need more."""
    instances = config.ddp.num_distributed_optimizer_instances
    replicas = config.data_parallel_size(world_size) * config.model.context_parallel_size
    counts = {"share the optimizer's state": replicas}
    if config.model.num_moe_experts:
        counts["hold the same experts"] = world_size // expert_ranks(config)
    for ranks_phrase, count in counts.items():
        if instances != 1 and (instances < 1 or count % instances):
            yield (
                f"ddp.num_distributed_optimizer_instances={instances} does not divide the {count} ranks that "
                f"{ranks_phrase}: use {near(instances, divisors(count))}"
            )
