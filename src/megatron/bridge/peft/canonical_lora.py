# SPDX-License-Identifier: Apache-2.0
"""LoRA with separate factors for the projections that Megatron fuses: queries, keys and values; gates and values."""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron.bridge.peft.fused_parts import GATED, QKV
from megatron.bridge.peft.lora import SplitLoRA


@dataclass
class CanonicalLoRA(SplitLoRA):
    """LoRA whose factors match those of Hugging Face's separate projections, one by one.

    Fused layers are targeted by their parts: ``linear_q``, ``linear_k``, ``linear_v``, ``linear_fc1_gate``,
    ``linear_fc1_up``.
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
