# SPDX-License-Identifier: Apache-2.0
"""Gated short convolutions, which replace attention in some layers of LFM2.

A projection computes two gates B and C and the input x. The output is a second projection of ``C * conv(B * x)``,
where the convolution sees a token and the few before it.
"""

from typing import Any, ClassVar

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megatron.bridge.backends.attention.block_mask import padded_cu_seqlens
from megatron.bridge.backends.decoding.recurrent_cache import StateShape, with_history
from megatron.bridge.backends.recurrent.gated_delta_net import causal_convolution, init_conv_weight
from megatron.bridge.backends.recurrent.tensor_parallel_mixer import TensorParallelMixer


class ShortConv(TensorParallelMixer):
    """A gated short convolution, whose state is the last inputs of the convolution."""

    cut: ClassVar[dict[str, int]] = {"conv1d.weight": 0}
    projected = ("before", "after", "x")

    @property
    def operations(self) -> float:
        return 0.0  # the convolution is not counted

    def scan_numbers(self, tokens: int) -> int:
        return 5 * tokens * self.features

    def prepare(self, submodules: Any) -> int:
        config: Any = self.config
        width = config.hidden_size
        self.in_proj = build_module(submodules.in_proj, width, 3 * width, **self.first_options)
        features = width // self.tp_group.size()
        assert config.linear_conv_kernel_dim is not None, "linear_conv_kernel_dim has a default"
        self.conv1d = nn.Conv1d(
            features,
            features,
            config.linear_conv_kernel_dim,
            groups=features,
            bias=False,
            **self.like,
        )
        set_tensor_model_parallel_attributes(self.conv1d.weight, True, 0, 1)
        if config.perform_initialization:
            init_conv_weight(self.conv1d.weight, self.tp_group)
        return width

    def mix(self, projected: Tensor, history: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        before, after, x = projected.chunk(3, dim=-1)
        extended, history = with_history(before * x, history)
        convolved = causal_convolution(extended, self.conv1d.weight.squeeze(1), None, None)[
            :, history.size(1) :
        ]
        return after * convolved, (history,)

    def mix_packed(self, projected: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        before, after, x = projected.chunk(3, dim=-1)
        bounds = None if packed_seq_params is None else padded_cu_seqlens(packed_seq_params)
        taps = self.share("conv1d.weight").squeeze(1)
        return after * causal_convolution(before * x, taps, None, bounds)

    def state_shapes(self) -> list[StateShape]:
        """Return the shape of a text's state: the last inputs of the convolution."""
        return [
            StateShape((self.conv1d.weight.shape[-1] - 1, self.features), self.config.params_dtype)
        ]
