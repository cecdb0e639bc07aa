# SPDX-License-Identifier: Apache-2.0
"""Public name of ``training.config.blocks.comm_overlap``."""

from megatron.bridge.training.config.blocks.distributed import CommOverlapConfig

__all__ = ["CommOverlapConfig"]
