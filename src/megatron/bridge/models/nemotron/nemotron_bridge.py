# SPDX-License-Identifier: Apache-2.0
"""Nemotron-4 and Minitron: LayerNorms stored as their distance from one, squared ReLU without a gate."""

from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import (
    BIASES,
    DENSE,
    LLAMA_LIKE,
    PARTIAL_ROPE,
)
from megatron.bridge.models.conversion.declare.fields import Field, override
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("NemotronForCausalLM", model_type="nemotron")
class NemotronBridge(DecoderBridge):
    fields = (*override(DENSE, PARTIAL_ROPE, Field("norm_eps", "layernorm_epsilon")), *BIASES)
    fixed = {
        **LLAMA_LIKE,
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": False,
    }
    weights = (ends(), attention(), mlp(gated=False))
