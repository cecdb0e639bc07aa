# SPDX-License-Identifier: Apache-2.0
"""OPT: learned positions, of which the table has two more rows than there are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.bridge.models.families import (
    ACTIVATION,
    DENSE,
    LAYER_NORM_LIKE,
    DecoderBridge,
    Field,
    ReplicatedMapping,
    attention,
    ends,
    mlp,
    override,
    register_bridge,
)
from megatron.bridge.utils.errors import UserError

_LAYERS = "model.decoder.layers.*"
_ABSENT = ("num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps")
_OWN = (
    replace(ACTIVATION, hf="activation_function", default="relu"),
    Field("ffn_dim", "ffn_hidden_size"),
    Field("init_std", "init_method_std", default=0.02),
)


def _same_width(width: int | None, config: Mapping[str, Any]) -> int:
    if width not in (None, config["hidden_size"]):
        raise UserError(f"word_embed_proj_dim={width} must be hidden_size={config['hidden_size']}")
    return config["hidden_size"]


@register_bridge("OPTForCausalLM", model_type="opt")
class OPTBridge(DecoderBridge):
    fields = (
        *(field for field in override(DENSE, *_OWN) if field.hf not in _ABSENT),
        Field("dropout", "hidden_dropout", default=0.1),
        Field("enable_bias", "add_bias_linear", default=True),
        Field("word_embed_proj_dim", "hidden_size", default=None, to=_same_width),
    )
    fixed = {
        **LAYER_NORM_LIKE,
        "gated_linear_unit": False,
        "position_embedding_type": "learned_absolute",
        "position_offset": 2,
        "embedding_dropout": 0.0,
        "layernorm_epsilon": 1e-5,
    }
    irrelevant = {
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
        "layerdrop": (0.0,),
        "activation_dropout": None,  # transformers has none
    }
    weights = (
        ends("model.decoder.embed_tokens.weight", "model.decoder.final_layer_norm"),
        (
            ReplicatedMapping(
                "embedding.position_embeddings.weight", "model.decoder.embed_positions.weight"
            ),
        ),
        attention(_LAYERS, "self_attn_layer_norm", "self_attn.out_proj"),
        mlp(_LAYERS, "final_layer_norm", "", gated=False, projections=("", "fc1", "fc2")),
    )
