# SPDX-License-Identifier: Apache-2.0
"""Rules on experts: their ranks, their sizes, and settings that a dense model would ignore."""

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.rules.words import divisors, multiple_near, near


def expert_ranks_fill_the_world(config: ConfigContainer, world_size: int) -> str | None:
    """Experts are shared out over the ranks of a pipeline stage, whatever dense layers make of these."""
    model = config.model
    cut = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    ranks = cut * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    if not model.num_moe_experts or world_size % ranks == 0:
        return None
    return (
        f"model.expert_model_parallel_size={model.expert_model_parallel_size} x expert_tensor_parallel_size={cut} "
        f"x pipeline_model_parallel_size={model.pipeline_model_parallel_size} needs {ranks} processes or more, in "
        f"multiples, but there are {world_size}: start {multiple_near(world_size, ranks)} or lower a size"
    )


def expert_tensor_ranks_need_experts(config: ConfigContainer, world_size: int) -> str | None:
    """A dense model would ignore the size."""
    model = config.model
    if model.num_moe_experts or model.expert_tensor_parallel_size is None:
        return None
    return (
        f"model.expert_tensor_parallel_size={model.expert_tensor_parallel_size} has no effect, because "
        "model.num_moe_experts is not set: leave it unset"
    )


def expert_tensor_ranks_divide_experts(config: ConfigContainer, world_size: int) -> str | None:
    """Each expert is cut into equal parts."""
    model = config.model
    cut = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
    if not model.num_moe_experts or width % cut == 0:
        return None
    return (
        f"model.expert_tensor_parallel_size={cut} does not divide the experts' width "
        f"model.moe_ffn_hidden_size={width}: use {near(cut, divisors(width))}"
    )


def tp_divides_shared_experts(config: ConfigContainer, world_size: int) -> str | None:
    """Experts that see every token are cut like dense layers."""
    model = config.model
    ranks, width = model.tensor_model_parallel_size, model.moe_shared_expert_intermediate_size
    if not model.num_moe_experts or not width or width % ranks == 0:
        return None
    return (
        f"model.tensor_model_parallel_size={ranks} does not divide "
        f"model.moe_shared_expert_intermediate_size={width}: use {near(ranks, divisors(width))}"
    )


def tokens_choose_few_experts(config: ConfigContainer, world_size: int) -> str | None:
    """Not more than there are."""
    model = config.model
    experts, chosen = model.num_moe_experts, model.moe_router_topk
    if not experts or 1 <= chosen <= experts:
        return None
    return f"model.moe_router_topk={chosen} must lie between 1 and model.num_moe_experts={experts}"


def expert_groups_are_even(config: ConfigContainer, world_size: int) -> str | None:
    """Routing by groups takes the best of each, so they are equally large."""
    model = config.model
    experts, groups, chosen = model.num_moe_experts, model.moe_router_num_groups, model.moe_router_group_topk
    if not experts or not groups:
        return None
    if experts % groups:
        return (
            f"model.moe_router_num_groups={groups} does not divide model.num_moe_experts={experts}: use "
            f"{near(groups, divisors(experts))}"
        )
    if chosen is not None and not 1 <= chosen <= groups:
        return f"model.moe_router_group_topk={chosen} must lie between 1 and model.moe_router_num_groups={groups}"
    return None


def own_layers_know_where_experts_are(config: ConfigContainer, world_size: int) -> str | None:
    """One spec makes all layers alike, whatever ``moe_layer_freq`` says."""
    model = config.model
    if not isinstance(model.transformer_layer_spec, ModuleSpec) or model.moe_layer_freq == 1:
        return None
    return (
        f"model.transformer_layer_spec is one spec for all layers, so model.moe_layer_freq={model.moe_layer_freq} "
        "has no effect: give a function from the config to the spec of a block, or leave moe_layer_freq at 1"
    )
