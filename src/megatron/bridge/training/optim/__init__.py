# SPDX-License-Identifier: Apache-2.0
"""Optimizer, parameter groups, learning-rate schedule, and the optimizer state in a checkpoint."""

from megatron.bridge.utils.optional_imports import lazy_names

__getattr__ = lazy_names(
    __name__, {"setup_optimizer": "megatron.bridge.compat.training_calls:setup_optimizer"}
)
