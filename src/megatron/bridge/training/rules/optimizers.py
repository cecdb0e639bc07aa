# SPDX-License-Identifier: Apache-2.0
"""Rules on the optimizer and on how ranks share its state, the gradients and the weights."""

import dataclasses

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optimizer import STATE_NAMES
from megatron.bridge.training.rules.words import divisors, near
from megatron.bridge.utils.errors import did_you_mean

MUON_TP_MODES = ("duplicated", "distributed", "blockwise")
_PREFIXES = ("sgd_", "muon_", "lion_", "soap_", "adaptive_muon_")
_OTHER_NAMES = {"adamw": "adam (it is AdamW: weight decay is apart from the gradient)"}


def optimizer_is_known(config: ConfigContainer, world_size: int) -> str | None:
    """Only those whose state can be saved."""
    name = config.optimizer.optimizer
    if name in STATE_NAMES:
        return None
    other = _OTHER_NAMES.get(str(name).lower().replace("_torch", ""))
    hint = (
        f": use {other}" if other else did_you_mean(str(name), STATE_NAMES) or f": use {' or '.join(STATE_NAMES)}"
    )
    return f"optimizer.optimizer={name} is not supported{hint}"


def only_adam_is_sharded(config: ConfigContainer, world_size: int) -> str | None:
    """The state is cut into flat intervals; Megatron-Core finds out when the model is there."""
    name = config.optimizer.optimizer
    if name == "adam" or not config.ddp.use_distributed_optimizer:
        return None
    return (
        f"ddp.use_distributed_optimizer=True works with adam only, not with optimizer.optimizer={name}: set "
        "ddp.use_distributed_optimizer=false"
    )


def state_can_be_saved(config: ConfigContainer, world_size: int) -> str | None:
    """Kinds of state that a checkpoint does not know."""
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


def half_precision_fits_optimizer(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core's Muon has no loss scaling."""
    if config.optimizer.optimizer != "muon" or not config.optimizer.fp16:
        return None
    return "optimizer.optimizer=muon with fp16, which it does not scale losses for: use mixed_precision=bf16_mixed"


def muon_sees_whole_matrices(config: ConfigContainer, world_size: int) -> str | None:
    """A matrix that is cut over ranks is put together first, or updated as another one."""
    optimizer, model = config.optimizer, config.model
    if optimizer.optimizer != "muon":
        return None
    if model.num_moe_experts and (model.expert_tensor_parallel_size or 1) > 1:
        return (
            f"model.expert_tensor_parallel_size={model.expert_tensor_parallel_size} with muon: "
            "it does not put the parts of an expert together: set model.expert_tensor_parallel_size=1"
        )
    if optimizer.muon_tp_mode in MUON_TP_MODES:
        return None
    return f"optimizer.muon_tp_mode={optimizer.muon_tp_mode}: use one of {', '.join(MUON_TP_MODES)}"


def settings_are_of_this_optimizer(config: ConfigContainer, world_size: int) -> str | None:
    """Those of another one would be ignored; Adam's come with recipes, and Muon uses them, too."""
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


def clipping_is_a_norm(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core takes a negative one for none; 0 says so."""
    value = config.optimizer.clip_grad
    return f"optimizer.clip_grad={value}: use a norm above 0, or 0 for no clipping" if value < 0 else None


def momentum_is_below_one(config: ConfigContainer, world_size: int) -> str | None:
    """Averages that never forget do not converge, and Adam divides by one minus their weights."""
    names = {"adam": ("adam_beta1", "adam_beta2"), "sgd": ("sgd_momentum",), "muon": ("muon_momentum",)}
    wrong = [
        f"optimizer.{name}={getattr(config.optimizer, name)}"
        for name in names.get(config.optimizer.optimizer, ())
        if not 0 <= getattr(config.optimizer, name) < 1
    ]
    return f"{', '.join(wrong)}: must lie in [0, 1)" if wrong else None


def optimizer_instances_divide_replicas(config: ConfigContainer, world_size: int) -> str | None:
    """Each instance of the sharded optimizer has equally many ranks."""
    instances = config.ddp.num_distributed_optimizer_instances
    replicas = config.data_parallel_size(world_size) * config.model.context_parallel_size
    if instances == 1 or (instances > 0 and replicas % instances == 0):
        return None
    return (
        f"ddp.num_distributed_optimizer_instances={instances} does not divide the {replicas} ranks that share the "
        f"optimizer's state: use {near(instances, divisors(replicas))}"
    )


def optimizer_instances_divide_expert_replicas(config: ConfigContainer, world_size: int) -> str | None:
    """Experts have fewer replicas, which the instances share out, too."""
    model, instances = config.model, config.ddp.num_distributed_optimizer_instances
    if instances == 1 or not model.num_moe_experts:
        return None
    expert_tensor = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    ranks = expert_tensor * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    replicas = world_size // ranks
    if instances > 0 and replicas % instances == 0:
        return None
    return (
        f"ddp.num_distributed_optimizer_instances={instances} does not divide the {replicas} ranks that hold "
        f"the same experts: use {near(instances, divisors(replicas))}"
    )


def optimizer_instances_share_state(config: ConfigContainer, world_size: int) -> str | None:
    """Several groups of ranks, each with a whole optimizer, are sharding with another number."""
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
