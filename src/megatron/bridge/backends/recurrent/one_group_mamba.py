# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers in the place of attention, whose heads are one group (Granite 4, Bamba).

Megatron-Core gives each tensor-parallel rank groups of heads with a B, a C and a norm of their own. Here all heads
share B and C, and the gated norm is over all of them: each rank computes a part of B and C, gathers the others, and
adds up its squares with those of the others.
"""

import copy
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        ranks, cut = groups.tp.size(), copy.copy(config)
        # the same rows of B and C in all, a part of them on each rank
        cut.mamba_num_groups, cut.mamba_state_dim = ranks, config.mamba_state_dim // ranks
        sizes: Any = {"d_model": config.hidden_size, "d_conv": getattr(config, "mamba_conv_kernel", 4)}
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
        norm.weight, norm.tp_group = self.norm.weight, groups.tp
        self.norm = norm

    def forward(self, hidden_states: Tensor, packed_seq_params: Any = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] to the same, and no bias."""
        return super().forward(hidden_states, packed_seq_params=packed_seq_params)

    def state_shapes(self) -> list[StateShape]:
        history, scan = super().state_shapes()
        return [history, StateShape((1, self.nheads_local_tp, self.headdim, self.state_size), scan.dtype)]

    def _grouped(self, states: Tensor) -> Tensor:
        group: Any = self.tp_group
        return mappings.all_gather_last_dim_from_tensor_parallel_region(states, group=group).unsqueeze(-2)


class NormOverRanks(GroupRMSNorm):
    """RMSNorm over the outputs of all tensor-parallel ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., outputs of this rank]; the result has the dtype of the gain."""
        x, ranks = x.float(), self.tp_group.size()
        # each rank's outputs depend on the sum, so its gradient is summed up, too
        total = mappings.reduce_from_tensor_model_parallel_region(x.square().sum(-1, keepdim=True), self.tp_group)
        total = mappings.copy_to_tensor_model_parallel_region(total, self.tp_group)
        normed = x * (total / (x.shape[-1] * ranks) + self.eps).rsqrt()
        return normed.to(self.weight.dtype) * self.weight
