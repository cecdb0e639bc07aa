# SPDX-License-Identifier: Apache-2.0
"""Bamba: Mamba-2 mixers, whose heads are one group, instead of attention in most layers."""

from megatron.bridge.models.families import (
    BIASES,
    DENSE,
    LLAMA_LIKE,
    ONE_GROUP,
    ONE_GROUP_MAMBA,
    PARTIAL_ROPE,
    DecoderBridge,
    Field,
    attention,
    ends,
    mamba,
    mlp,
    override,
    register_bridge,
)


@register_bridge("BambaForCausalLM", model_type="bamba")
class BambaBridge(DecoderBridge):
    fields = (
        *override((*DENSE, *BIASES), PARTIAL_ROPE, *ONE_GROUP_MAMBA),
        Field(
            "attn_layer_indices",
            "mamba_layers",
            default=None,
            to=lambda found, config: [
                int(layer not in (found or ())) for layer in range(config["num_hidden_layers"])
            ],
            back=lambda layers, _: (
                [index for index, mixer in enumerate(layers) if not mixer] or None
            ),
        ),
    )
    fixed = {**LLAMA_LIKE, **ONE_GROUP}
    irrelevant = dict.fromkeys(
        ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")
    )
    irrelevant |= dict.fromkeys(("mamba_dt_rank", "use_mamba_kernels"))  # published, and not read
    weights = (
        ends(norm="model.final_layernorm"),
        attention(),
        mamba("model.layers.*", "mamba", "input_layernorm", replaces_attention=True),
        mlp(norm="pre_ff_layernorm", names="feed_forward"),
    )
