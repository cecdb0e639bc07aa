# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, dense: Llama with rotated pairs of neighbours and one switch for all biases."""

from megatron.bridge.models.families import *


@register_bridge("Ernie4_5ForCausalLM", model_type="ernie4_5")
class Ernie45Bridge(DecoderBridge):
    fields = (*DENSE, ALL_BIASES)
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True}
    # transformers has no dropout; the others tell of the training code
    irrelevant = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "compression_ratio"))
    weights = (ends(), attention(), mlp())
