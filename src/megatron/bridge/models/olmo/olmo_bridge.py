# SPDX-License-Identifier: Apache-2.0
"""OLMo 1 to 3, OLMoE and FlexOlmo: most have queries and keys normed over all heads together."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS,
    ATTENTION_BIAS_OF_EXPERTS,
    AUX_LOSS,
    DENSE,
    LAYER_NORM_LIKE,
    LAYER_ROPE,
    LLAMA_LIKE,
    NORM_TOPK,
    SOFTMAX_ROUTING,
    WINDOWS,
    DecoderBridge,
    Field,
    attention,
    ends,
    expert_sizes,
    experts,
    mlp,
    override,
    post_norms,
    register_bridge,
    router,
)

_QKV_CLIP = Field("clip_qkv", "qkv_clip", default=None)


@register_bridge("OlmoForCausalLM", model_type="olmo")
class OlmoBridge(DecoderBridge):
    """OLMo 1: LayerNorms without a gain or a bias."""

    fields = (*(field for field in DENSE if field.hf != "rms_norm_eps"), ATTENTION_BIAS, _QKV_CLIP)
    fixed = {
        **LAYER_NORM_LIKE,
        "layernorm_bias": False,
        "norm_gain": False,
        "layernorm_epsilon": 1e-5,
        "mlp_bias": False,
    }
    weights = (ends(), attention(), mlp())


@register_bridge("Olmo2ForCausalLM", model_type="olmo2")
class Olmo2Bridge(DecoderBridge):
    """OLMo 2: norms after attention and MLP instead of before, queries and keys normed over all heads together."""

    fields = (*DENSE, ATTENTION_BIAS)
    fixed = {
        **LLAMA_LIKE,
        "norm_placement": "post",
        "qk_norm_across_heads": True,
        "mlp_bias": False,
    }
    weights = (
        ends(),
        attention(norm=None, qk_norm=True),
        mlp(norm=None),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


@register_bridge("Olmo3ForCausalLM", model_type="olmo3")
class Olmo3Bridge(Olmo2Bridge):
    """OLMo 3: OLMo 2 with windows in three of four layers, a rotary scaling in the others."""

    fields = (*override(Olmo2Bridge.fields, LAYER_ROPE), *WINDOWS)


@register_bridge("OlmoeForCausalLM", model_type="olmoe")
class OlmoeBridge(DecoderBridge):
    """OLMoE: experts in every layer, queries and keys normalized over all heads together."""

    fields = (
        *DENSE,
        *expert_sizes(width="intermediate_size"),
        NORM_TOPK,
        AUX_LOSS,
        ATTENTION_BIAS_OF_EXPERTS,
        _QKV_CLIP,
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "add_bias_linear": False,
        "qk_norm_across_heads": True,
    }
    weights = (ends(), attention(qk_norm=True), router(norm="post_attention_layernorm"), experts())


OlMoEBridge = OlmoeBridge


@register_bridge("FlexOlmoForCausalLM", model_type="flex_olmo")
class FlexOlmoBridge(DecoderBridge):
    """FlexOlmo: OLMo 2's attention and norms, OLMoE's experts."""

    fields = (
        *DENSE,
        *expert_sizes(width="intermediate_size"),
        NORM_TOPK,
        AUX_LOSS,
        ATTENTION_BIAS_OF_EXPERTS,
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "add_bias_linear": False,
        "norm_placement": "post",
        "qk_norm_across_heads": True,
    }
    weights = (
        ends(),
        attention(norm=None, qk_norm=True),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
        router(),
        experts(),
    )
