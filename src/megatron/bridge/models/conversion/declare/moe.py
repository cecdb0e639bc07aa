# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: fields for the number of experts, their layers and the routing of tokens, and their weights.

The auxiliary loss uses the coefficient of the config; it affects gradients in training, but never the logits.

Experts are parameters of one grouped layer (``experts.linear_fc1.weight3``) or separate modules
(``experts.local_experts.3.linear_fc1.weight``). A block lists both names, and a model has one of them.
"""

from collections.abc import Mapping
from functools import partial
from math import gcd
from typing import Any

from megatron.bridge.backends.specs.layer_specs import moe_pattern
from megatron.bridge.models.conversion.declare.blocks import Block, mlp
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ConcatenatedGatedMLPMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    ReplicatedMapping,
)
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.utils.errors import UserError


def _of_all_layers(expert_count: int | list[int]) -> Any:
    return (
        expert_count[0]
        if isinstance(expert_count, list) and len({*map(str, expert_count)}) == 1
        else expert_count
    )


def _check_top_k(key: str, normalized: str, count: Any, config: Mapping[str, Any]) -> int:
    count = _of_all_layers(count)
    if count == 1 and config.get(normalized, True):
        switch = f" with {normalized}=True" if normalized in config else ""
        raise UserError(
            f"{key}=1{switch} is not supported: one expert's normalized weight is always 1, so the router could "
            "not learn"
        )
    return count


def _check_expert_count(key: str, chosen: str, count: Any, config: Mapping[str, Any]) -> int:
    count, top = map(_of_all_layers, (count, config[chosen]))
    for name, value in ((key, count), (chosen, top)):
        if not isinstance(value, int):
            raise UserError(f"{name}={value} must be one number for all layers")
    if top < 1:
        raise UserError(f"{chosen}={top} must be at least 1, because the config has {key}={count}")
    if count < top:
        raise UserError(f"{chosen}={top} is more than {key}={count}")
    return count


def _negate(value: Any, _: Any) -> bool:
    return not value


def _read_groups(count: Any, config: Mapping[str, Any]) -> tuple[int | None, int | None, str]:
    """Return (groups, groups per token, their score); a single group is no restriction."""
    chosen = config["topk_group"]
    experts = config["num_experts_per_tok"]
    check_groups(count or 1, chosen, config)
    if count in (None, 1):
        return None, None, "sum"
    # Megatron-Core ranks a group by its best topk / group_topk experts, these architectures by the best two
    return count, chosen, "sum" if chosen == count or experts // chosen == 2 else "two"


def check_groups(count: int, chosen: int | None, config: Mapping[str, Any]) -> None:
    """Refuse a number of groups that does not divide the experts, or more chosen groups than groups."""
    key = "n_routed_experts" if "n_routed_experts" in config else "num_experts"
    if config[key] % count:
        raise UserError(f"n_group={count} does not divide {key}={config[key]}")
    if chosen is not None and chosen > count:
        raise UserError(f"topk_group={chosen} is more than n_group={count}")
    reach = (chosen or 1) * config[key] // count
    experts_per_token = config["num_experts_per_tok"]
    if reach < experts_per_token:
        raise UserError(
            f"topk_group={chosen} of n_group={count} have {reach} experts, fewer than "
            f"num_experts_per_tok={experts_per_token}"
        )


def _groups_back(values: tuple[Any, ...], provider: Any) -> int:
    count, chosen, score = values
    if (
        count not in (None, chosen)
        and score != "two"
        and (score, provider.moe_router_topk // chosen) != ("sum", 2)
    ):
        raise UserError(
            f"moe_router_group_score={score!r} is not supported here, where two experts rank a group: set 'two'"
        )
    return count or 1


def _chosen_groups(_: Any, config: Mapping[str, Any]) -> int | None:
    return _read_groups(config["n_group"], config)[1]


def _as_frequency(pattern: list[int]) -> int | list[int]:
    """Return 1 for experts in every layer, which stays valid if the number of layers changes."""
    return pattern if 0 in pattern else 1


def leading_dense(provider: Any) -> int:
    """Return the number of layers before the first one with experts."""
    return [*moe_pattern(provider), 1].index(1)


def dense_before_sparse(key: str) -> Field:
    """Return a field for the number of dense layers at the start."""

    def after(dense: Any, config: Mapping[str, Any]) -> int | list[int]:
        layers = config["num_hidden_layers"]
        return _as_frequency([int(layer >= dense) for layer in range(layers)])

    def before(_: Any, provider: Any) -> int:
        pattern = moe_pattern(provider)
        dense = leading_dense(provider)
        if 0 in pattern[dense:]:
            raise UserError(
                f"moe_layer_freq has dense layers after sparse ones, which {key} cannot express"
            )
        return dense

    return Field(key, "moe_layer_freq", default=0, to=after, back=before)


def _interval_pattern(_: Any, config: Mapping[str, Any]) -> int | list[int]:
    """Return 1 for each layer with experts: every ``moe_layer_interval``-th from the start to the end index."""
    first, last, step = (
        config[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval")
    )
    layers = config["num_hidden_layers"]
    last = last if last >= 0 else layers - 1
    pattern = [int((layer + 1) % step == 0 and first <= layer <= last) for layer in range(layers)]
    if 1 not in pattern:
        raise UserError(
            f"moe_layer_start_index={first} and moe_layer_end_index={last} leave no layer for experts"
        )
    return _as_frequency(pattern)


def _last_sparse(_: Any, provider: Any) -> int:
    return provider.num_layers - 1 - moe_pattern(provider)[::-1].index(1)


def _sparse_step_pattern(_: Any, config: Mapping[str, Any]) -> int | list[int]:
    """Return 1 for every ``decoder_sparse_step``-th layer (with experts), unless ``mlp_only_layers`` names it."""
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    pattern = [int((layer + 1) % step == 0 and layer not in dense) for layer in layers]
    if 1 not in pattern:
        raise UserError(
            f"decoder_sparse_step={step} and mlp_only_layers={dense} leave no layer for experts"
        )
    return _as_frequency(pattern)


def _sparse_step(_: Any, provider: Any) -> int:
    return gcd(*(layer + 1 for layer, sparse in enumerate(moe_pattern(provider)) if sparse))


def _dense_exceptions(_: Any, provider: Any) -> list[int]:
    step = _sparse_step(_, provider)
    return [
        layer
        for layer, sparse in enumerate(moe_pattern(provider))
        if (layer + 1) % step == 0 and not sparse
    ]


def expert_sizes(
    count: str = "num_experts",
    width: str = "moe_intermediate_size",
    chosen: str = "num_experts_per_tok",
    normalized: str = "norm_topk_prob",
) -> tuple[Field, ...]:
    """Number of experts, their width, and how many a token chooses, more than one under the switch ``normalized``."""
    return (
        Field(count, "num_moe_experts", to=partial(_check_expert_count, count, chosen)),
        Field(chosen, "moe_router_topk", to=partial(_check_top_k, chosen, normalized)),
        Field(width, "moe_ffn_hidden_size"),
    )


AUX_LOSS = Field("router_aux_loss_coef", "moe_aux_loss_coeff", default=0.0)

NORM_TOPK = Field(
    "norm_topk_prob", "moe_router_pre_softmax", default=False, to=_negate, back=_negate
)
"""Softmax over the chosen experts, which equals the normalized weights of a softmax over all experts."""

DENSE_AMONG_SPARSE: tuple[Field, ...] = (
    Field(
        "decoder_sparse_step",
        "moe_layer_freq",
        default=1,
        to=_sparse_step_pattern,
        back=_sparse_step,
    ),
    Field(
        "mlp_only_layers",
        "moe_layer_freq",
        default=(),
        to=_sparse_step_pattern,
        back=_dense_exceptions,
    ),
)
"""Dense layers, from a step and a list of exceptions."""

DENSE_BEFORE_SPARSE = dense_before_sparse("first_k_dense_replace")
"""Dense layers at the start."""

SPARSE_BETWEEN: tuple[Field, ...] = (
    Field(
        "moe_layer_start_index",
        "moe_layer_freq",
        to=_interval_pattern,
        back=lambda _, it: moe_pattern(it).index(1),
    ),
    Field("moe_layer_end_index", "moe_layer_freq", to=_interval_pattern, back=_last_sparse),
    Field("moe_layer_interval", "moe_layer_freq", to=_interval_pattern, back=_sparse_step),
)
"""Experts in layers at an interval between two indices."""

NORM_SIGMOIDS = Field("norm_topk_prob", "moe_router_norm_topk", default=True)
"""Normalization of the sigmoids of the chosen experts by their sum."""

ATTENTION_BIAS_OF_EXPERTS = Field(
    "attention_bias", ("add_qkv_bias", "attention_output_bias"), default=False
)
"""Biases of all four projections of attention, but not of experts."""

SHARED_EXPERTS = Field(
    "n_shared_experts",
    "moe_shared_expert_intermediate_size",
    default=None,
    to=lambda count, config: count * config["moe_intermediate_size"] if count else None,
    back=lambda width, it: width // it.moe_ffn_hidden_size if width else None,
)
"""Shared experts with the width of routed experts, as one feed-forward layer."""

_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score")

GROUPS: tuple[Field, ...] = (
    Field("n_group", _GROUPS, to=_read_groups, back=_groups_back),
    Field(
        "topk_group", "moe_router_group_topk", to=_chosen_groups, back=lambda count, _: count or 1
    ),
)
"""A token chooses among the experts of a few groups; groups are ranked by their two best experts."""

SCALING = Field("routed_scaling_factor", "moe_router_topk_scaling_factor", default=1.0)
"""Factor of the weights of the chosen experts."""

ROUTED_AND_SHARED: tuple[Field, ...] = (*expert_sizes("n_routed_experts"), SHARED_EXPERTS, SCALING)
"""Experts with DeepSeek's keys."""

