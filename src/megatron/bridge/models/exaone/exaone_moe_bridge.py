# SPDX-License-Identifier: Apache-2.0
"""K-EXAONE: EXAONE 4's attention behind norms before it, DeepSeek-V3's experts."""

from dataclasses import replace

from megatron.bridge.models.exaone.exaone4_bridge import Exaone4Bridge
from megatron.bridge.models.families import *


@register_bridge("ExaoneMoeForCausalLM", model_type="exaone_moe")
class ExaoneMoeBridge(DecoderBridge):
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
        "output_router_logits": None,
        **dict.fromkeys(("first_last_k_dense_replace", "is_moe_layer")),  # published, and not read
        **dict.fromkeys(("num_nextn_predict_layers", "mtp_share_layers", "mtp_loss_weight")),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    weights = (ends(), attention(qk_norm=True), *DENSE_OR_SPARSE[:1], router(correction_in="mlp"), *DENSE_OR_SPARSE[2:])
    # transformers leaves the layer of multi-token prediction out: its tensors are carried over
    buffers = (*MegatronModelBridge.buffers, "mtp.**")
