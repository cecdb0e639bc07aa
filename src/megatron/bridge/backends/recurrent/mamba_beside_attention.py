# SPDX-License-Identifier: Apache-2.0
"""Attention with a Mamba-2 mixer beside it: both read the same input, and their outputs are added (Falcon-H1).

The outputs of the mixer's scan are gated, not normalized.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from torch import Tensor, nn

from megatron.bridge.backends.recurrent.mamba import TorchMambaMixer
from megatron.bridge.backends.recurrent.one_group_mamba import OneGroupMambaMixer


@dataclass(kw_only=True)
class BesideMambaSubmodules(SelfAttentionSubmodules):
    """Those of attention, and of the mixer."""

    mixer: MambaMixerSubmodules


class AttentionBesideMamba(SelfAttention):
    """Attention and a mixer, with ``multipliers`` of the outputs of each."""

    def __init__(
        self, config: Any, submodules: BesideMambaSubmodules, layer_number: int, *args: Any, **kwargs: Any
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
        """[s, b, hidden] to the same, and the bias of the output projection."""
        out, bias = super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
        mixed, _ = self.mixer(hidden_states, packed_seq_params=packed_seq_params)
        return out * self.multipliers[0] + mixed * self.multipliers[1], bias


class _Cast(nn.Module):
    """Stands where a mixer has its norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)
