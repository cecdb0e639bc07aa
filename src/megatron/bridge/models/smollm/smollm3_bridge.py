# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama's layers, every few of them without a rotary embedding."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import BIASES, DENSE, LLAMA_LIKE, SWITCHED_WINDOWS
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.utils.errors import UserError


def _without_rope(rotated: list[int], config: Mapping[str, Any]) -> list[int]:
    """1 for each layer without; Hugging Face has a 1 for each layer with."""
    layers = config["num_hidden_layers"]
    if len(rotated) < layers:
        raise UserError(f"no_rope_layers has {len(rotated)} layers, num_hidden_layers={layers}")
    return [int(not rotates) for rotates in rotated[:layers]]


def _rotated(without: list[int] | None, provider: Any) -> list[int]:
    return [int(not skips) for skips in without or [0] * provider.num_layers]


@register_bridge("SmolLM3ForCausalLM", model_type="smollm3")
class SmolLM3Bridge(DecoderBridge):
    """Hugging Face's ``SmolLM3ForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *DENSE,
        *BIASES,
        *SWITCHED_WINDOWS,
        Field("no_rope_layers", "no_rope_freq", to=_without_rope, back=_rotated),
    )
    fixed = LLAMA_LIKE
    # what no_rope_layers and layer_types, which transformers always fills in, are made from
    irrelevant = {"no_rope_layer_interval": None, "max_window_layers": None}
    weights = (ends(), attention(), mlp())
