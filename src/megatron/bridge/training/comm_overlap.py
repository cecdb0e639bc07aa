# SPDX-License-Identifier: Apache-2.0
"""Public import path of ``CommOverlapConfig``."""

from megatron.bridge.training.config.blocks.distributed import CommOverlapConfig

__all__ = ["CommOverlapConfig"]
