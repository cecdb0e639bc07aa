# SPDX-License-Identifier: Apache-2.0
"""Slices of a batch in host memory for this context-parallel rank."""

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron.bridge.data.finetuning.packing import cut_for_rank


def cut_on_host(values: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The part [b, s] of this context-parallel rank of ``values`` of whole sequences; both are on the host."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    return values[:, cut_for_rank(bounds_on_host(batch), group.rank(), group.size())]


def bounds_on_host(batch: dict[str, Any]) -> np.ndarray:
    """Where the sequences of each row begin and end; ``batch`` is on the host."""
    return batch["cu_seqlens"].numpy() if "cu_seqlens" in batch else np.array([0, batch["tokens"].shape[1]])
