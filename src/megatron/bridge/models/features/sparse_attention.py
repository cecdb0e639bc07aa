# SPDX-License-Identifier: Apache-2.0
"""What a model with sparse attention must fulfil, and what its built chunks are given."""

from typing import Any

from torch import nn

from megatron.bridge.backends.attention.sparse_attention import (
    Indexer,
    is_sparse,
    link_shared,
    takes_over,
)
from megatron.bridge.models.features.gated_delta_net import exclude
from megatron.bridge.utils.errors import UserError

_OTHERS: dict[str, Any] = {
    "backend": "torch",
    "dsa_kernel_backend": "none",
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_k_norm_fp32": False,
    "linear_attention_freq": None,
    "window_size": None,
    "apply_rope_fusion": False,
}


def check(config: Any) -> None:
    """Refuse settings of sparse attention that this implementation does not have."""
    if not is_sparse(config):
        return
    exclude(config, _OTHERS, "with experimental_attention_variant='dsa'", say_value=True)
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "q_lora_rank"):
        if not getattr(config, name):
            raise UserError(
                f"{name}={getattr(config, name)} must be positive: the indexer of sparse attention needs it"
            )
    if config.dsa_indexer_head_dim < config.qk_pos_emb_head_dim:
        raise UserError(
            f"dsa_indexer_head_dim={config.dsa_indexer_head_dim} is less than qk_pos_emb_head_dim="
            f"{config.qk_pos_emb_head_dim}, which of each head are rotated"
        )
    if config.dsa_indexer_topk_freq > 1:
        _check_shared(config)


def _check_shared(config: Any) -> None:
    """Layers that share a choice must run in the same pass through the same stage."""
    reason = f"dsa_indexer_topk_freq={config.dsa_indexer_topk_freq} lets layers share what an indexer chooses"
    if config.mtp_num_layers:
        raise UserError(
            f"{reason}, which mtp_num_layers={config.mtp_num_layers} does not support: set it to None"
        )
    stages, recompute = config.pipeline_model_parallel_size, config.recompute_granularity
    if stages > 1 and recompute:
        raise UserError(
            f"{reason}, but recompute_granularity={recompute!r} with pipeline_model_parallel_size={stages} would "
            "take the choice of another microbatch: set one of them to its default"
        )


def check_stage(config: Any, first: int) -> None:
    """Refuse a pipeline stage that starts with a layer without an indexer; ``first`` counts from 1."""
    if takes_over(first, config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq):
        raise UserError(
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} begins a stage with layer {first}, "
            f"which takes the choice of an earlier one (dsa_indexer_topk_freq={config.dsa_indexer_topk_freq}): begin "
            "it with a layer that has an indexer, by model.pipeline_model_parallel_layout"
        )


def apply(model: nn.Module, config: Any) -> None:
    """Connect layers that share a choice; an indexer without its own loss is frozen."""
    if not is_sparse(config):
        return
    layers = model.decoder.layers  # type: ignore[union-attr]
    if len(layers):  # type: ignore[arg-type]
        check_stage(config, layers[0].layer_number)  # type: ignore[index]
    link_shared(model)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.requires_grad_(bool(config.dsa_indexer_loss_coeff))
