# SPDX-License-Identifier: Apache-2.0
"""Activations without a function of the right name: options of PyTorch's functions, and xIELU, which is trained."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.utils.errors import UserError

_ALPHA, _BETA, _EPS = 0.8, 0.5, -1e-6  # of xIELU; the last two are not trained


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU with the tanh approximation, Hugging Face's ``gelu_pytorch_tanh``."""
    return F.gelu(x, approximate="tanh")


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """The same under the name that GPT-2 and Phi have for it."""
    return gelu_tanh(x)


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """The same under the name that GPT-NeoX-20B has for it."""
    return gelu_tanh(x)


def xielu(x: Tensor) -> Tensor:
    """The activation xIELU with its initial parameters; ``apply_xielu`` makes them trainable in each layer."""
    return _xielu_formula(x, _ALPHA, _ALPHA - _BETA, _BETA, x.clamp(max=_EPS))


def _xielu_formula(x: Tensor, positive: Any, negative: Any, beta: Any, capped: Tensor) -> Tensor:
    return (
        torch.where(x > 0, positive * x * x, (torch.expm1(capped) - x) * (negative + beta))
        + beta * x
    )


class XIELU(nn.Module):
    """An activation with two numbers (arXiv:2411.13010) that tensor-parallel ranks share, adding up gradients."""

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        like: Any = {"dtype": config.params_dtype, "device": device}
        for name, value in (("alpha_p", _ALPHA), ("alpha_n", _ALPHA - _BETA)):
            self.register_parameter(
                name, nn.Parameter(torch.full((1,), value, **like).expm1().log())
            )
        for name, value in (("beta", _BETA), ("eps", _EPS)):
            self.register_buffer(name, torch.full((), value, **like))

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = (
            F.softplus(mappings.copy_to_tensor_model_parallel_region(alpha, self.tp_group))
            for alpha in (self.alpha_p, self.alpha_n)
        )
        beta = self.get_buffer("beta")
        eps = self.get_buffer("eps")
        return _xielu_formula(x, positive, negative, beta, torch.minimum(x, eps))


def apply_xielu(model: nn.Module, config: Any) -> None:
    """Replace the function ``xielu`` in each feed-forward layer by one with trained parameters."""
    if config.activation_func is not xielu:
        return
    if config.gated_linear_unit or config.num_moe_experts:
        raise UserError(
            "activation_func=xielu is for feed-forward layers without a gate and experts: set "
            "model.gated_linear_unit=False and model.num_moe_experts=None"
        )
    for module in model.modules():
        if isinstance(module, MLP):
            module.activation_func = XIELU(config, module.tp_group)


class XIELUFeature(LayerFeature):
    def is_used(self, config: Any) -> bool:
        return config.activation_func is xielu

    def change_model(self, model: nn.Module, config: Any) -> None:
        apply_xielu(model, config)
