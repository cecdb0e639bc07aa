# SPDX-License-Identifier: Apache-2.0
"""GLM-4 and GLM-5: dense decoders, decoders with experts, and models with images."""

from megatron.bridge.models.families import (
    DENSE,
    DENSE_BEFORE_SPARSE,
    DENSE_OR_SPARSE,
    GROUPS,
    INDEXER,
    INDEXERS,
    LATENT,
    LATENT_LIKE,
    LLAMA_LIKE,
    NEXT_TOKENS,
    NORM_SIGMOIDS,
    ONLY_SIGMOIDS,
    PARTIAL_ROPE,
    ROUTED_AND_SHARED,
    SIGMOID_ROUTING,
    SPARSE_AFTER_DENSE,
    SPARSE_LAYERS,
    SPARSE_LIKE,
    UNSPOKEN,
    DecoderBridge,
    Field,
    MLAModelProvider,
    VisionBridge,
    attention,
    ends,
    indexer,
    latent_attention,
    mlp,
    mtp,
    mtp_copies,
    override,
    post_norms,
    register_bridge,
)

_LAYER = (attention(qk_norm=True), *DENSE_OR_SPARSE)
_LATENT_LAYER = (latent_attention(), *DENSE_OR_SPARSE)
_INDEXED_LAYER = (latent_attention(), indexer(), *DENSE_OR_SPARSE)


@register_bridge("GlmForCausalLM", model_type="glm")
class GlmBridge(DecoderBridge):
    """GLM-4 9B of 2024: half of each head is rotated, in neighboring pairs; gate and up projection are one tensor."""

    fields = (*override(DENSE, PARTIAL_ROPE), Field("attention_bias", "add_qkv_bias", default=True))
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True, "add_bias_linear": False}
    weights = (ends(), attention(), mlp(fused=True))


@register_bridge("Glm4ForCausalLM", model_type="glm4")
class Glm4Bridge(GlmBridge):
    """GLM-4-0414, 9B and 32B: GLM with norms after attention and MLP as well."""

    fixed = {**GlmBridge.fixed, "norm_placement": "both"}
    weights = (*GlmBridge.weights, post_norms("post_self_attn_layernorm", "post_mlp_layernorm"))


@register_bridge("Glm4MoeForCausalLM", model_type="glm4_moe")
class Glm4MoeBridge(DecoderBridge):
    """GLM-4.5, 4.5-Air, 4.6 and 4.7: sigmoid routing, shared experts, dense layers first, multi-token prediction."""

    fields = (
        *override(DENSE, PARTIAL_ROPE),
        *ROUTED_AND_SHARED,
        *GROUPS,
        NORM_SIGMOIDS,
        DENSE_BEFORE_SPARSE,
        NEXT_TOKENS,
        Field("attention_bias", "add_qkv_bias", default=False),
        Field("use_qk_norm", "qk_layernorm", default=False),
    )
    fixed = {**LLAMA_LIKE, **SIGMOID_ROUTING, "add_bias_linear": False}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()


@register_bridge("Glm4MoeLiteForCausalLM", provider=MLAModelProvider, model_type="glm4_moe_lite")
class Glm4MoeLiteBridge(DecoderBridge):
    """GLM-4.7-Flash: latent attention, sigmoid routing, multi-token prediction."""

    fields = (*LATENT, *ROUTED_AND_SHARED, *GROUPS, NORM_SIGMOIDS, SPARSE_LAYERS, NEXT_TOKENS)
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING}
    irrelevant = {
        **UNSPOKEN,
        "first_k_dense_replace": None,  # checked by SPARSE_LAYERS
        **ONLY_SIGMOIDS,
    }
    weights = (ends(), *_LATENT_LAYER, mtp(*_LATENT_LAYER))
    copies = mtp_copies()


@register_bridge("GlmMoeDsaForCausalLM", provider=MLAModelProvider, model_type="glm_moe_dsa")
class GlmMoeDsaBridge(DecoderBridge):
    """GLM-5: latent and sparse attention, whose keys an indexer of the layer, or of an earlier one, chooses."""

    fields = (
        *LATENT,
        *INDEXER,
        INDEXERS,
        *ROUTED_AND_SHARED,
        *GROUPS,
        *SPARSE_AFTER_DENSE,
        NORM_SIGMOIDS,
        NEXT_TOKENS,
    )
    fixed = {**SPARSE_LIKE, **SIGMOID_ROUTING, "dsa_indexer_rope_interleaved": True}
    irrelevant = {**UNSPOKEN, **ONLY_SIGMOIDS, "indexer_rope_interleave": (True,)}
    weights = (ends(), *_INDEXED_LAYER, mtp(*_INDEXED_LAYER))
    copies = mtp_copies()


@register_bridge("Glm4vForConditionalGeneration", model_type="glm4v")
class GLM4VBridge(VisionBridge):
    """GLM-4.1V: GLM-4's decoder, its rotated pairs of neighbors with positions on three axes."""

    texts = {"glm4v_text": "Glm4ForCausalLM"}
    tower = ("visual",)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    values = {"mrope_section": [8, 12, 12]}


@register_bridge("Glm46VForConditionalGeneration", model_type="glm46v")
class GLM46VBridge(GLM4VBridge):
    """GLM-4.6V Flash: GLM-4.1V with other frames of videos; GLM-4.6V itself has the architecture of GLM-4.5V."""


@register_bridge("Glm4vMoeForConditionalGeneration", model_type="glm4v_moe")
class GLM45VBridge(GLM4VBridge):
    """GLM-4.5V: GLM-4.5's decoder without multi-token prediction, positions on three axes."""

    texts = {"glm4v_moe_text": "Glm4MoeForCausalLM"}
    text_ignored = (
        "router_aux_loss_coef",
        "image_token_id",
        "image_start_token_id",
        "image_end_token_id",
    )
    text_values = {"num_nextn_predict_layers": 0}
