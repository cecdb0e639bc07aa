# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers whose heads are one group, instead of attention (Granite 4, Bamba) or parallel to it (Falcon-H1).

In Megatron-Core, each tensor-parallel rank has groups of heads with their own B, C and norm. Here all heads share B
and C, and the gated norm is over all heads: each rank computes a part of B and C, gathers the other parts, and sums
its squares with the other ranks. A mixer parallel to attention reads the same input, and both outputs are added; the
outputs of its scan are gated, not normalized.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.bridge.backends.decoding.recurrent_cache import StateShape
from megatron.bridge.backends.recurrent.mamba import GroupRMSNorm, TorchMambaMixer


class OneGroupMambaMixer(TorchMambaMixer):
    """A mixer with the call of attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        ranks = groups.tp.size()
        cut = copy.copy(config)
        # each rank has a part of the shared rows of B and C
        cut.mamba_num_groups = ranks
        cut.mamba_state_dim = config.mamba_state_dim // ranks
        sizes: Any = {
            "d_model": config.hidden_size,
            "d_conv": getattr(config, "mamba_conv_kernel", 4),
        }
        super().__init__(cut, submodules, layer_number=layer_number, pg_collection=groups, **sizes)
        self.state_size = config.mamba_state_dim
        norm = NormOverRanks(
            self.d_inner_local_tp,
            config.layernorm_epsilon,
            self.d_inner_local_tp,
            norm_before_gate=False,
            device=self.norm.weight.device,
            dtype=config.params_dtype,
        )
        norm.weight = self.norm.weight
        norm.tp_group = groups.tp
        self.norm = norm

    def forward(
        self, hidden_states: Tensor, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, hidden] to the same shape; there is no bias."""
        return super().forward(hidden_states, packed_seq_params=packed_seq_params)

    def state_shapes(self) -> list[StateShape]:
        history, scan = super().state_shapes()
        return [
            history,
            StateShape((1, self.nheads_local_tp, self.headdim, self.state_size), scan.dtype),
        ]

    def _grouped(self, states: Tensor) -> Tensor:
        group: Any = self.tp_group
        return mappings.all_gather_last_dim_from_tensor_parallel_region(
            states, group=group
        ).unsqueeze(-2)


class NormOverRanks(GroupRMSNorm):
    """RMSNorm over the outputs of all tensor-parallel ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., outputs of this rank]; the result has the dtype of the gain."""
        x = x.float()
        ranks = self.tp_group.size()
        # each rank's outputs depend on the sum, so its gradient is also summed
        total = mappings.reduce_from_tensor_model_parallel_region(
            x.square().sum(-1, keepdim=True), self.tp_group
        )
        total = mappings.copy_to_tensor_model_parallel_region(total, self.tp_group)
        normed = x * (total / (x.shape[-1] * ranks) + self.eps).rsqrt()
        return normed.to(self.weight.dtype) * self.weight


@dataclass(kw_only=True)
class BesideMambaSubmodules(SelfAttentionSubmodules):
    mixer: MambaMixerSubmodules


class AttentionBesideMamba(SelfAttention):
    """Attention and a mixer; ``multipliers`` scale their outputs."""

    def __init__(
        self,
        config: Any,
        submodules: BesideMambaSubmodules,
        layer_number: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        groups: Any = {"layer_number": layer_number, "pg_collection": self.pg_collection}
        if config.mamba_num_groups == 1:
            mixer: Any = OneGroupMambaMixer(config, submodules.mixer, **groups)
        else:
            sizes = {"d_model": config.hidden_size, "d_conv": config.mamba_conv_kernel}
            mixer = TorchMambaMixer(config, submodules.mixer, **sizes, **groups)
        mixer.norm = _Cast(config.params_dtype)
        self.mixer = mixer
        self.multipliers = (1.0, 1.0)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, hidden] to the same shape, and return the bias of the output projection."""
        out, bias = super().forward(
            hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        mixed, _ = self.mixer(hidden_states, packed_seq_params=packed_seq_params)
        return out * self.multipliers[0] + mixed * self.multipliers[1], bias


class _Cast(nn.Module):
    """Replaces the norm of a mixer by a cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)
