# SPDX-License-Identifier: Apache-2.0
"""Predict the time of collectives from latency and bandwidth of the slowest link of a group (alpha-beta model)."""

from dataclasses import dataclass

from megatron.bridge.autotune.gpus import Gpu

# Parts of a link's rate; docs/tuner.md lists the origins.
NVLINK_EFFICIENCY = 0.8  # NCCL's ring collectives
NETWORK_EFFICIENCY = 0.9
ALL_TO_ALL_EFFICIENCY = 0.7  # of a ring, for NCCL's all-to-all, which sends many small messages
FLEX_NVLINK_EFFICIENCY = 0.87  # DeepEP and HybridEP, in addition to the time per token below
FLEX_NETWORK_EFFICIENCY = 0.9

# Seconds of a collective without data, within a node and between nodes.
NVLINK_LATENCY = 12e-6
NETWORK_LATENCY = 25e-6

# Seconds that DeepEP and HybridEP need to send a token, whatever its size.
FLEX_NVLINK_TOKEN = 3.4e-9
FLEX_NETWORK_TOKEN = 20e-9


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks of a collective in Megatron-Core's rank order, in which neighbors differ by ``stride``."""

    size: int
    stride: int = 1

    def inside(self, domain: int) -> int:
        """Return the number of ranks of this group within one NVLink domain."""
        return max(1, min(self.size, domain // self.stride))


@dataclass(frozen=True)
class AlphaBeta:
    """Times of collectives on one type of GPU, in seconds; ``size`` is in bytes."""

    card: Gpu

    def all_gather(self, size: float, group: CollectiveGroup) -> float:
        """``size`` is the size of the result."""
        if group.size == 1 or not size:
            return 0.0
        return self._ring(size, group) + self._latency(group)

    def reduce_scatter(self, size: float, group: CollectiveGroup) -> float:
        """``size`` is the size of the input."""
        return self.all_gather(size, group)

    def all_reduce(self, size: float, group: CollectiveGroup) -> float:
        return 2 * self.all_gather(size, group)

    def all_to_all(self, size: float, group: CollectiveGroup) -> float:
        """``size`` is the data of one rank, which sends an equal share to each rank."""
        if group.size == 1 or not size:
            return 0.0
        inside = group.inside(self.card.domain)
        near = size * (inside - 1) / group.size / (self.card.nvlink * NVLINK_EFFICIENCY)
        far = size * (group.size - inside) / group.size / (self.card.network * NETWORK_EFFICIENCY)
        return max(near, far) / ALL_TO_ALL_EFFICIENCY + self._latency(group)

    def dispatch(self, tokens: float, width: float, top_k: int, group: CollectiveGroup) -> float:
        """Time DeepEP or HybridEP, which send a token once to a node and once to a rank, however many experts it chose.

        Args:
            tokens: Tokens of a rank, without copies.
            width: Bytes of a token.
            top_k: Experts that a token chooses, evenly over the ranks.
        """
        if group.size == 1:
            return 0.0
        inside = group.inside(self.card.domain)
        nodes = group.size / inside
        near = width / (self.card.nvlink * FLEX_NVLINK_EFFICIENCY) + FLEX_NVLINK_TOKEN
        near *= tokens * reached(group.size, top_k) * (inside - 1) / inside
        far = width / (self.card.network * FLEX_NETWORK_EFFICIENCY) + FLEX_NETWORK_TOKEN
        far *= tokens * reached(nodes, top_k) * (nodes - 1) / nodes
        return max(near, far) + self._latency(group)

    def send(self, size: float, distance: int) -> float:
        if distance < self.card.domain:
            return size / (self.card.nvlink * NVLINK_EFFICIENCY) + NVLINK_LATENCY
        return size / (self.card.network * NETWORK_EFFICIENCY) + NETWORK_LATENCY

    def _ring(self, size: float, group: CollectiveGroup) -> float:
        """Rings through all GPUs of a node use all network adapters, so each GPU's share uses its own adapter."""
        inside = group.inside(self.card.domain)
        near = size * (group.size - 1) / group.size / (self.card.nvlink * NVLINK_EFFICIENCY)
        if inside >= group.size:
            return near
        return max(
            near,
            size * (1 - inside / group.size) / (inside * self.card.network * NETWORK_EFFICIENCY),
        )

    def _latency(self, group: CollectiveGroup) -> float:
        inside = group.inside(self.card.domain)
        return NVLINK_LATENCY if inside >= group.size else NETWORK_LATENCY


def reached(places: float, chosen: int) -> float:
    """Return how many of ``places`` a token reaches on average with ``chosen`` experts.

    Example:
        >>> reached(1, 8), round(reached(8, 8), 2)
        (1.0, 5.25)
    """
    return places * (1 - (1 - 1 / places) ** chosen)
