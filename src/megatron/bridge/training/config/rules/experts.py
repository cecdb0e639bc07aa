# SPDX-License-Identifier: Apache-2.0
"""Rules on experts."""

from collections.abc import Iterator

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.training.config.rules.values import indivisible, multiple_near
from megatron.bridge.training.config.run_config import RunConfig

_COUNT = "model.num_moe_experts"


def expert_ranks_fill_the_world(config: RunConfig, world_size: int) -> Iterator[str]:
    """Experts are distributed over the ranks of a pipeline stage, independently of the dense layers."""
    model = config.model
    cut = model.expert_tensor_ranks
    ranks = expert_ranks(config)
    if model.num_moe_experts and world_size % ranks:
        yield (
            f"model.expert_model_parallel_size={model.expert_model_parallel_size} x expert_tensor_parallel_size="
            f"{cut} x pipeline_model_parallel_size={model.pipeline_model_parallel_size} needs {ranks} processes "
            f"or more, in multiples, but there are {world_size}: start {multiple_near(world_size, ranks)} or "
            "lower a size"
        )


def expert_ranks(config: RunConfig) -> int:
    """Processes that hold all experts once."""
    model = config.model
    return (
        model.expert_tensor_ranks
        * model.expert_model_parallel_size
        * model.pipeline_model_parallel_size
    )


def expert_tensor_ranks_divide_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each expert is split into equal parts."""
    model = config.model
    if model.num_moe_experts:
        width = model.moe_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
        description = "the experts' width model.moe_ffn_hidden_size"
        yield from indivisible(
            "model.expert_tensor_parallel_size", model.expert_tensor_ranks, description, width
        )


def tp_divides_shared_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Shared experts are split like dense layers."""
    model = config.model
    name = "moe_shared_expert_intermediate_size"
    if model.num_moe_experts and (width := model.moe_shared_expert_intermediate_size):
        ranks = model.tensor_model_parallel_size
        yield from indivisible("model.tensor_model_parallel_size", ranks, f"model.{name}", width)


def topk_fits_num_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """A token cannot choose more experts than there are."""
    experts = config.model.num_moe_experts
    chosen = config.model.moe_router_topk
    if experts and not 1 <= chosen <= experts:
        yield f"model.moe_router_topk={chosen} must lie between 1 and {_COUNT}={experts}"


def expert_groups_are_even(config: RunConfig, world_size: int) -> Iterator[str]:
    """Group-limited routing needs groups of equal size."""
    model = config.model
    experts = model.num_moe_experts
    groups = model.moe_router_num_groups
    chosen = model.moe_router_group_topk
    if experts and groups:
        yield from indivisible("model.moe_router_num_groups", groups, _COUNT, experts)
        if chosen is not None and not 1 <= chosen <= groups:
            yield (
                f"model.moe_router_group_topk={chosen} must lie between 1 and model.moe_router_num_groups={groups}"
            )


def layer_spec_fits_moe_layer_freq(config: RunConfig, world_size: int) -> Iterator[str]:
    """One layer spec makes all layers alike, so ``moe_layer_freq`` has no effect."""
    model = config.model
    if isinstance(model.transformer_layer_spec, ModuleSpec) and model.moe_layer_freq != 1:
        yield (
            "model.transformer_layer_spec is one spec for all layers, so model.moe_layer_freq="
            f"{model.moe_layer_freq} has no effect: give a function from the config to the spec of a block, or "
            "leave moe_layer_freq at 1"
        )
