# SPDX-License-Identifier: Apache-2.0
"""Solar Open 100B: GLM-4.5's experts in every layer, shared ones beside them."""

from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.fields import Field
from megatron.bridge.models.conversion.declare.moe_blocks import experts, router, shared_experts
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


@register_bridge("SolarOpenForCausalLM", model_type="solar_open")
class SolarOpenBridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf != "intermediate_size"),
        *moe.ROUTED_AND_SHARED,
        *moe.GROUPS,
        moe.NORM_SIGMOIDS,
        Field("attention_bias", "add_qkv_bias", default=False),
    )
    fixed = {**LLAMA_LIKE, **moe.SIGMOID_ROUTING, "add_bias_linear": False}
    # of published configs; no layer is dense, and transformers has no norm of queries and no next-token layer
    irrelevant = {
        "output_router_logits": None,
        "intermediate_size": None,
        "first_k_dense_replace": (0,),
        "use_qk_norm": (False,),
        "num_nextn_predict_layers": (0,),
        "partial_rotary_factor": (1.0,),
    }
    weights = (ends(), attention(), router(norm="post_attention_layernorm"), experts(), shared_experts())
