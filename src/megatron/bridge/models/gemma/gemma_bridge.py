# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 4 and their relatives."""

from dataclasses import replace

from megatron.bridge.models.families import (
    ACTIVATION,
    ATTENTION_BIAS,
    ATTENTION_BIAS_OF_EXPERTS,
    DENSE,
    EXPERTS_BESIDE,
    LAYER_ROPE,
    LLAMA_LIKE,
    LLAVA_NAMES,
    LLAVA_OTHER_NAMES,
    PER_LAYER_INPUTS,
    QUERY_SCALE,
    SHARED_KV,
    WINDOWS,
    DecoderBridge,
    Field,
    VisionBridge,
    attention,
    ends,
    experts_beside,
    layer_ends,
    mlp,
    override,
    post_norms,
    register_bridge,
    shared_kv_attention,
)

GEMMA_LIKE = {
    **LLAMA_LIKE,
    "layernorm_zero_centered_gamma": True,
    "embedding_multiplier": "sqrt_hidden_size",
    "mlp_bias": False,
}


@register_bridge("GemmaForCausalLM", model_type="gemma")
class GemmaBridge(DecoderBridge):
    """Gemma 1 and CodeGemma: embeddings scaled by the root of their width, norms stored as their distance from one."""

    fields = (*DENSE, ATTENTION_BIAS)
    fixed = GEMMA_LIKE
    irrelevant = {
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    }
    weights = (ends(), attention(), mlp())


@register_bridge("Gemma2ForCausalLM", model_type="gemma2")
class Gemma2Bridge(DecoderBridge):
    """Gemma 2: windows in every second layer, norms before and after each part, soft-capped scores and logits."""

    fields = (
        *override(DENSE, replace(ACTIVATION, hf="hidden_activation")),
        *WINDOWS,
        QUERY_SCALE,
        ATTENTION_BIAS,
        Field("attn_logit_softcapping", "attn_logit_softcapping", default=None),
        Field("final_logit_softcapping", "final_logit_softcapping", default=None),
    )
    fixed = {**GEMMA_LIKE, "norm_placement": "both"}
    irrelevant = {
        "hidden_act": None,
        "sliding_window_size": None,
        "use_bidirectional_attention": (None, False),
    }
    weights = (
        ends(),
        attention(),
        mlp(norm="pre_feedforward_layernorm"),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


@register_bridge("Gemma3ForCausalLM", model_type="gemma3_text")
class Gemma3Bridge(Gemma2Bridge):
    """Gemma 3, text: windows with a separate rotary base in five of six layers, normed queries and keys."""

    fields = tuple(
        field
        for field in override(Gemma2Bridge.fields, LAYER_ROPE)
        if field.hf != "attn_logit_softcapping"
    )
    fixed = {**Gemma2Bridge.fixed, "qk_layernorm": True}
    # transformers reads the soft-capping of scores and applies none
    irrelevant = {
        **Gemma2Bridge.irrelevant,
        "attn_logit_softcapping": (None,),
        "sliding_window_pattern": None,
        "_sliding_window_pattern": None,
    }
    weights = (*Gemma2Bridge.weights[:1], attention(qk_norm=True), *Gemma2Bridge.weights[2:])


@register_bridge("VaultGemmaForCausalLM", model_type="vaultgemma")
class VaultGemmaBridge(Gemma2Bridge):
    """VaultGemma: Gemma 2 without the norms after attention and MLP, trained with differential privacy."""

    fixed = {**Gemma2Bridge.fixed, "norm_placement": "pre"}
    weights = Gemma2Bridge.weights[:-1]


@register_bridge("Gemma4ForCausalLM", model_type="gemma4_text")
class Gemma4Bridge(DecoderBridge):
    """Gemma 4, text: KV sharing, keys as values, per-layer embeddings, two head widths, experts parallel to an MLP."""

    fields = (
        *override(DENSE, replace(ACTIVATION, hf="hidden_activation"), *SHARED_KV),
        *WINDOWS,
        *PER_LAYER_INPUTS,
        *EXPERTS_BESIDE,
        ATTENTION_BIAS_OF_EXPERTS,
        Field("final_logit_softcapping", "final_logit_softcapping", default=None),
    )
    fixed = {
        **LLAMA_LIKE,
        "embedding_multiplier": "sqrt_hidden_size",
        "add_bias_linear": False,
        "norm_placement": "both",
        "qk_layernorm": True,
        "value_norm": True,
        "layer_scales": True,
        "softmax_scale": 1.0,
    }
    # tokens of images, which this class has not, would see each other both ways
    irrelevant = {"use_bidirectional_attention": (None, "vision")}
    weights = (
        ends(),
        shared_kv_attention,
        mlp(norm="pre_feedforward_layernorm"),
        experts_beside(),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
        layer_ends(),
    )


@register_bridge("Gemma3ForConditionalGeneration", model_type="gemma3")
class Gemma3VLBridge(VisionBridge):
    """Gemma 3 with images, 4B to 27B: the tokens of an image attend to each other both ways."""

    texts = {"gemma3_text": "Gemma3ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
    values = {"bidirectional_images": True}
    tied_unless_said = True


@register_bridge("PaliGemmaForConditionalGeneration", model_type="paligemma")
class PaliGemmaBridge(VisionBridge):
    """PaliGemma and PaliGemma 2: SigLIP in front of Gemma or Gemma 2, whose prompt attends to itself both ways."""

    texts = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
    text_ignored = (
        "num_image_tokens",
        "use_bidirectional_attention",
    )  # the mask is given with each sample
    values = {"bidirectional_prompt": True}
    tied_unless_said = True
