# SPDX-License-Identifier: Apache-2.0
"""Activations that PyTorch has only as an option of a function: a config needs them by name."""

import torch
import torch.nn.functional as F


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, Hugging Face's ``gelu_pytorch_tanh``."""
    return F.gelu(x, approximate="tanh")


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """The same under the name that GPT-2 and Phi have for it."""
    return gelu_tanh(x)


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """The same under the name that GPT-NeoX-20B has for it."""
    return gelu_tanh(x)
