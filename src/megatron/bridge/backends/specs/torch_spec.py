# SPDX-License-Identifier: Apache-2.0
"""The modules of the ``torch`` backend for Megatron-Core's layers."""

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.torch_norm import LayerNormBuilder
from torch import Tensor

from megatron.bridge.backends.attention.torch_attention import TorchAttention
from megatron.bridge.backends.decoding.attention_cache import LatentCache
from megatron.bridge.backends.kernels.norms import TorchNorm
from megatron.bridge.backends.moe.grouped_experts import grouped_experts


class TorchSpecProvider(LocalSpecProvider):
    """Megatron-Core's parallel linear layers, with norms, attention and experts in plain PyTorch."""

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> LayerNormBuilder:
        """Return one builder for all norms, which reads the kind of norm from the config."""
        return TorchNorm

    def core_attention(self) -> type:
        return TorchAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> ExpertsBuilder:
        """Return grouped experts, even if ``moe_grouped_gemm`` is off: results and checkpoints are the same.

        Megatron-Core's alternative, one module per expert, is slower, and on a machine without a GPU all
        expert-parallel ranks draw the same initial weights.
        """
        return grouped_experts()


class TorchLatentAttention(MLASelfAttention):
    """Multi-head latent attention with exactly the modules of the layer spec.

    Megatron-Core overrides the spec by ``config.transformer_impl``. Without a query LoRA it then requires
    Transformer Engine's fused norm and projection, although models such as DeepSeek-V2-Lite have no query norm.

    Attributes:
        cache: latents of earlier tokens while the model decodes, else None.
    """

    cache: LatentCache | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.sequence_parallel or self.config.q_lora_rank is None:
            return
        # The latent of the queries, and so the gradient of its norm, is the same on every rank. Megatron-Core sums
        # the gradients of every ``q_layernorm`` as if it were per head, which would multiply it by the ranks.
        norm: Any = self.q_layernorm
        for parameter in norm.parameters():
            parameter.average_gradients_across_tp_domain = True

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = (
            "linear_q_proj",
            "linear_q_up_proj",
            "linear_kv_up_proj",
            "q_layernorm",
            "kv_layernorm",
        )
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the full latents of this rank's part of the sequence under sequence parallelism, else of all tokens.

        Megatron-Core would gather the latent of keys and values, but ignore that each rank has only the gradient of
        its own heads for the rotary part of the keys.
        """
        queries, latent = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return queries, latent
        latent = gather_from_tensor_model_parallel_region(latent, group=self.tp_group)
        if self.config.sequence_parallel:  # clones, because a view would keep the full latents
            return queries.clone(), scatter_to_sequence_parallel_region(
                latent, group=self.tp_group
            ).clone()
        positions = self.config.qk_pos_emb_head_dim
        compressed, rotated = latent.split([latent.size(-1) - positions, positions], dim=-1)
        rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
        return queries, torch.cat((compressed, rotated), dim=-1)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return queries, keys and values as in Megatron-Core, or for attention to latents if there is a cache."""
        if self.cache is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        queries, latents = self._qkv_down_projection(hidden_states)
        if self.config.sequence_parallel:
            latents = gather_from_sequence_parallel_region(latents, group=self.tp_group)
        compressed, rotated = latents.split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        norm: Any = self.kv_layernorm
        compressed = norm(compressed)
        if self.config.q_lora_rank is not None:
            norm = self.q_layernorm
            queries = norm(queries)
        query = self._queries(queries)
        plain, turned = query.split(
            [self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1
        )
        turned = self._rotate(turned)
        rotated = self._rotate(rotated.unsqueeze(2))
        plain = self.cache.project_queries(plain[:, 0]).unsqueeze(1)
        key = torch.cat((compressed.unsqueeze(2), rotated), dim=-1)
        return torch.cat((plain, turned), dim=-1), key, compressed.unsqueeze(2), queries, compressed

    def _queries(self, compressed: Tensor) -> Tensor:
        """Compute queries [s, b, h, d] from the normalized latent, or from hidden states in models without a latent."""
        up: Any = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        projected, _ = up(compressed)
        return projected.unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate [s, b, h, d] by the angles of the positions of the tokens."""
        embedding: Any = self.rotary_pos_emb(x.size(0))
        angles, factor = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
        return apply_rotary_pos_emb(
            x,
            angles,
            self.config,
            mscale=factor,
            cp_group=self.pg_collection.cp,
            mla_rotary_interleaved=True,
        )