DROPLESS: dict[str, Any] = {
    "moe_grouped_gemm": True,
    # no capacity limit: every token reaches its chosen experts
    "moe_token_dispatcher_type": "alltoall",
}

SOFTMAX_ROUTING: dict[str, Any] = {
    **DROPLESS,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
}
"""Weights are a softmax, in fp32, of logits in the model's own precision."""

SIGMOID_ROUTING: dict[str, Any] = {
    **DROPLESS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
}
"""Weights are normalized sigmoids; a correction, trained without gradients, helps to choose the experts."""


_LAYER = "decoder.layers.*.mlp"


def expert_names(linear: str, kind: str = "weight") -> tuple[str, str]:
    """Return Megatron's two names of one expert's parameter; the last wildcard is the index of the expert."""
    parent = f"{_LAYER}.experts"
    return f"{parent}.{linear}.{kind}*", f"{parent}.local_experts.*.{linear}.{kind}"


def experts(
    names: str = "mlp.experts.*",
    gate: str | None = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    layers: str = "model.layers.*",
) -> Block:
    """Experts without biases, each with its own tensors.

    ``names`` is the Hugging Face name of an expert in a layer; the others name its projections. ``gate`` may be None.
    """
    expert = f"{layers}.{names}"
    gates = gate and f"{expert}.{gate}.weight"
    return (
        *(
            _fc1_mapping(name, gates, f"{expert}.{up}.weight")
            for name in expert_names("linear_fc1")
        ),
        *(AutoMapping(name, f"{expert}.{down}.weight") for name in expert_names("linear_fc2")),
    )


