# SPDX-License-Identifier: Apache-2.0
"""Llama 4's decoder: chunks of attention, layers without rotary embedding, one expert for each token."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE, NO_ROPE_LAYERS
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.declare.llama4_fields import CHUNKS, LISTED_EXPERTS, QUERY_GROWTH
from megatron.bridge.models.conversion.declare.moe_blocks import router, shared_experts, stacked_experts
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("Llama4ForCausalLM", model_type="llama4_text")
class Llama4Bridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf != "intermediate_size"),
        *LISTED_EXPERTS,
        *CHUNKS,
        *QUERY_GROWTH,
        NO_ROPE_LAYERS,
        moe.ATTENTION_BIAS_OF_EXPERTS,
        moe.AUX_LOSS,
        Field("use_qk_norm", "qk_l2_norm", default=True),
    )
    fixed = {
        **LLAMA_LIKE,
        **moe.DROPLESS,
        "rotary_interleaved": True,
        "add_bias_linear": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_apply_probs_on_input": True,
    }
    # what transformers makes lists of layers from, which it always fills in; and what it does not read
    irrelevant = {
        **dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval")),
        **dict.fromkeys(("output_router_logits", "router_jitter_noise", "for_llm_compressor")),
    }
    weights = (
        ends(),
        attention(),
        mlp(names="feed_forward"),
        router("feed_forward.router"),
        stacked_experts("feed_forward.experts", turned=True),
        shared_experts("feed_forward.shared_expert"),
    )
