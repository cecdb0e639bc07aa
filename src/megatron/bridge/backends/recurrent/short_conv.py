# SPDX-License-Identifier: Apache-2.0
"""Gated short convolutions, which replace attention in some layers of LFM2.

A projection computes two gates B and C and the input x. The output is a second projection of ``C * conv(B * x)``,
where the convolution sees a token and the few before it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from megatron.bridge.backends.attention.block_mask import padded_cu_seqlens
from megatron.bridge.backends.decoding.recurrent_cache import RecurrentCache, StateShape, with_history
from megatron.bridge.backends.recurrent.gated_delta_net import causal_convolution, init_conv_weight


@dataclass
class ShortConvSubmodules:
    """The two projections, or specs of them."""

    in_proj: Any
    out_proj: Any


class ShortConv(MegatronModule):
    """A gated short convolution with the call of attention; tensor-parallel ranks split the features.

    Attributes:
        cache: last inputs of the texts while the model decodes, else None.
    """

    cache: RecurrentCache | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: ShortConvSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.layer_number, self.tp_group = layer_number, groups.tp
        width = config.hidden_size
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": groups.tp}
        self.in_proj = build_module(
            submodules.in_proj,
            width,
            3 * width,
            **common,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
        )
        self.features = width // groups.tp.size()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        kernel = config.linear_conv_kernel_dim
        assert kernel is not None, "linear_conv_kernel_dim has a default"
        sizes: Any = {"groups": self.features, "bias": False, "device": device, "dtype": config.params_dtype}
        self.conv1d = nn.Conv1d(self.features, self.features, kernel, **sizes)
        tensor_parallel.set_tensor_model_parallel_attributes(self.conv1d.weight, True, 0, 1)
        if config.perform_initialization:
            init_conv_weight(self.conv1d.weight, groups.tp)
        self.out_proj = build_module(
            submodules.out_proj,
            width,
            width,
            **common,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedSeqParams | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] to the same, and no bias."""
        projected = self.in_proj(hidden_states)[0]
        if self.cache is not None:
            return self.out_proj(self.cache.run(projected, self.features, self._advance))
        before, after, x = projected.transpose(0, 1).chunk(3, dim=-1)
        bounds = None if packed_seq_params is None else padded_cu_seqlens(packed_seq_params)
        seen = causal_convolution(before * x, self.conv1d.weight.squeeze(1), None, bounds)
        return self.out_proj((after * seen).transpose(0, 1).contiguous())

    def _advance(self, projected: Tensor, history: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """Outputs [b, s, features] of texts that go on, and their last inputs."""
        before, after, x = projected.chunk(3, dim=-1)
        whole, history = with_history(before * x, history)
        seen = causal_convolution(whole, self.conv1d.weight.squeeze(1), None, None)[:, history.size(1) :]
        return after * seen, (history,)

    def state_shapes(self) -> list[StateShape]:
        """Of the states of one text: the last inputs of the convolution."""
        return [StateShape((self.conv1d.weight.shape[-1] - 1, self.features), self.config.params_dtype)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The parameters; each of the three kinds of features is split over the ranks separately."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            module: Any = getattr(self, name)
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        state |= make_sharded_tensors_for_checkpoint(
            self.conv1d.state_dict(prefix="", keep_vars=True),
            f"{prefix}conv1d.",
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        weight = f"{prefix}in_proj.weight"
        state[weight] = _split_tensor_factory(state[weight], [self.features] * 3, ["before", "after", "x"], 0)
        return state
