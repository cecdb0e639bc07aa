# SPDX-License-Identifier: Apache-2.0
"""Write the table of formats into docs/low-precision.md: ``make formats``."""

from typing import Any

import torch

from scripts.docs.generated import table_of

PART = table_of("low-precision.md", "formats")
ROWS = 512
COLUMNS = 2048
_OUTLIERS = 1000  # one weight in as many is ten times as large


def table() -> str:
    """A Markdown table with the size of each format and the error of two kinds of weights."""
    from megatron.bridge.models.hf_pretrained.written_formats import WRITTEN_FORMATS

    lines = [
        "| `--quantize` | stores | bits per weight | error | with outliers |",
        "|---|---|---|---|---|",
    ]
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    spiky = normal.clone()
    spiky.view(-1)[::_OUTLIERS] *= 10
    for name, row in WRITTEN_FORMATS.items():
        errors = [_error(name, weight) for weight in (normal, spiky)]
        cells = (
            f"`{name}`",
            row.description,
            f"{_bits(name):.2f}",
            *(f"{100 * error:.2g} %" for error in errors),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _outline(name: str) -> Any:
    from megatron.bridge.models.hf_pretrained.written_formats import WRITTEN_FORMATS, outline

    row = WRITTEN_FORMATS[name]
    return outline(row, "m.weight", (ROWS, COLUMNS), torch.bfloat16, row.group_size or 0)


def _error(name: str, weight: torch.Tensor) -> float:
    """Root mean square of the error over that of the weights."""
    outlined = _outline(name)
    stored = outlined.tensor.encode(weight) | outlined.constants
    read = torch.empty_like(weight)
    outlined.tensor.fill(stored, (), read)
    return float((read - weight).norm() / weight.norm())


def _bits(name: str) -> float:
    entries = _outline(name).entries.values()
    return 8 * sum(entry.end - entry.begin for entry in entries) / (ROWS * COLUMNS)


if __name__ == "__main__":
    PART.write(table())
