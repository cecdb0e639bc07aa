# SPDX-License-Identifier: Apache-2.0
"""Group-limited routing by the best expert, or the two best, of each group.

Megatron-Core ranks groups by the sum of their ``topk / group_topk`` best scores, which are two in DeepSeek-V3. In
DeepSeek-V2 the best score alone ranks them (``group_limited_greedy``).
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.bridge.utils.errors import UserError

_BEST = {"max": 1, "two": 2}


class BestExpertGroups:
    """Replaces a router's replay, the hook with which Megatron-Core allows another choice of experts."""

    layer_number: int | None = None

    def __init__(self, best: int) -> None:
        self._best = best  # scores of a group that are added up to rank it

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, _default: Any
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts), both [tokens, topk], from scores [tokens, experts]."""
        groups = scores.view(len(scores), num_groups, -1)
        chosen = groups.topk(self._best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
        limited = groups.masked_fill(hidden[..., None], float("-inf")).flatten(1)
        return limited.topk(topk, dim=-1)


def check(config: Any) -> None:
    """Refuse settings that take the choice of experts away from the router's own code."""
    for name in ("moe_router_fusion", "moe_enable_routing_replay"):
        if _is_asked_for(config) and getattr(config, name):
            score = config.moe_router_group_score
            raise UserError(f"moe_router_group_score={score!r} does not work with {name}=True: set model.{name}=False")


def apply(model: Any, config: Any) -> None:
    """Make the routers of ``model`` choose groups as ``config.moe_router_group_score`` says."""
    if not _is_asked_for(config):
        return
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = BestExpertGroups(_BEST[config.moe_router_group_score])  # type: ignore[assignment]


def _is_asked_for(config: Any) -> bool:
    return config.moe_router_group_score in _BEST and bool(config.moe_router_num_groups)
