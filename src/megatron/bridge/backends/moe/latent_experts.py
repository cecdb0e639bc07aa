# SPDX-License-Identifier: Apache-2.0
"""Experts of a narrower width, between two projections that all tokens go through, without Transformer Engine.

``moe_latent_size`` (Nemotron 3 Super): router and shared experts read the hidden states, routed experts a projection.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.bridge.backends.kernels.norms import replicated


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that is replicated over tensor-parallel ranks, instead of ``TELinear``."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "Megatron-Core's experts have no bias with projections"
        self.weight = replicated(config, output_size, input_size)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the output [..., output_size] for ``x`` [..., input_size], and no bias."""
        return F.linear(x, self.weight), None


class LatentExperts(moe_layer.MoELayer):
    """Megatron-Core's experts with projections of PyTorch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _replicated_linear():
            super().__init__(*args, **kwargs)


@contextmanager
def _replicated_linear() -> Iterator[None]:
    module: Any = moe_layer
    before = module.HAVE_TE, module.TELinear
    module.HAVE_TE = True
    module.TELinear = ReplicatedLinear
    try:
        yield
    finally:
        module.HAVE_TE, module.TELinear = before
