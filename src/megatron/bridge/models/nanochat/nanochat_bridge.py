# SPDX-License-Identifier: Apache-2.0
"""NanoChat: norms without gains, also of the embeddings; pairs that turn the other way; a squared ReLU."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS,
    DENSE,
    LLAMA_LIKE,
    DecoderBridge,
    Field,
    attention,
    ends,
    mlp,
    register_bridge,
)


@register_bridge("NanoChatForCausalLM", model_type="nanochat")
class NanoChatBridge(DecoderBridge):
    fields = (
        *DENSE,
        ATTENTION_BIAS,
        Field("final_logit_softcapping", "final_logit_softcapping", default=15.0),
    )
    fixed = {
        **LLAMA_LIKE,
        "gated_linear_unit": False,
        "mlp_bias": False,
        "norm_gain": False,
        "embedding_norm": True,
        "qk_layernorm": True,
        "qk_norm_after_rope": True,
        "rotary_reversed": True,
    }
    weights = (
        ends(),
        attention(norm=None),
        mlp(norm=None, gated=False, projections=("", "fc1", "fc2")),
    )
