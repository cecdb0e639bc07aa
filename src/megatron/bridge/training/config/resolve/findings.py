# SPDX-License-Identifier: Apache-2.0
"""What resolving a config finds: replaced values, and contradictions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.training.config.hardware import Hardware


@dataclass
class Findings:
    """Notes for the user and problems for one error message."""

    hardware: Hardware
    # counts the rows of an epoch of a config; None where the data is not read
    count_rows: Callable[[Any], int] | None = None
    notes: list[str] = field(default_factory=list[str])  # a sentence for each value that was replaced
    problems: list[str] = field(default_factory=list[str])  # a sentence for each contradiction

    def lacking(self, what: str, remedy: str) -> None:
        """This machine cannot do ``what``: a problem where the run is here, a note where it is elsewhere."""
        if self.hardware.runs_here:
            self.problems.append(f"{what}: {remedy}")
        else:
            self.notes.append(f"{what}: the machine of the run must have it")

    def agree(self, owner: Any, block: str, name: str, value: Any, why: str) -> None:
        """Set ``owner.name`` if it is None; any other value than ``value`` is a problem."""
        current = getattr(owner, name)
        if current is None:
            setattr(owner, name, value)
        elif current != value:
            self.problems.append(
                f"{block}.{name}={current} contradicts {why}, which asks for {value}: remove one of them"
            )
