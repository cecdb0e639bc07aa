# SPDX-License-Identifier: Apache-2.0
"""The experts of each cached token, at the same places as its keys, so that copies of caches keep them."""

from typing import Any

import torch
from torch import Tensor

from megatron.bridge.backends.decoding.step import DecodingStep
from megatron.bridge.backends.moe.router_replay import ExpertChoice


def expert_dtype(experts: int) -> torch.dtype:
    """Return the smallest dtype that holds the indices of ``experts`` experts."""
    return torch.uint8 if experts <= 256 else torch.int16


class ExpertCache:
    """The experts [tokens, topk] that one router chose: the ``cache`` of the router.

    Args:
        tokens: capacity in tokens for all requests.
        router: a Megatron-Core router.
        device: the device of the caches.
    """

    step: DecodingStep

    def __init__(self, tokens: int, router: Any, device: torch.device) -> None:
        dtype = expert_dtype(router.config.num_moe_experts)
        self.experts = torch.zeros(tokens, router.topk, dtype=dtype, device=device)
        self.is_recording = False
        self._group: Any = router.tp_group
        self._is_split = bool(router.config.sequence_parallel) and self._group.size() > 1
        self.choice = ExpertChoice(router.router_replay)
        self.choice.record = self.store

    @staticmethod
    def bytes_per_token(router: Any) -> int:
        return router.topk * expert_dtype(router.config.num_moe_experts).itemsize

    def store(self, chosen: Tensor) -> None:
        """Store the experts [rows of this rank, topk]; rows of other tensor-parallel ranks are zeros here."""
        if not self.is_recording:
            return
        if self._is_split:
            rows = chosen
            first_row = len(rows) * self._group.rank()
            chosen = rows.new_zeros(self.step.rows, rows.size(1))
            chosen[first_row : first_row + len(rows)] = rows
        self.experts[self.step.places] = chosen[: self.step.tokens].to(self.experts.dtype)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy ``count`` tokens within the cache; the two ranges may overlap."""
        self.experts[target : target + count] = self.experts[source : source + count].clone()
