# SPDX-License-Identifier: Apache-2.0
"""dots.llm1: DeepSeek-V3's experts behind Qwen3's attention, a window in the layers that say so."""

from dataclasses import replace

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, WINDOWS
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("Dots1ForCausalLM", model_type="dots1")
class Dots1Bridge(DecoderBridge):
    fields = (
        *DENSE,
        *WINDOWS,
        *moe.ROUTED_AND_SHARED,
        *moe.GROUPS,
        moe.DENSE_BEFORE_SPARSE,
        moe.ATTENTION_BIAS_OF_EXPERTS,
        replace(moe.NORM_SIGMOIDS, default=False),
    )
    fixed = {**LLAMA_LIKE, **moe.SIGMOID_ROUTING, "add_bias_linear": False, "qk_layernorm": True}
    irrelevant = {
        "max_window_layers": None,  # it stands in for layer_types, which transformers always fills in
        "output_router_logits": None,
        "scoring_func": ("noaux_tc", "sigmoid"),
    }
    weights = (ends(), attention(qk_norm=True), *DENSE_OR_SPARSE)
