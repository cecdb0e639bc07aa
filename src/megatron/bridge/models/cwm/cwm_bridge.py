# SPDX-License-Identifier: Apache-2.0
"""Code World Model: Llama with a window in three of four layers."""

from megatron.bridge.models.families import (
    BIASES,
    DENSE,
    LLAMA_LIKE,
    WINDOWS,
    DecoderBridge,
    attention,
    ends,
    mlp,
    register_bridge,
)


@register_bridge("CwmForCausalLM", model_type="cwm")
class CwmBridge(DecoderBridge):
    fields = (*DENSE, *BIASES[1:], *WINDOWS)
    fixed = {**LLAMA_LIKE, "attention_bias": False}
    irrelevant = {"attention_bias": (False,)}
    weights = (ends(), attention(), mlp())
