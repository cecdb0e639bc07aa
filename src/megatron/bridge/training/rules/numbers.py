# SPDX-License-Identifier: Apache-2.0
"""Rules on what is computed: activations, the optimizer and how its state is shared."""

import torch.nn.functional as F

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optimizer import STATE_NAMES
from megatron.bridge.training.rules.words import divisors, near
from megatron.bridge.utils.errors import did_you_mean

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


def exact_gelu_is_not_fused(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core's fused GELU is the tanh approximation: up to 5e-4 off, without an error."""
    model = config.model
    if not model.bias_activation_fusion or model.activation_func is not F.gelu:
        return None
    return (
        "model.bias_activation_fusion=True computes GELU by its tanh approximation, and "
        "model.activation_func=torch.nn.functional.gelu is the exact one: set model.bias_activation_fusion=false"
    )


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


def heads_divide_width(config: ConfigContainer, world_size: int) -> str | None:
    """Unless heads have a width of their own."""
    model = config.model
    heads = model.unpadded_heads[0]
    if model.kv_channels is not None or model.multi_latent_attention or model.hidden_size % heads == 0:
        return None
    return (
        f"model.num_attention_heads={heads} does not divide model.hidden_size={model.hidden_size}: use "
        f"{near(heads, divisors(model.hidden_size))}, or set model.kv_channels"
    )
