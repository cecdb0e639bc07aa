# SPDX-License-Identifier: Apache-2.0
"""Experts beside a dense feed-forward layer, each between its own norms, and a router that normalizes its input.

Gemma 4: both read the residual stream; the router reads it through an RMSNorm without a gain and a trained scale,
and the normalized weights of the chosen experts are multiplied by a trained scale of each expert.
"""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.bridge.backends.kernels.norms import TorchNorm, replicated


class ExpertsBesideMLP(MoELayer):
    """Megatron-Core's experts and a dense feed-forward layer, which the argument ``dense`` builds."""

    def __init__(
        self, config: TransformerConfig, *args: Any, dense: Any, pg_collection: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.dense = dense(
            config=config, pg_collection=pg_collection, is_mtp_layer=False, name=None
        )
        for name in ("dense_norm", "dense_output_norm", "expert_norm", "expert_output_norm"):
            setattr(self, name, TorchNorm(config, config.hidden_size, config.layernorm_epsilon))
        router: Any = self.router
        router.scale = replicated(config, config.hidden_size)
        router.expert_scale = replicated(config, config.num_moe_experts or 0)
        router.scale.data.fill_(1.0)
        router.expert_scale.data.fill_(1.0)
        self._stream: Tensor | None = None

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Compute weights and choice of experts, both [tokens, experts], from the residual stream."""
        stream = self._stream
        self._stream = None
        assert stream is not None, "forward() comes first"
        router: Any = self.router
        normed = F.rms_norm(stream, stream.shape[-1:], eps=self.config.layernorm_epsilon)
        scaled = normed * router.scale * self.config.hidden_size**-0.5
        weights, chosen = super().route(scaled, padding_mask)
        return weights * router.expert_scale, chosen

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the sum of both outputs; ``hidden_states`` is the residual stream [s, b, hidden]."""
        self._stream = hidden_states
        norms: Any = self
        sparse, _ = super().forward(norms.expert_norm(hidden_states), *args, **kwargs)
        dense, _ = self.dense(norms.dense_norm(hidden_states))
        return norms.dense_output_norm(dense) + norms.expert_output_norm(sparse), None
