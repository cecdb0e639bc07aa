# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4: norms after attention and MLP, rotary embeddings only in layers with a window."""

from dataclasses import replace

from megatron.bridge.models.families import (
    DENSE,
    DENSE_OR_SPARSE,
    GROUPS,
    LLAMA_LIKE,
    NORM_SIGMOIDS,
    SCALING,
    SHARED_EXPERTS,
    SIGMOID_ROUTING,
    SPARSE_LAYERS,
    WINDOW,
    WINDOWED_ROPE_IF_ANY,
    DecoderBridge,
    MegatronModelBridge,
    attention,
    ends,
    expert_sizes,
    mlp,
    post_norms,
    register_bridge,
    router,
)


@register_bridge("Exaone4ForCausalLM", model_type="exaone4")
class Exaone4Bridge(DecoderBridge):
    fields = (*DENSE, WINDOW, WINDOWED_ROPE_IF_ANY)
    fixed = {**LLAMA_LIKE, "norm_placement": "post", "qk_layernorm": True, "add_bias_linear": False}
    irrelevant = {"sliding_window_pattern": None}  # transformers makes layer_types of it
    weights = (
        ends(),
        attention(norm=None, qk_norm=True),
        mlp(norm=None),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


@register_bridge("ExaoneMoeForCausalLM", model_type="exaone_moe")
class ExaoneMoeBridge(DecoderBridge):
    """K-EXAONE: EXAONE 4's attention behind norms before it, DeepSeek-V3's experts."""

    fields = (
        *Exaone4Bridge.fields,
        *expert_sizes(),
        replace(SHARED_EXPERTS, hf="num_shared_experts"),
        SPARSE_LAYERS,
        *GROUPS,
        NORM_SIGMOIDS,
        SCALING,
    )
    fixed = {**Exaone4Bridge.fixed, **SIGMOID_ROUTING, "norm_placement": "pre"}
    irrelevant = {
        **Exaone4Bridge.irrelevant,
        "first_k_dense_replace": None,  # checked by SPARSE_LAYERS
        **dict.fromkeys(("first_last_k_dense_replace", "is_moe_layer")),  # published, and not read
        **dict.fromkeys(("num_nextn_predict_layers", "mtp_share_layers", "mtp_loss_weight")),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    weights = (
        ends(),
        attention(qk_norm=True),
        *DENSE_OR_SPARSE[:1],
        router(correction_in="mlp"),
        *DENSE_OR_SPARSE[2:],
    )
    # transformers leaves the layer of multi-token prediction out: its tensors are carried over
    buffers = (*MegatronModelBridge.buffers, "mtp.**")
