# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2 mixer in parallel with attention in each layer, and the multipliers of both (Falcon-H1)."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron.bridge.backends.recurrent.one_group_mamba import (
    AttentionBesideMamba,
    BesideMambaSubmodules,
)
from megatron.bridge.models.features.feature import (
    LayerFeature,
    ToySizes,
    differing,
    indivisible_by_context,
    indivisible_sizes,
)
from megatron.bridge.models.features.mamba_layers import toy_mamba_sizes
from megatron.bridge.utils.errors import did_you_mean

MULTIPLIERS: dict[str, Any] = {
    "attention_in_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,  # of the gate, x, B, C and dt
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": [1.0] * 2,  # of the gate and of the output
}
"""The keys of ``mamba_beside_attention``, which are transformers', with the values that change nothing."""

_EXCLUDED: dict[str, Any] = {
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "num_moe_experts": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "parallel_residual": None,
    "norm_placement": "pre",
    "experimental_attention_variant": None,
}


@dataclass
class MambaBesideAttentionFields:
    mamba_beside_attention: dict[str, Any] | None = None
    """Each layer has a Mamba-2 mixer beside attention; both read the same input. The keys are transformers' names of
    Falcon-H1's multipliers (``ssm_in_multiplier``, ...); those that are left out are 1. None has no such mixers."""


class MambaBesideAttentionFeature(LayerFeature):
    """The costs of the mixers are those of ``MambaFeature``."""

    switches = {"mamba_beside_attention": None}
    plain_layers_only = True
    prefixes = ("mamba_",)
    prefix_switch = "mamba_beside_attention"
    pricing = {"mamba_beside_attention": "modules"}

    def check(self, config: Any) -> Iterator[str]:
        if config.mamba_beside_attention is None:
            return
        for name in config.mamba_beside_attention:
            if name not in MULTIPLIERS:
                hint = did_you_mean(name, MULTIPLIERS)
                yield f"mamba_beside_attention has no multiplier {name}{hint}"
        yield from differing(config, _EXCLUDED, "with mamba_beside_attention")
        groups = config.mamba_num_groups
        heads = config.mamba_num_heads
        if (heads or 0) % groups:
            yield f"mamba_num_groups={groups} does not divide mamba_num_heads={heads}"
        names = ("mamba_num_heads", "mamba_state_dim" if groups == 1 else "mamba_num_groups")
        yield from indivisible_sizes(config, names, "mamba_beside_attention")
        yield from indivisible_by_context(config, names[:1], "mamba_beside_attention")
        groups_per_rank = max(groups // config.tensor_model_parallel_size, 1)
        context = config.context_parallel_size
        if max(groups_per_rank, context) % min(groups_per_rank, context):
            yield (
                f"context_parallel_size={context} cannot share the {groups_per_rank} groups of Mamba heads of a "
                "tensor-parallel rank, which mamba_beside_attention needs: use a divisor"
            )

    def derive(self, config: Any) -> None:
        """Make the multiplier of queries and keys a part of the scale of attention."""
        if config.mamba_beside_attention is None or config.softmax_scale is not None:
            return
        factors = {**MULTIPLIERS, **config.mamba_beside_attention}
        width = config.kv_channels or config.hidden_size // config.num_attention_heads
        config.softmax_scale = (
            factors["attention_in_multiplier"] ** 2 * factors["key_multiplier"] * width**-0.5
        )

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        """Put a mixer beside attention, with a separate norm before both."""
        if config.mamba_beside_attention is None:
            return spec
        layer: Any = spec.submodules
        attention = layer.self_attention
        column = provider.column_parallel_linear()
        row = provider.row_parallel_linear()
        parts = {**vars(attention.submodules), "linear_qkv": column}
        mixer = MambaMixerSubmodules(in_proj=column, out_proj=row)
        names = dict(layer.sharded_state_dict_keys_map)
        names.pop("input_layernorm.", None)
        changed = dataclasses.replace(
            layer,
            input_layernorm=provider.layer_norm(),
            self_attention=dataclasses.replace(
                attention,
                module=AttentionBesideMamba,
                submodules=BesideMambaSubmodules(**parts, mixer=mixer),
            ),
            sharded_state_dict_keys_map=names,
        )
        return dataclasses.replace(spec, submodules=changed)

    def change_model(self, model: nn.Module, config: Any) -> None:
        """Give the layers their multipliers."""
        if config.mamba_beside_attention is None:
            return
        factors = {**MULTIPLIERS, **config.mamba_beside_attention}
        for module in model.modules():
            if isinstance(module, AttentionBesideMamba):
                _multiply_attention_and_mixer(module, factors)
            elif isinstance(module, MLP):
                _multiply_mlp(module, config, *factors["mlp_multipliers"])

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        return {} if config.mamba_beside_attention is None else toy_mamba_sizes(config, toy)


def _multiply_attention_and_mixer(attention: AttentionBesideMamba, factors: dict[str, Any]) -> None:
    of_attention = factors["attention_in_multiplier"] * factors["attention_out_multiplier"]
    attention.multipliers = (of_attention, factors["ssm_out_multiplier"])
    mixer: Any = attention.mixer
    features = mixer.d_inner_local_tp
    heads = mixer.nheads_local_tp
    states = mixer.ngroups_local_tp * mixer.d_state
    of_sections = [factors["ssm_in_multiplier"] * factor for factor in factors["ssm_multipliers"]]
    multiply = partial(_multiply_outputs, of_sections, (features, features, states, states, heads))
    mixer.in_proj.register_forward_hook(multiply)


def _multiply_mlp(mlp: MLP, config: Any, of_gate: float, of_output: float) -> None:
    width = config.ffn_hidden_size // config.tensor_model_parallel_size
    multiply_gate = partial(_multiply_outputs, (of_gate, 1.0), (width, width))
    multiply_output = partial(_multiply_outputs, (of_output,), (config.hidden_size,))
    mlp.get_submodule("linear_fc1").register_forward_hook(multiply_gate)
    mlp.get_submodule("linear_fc2").register_forward_hook(multiply_output)


def _multiply_outputs(
    factors: Sequence[float],
    sizes: Sequence[int],
    _module: nn.Module,
    _inputs: Any,
    outputs: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    """Multiply parts of a linear layer's concatenated outputs."""
    out, bias = outputs
    parts = [out.new_full((size,), factor) for factor, size in zip(factors, sizes, strict=True)]
    return out * torch.cat(parts), bias
