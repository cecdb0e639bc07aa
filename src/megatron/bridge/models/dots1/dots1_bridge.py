# SPDX-License-Identifier: Apache-2.0
"""dots.llm1: DeepSeek-V3's experts behind Qwen3's attention, a window in the layers that say so."""

from dataclasses import replace

from megatron.bridge.models.families import (
    ATTENTION_BIAS_OF_EXPERTS,
    DENSE,
    DENSE_BEFORE_SPARSE,
    DENSE_OR_SPARSE,
    GROUPS,
    LLAMA_LIKE,
    NORM_SIGMOIDS,
    ROUTED_AND_SHARED,
    SIGMOID_ROUTING,
    WINDOWS,
    DecoderBridge,
    attention,
    ends,
    register_bridge,
)


@register_bridge("Dots1ForCausalLM", model_type="dots1")
class Dots1Bridge(DecoderBridge):
    fields = (
        *DENSE,
        *WINDOWS,
        *ROUTED_AND_SHARED,
        *GROUPS,
        DENSE_BEFORE_SPARSE,
        ATTENTION_BIAS_OF_EXPERTS,
        replace(NORM_SIGMOIDS, default=False),
    )
    fixed = {**LLAMA_LIKE, **SIGMOID_ROUTING, "add_bias_linear": False, "qk_layernorm": True}
    irrelevant = {
        "max_window_layers": None,  # it stands in for layer_types, which transformers always fills in
        "scoring_func": ("noaux_tc", "sigmoid"),
    }
    weights = (ends(), attention(qk_norm=True), *DENSE_OR_SPARSE)
