# SPDX-License-Identifier: Apache-2.0
"""LoRA with separate factors for the projections that Megatron fuses: queries, keys and values; gates and values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from megatron.bridge.peft.fused_parts import GATED, QKV
from megatron.bridge.peft.lora import SplitLoRA
from megatron.bridge.peft.targets import TargetCandidate


@dataclass
class CanonicalLoRA(SplitLoRA):
    """LoRA whose factors match those of Hugging Face's separate projections, one by one.

    Fused layers are targeted by their parts: ``linear_q``, ``linear_k``, ``linear_v``, ``linear_fc1_gate``,
    ``linear_fc1_up``. A model whose feed-forward layers have no gates has ``linear_fc1`` in their place.
    """

    target_modules: list[str] = field(
        default_factory=lambda: [
            *QKV.values(),
            "linear_proj",
            *reversed(GATED.values()),
            "linear_fc2",
        ]
    )

    parts_have_names: ClassVar[bool] = True

    def target_patterns(self, candidates: Sequence[TargetCandidate]) -> list[str]:
        """Return ``target_modules``; its default means the whole ``linear_fc1`` in models without gates."""
        patterns = self.target_modules
        if patterns != CanonicalLoRA().target_modules:
            return patterns
        leaves = {candidate.name.rpartition(".")[2] for candidate in candidates}
        gates = set(GATED.values())
        if gates & leaves or "linear_fc1" not in leaves:
            return patterns
        return [*(pattern for pattern in patterns if pattern not in gates), "linear_fc1"]
