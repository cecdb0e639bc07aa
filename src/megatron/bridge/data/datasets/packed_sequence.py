# SPDX-License-Identifier: Apache-2.0
"""Sequence packing under its public names."""

from megatron.bridge.data.finetuning.rows import PackedRows
from megatron.bridge.data.records.record_config import PackedSequenceSpecs

__all__ = ["PackedRows", "PackedSequenceSpecs"]
