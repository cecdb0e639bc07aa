# SPDX-License-Identifier: Apache-2.0
"""Decide how this machine's processor multiplies matrices in bfloat16.

A processor without bf16 instructions (AVX2 alone, or the first generations of AVX-512) multiplies bf16 matrices 4 to 15
times slower than fp32 ones. There, products are computed in fp32 and rounded once. All code asks this module.
"""

import functools
import os
from dataclasses import dataclass

import torch

from megatron.bridge.utils.errors import UserError

VARIABLE = "MEGATRON_BRIDGE_CPU_BF16"
"""Environment variable that overrides the decision: ``native`` or ``widen``."""

_CHOICES = ("native", "widen")
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx10_2")


@dataclass(frozen=True)
class Bf16Products:
    """How bf16 products are computed on the CPU, and why."""

    widened: bool  # computed in fp32 and rounded once
    reason: str


@functools.cache
def choose_products() -> Bf16Products:
    """Return how to compute bf16 products on this processor.

    The answer depends on what the processor and its libraries support, never on a measurement: all ranks and all runs
    on a machine get the same numbers. It follows ``ONEDNN_MAX_CPU_ISA``.
    """
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        if asked not in _CHOICES:
            raise UserError(f"{VARIABLE}={asked} is not one of {', '.join(_CHOICES)}")
        return Bf16Products(asked == "widen", f"{VARIABLE}={asked}")
    if not _library_multiplies():
        return Bf16Products(True, "oneDNN has no bf16 products for this processor")
    if not _has_instructions():
        return Bf16Products(
            True, "the processor has no bf16 instructions, and oneDNN emulates them"
        )
    return Bf16Products(False, "the processor has bf16 instructions")


def _library_multiplies() -> bool:
    """Return whether PyTorch passes bf16 products to oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_instructions() -> bool:
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return True  # on Arm, oneDNN's answer already depends on the instructions
    return any(capabilities.get(name) for name in _INSTRUCTIONS)
