# SPDX-License-Identifier: Apache-2.0
"""Initialization before the first step: parallel sizes, random states, and the trained part of a model."""

from megatron.bridge.utils.optional_imports import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "initialize_megatron": "megatron.bridge.training.facade:initialize_megatron",
        "set_jit_fusion_options": "megatron.bridge.training.facade:set_jit_fusion_options",
    },
)