def stacked_experts(
    names: str,
    up: str = "gate_up_proj",
    down: str = "down_proj",
    layers: str = "model.layers.*",
    turned: bool = False,
) -> Block:
    """The experts of a layer, stored in two tensors; the first one fuses gate and up projections."""
    parent = f"{layers}.{names}"
    first = [
        FusedGatedExpertMapping(name, f"{parent}.{up}", transpose_on_export=turned)
        for name in expert_names("linear_fc1")
    ]
    second = [
        FusedExpertMapping(name, f"{parent}.{down}", transpose_on_export=turned)
        for name in expert_names("linear_fc2")
    ]
    return (*first, *second)


def stacked_mapping(megatron_name: str, hf_name: str) -> MegatronParamMapping:
    """Return the mapping of one projection of all experts, each expert's matrix as [out, in].

    Args:
        megatron_name: of one expert's parameter; the last wildcard is the index of the expert.
        hf_name: of the tensor of all experts; ``gate_up_proj`` has gate and up projection, one behind the other.
    """
    if hf_name.endswith("gate_up_proj"):
        return FusedGatedExpertMapping(megatron_name, hf_name)
    return FusedExpertMapping(megatron_name, hf_name)


def as_stacked(
    registry: MegatronMappingRegistry,
    entries: Mapping[str, TensorEntry],
    layers: str,
    names: str = "mlp.experts",
) -> MegatronMappingRegistry:
    """Adapt ``registry`` to a checkpoint with stacked experts, in either orientation; otherwise return it unchanged."""
    ends = (f".{names}.gate_up_proj", f".{names}.down_proj")
    up, down = (
        next((entry.shape for name, entry in entries.items() if name.endswith(end)), None)
        for end in ends
    )
    if up is None or down is None:
        return registry
    turned = (up[1], up[2]) != (2 * down[2], down[1])
    return with_stacked_experts(registry, layers, names, turned)


