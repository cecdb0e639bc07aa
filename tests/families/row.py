# SPDX-License-Identifier: Apache-2.0
"""What a family declares to be tested."""

from megatron.bridge.testing.row import Rewrite, Row

__all__ = ["Rewrite", "Row"]
