# SPDX-License-Identifier: Apache-2.0
"""Rules on the optimizer and on how its state is sharded."""

import dataclasses

from megatron.bridge.training.config.blocks.optimizer import STATE_NAMES
from megatron.bridge.training.config.rules.nearest_values import divisors, near
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import did_you_mean

MUON_TP_MODES = ("duplicated", "distributed", "blockwise")
_PREFIXES = ("sgd_", "muon_", "lion_", "soap_", "adaptive_muon_")
_OTHER_NAMES = {"adamw": "adam (it is AdamW: weight decay is apart from the gradient)"}


def optimizer_is_known(config: RunConfig, world_size: int) -> str | None:
    """Checkpoints support the state of these optimizers only."""
    name = config.optimizer.optimizer
    if name in STATE_NAMES:
        return None
    other = _OTHER_NAMES.get(str(name).lower().replace("_torch", ""))
    hint = (
        f": use {other}" if other else did_you_mean(str(name), STATE_NAMES) or f": use {' or '.join(STATE_NAMES)}"
    )
    return f"optimizer.optimizer={name} is not supported{hint}"


def only_adam_is_sharded(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core shards only Adam, and would refuse after building the model."""
    name = config.optimizer.optimizer
    if name == "adam" or not config.ddp.use_distributed_optimizer:
        return None
    return (
        f"ddp.use_distributed_optimizer=True works with adam only, not with optimizer.optimizer={name}: set "
        "ddp.use_distributed_optimizer=false"
    )


def optimizer_state_can_be_saved(config: RunConfig, world_size: int) -> str | None:
    """Checkpoints do not support these kinds of optimizer state."""
    wrong = [
        f"optimizer.{name}=True"
        for name in (
            "use_precision_aware_optimizer",
            "optimizer_cpu_offload",
            "use_layer_wise_distributed_optimizer",
        )
        if getattr(config.optimizer, name)
    ]
    return f"{', '.join(wrong)}: not supported, because the state cannot be saved: unset" if wrong else None


def muon_needs_bf16(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core's Muon has no loss scaling."""
    if config.optimizer.optimizer != "muon" or not config.optimizer.fp16:
        return None
    return "optimizer.optimizer=muon does not support the loss scaling of fp16: use mixed_precision=bf16_mixed"


def muon_fits_tensor_parallelism(config: RunConfig, world_size: int) -> str | None:
    """Muon needs whole matrices, which it gathers over tensor-parallel ranks but not over expert ones."""
    optimizer, model = config.optimizer, config.model
    if optimizer.optimizer != "muon":
        return None
    if model.num_moe_experts and model.expert_tensor_ranks > 1:
        return (
            f"model.expert_tensor_parallel_size={model.expert_tensor_ranks} with muon: "
            "muon does not gather the shards of an expert: set model.expert_tensor_parallel_size=1"
        )
    if optimizer.muon_tp_mode in MUON_TP_MODES:
        return None
    return f"optimizer.muon_tp_mode={optimizer.muon_tp_mode}: use one of {', '.join(MUON_TP_MODES)}"


def optimizer_settings_are_used(config: RunConfig, world_size: int) -> str | None:
    """Settings of another optimizer would be ignored. Adam's are exempt: recipes set them, and Muon uses them."""
    optimizer = config.optimizer
    others = tuple(prefix for prefix in _PREFIXES if prefix != f"{optimizer.optimizer}_")
    wrong = [
        f"optimizer.{entry.name}={value}"
        for entry in dataclasses.fields(optimizer)
        if entry.name.startswith(others) and (value := getattr(optimizer, entry.name)) != entry.default
    ]
    if not wrong:
        return None
    return f"{', '.join(wrong)} has no effect with optimizer.optimizer={optimizer.optimizer}: remove it"


def optimizer_instances_divide_replicas(config: RunConfig, world_size: int) -> str | None:
    """Each instance of the distributed optimizer has the same number of ranks."""
    instances = config.ddp.num_distributed_optimizer_instances
    replicas = config.data_parallel_size(world_size) * config.model.context_parallel_size
    if instances == 1 or (instances > 0 and replicas % instances == 0):
        return None
    return (
        f"ddp.num_distributed_optimizer_instances={instances} does not divide the {replicas} ranks that share the "
        f"optimizer's state: use {near(instances, divisors(replicas))}"
    )


def optimizer_instances_divide_expert_replicas(config: RunConfig, world_size: int) -> str | None:
    """Experts have fewer replicas, which the instances must divide too."""
    model, instances = config.model, config.ddp.num_distributed_optimizer_instances
    if instances == 1 or not model.num_moe_experts:
        return None
    expert_tensor = model.expert_tensor_ranks
    ranks = expert_tensor * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    replicas = world_size // ranks
    if instances > 0 and replicas % instances == 0:
        return None
    return (
        f"ddp.num_distributed_optimizer_instances={instances} does not divide the {replicas} ranks that hold "
        f"the same experts: use {near(instances, divisors(replicas))}"
    )


def optimizer_instances_share_state(config: RunConfig, world_size: int) -> str | None:
    """Several instances need the distributed optimizer."""
    ddp = config.ddp
    if ddp.num_distributed_optimizer_instances == 1:
        return None
    if ddp.reduce_scatter_with_fp32_accumulation:
        return (
            f"ddp.num_distributed_optimizer_instances={ddp.num_distributed_optimizer_instances} with "
            "ddp.reduce_scatter_with_fp32_accumulation=True: switch the second off, or use 1 instance"
        )
    if ddp.use_distributed_optimizer:
        return None
    return (
        f"ddp.num_distributed_optimizer_instances={ddp.num_distributed_optimizer_instances} needs the distributed "
        "optimizer: set ddp.use_distributed_optimizer=true, or 1 instance"
    )
