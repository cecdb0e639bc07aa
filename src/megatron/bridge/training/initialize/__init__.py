# SPDX-License-Identifier: Apache-2.0
"""Initialization before the first step: parallel sizes, random states, and the trained part of a model."""

from megatron.bridge.utils.optional_imports import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "initialize_megatron": "megatron.bridge.compat.training_calls:initialize_megatron",
        "set_jit_fusion_options": "megatron.bridge.compat.training_calls:set_jit_fusion_options",
    },
)