def with_stacked_experts(
    registry: MegatronMappingRegistry,
    layers: str,
    names: str = "mlp.experts",
    turned: bool = False,
) -> MegatronMappingRegistry:
    """Return ``registry`` with one Hugging Face tensor for all experts of a layer, as in transformers' modules.

    Args:
        registry: Mappings of the experts in any form.
        layers: Pattern of the layers' names.
        names: Of the experts in a layer.
        turned: Whether each expert's matrix is stored as [in, out].
    """
    stacked_mappings = {
        mapping.megatron_param: mapping
        for mapping in stacked_experts(names, layers=layers, turned=turned)
    }
    mappings = registry.get_all_mappings()
    return MegatronMappingRegistry(
        *(stacked_mappings.get(mapping.megatron_param, mapping) for mapping in mappings)
    )


def _fc1_mapping(name: str, gate: str | None, up: str) -> MegatronParamMapping:
    return GatedMLPMapping(name, gate=gate, up=up) if gate else AutoMapping(name, up)


def router(
    name: str = "mlp.gate",
    correction: str = "e_score_correction_bias",
    norm: str | None = None,
    layers: str = "model.layers.*",
    correction_in: str | None = None,
) -> Block:
    """The router with its bias and the correction bias, which only affects the choice of experts.

    The correction bias belongs to the router or to the module ``correction_in`` of the layer. ``norm`` comes before the
    experts; it is None if ``mlp`` maps it for the dense layers.
    """
    hf_name = f"{layers}.{name}"
    block: Block = (
        ReplicatedMapping(f"{_LAYER}.router.weight", f"{hf_name}.weight"),
        ReplicatedMapping(f"{_LAYER}.router.bias", f"{hf_name}.bias"),
        ReplicatedMapping(
            f"{_LAYER}.router.expert_bias", f"{layers}.{correction_in or name}.{correction}"
        ),
    )
    if norm is None:
        return block
    megatron_norm = "decoder.layers.*.pre_mlp_layernorm"
    norms = (
        ReplicatedMapping(f"{megatron_norm}.{kind}", f"{layers}.{norm}.{kind}")
        for kind in ("weight", "bias")
    )
    return (*block, *norms)


def shared_experts(
    name: str = "mlp.shared_experts",
    gate: str | None = None,
    layers: str = "model.layers.*",
    gated: bool = True,
    fused: tuple[str, str] | None = None,
) -> Block:
    """The shared experts, which process every token, as one feed-forward layer.

    ``gate`` is the gate of their output, if any. With ``gated``, the layer has a gate projection. ``fused`` has two
    names: of the tensor with gate and up projection, and of the down projection.
    """
    parent = f"{_LAYER}.shared_experts"
    hf_name = f"{layers}.{name}"
    if fused:
        return (
            ConcatenatedGatedMLPMapping(
                f"{parent}.linear_fc1.weight", f"{hf_name}.{fused[0]}.weight"
            ),
            AutoMapping(f"{parent}.linear_fc2.weight", f"{hf_name}.{fused[1]}.weight"),
        )
    gates = f"{hf_name}.gate_proj.weight" if gated else None
    block: Block = (
        _fc1_mapping(f"{parent}.linear_fc1.weight", gates, f"{hf_name}.up_proj.weight"),
        AutoMapping(f"{parent}.linear_fc2.weight", f"{hf_name}.down_proj.weight"),
    )
    if gate is None:
        return block
    return (*block, ReplicatedMapping(f"{parent}.gate_weight", f"{layers}.{gate}.weight"))


def latent_projections(name: str = "mlp", layers: str = "model.layers.*") -> Block:
    """The projections around routed experts of another width than the hidden size."""
    names = ("fc1_latent_proj", "fc2_latent_proj")
    return tuple(
        ReplicatedMapping(f"{_LAYER}.{projection}.weight", f"{layers}.{name}.{projection}.weight")
        for projection in names
    )


DENSE_OR_SPARSE: tuple[Block, ...] = (mlp(), router(), experts(), shared_experts())
"""Feed-forward layers of a decoder in which some layers have routed and shared experts."""
