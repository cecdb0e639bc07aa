# SPDX-License-Identifier: Apache-2.0
"""Parts of a mixture-of-experts layer: experts, router, shared experts.

Experts are parameters of one grouped layer (``experts.linear_fc1.weight3``) or separate modules
(``experts.local_experts.3.linear_fc1.weight``). A block lists both names, and a model has one of them.
"""

from collections.abc import Mapping

from megatron.bridge.models.conversion.declare.blocks import Block, mlp
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import *
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry

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
        *(_fc1(name, gates, f"{expert}.{up}.weight") for name in expert_names("linear_fc1")),
        *(AutoMapping(name, f"{expert}.{down}.weight") for name in expert_names("linear_fc2")),
    )


def stacked_experts(
    names: str, up: str = "gate_up_proj", down: str = "down_proj", layers: str = "model.layers.*", turned: bool = False
) -> Block:
    """The experts of a layer, stored in two tensors; the first one fuses gate and up projections."""
    parent = f"{layers}.{names}"
    first = (ConcatenatedGatedMLPMapping(name, f"{parent}.{up}") for name in expert_names("linear_fc1"))
    second = (AutoMapping(name, f"{parent}.{down}") for name in expert_names("linear_fc2"))
    return tuple(mapping.stacked(turned) for mapping in (*first, *second))


def as_stacked(
    registry: MegatronMappingRegistry, entries: Mapping[str, TensorEntry], layers: str, names: str = "mlp.experts"
) -> MegatronMappingRegistry:
    """Adapt ``registry`` to a checkpoint with stacked experts, in either orientation; otherwise return it unchanged."""
    ends = (f".{names}.gate_up_proj", f".{names}.down_proj")
    up, down = (next((it.shape for name, it in entries.items() if name.endswith(end)), None) for end in ends)
    if up is None or down is None:
        return registry
    turned = (up[1], up[2]) != (2 * down[2], down[1])
    own = {mapping.megatron_param: mapping for mapping in stacked_experts(names, layers=layers, turned=turned)}
    mappings = registry.get_all_mappings()
    return MegatronMappingRegistry(*(own.get(mapping.megatron_param, mapping) for mapping in mappings))


def _fc1(name: str, gate: str | None, up: str) -> MegatronParamMapping:
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
    theirs = f"{layers}.{name}"
    block: Block = (
        ReplicatedMapping(f"{_LAYER}.router.weight", f"{theirs}.weight"),
        ReplicatedMapping(f"{_LAYER}.router.bias", f"{theirs}.bias"),
        ReplicatedMapping(f"{_LAYER}.router.expert_bias", f"{layers}.{correction_in or name}.{correction}"),
    )
    if norm is None:
        return block
    ours = "decoder.layers.*.pre_mlp_layernorm"
    norms = (ReplicatedMapping(f"{ours}.{kind}", f"{layers}.{norm}.{kind}") for kind in ("weight", "bias"))
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
    parent, theirs = f"{_LAYER}.shared_experts", f"{layers}.{name}"
    if fused:
        return (
            ConcatenatedGatedMLPMapping(f"{parent}.linear_fc1.weight", f"{theirs}.{fused[0]}.weight"),
            AutoMapping(f"{parent}.linear_fc2.weight", f"{theirs}.{fused[1]}.weight"),
        )
    gates = f"{theirs}.gate_proj.weight" if gated else None
    block: Block = (
        _fc1(f"{parent}.linear_fc1.weight", gates, f"{theirs}.up_proj.weight"),
        AutoMapping(f"{parent}.linear_fc2.weight", f"{theirs}.down_proj.weight"),
    )
    if gate is None:
        return block
    return (*block, ReplicatedMapping(f"{parent}.gate_weight", f"{layers}.{gate}.weight"))


DENSE_OR_SPARSE: tuple[Block, ...] = (mlp(), router(), experts(), shared_experts())
"""Feed-forward layers of a decoder in which some layers have routed and shared experts."""
