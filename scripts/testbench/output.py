# SPDX-License-Identifier: Apache-2.0
"""Files of the testbench: what was measured and what was estimated, for each operator and case."""

import json
from pathlib import Path
from typing import Any, Literal

from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import refuse_unwritable, write_text
from scripts.testbench.cases import Case

Unit = Literal["s", "bytes", "operations"]
File = Literal["timing", "memory_weights", "memory_activation", "flops"]

_SCALES: dict[Unit, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (0.0, "us")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (0.0, "kB")),
    "operations": ((1e12, "TFLOP"), (1e9, "GFLOP"), (0.0, "MFLOP")),
}
_SMALLEST: dict[Unit, float] = {"s": 1e-6, "bytes": 1e3, "operations": 1e6}


def spelled(value: float | None, unit: Unit) -> str:
    """A value in the largest unit that it reaches.

    Example:
        >>> spelled(0.0123, "s"), spelled(None, "bytes")
        ('12.300 ms', 'unknown')
    """
    if value is None:
        return "unknown"
    scale, name = next(each for each in _SCALES[unit] if value >= each[0])
    return f"{value / (scale or _SMALLEST[unit]):.3f} {name}"


class Results:
    """The results of one rank: leaves of ``real`` and ``estimated``, by file, operator and case.

    What the files in ``folder`` hold is kept; an operator and case that runs again is replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}

    def add(
        self,
        file: File,
        op: str,
        case: Case,
        direction: str | None,
        real: float,
        estimated: float | None,
        unit: Unit,
    ) -> None:
        leaf: dict[str, Any] = {"real": spelled(real, unit), "estimated": spelled(estimated, unit)}
        leaf |= {"real_value": real, "estimated_value": estimated, "unit": unit}
        place = self.files.setdefault(file, {}).setdefault(op, {})
        if direction is None:
            place[case.name] = leaf
        else:
            place.setdefault(case.name, {})[direction] = leaf

    def write(self) -> None:
        with refuse_unwritable(f"--output {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file, found in self.files.items():
                path = self.folder / f"{file}.json"
                before = strict_json.read(path) if path.exists() else {}
                merged = before | {op: before.get(op, {}) | cases for op, cases in found.items()}
                write_text(path, json.dumps(merged, indent=2) + "\n")
