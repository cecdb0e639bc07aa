# SPDX-License-Identifier: Apache-2.0
"""LFM2, dense: gated short convolutions among attention with normalised queries and keys."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megatron.bridge.models.conversion.blocks import attention, ends, fused_norm, linear
from megatron.bridge.models.conversion.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.fields import Field
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    ReplicatedMapping,
    ShortConvMapping,
)
from megatron.bridge.utils.errors import UserError

_OTHER = ("rms_norm_eps", "intermediate_size", "hidden_act", "attention_dropout", "tie_word_embeddings")
_KINDS = ("full_attention", "conv")
_OURS, _THEIRS = "decoder.layers.*", "model.layers.*"
_CONV = f"{_OURS}.self_attention"


def _convolutions(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    layers = config["num_hidden_layers"]
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise UserError(f"layer_types={kinds} must say {' or '.join(_KINDS)} for num_hidden_layers={layers}")
    return [_KINDS.index(kind) for kind in kinds]


def _convolutions_back(layers: list[int], _: Any) -> list[str]:
    return [_KINDS[layer] for layer in layers]


def _width(_: Any, config: Mapping[str, Any]) -> int:
    """What transformers makes of the four keys."""
    width = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    multiple, factor = config.get("block_multiple_of", 256), config.get("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _width_back(width: int, _: Any) -> int:
    return width * 3 // 2 if _adjusted(width, None) else width


def _adjusted(width: int, _: Any) -> bool:
    return width % 256 == 0


@register_bridge("Lfm2ForCausalLM", model_type="lfm2")
class Lfm2Bridge(DecoderBridge):
    """Hugging Face's ``Lfm2ForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *(field for field in DENSE if field.hf not in _OTHER),
        Field("norm_eps", "layernorm_epsilon"),
        Field("tie_word_embeddings", "share_embeddings_and_output_weights", default=True),
        Field("intermediate_size", "ffn_hidden_size", to=_width, back=_width_back),
        Field("block_auto_adjust_ff_dim", "ffn_hidden_size", default=True, to=_width, back=_adjusted),
        Field("block_ffn_dim_multiplier", "ffn_hidden_size", default=1.0, to=_width, back=lambda *_: 1.0),
        Field("block_multiple_of", "ffn_hidden_size", default=256, to=_width, back=lambda *_: 256),
        Field("conv_L_cache", "linear_conv_kernel_dim"),
        Field("layer_types", "short_conv_layers", to=_convolutions, back=_convolutions_back),
    )
    fixed = {
        **LLAMA_LIKE,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "qk_layernorm": True,
    }
    irrelevant = {
        "conv_bias": (False,),
        "full_attn_idxs": None,  # it stands in for layer_types, which transformers always fills in
        # of the training code; transformers does not read them
        **dict.fromkeys(("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")),
        **dict.fromkeys(("conv_use_xavier_init", "conv_dim", "conv_dim_out", "block_dim", "block_norm_eps")),
        **dict.fromkeys(("num_heads", "theta")),
        "block_use_swiglu": (True,),
        "use_pos_enc": (True,),
    }
    weights = (
        ends(norm="model.embedding_norm"),
        attention(norm="operator_norm", output="self_attn.out_proj"),
        tuple(
            AutoMapping(
                f"{_OURS}.self_attention.{role}_layernorm.weight", f"{_THEIRS}.self_attn.{role}_layernorm.weight"
            )
            for role in "qk"
        ),
        (
            ShortConvMapping(f"{_CONV}.in_proj.weight", f"{_THEIRS}.conv.in_proj.weight"),
            ReplicatedMapping(f"{_CONV}.in_proj.layer_norm_weight", f"{_THEIRS}.operator_norm.weight"),
            AutoMapping(f"{_CONV}.conv1d.weight", f"{_THEIRS}.conv.conv.weight"),
            AutoMapping(f"{_CONV}.out_proj.weight", f"{_THEIRS}.conv.out_proj.weight"),
            GatedMLPMapping(
                f"{_OURS}.mlp.linear_fc1.weight",
                gate=f"{_THEIRS}.feed_forward.w1.weight",
                up=f"{_THEIRS}.feed_forward.w3.weight",
            ),
        ),
        linear(f"{_OURS}.mlp.linear_fc2", f"{_THEIRS}.feed_forward.w2"),
        fused_norm(f"{_OURS}.pre_mlp_layernorm", f"{_OURS}.mlp.linear_fc1", f"{_THEIRS}.ffn_norm"),
    )
