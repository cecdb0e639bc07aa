# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H, Nemotron Nano 2, Nemotron 3: Mamba-2, attention without positions, and squared ReLU or experts of it."""

from collections.abc import Mapping
from math import inf
from typing import Any

from megatron.bridge.models.conversion.declare import hybrid, moe
from megatron.bridge.models.conversion.declare.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.fields import Field, override
from megatron.bridge.models.conversion.declare.hybrid import mamba
from megatron.bridge.models.conversion.declare.moe import (
    experts,
    latent_projections,
    router,
    shared_experts,
)
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.models.mamba_provider import MambaModelProvider

_LAYERS = "backbone.layers.*"
_OWN = (
    *hybrid.LAYER_KINDS,
    *hybrid.ATTENTION_WIDTH,
    hybrid.MLP_ACTIVATION,
    Field("layer_norm_epsilon", "layernorm_epsilon"),
)


@register_bridge("NemotronHForCausalLM", provider=MambaModelProvider, model_type="nemotron_h")
class NemotronHBridge(DecoderBridge):
    fields = (
        *(
            field
            for field in override(DENSE, *_OWN)
            if field.hf not in ("rope_parameters", "tie_word_embeddings")
        ),
        *hybrid.MAMBA_SIZES,
        *hybrid.MAMBA_STEPS,
        hybrid.MLP_BIAS,
        *hybrid.of_experts(
            *moe.expert_sizes("n_routed_experts"),
            *moe.GROUPS,
            moe.NORM_SIGMOIDS,
            moe.SCALING,
            Field("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            Field("moe_latent_size", "moe_latent_size", default=None),
        ),
    )
    fixed = {
        **LLAMA_LIKE,
        **moe.SIGMOID_ROUTING,
        "gated_linear_unit": False,
        "position_embedding_type": "none",
        "share_embeddings_and_output_weights": False,
        "attention_bias": False,
    }
    irrelevant = {
        # without effect in transformers or on the logits: initialization, caches, choice of kernels, rotary sizes
        **dict.fromkeys(
            ("expand", "rescale_prenorm_residual", "mamba_ssm_cache_dtype", "num_logits_to_keep")
        ),
        **dict.fromkeys(("use_mamba_kernels", "moe_shared_expert_overlap")),
        # layers of multi-token prediction are carried along
        **dict.fromkeys(
            ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        ),
        "time_step_rank": None,
        **dict.fromkeys(
            ("rope_theta", "partial_rotary_factor", "rope_parameters", "num_query_groups")
        ),
        **dict.fromkeys(("rms_norm_eps", "norm_eps")),  # layer_norm_epsilon is meant
        "time_step_limit": ([0.0, inf], (0.0, inf)),
        **dict.fromkeys(("attention_bias", "use_bias", "mamba_proj_bias"), (False,)),
        **dict.fromkeys(("residual_in_fp32", "tie_word_embeddings"), (False,)),
        "use_conv_bias": (True,),
        "sliding_window": (None,),
        "mamba_hidden_act": ("silu",),
        "hidden_dropout": (0.0,),
        "n_shared_experts": (1,),
    }
    has_padding_row = False
    weights = (
        ends("backbone.embeddings.weight", "backbone.norm_f", stack="final_norm"),
        mamba(_LAYERS),
        attention(_LAYERS, "norm", "mixer.o_proj", names="mixer"),
        mlp(_LAYERS, "norm", "mixer", gated=False),
        router("mixer.gate", layers=_LAYERS),
        experts("mixer.experts.*", gate=None, layers=_LAYERS),
        shared_experts("mixer.shared_experts", gated=False, layers=_LAYERS),
        latent_projections("mixer", layers=_LAYERS),
    )

    def provider_of(self, config: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
        hybrid.check_stored_pattern(raw)
        return super().provider_of(config, raw)

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Return the layers of multi-token prediction, if the checkpoint has them."""
        del config
        return ("mtp.**",) if any(name.startswith("mtp.") for name in entries) else ()
