# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (DeepSeek-V3.2): an indexer chooses the keys that latent attention attends to."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends.attention.sparse_attention import (
    Indexer,
    SparseAttention,
    is_sparse,
    link_shared,
    takes_over,
)
from megatron.bridge.backends.moe import aux_loss_metrics
from megatron.bridge.models.features.feature import (
    LayerFeature,
    ToySizes,
    average_keys,
    differing,
)
from megatron.bridge.utils.errors import UserError

_OTHERS: dict[str, Any] = {
    "dsa_kernel_backend": "none",
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_k_norm_fp32": False,
    "linear_attention_freq": None,
    "window_size": None,
    "apply_rope_fusion": False,
}
"""Settings that this implementation does not have -> the values with which they change nothing."""

_POSITIVE = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "q_lora_rank")


class SparseAttentionFeature(LayerFeature):
    """``experimental_attention_variant='dsa'``, by Megatron-Core's own settings."""

    prefixes = ("dsa_",)
    prefix_switch = "experimental_attention_variant"
    prefix_value = "dsa"
    pricing = {
        "dsa_indexer_n_heads": "modules",
        "dsa_indexer_head_dim": "modules",
        "dsa_indexer_topk": "modules",
        "dsa_indexer_topk_freq": "modules",
        "dsa_indexer_skip_topk_offset": "modules",
        "dsa_indexer_use_sparse_loss": "unpriced",
        "dsa_indexer_*": "numbers",
    }
    modules = (Indexer,)

    def is_used(self, config: Any) -> bool:
        return is_sparse(config)

    def check(self, config: Any) -> Iterator[str]:
        if not (is_sparse(config) and config.multi_latent_attention):
            return
        context = "with experimental_attention_variant='dsa'"
        if config.backend not in ("torch", "auto"):
            yield f"backend={config.backend!r} is not supported {context}: set model.backend='torch'"
        yield from differing(config, _OTHERS, context, with_remedy=True)
        kinds = config.cp_comm_type
        other_kinds = set(kinds if isinstance(kinds, list) else [kinds]) - {None, "all_gather"}
        if config.context_parallel_size > 1 and other_kinds:
            yield (
                f"cp_comm_type={kinds} is not supported {context}, whose queries choose among the keys of all "
                "ranks: set model.cp_comm_type='all_gather'"
            )
        missing = [name for name in _POSITIVE if not getattr(config, name)]
        for name in missing:
            yield (
                f"{name}={getattr(config, name)} must be positive: the indexer of sparse attention needs it"
            )
        if not missing and config.dsa_indexer_head_dim < config.qk_pos_emb_head_dim:
            yield (
                f"dsa_indexer_head_dim={config.dsa_indexer_head_dim} is less than qk_pos_emb_head_dim="
                f"{config.qk_pos_emb_head_dim}, which of each head are rotated"
            )
        if config.dsa_indexer_topk_freq > 1:
            yield from _check_shared(config)

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        if not is_sparse(config):
            return spec
        aux_loss_metrics.install_growing_tracker()  # of the loss of indexers
        layer: Any = spec.submodules
        attention = layer.self_attention
        parts = dataclasses.replace(attention.submodules, core_attention=SparseAttention)
        changed = dataclasses.replace(
            layer, self_attention=dataclasses.replace(attention, submodules=parts)
        )
        return dataclasses.replace(spec, submodules=changed)

    def change_model(self, model: Any, config: Any) -> None:
        """Connect layers that share a choice; an indexer without its own loss is frozen."""
        if not is_sparse(config):
            return
        layers = model.decoder.layers
        if len(layers):
            check_stage(config, layers[0].layer_number)
        link_shared(model)
        for module in model.modules():
            if isinstance(module, Indexer):
                module.requires_grad_(bool(config.dsa_indexer_loss_coeff))

    def keys_seen(self, config: Any, length: int) -> int | None:
        return min(length, config.dsa_indexer_topk) if is_sparse(config) else None

    def operations(self, module: Any, length: int) -> float:
        """Count the scores of all keys that a query may see."""
        config = module.config
        width = config.dsa_indexer_n_heads * (config.dsa_indexer_head_dim + 1)
        return 2 * width * average_keys(length, length) / config.tensor_model_parallel_size

    def notes(self, config: Any) -> Iterator[str]:
        best = config.dsa_indexer_topk
        if is_sparse(config) and best and config.seq_length > best:
            yield "activations leave out the masks of sparse attention: seq_length² x 3 bytes for each layer and sample"

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        sizes = {
            "dsa_indexer_n_heads": 8,
            "dsa_indexer_head_dim": toy.head_dim,
            "dsa_indexer_topk": toy.seq_length // 4,
        }
        return {name: size for name, size in sizes.items() if getattr(config, name)}


def _check_shared(config: Any) -> Iterator[str]:
    """Yield problems of layers that share a choice and must run in the same pass through the same stage."""
    reason = f"dsa_indexer_topk_freq={config.dsa_indexer_topk_freq} lets layers share what an indexer chooses"
    if config.mtp_num_layers:
        yield (
            f"{reason}, which mtp_num_layers={config.mtp_num_layers} does not support: set it to None"
        )
    stages = config.pipeline_model_parallel_size
    recompute = config.recompute_granularity
    if stages > 1 and recompute:
        yield (
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
