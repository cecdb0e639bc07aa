# SPDX-License-Identifier: Apache-2.0
"""What kernels reach of a GPU's data sheet, by generation; the table names the origin of each number."""

from dataclasses import dataclass
from typing import Literal

from megatron.bridge.utils.config import yaml_text

Direction = Literal["forward", "backward"]
Precision = Literal["bf16", "fp8", "fp4"]

MXFP8_BYTES = 33 / 32  # of a number with its share of the scale of 32 numbers


@dataclass(frozen=True, eq=False)
class Efficiency:
    """Fractions of the data sheet's rates."""

    matrix: dict[Precision, float]  # large matrix products
    attention: dict[Direction, float]  # fused attention over many keys, of the bf16 rate
    fp8_attention: dict[Direction, float]  # the same in FP8, of the bf16 rate
    bandwidth: float  # kernels that only read and write


EFFICIENCY: dict[str, Efficiency] = {
    name: Efficiency(**row) for name, row in yaml_text.tables_beside(__file__).items()
}
