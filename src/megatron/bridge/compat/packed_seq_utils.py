# SPDX-License-Identifier: Apache-2.0
"""Packed rows under context parallelism."""

from typing import Any

import numpy as np
import torch

from megatron.bridge.backends.attention.block_mask import host_values, padded_cu_seqlens
from megatron.bridge.data.finetuning.packing import cut_for_rank
from megatron.bridge.utils.errors import UserError


def get_packed_seq_cp_partition_indices(
    packed_seq_params: Any, total_tokens: int, cp_size: int, cp_rank: int, device: Any = None
) -> torch.Tensor:
    """The positions of a packed row of ``total_tokens`` that one context-parallel rank holds, as int64."""
    bounds = host_values(padded_cu_seqlens(packed_seq_params))
    if bounds[-1] != total_tokens:
        raise UserError(
            f"total_tokens={total_tokens}, but the packed sequences end at {bounds[-1]}: pad the last one"
        )
    return torch.from_numpy(cut_for_rank(np.array(bounds), cp_rank, cp_size)).to(device)
