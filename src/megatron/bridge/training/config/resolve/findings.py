# SPDX-License-Identifier: Apache-2.0
"""The machine that a config is resolved for, and what resolving finds: replaced values, and contradictions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

from megatron.bridge.backends.cpu import device
from megatron.bridge.backends.specs import layer_specs

# scaling of FP8 or FP4 -> lowest compute capability on which Transformer Engine supports it
CAPABILITIES: dict[str, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}


@dataclass(frozen=True)
class Hardware:
    """A machine, as far as a config depends on it."""

    runs_here: bool  # the config runs on this machine, so whatever is missing is an error; otherwise it is a note
    cuda: bool
    capability: tuple[int, int]  # CUDA compute capability; (0, 0) without a GPU
    transformer_engine: bool
    emerging_optimizers: bool  # the package that holds Muon

    @classmethod
    def detect(cls, runs_here: bool = True) -> "Hardware":
        cuda = device.has_cuda()
        capability = torch.cuda.get_device_capability() if cuda else (0, 0)
        return cls(
            runs_here,
            cuda,
            capability,
            layer_specs.has_transformer_engine(),
            HAVE_EMERGING_OPTIMIZERS,
        )

    def lacks_for(self, scaling: str) -> str | None:
        """What this machine lacks for matrix products with ``scaling``; None if it lacks nothing."""
        if not self.transformer_engine:
            return "Transformer Engine, which is not installed"
        if self.capability >= CAPABILITIES[scaling]:
            return None
        needed, available = (
            ".".join(map(str, pair)) for pair in (CAPABILITIES[scaling], self.capability)
        )
        return f"a GPU of compute capability {needed}, and this machine has {available if self.cuda else 'none'}"


@dataclass
class Findings:
    """Notes for the user and problems for one error message."""

    hardware: Hardware
    # counts the rows of an epoch of a config; None where the data is not read
    count_rows: Callable[[Any], int] | None = None
    notes: list[str] = field(
        default_factory=list[str]
    )  # a sentence for each value that was replaced
    problems: list[str] = field(default_factory=list[str])  # a sentence for each contradiction

    def lacking(self, problem: str, remedy: str) -> None:
        """This machine cannot do ``problem``: a problem where the run is here, a note where it is elsewhere."""
        if self.hardware.runs_here:
            self.problems.append(f"{problem}: {remedy}")
        else:
            self.notes.append(f"{problem}: the machine of the run must have it")

    def agree(self, owner: Any, block: str, name: str, value: Any, why: str) -> None:
        """Set ``owner.name`` if it is None; any other value than ``value`` is a problem."""
        current = getattr(owner, name)
        if current is None:
            setattr(owner, name, value)
        elif current != value:
            self.problems.append(
                f"{block}.{name}={current} contradicts {why}, which sets {value}: remove one of them"
            )
