# SPDX-License-Identifier: Apache-2.0
"""Random numbers."""

from dataclasses import dataclass


@dataclass
class RNGConfig:
    """Random numbers."""

    seed: int = 1234
    """Seed of weight initialization, dropout and data order."""
    data_parallel_random_init: bool = False
    """Initialize each data-parallel rank with its own seed, then broadcast the first rank's weights."""
