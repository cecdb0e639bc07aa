# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 and CodeGemma: embeddings scaled by the root of their width, norms stored as their distance from one."""

from dataclasses import replace

from megatron.bridge.models.families import *

GEMMA_LIKE = {
    **LLAMA_LIKE,
    "layernorm_zero_centered_gamma": True,
    "embedding_multiplier": "sqrt_hidden_size",
    "mlp_bias": False,
}


@register_bridge("GemmaForCausalLM", model_type="gemma")
class GemmaBridge(DecoderBridge):
    fields = (*DENSE, ATTENTION_BIAS)
    fixed = GEMMA_LIKE
    irrelevant = {"hidden_activation": (None, "gelu_pytorch_tanh"), "use_bidirectional_attention": (None, False)}
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
    irrelevant = {"hidden_act": None, "sliding_window_size": None, "use_bidirectional_attention": (None, False)}
    weights = (
        ends(),
        attention(),
        mlp(norm="pre_feedforward_layernorm"),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


@register_bridge("Gemma3ForCausalLM", model_type="gemma3_text")
class Gemma3Bridge(Gemma2Bridge):
    """Gemma 3, text: windows with a rotary base of their own in five of six layers, normed queries and keys."""

    fields = tuple(field for field in override(Gemma2Bridge.fields, LAYER_ROPE) if field.hf != "attn_logit_softcapping")
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
