# SPDX-License-Identifier: Apache-2.0
"""Granite 3: Llama with multipliers of embeddings, attention scores, residuals and logits."""

from megatron.bridge.models.families import *


@register_bridge("GraniteForCausalLM", model_type="granite")
class GraniteBridge(DecoderBridge):
    fields = (
        *DENSE,
        *BIASES,
        Field("embedding_multiplier", "embedding_multiplier", default=1.0),
        Field("attention_multiplier", "softmax_scale", default=1.0),
        Field("residual_multiplier", "residual_multiplier", default=1.0),
        Field("logits_scaling", "logits_scaling", default=1.0),
    )
    fixed = LLAMA_LIKE
    weights = (ends(), attention(), mlp())
