# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, dense: Llama with rotated pairs of neighbors and one switch for all biases."""

from dataclasses import replace
from typing import Any

from megatron.bridge.models.families import (
    ALL_BIASES,
    AUX_LOSS,
    DENSE,
    DENSE_OR_SPARSE,
    LLAMA_LIKE,
    SHARED_EXPERTS,
    SOFTMAX_ROUTING,
    SPARSE_BETWEEN,
    DecoderBridge,
    Field,
    MegatronModelBridge,
    OneRowMapping,
    ReplicatedMapping,
    attention,
    ends,
    expert_sizes,
    mlp,
    register_bridge,
)


@register_bridge("Ernie4_5ForCausalLM", model_type="ernie4_5")
class Ernie45Bridge(DecoderBridge):
    fields = (*DENSE, ALL_BIASES)
    fixed = {**LLAMA_LIKE, "rotary_interleaved": True}
    # transformers has no dropout; the others tell of the training code
    irrelevant = dict.fromkeys(
        ("attention_probs_dropout_prob", "hidden_dropout_prob", "compression_ratio")
    )
    weights = (ends(), attention(), mlp())


_ROUTER = (
    ReplicatedMapping("decoder.layers.*.mlp.router.weight", "model.layers.*.mlp.gate.weight"),
    OneRowMapping(
        "decoder.layers.*.mlp.router.expert_bias",
        "model.layers.*.mlp.moe_statics.e_score_correction_bias",
    ),
)


def _shared_expert_count(width: int | None, provider: Any) -> int:
    return width // provider.moe_ffn_hidden_size if width else 0


@register_bridge("Ernie4_5_MoeForCausalLM", model_type="ernie4_5_moe")
class Ernie45MoeBridge(DecoderBridge):
    """ERNIE 4.5 with experts, 21B-A3B and 300B-A47B: a softmax of which a correction chooses, shared experts."""

    fields = (
        *DENSE,
        *expert_sizes("moe_num_experts", chosen="moe_k"),
        replace(SHARED_EXPERTS, hf="moe_num_shared_experts", default=0, back=_shared_expert_count),
        *SPARSE_BETWEEN,
        Field("moe_norm_min", "moe_router_norm_min", default=1e-12),
        AUX_LOSS,
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "rotary_interleaved": True,
        "add_bias_linear": False,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
    }
    irrelevant = {
        "use_bias": (False,),
        "moe_use_aux_free": (True,),
        "moe_gate": ("topk", "top2_fused"),
        # of the training code, and of the layer of multi-token prediction, which transformers leaves out
        **dict.fromkeys(("moe_capacity", "num_nextn_predict_layers", "compression_ratio")),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "sinkhorn_2gate")),
    }
    weights = (ends(), attention(), *DENSE_OR_SPARSE[:1], _ROUTER, *DENSE_OR_SPARSE[2:])
    buffers = (*MegatronModelBridge.buffers, "model.mtp_**")
