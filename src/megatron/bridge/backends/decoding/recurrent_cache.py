# SPDX-License-Identifier: Apache-2.0
"""States of fixed size, one of each kind for each request of a recurrent layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.bridge.backends.decoding.step import DecodingStep

Mix = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""Function (inputs [b, s, f], *states [b, ...]) -> (outputs [b, s, o], states after the last token)."""


@dataclass(frozen=True)
class StateShape:
    """Shape and dtype of one state of one request."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class RecurrentCache:
    """States, attached to a recurrent layer as its ``cache``."""

    step: DecodingStep

    def __init__(self, requests: int, shapes: Sequence[StateShape], device: torch.device) -> None:
        # the last slot is for padding
        self.states = [
            torch.zeros(requests + 1, *state.shape, dtype=state.dtype, device=device)
            for state in shapes
        ]

    def run(self, inputs: Tensor, width: int, mix: Mix, dtype: torch.dtype | None = None) -> Tensor:
        """Advance the states of the step's requests.

        ``mix`` computes one group of ``inputs`` [rows, 1, f]. Outputs are [rows, 1, width], zeros for padding, in
        ``dtype`` or the dtype of the inputs.
        """
        out = inputs.new_zeros(inputs.size(0), width, dtype=dtype or inputs.dtype)
        for group in self.step.groups:
            x = inputs[group.rows, 0].view(len(group.slots), group.count, -1)
            before = [state[group.slots] for state in self.states]
            if group.fresh:
                before = [state.zero_() for state in before]
            y, after = mix(x, *before)
            out[group.rows[: group.tokens]] = y.flatten(0, 1)[: group.tokens].to(out.dtype)
            for state, new in zip(self.states, after, strict=True):
                state[group.slots] = new.to(state.dtype)
        return out.unsqueeze(1)


def with_history(x: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend the last inputs of the previous step; return this and the last inputs of this step, [b, s, f] each."""
    extended = torch.cat((history, x), dim=1)
    return extended, extended[:, extended.size(1) - history.size(1) :]
