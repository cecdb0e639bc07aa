# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 4 and their relatives."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

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
    TensorEntry,
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
    unused_keys_and_values,
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
    irrelevant = {
        "use_bidirectional_attention": (None, "vision"),
        "expert_intermediate_size": (None,),
    }
    weights = (
        ends(),
        shared_kv_attention,
        mlp(norm="pre_feedforward_layernorm"),
        experts_beside(),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
        layer_ends(),
    )

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Return the tensors that shared keys and values replace."""
        return (*super().carried_by(config, entries), *unused_keys_and_values(config, entries))


@register_bridge("Gemma4UnifiedForCausalLM", model_type="gemma4_unified_text")
class Gemma4UnifiedBridge(Gemma4Bridge):
    """Gemma 4 12B, text: Gemma 4 without experts and per-layer embeddings."""

    fields = tuple(
        field for field in Gemma4Bridge.fields if field not in (*PER_LAYER_INPUTS, *EXPERTS_BESIDE)
    )
    irrelevant = {
        **Gemma4Bridge.irrelevant,
        "hidden_size_per_layer_input": (0, None),
        "vocab_size_per_layer_input": None,
        "enable_moe_block": (False,),
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), (None,)),
    }


@register_bridge("Gemma3ForConditionalGeneration", model_type="gemma3")
class Gemma3VLBridge(VisionBridge):
    """Gemma 3 with images, 4B to 27B: the tokens of an image attend to each other both ways."""

    texts = {"gemma3_text": "Gemma3ForCausalLM"}
    names = LLAVA_NAMES
    other_names = LLAVA_OTHER_NAMES
    values = {"bidirectional_images": True}
    tied_unless_said = True


_BIDIRECTIONAL = "use_bidirectional_attention"


@register_bridge("Gemma4ForConditionalGeneration", model_type="gemma4")
class Gemma4VLBridge(VisionBridge):
    """Gemma 4 with images and videos, E2B to 31B and 26B-A4B; its audio part is carried along."""

    texts = {"gemma4_text": "Gemma4ForCausalLM"}
    tower = ("vision_tower", "embed_vision")
    audio: ClassVar[tuple[str, ...]] = ("model.audio_tower.**", "model.embed_audio.**")
    names = {
        "model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "embed_vision.": "model.embed_vision.",
    }
    # in layers without a window, attention is causal
    values = {"bidirectional_full_layers": False}
    tied_unless_said = True
    irrelevant = {
        # of the processor
        **dict.fromkeys(
            (
                "default_output_length",
                "image_seq_length",
                "video_seq_length",
                "vision_soft_tokens_per_image",
            )
        ),
        "global_head_dim": None,  # of the text model, also written for the tower
        "eoa_token_id": None,
    }

    def provider_of(self, config: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
        provider = super().provider_of(config, raw)
        provider.bidirectional_images = config["text_config"].get(_BIDIRECTIONAL) == "vision"
        return provider

    def changed_config(self, provider: Any, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changed keys, among them whether tokens of an image attend to each other both ways."""
        changed = super().changed_config(provider, hf_config)
        text = hf_config["text_config"]
        if (text.get(_BIDIRECTIONAL) == "vision") != provider.bidirectional_images:
            changed["text_config"] = self._written(
                {**text, **changed.get("text_config", {})}, provider
            )
        return changed

    def _written(self, text: dict[str, Any], provider: Any) -> dict[str, Any]:
        written = super()._written(text, provider)
        return {**written, _BIDIRECTIONAL: "vision" if provider.bidirectional_images else None}

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Return the tensors of the audio part, those of the text model, and the tower's if there is none."""
        has_audio = any(name.startswith("model.embed_audio.") for name in entries)
        if config.vision is not None:
            has_audio = config.vision.get("audio_config") is not None
        unused = unused_keys_and_values(config, entries)
        audio = self.audio if has_audio else ()
        return (*super().carried_by(config, entries), *unused, *audio)


@register_bridge("Gemma4UnifiedForConditionalGeneration", model_type="gemma4_unified")
class Gemma4UnifiedVLBridge(Gemma4VLBridge):
    """Gemma 4 12B with images and videos, whose patches are projected without a tower; audio is carried along."""

    texts = {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
    tower = tuple(
        f"embed_vision.{part}"
        for part in (
            "patch_ln1",
            "patch_dense",
            "patch_ln2",
            "pos_embedding",
            "pos_norm",
            "multimodal_embedder",
        )
    )
    audio = ("model.embed_audio.**",)
    names = {
        "model.": "model.language_model.",
        "embed_vision.": "model.vision_embedder.",
        "embed_vision.multimodal_embedder": "model.embed_vision",
    }
    values = {}
    irrelevant = {
        **Gemma4VLBridge.irrelevant,
        "num_soft_tokens": None,  # of the processor
        "model_patch_size": None,
    }


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
