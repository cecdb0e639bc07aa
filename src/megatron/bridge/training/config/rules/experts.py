# SPDX-License-Identifier: Apache-2.0
"""Rules on experts."""

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.training.config.rules.nearest_values import divisors, multiple_near, near
from megatron.bridge.training.config.run_config import RunConfig


def expert_ranks_fill_the_world(config: RunConfig, world_size: int) -> str | None:
    """Experts are distributed over the ranks of a pipeline stage, independently of the dense layers."""
    model = config.model
    cut = model.expert_tensor_ranks
    ranks = cut * model.expert_model_parallel_size * model.pipeline_model_parallel_size
    if not model.num_moe_experts or world_size % ranks == 0:
        return None
    return (
        f"model.expert_model_parallel_size={model.expert_model_parallel_size} x expert_tensor_parallel_size={cut} "
        f"x pipeline_model_parallel_size={model.pipeline_model_parallel_size} needs {ranks} processes or more, in "
        f"multiples, but there are {world_size}: start {multiple_near(world_size, ranks)} or lower a size"
    )


def expert_tensor_ranks_need_experts(config: RunConfig, world_size: int) -> str | None:
    """A dense model would ignore the setting."""
    model = config.model
    if model.num_moe_experts or model.expert_tensor_parallel_size is None:
        return None
    return (
        f"model.expert_tensor_parallel_size={model.expert_tensor_parallel_size} has no effect, because "
        "model.num_moe_experts is not set: leave it unset"
    )


def expert_tensor_ranks_divide_experts(config: RunConfig, world_size: int) -> str | None:
    """Each expert is split into equal parts."""
    model = config.model
    cut = model.expert_tensor_ranks
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
    if not model.num_moe_experts or width % cut == 0:
        return None
    return (
        f"model.expert_tensor_parallel_size={cut} does not divide the experts' width "
        f"model.moe_ffn_hidden_size={width}: use {near(cut, divisors(width))}"
    )


def tp_divides_shared_experts(config: RunConfig, world_size: int) -> str | None:
    """Shared experts are split like dense layers."""
    model = config.model
    ranks, width = model.tensor_model_parallel_size, model.moe_shared_expert_intermediate_size
    if not model.num_moe_experts or not width or width % ranks == 0:
        return None
    return (
        f"model.tensor_model_parallel_size={ranks} does not divide "
        f"model.moe_shared_expert_intermediate_size={width}: use {near(ranks, divisors(width))}"
    )


def topk_fits_num_experts(config: RunConfig, world_size: int) -> str | None:
    """A token cannot choose more experts than there are."""
    model = config.model
    experts, chosen = model.num_moe_experts, model.moe_router_topk
    if not experts or 1 <= chosen <= experts:
        return None
    return f"model.moe_router_topk={chosen} must lie between 1 and model.num_moe_experts={experts}"


def expert_groups_are_even(config: RunConfig, world_size: int) -> str | None:
    """Group-limited routing needs groups of equal size."""
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


def layer_spec_fits_moe_layer_freq(config: RunConfig, world_size: int) -> str | None:
    """One layer spec makes all layers alike, so ``moe_layer_freq`` has no effect."""
    model = config.model
    if not isinstance(model.transformer_layer_spec, ModuleSpec) or model.moe_layer_freq == 1:
        return None
    return (
        f"model.transformer_layer_spec is one spec for all layers, so model.moe_layer_freq={model.moe_layer_freq} "
        "has no effect: give a function from the config to the spec of a block, or leave moe_layer_freq at 1"
    )
