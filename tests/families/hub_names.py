# SPDX-License-Identifier: Apache-2.0
"""The hub's names of tensors that transformers keeps together in memory."""

from torch import Tensor


def by_expert(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter of a layer as the hub stores it: all experts' tensors apart, anything else as it is."""
    if name == "mlp.experts.gate_up_proj":
        return [
            (f"mlp.experts.{expert}.{kind}_proj.weight", part)
            for expert, both in enumerate(value)
            for kind, part in zip(("gate", "up"), both.chunk(2), strict=True)
        ]
    if name == "mlp.experts.down_proj":
        return [
            (f"mlp.experts.{expert}.down_proj.weight", part) for expert, part in enumerate(value)
        ]
    return [(name, value)]
