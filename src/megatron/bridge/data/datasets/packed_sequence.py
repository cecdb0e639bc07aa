# SPDX-License-Identifier: Apache-2.0
"""Several samples in a row, under the name that scripts know."""

from megatron.bridge.data.config import PackedSequenceSpecs
from megatron.bridge.data.rows import PackedRows

__all__ = ["PackedRows", "PackedSequenceSpecs"]
