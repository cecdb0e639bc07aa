# SPDX-License-Identifier: Apache-2.0
"""AFM: Llama without a gate and with squared ReLU."""

from megatron.bridge.models.families import (
    BIASES,
    DENSE,
    LLAMA_LIKE,
    DecoderBridge,
    attention,
    ends,
    mlp,
    register_bridge,
)


@register_bridge("ArceeForCausalLM", model_type="arcee")
class ArceeBridge(DecoderBridge):
    fields = (*DENSE, *BIASES)
    fixed = {**LLAMA_LIKE, "gated_linear_unit": False}
    weights = (ends(), attention(), mlp(gated=False))
