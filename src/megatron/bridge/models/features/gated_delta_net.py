# SPDX-License-Identifier: Apache-2.0
"""Layers with a gated delta net instead of attention (Qwen3-Next, Qwen3.5), by Megatron-Core's own settings."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.recurrent.gated_delta_net import DeltaNet
from megatron.bridge.backends.specs.layer_specs import listed_pattern
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from megatron.bridge.models.features.feature import LayerFeature, ToySizes, differing, kernels_note
from megatron.bridge.models.features.mixer_layers import MADE_FOR_ATTENTION

KIND = "gated_delta_net"
"""Value of ``experimental_attention_variant``."""

_CHUNK = 64  # tokens whose scores a kernel computes together
_BF16 = 2  # bytes


def linear_pattern(config: Any) -> list[int]:
    """Return 1 for each decoder layer with a gated delta net, 0 for each with attention."""
    frequency = config.linear_attention_freq
    if frequency is None:
        return [0] * config.num_layers
    if isinstance(frequency, int):
        return [int((index + 1) % frequency != 0) for index in range(config.num_layers)]
    return listed_pattern(config, "linear_attention_freq", "1 (gated delta net) or 0 (attention)")


class GatedDeltaNetFeature(LayerFeature):
    per_layer = ("linear_attention_freq",)
    prefixes = ("linear_", "linear_conv_kernel_dim")
    prefix_switch = "experimental_attention_variant"
    prefix_value = KIND
    pricing = {"experimental_attention_variant": "modules", "linear_*": "modules"}
    scales_with_width = ("linear_num_key_heads", "linear_num_value_heads")
    modules = (GatedDeltaNet,)
    recurrent_modules = (DeltaNet,)

    def is_used(self, config: Any) -> bool:
        return config.experimental_attention_variant == KIND

    def check(self, config: Any) -> Iterator[str]:
        """Refuse layers that Megatron-Core would build differently or not at all."""
        kind = config.experimental_attention_variant
        if kind == "dsa" and not config.multi_latent_attention:
            yield "experimental_attention_variant='dsa' is not supported without multi_latent_attention"
        elif kind in (None, "dsa"):
            if config.linear_attention_freq is not None:
                yield (
                    "linear_attention_freq has no effect without experimental_attention_variant='gated_delta_net': "
                    "set both, or neither"
                )
        elif kind != KIND:
            yield f"experimental_attention_variant={kind!r} is not supported: 'gated_delta_net' and 'dsa' are"
        elif config.linear_attention_freq is None:
            yield "linear_attention_freq is not set: say which layers have a gated delta net"
        else:
            yield from _check_layers(config)

    def change_layer_spec(
        self,
        spec: ModuleSpec,
        config: Any,
        layer_number: int | None,
        provider: BackendSpecProvider,
    ) -> ModuleSpec:
        if layer_number is None or not self.is_used(config):
            return spec
        if not linear_pattern(config)[layer_number - 1]:
            return spec
        layer: Any = spec.submodules
        names = dict(layer.sharded_state_dict_keys_map)
        if isinstance(provider, TorchSpecProvider):
            net = _torch_spec(provider)
            names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
        else:  # Megatron-Core's specs have such layers
            net = dataclasses.replace(layer.self_attention, module=DeltaNet)
        changed = dataclasses.replace(layer, self_attention=net, sharded_state_dict_keys_map=names)
        return dataclasses.replace(spec, submodules=changed)

    def operations(self, module: Any, length: int) -> float:
        """Count those of the state, and within a chunk those of scores, outputs and a triangular system."""
        keys = module.key_head_dim
        values = module.value_head_dim
        heads = module.num_value_heads // module.tp_size
        return heads * (6 * keys * values + _CHUNK * (3 * keys + 2 * values))

    def saved_elements(self, module: Any) -> int:
        """Count normalized queries and keys, copies per value head, values, gates, outputs, and a chunk's inverse."""
        value_heads = module.num_v_heads_local_tp
        queries_and_keys = 2 * module.key_head_dim * (module.num_k_heads_local_tp + value_heads)
        return queries_and_keys + 3 * module.v_dim_local_tp + _CHUNK * value_heads

    def scan_elements(self, module: Any, tokens: int) -> int:
        if has_cuda() or not isinstance(module, DeltaNet):
            return 0
        return module.scan_numbers(tokens)

    def scan_bytes(self, module: Any) -> float:
        """Count the states of a chunk in bf16, which fla moves twice."""
        heads = module.num_value_heads // module.tp_size
        return 2 * _BF16 * heads * module.key_head_dim * module.value_head_dim / _CHUNK

    def notes(self, config: Any) -> Iterator[str]:
        if self.is_used(config):
            yield kernels_note("flash-linear-attention")

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        return toy_delta_sizes(toy, values_per_key=2) if self.is_used(config) else {}


def _torch_spec(provider: TorchSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=DeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=provider.column_parallel_linear(),
            out_norm=cast(type, provider.layer_norm()),
            out_proj=provider.row_parallel_linear(),
        ),
    )


def toy_delta_sizes(toy: ToySizes, values_per_key: int) -> dict[str, Any]:
    """Return sizes of delta nets with enough heads for every rank; ``values_per_key`` is a number of heads."""
    heads = max(2, toy.head_ranks)
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": values_per_key * heads,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }


def _check_layers(config: Any) -> Iterator[str]:
    pattern = linear_pattern(config)
    if config.mtp_num_layers and pattern[-1]:
        yield (
            f"mtp_num_layers={config.mtp_num_layers} needs attention in the last layer, which it repeats: "
            "linear_attention_freq has a gated delta net there"
        )
    yield from _check_heads(config)
    if config.activation_func is not F.silu:
        yield "activation_func must be SiLU: gated delta nets have no other"
    context = "in a model with gated delta nets"
    yield from differing(config, MADE_FOR_ATTENTION, context, with_remedy=True)


def _check_heads(config: Any) -> Iterator[str]:
    keys = config.linear_num_key_heads or 0
    values = config.linear_num_value_heads or 0
    if keys < 1 or values % keys:
        yield f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}"
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    if keys % ranks:
        yield (
            f"linear_num_key_heads={keys} cannot be shared among tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} x context_parallel_size={config.context_parallel_size} ranks: "
            "lower one of them"
        )
