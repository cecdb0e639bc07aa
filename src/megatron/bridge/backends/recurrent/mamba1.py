# SPDX-License-Identifier: Apache-2.0
"""Mamba-1 mixers in plain PyTorch (Jamba), which replace attention.

Every feature has a separate state h, and steps dt, B and C are computed from the inputs x (Gu and Dao, "Mamba",
2023, arXiv:2312.00752), each normalized in Jamba:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = h_t C_t + D x_t

Tensor-parallel ranks split the features; all of them share B, C and the narrow input of dt.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.bridge.backends.decoding.recurrent_cache import StateShape, with_history
from megatron.bridge.backends.recurrent.gated_delta_net import causal_convolution
from megatron.bridge.backends.recurrent.mamba import lengths_of
from megatron.bridge.backends.recurrent.tensor_parallel_mixer import TensorParallelMixer

CHUNK = 64  # tokens whose states are in memory at a time


def selective_scan(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute all outputs in fp32, and the state after them.

    Args:
        x: Inputs [batch, sequence, features].
        dt: Steps [batch, sequence, features], positive.
        rate: A, negative, [features, states].
        b: [batch, sequence, states].
        c: [batch, sequence, states].
        state: Before the inputs, [batch, features, states]; zero when None.
    """
    x, dt, b, c = (part.float() for part in (x, dt, b, c))
    state = x.new_zeros(len(x), *rate.shape) if state is None else state
    outputs = []
    for parts in zip(*(part.split(CHUNK, 1) for part in (x, dt, b, c)), strict=True):
        # the states of a chunk are recomputed in the backward pass
        y, state = checkpoint(_scan_chunk, *parts, rate, state, use_reentrant=False)  # type: ignore[misc]
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, 1), state


def _scan_chunk(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``selective_scan`` of one chunk, in log2(tokens) steps."""
    decay = (dt.unsqueeze(-1) * rate).exp()
    states = (dt * x).unsqueeze(-1) * b.unsqueeze(2)
    first_state = states[:, :1] + decay[:, :1] * state.unsqueeze(1)
    states = torch.cat((first_state, states[:, 1:]), 1)
    reach = 1  # each state is the sum over this many tokens
    while reach < x.size(1):
        # the sum that ends ``reach`` tokens earlier doubles the reach; the first sums are complete
        carried_states = decay[:, reach:] * states[:, :-reach]
        carried_decay = decay[:, reach:] * decay[:, :-reach]
        states = torch.cat((states[:, :reach], states[:, reach:] + carried_states), 1)
        decay = torch.cat((decay[:, :reach], carried_decay), 1)
        reach *= 2
    return (states @ c.unsqueeze(-1)).squeeze(-1), states[:, -1]


class Mamba1Mixer(TensorParallelMixer):
    """A Mamba-1 mixer; packed sequences are independent."""

    conv1d_weight: Tensor
    conv1d_bias: Tensor
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor

    cut: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("conv1d_weight", "conv1d_bias", "dt_proj", "dt_bias", "A_log", "D"), 0),
        "x_proj": 1,
    }
    projected = ("x", "gate")

    def prepare(self, submodules: MambaMixerSubmodules) -> int:
        config: Any = self.config
        inner = config.mamba_num_heads * config.mamba_head_dim
        width = inner // self.tp_group.size()
        states = config.mamba_state_dim
        rank = config.mamba_dt_rank
        self.d_inner_local_tp = width
        self.states = states
        self.rank = rank
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, 2 * inner, **self.first_options
        )
        # widths of the parts that all features share
        self.shared = {"dt": rank, "b": states, "c": states}
        self.norms = nn.ModuleDict()
        for name, size in self.shared.items():
            self.norms[name] = nn.RMSNorm(size, config.layernorm_epsilon, **self.like)
        self.make_parameters(
            {
                "conv1d_weight": (width, 1, config.mamba_conv_kernel),
                "x_proj": (rank + 2 * states, width),
                "dt_proj": (width, rank),
                "A_log": (width, states),
                "conv1d_bias": (width,),
                "dt_bias": (width,),
                "D": (width,),
            }
        )
        if config.perform_initialization:
            with torch.no_grad():
                rates = torch.arange(1, states + 1, **self.like).log()
                self.A_log.copy_(rates.expand_as(self.A_log))
        return inner

    @property
    def operations(self) -> float:
        """Count forward operations of one token; the product with A counts as a product with a matrix."""
        return 4.0 * self.d_inner_local_tp * self.states

    def scan_numbers(self, tokens: int) -> int:
        return self.features * (tokens * (10 + self.states) + 14 * CHUNK * self.states)

    def mix_packed(self, projected: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        parts = projected.split(lengths_of(packed_seq_params, projected.size(1)), 1)
        return torch.cat([self.mix(part)[0] for part in parts], 1)

    def mix(
        self, projected: Tensor, history: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, gate = projected.chunk(2, -1)
        history_length = 0 if history is None else history.size(1)
        extended, history = with_history(x, x[:, :0] if history is None else history)
        taps = self.share("conv1d_weight").squeeze(1)
        convolved = causal_convolution(extended, taps, self.share("conv1d_bias"), None)
        x = F.silu(convolved[:, history_length:])
        narrow, b, c = self._shared_parts(x)
        steps = F.linear(narrow, self.share("dt_proj")).float() + self.share("dt_bias").float()
        rate = -self.share("A_log").float().exp()
        y, state = selective_scan(x, F.softplus(steps), rate, b, c, state)
        y = (y + self.share("D").float() * x.float()) * F.silu(gate.float())
        return y.to(projected.dtype), (history, state)

    def _shared_parts(self, x: Tensor) -> list[Tensor]:
        """Compute the narrow input of dt, B and C [b, s, width], which all ranks share, from ``x`` of this rank."""
        sums = mappings.reduce_from_tensor_model_parallel_region(
            F.linear(x, self.share("x_proj")), self.tp_group
        )
        if self.cp_group is not None:
            # all need the sum, and each has a part of its gradient; gradients of the norms are summed over ranks later
            sums = mappings.reduce_from_tensor_model_parallel_region(sums, self.cp_group)
            sums = mappings.copy_to_tensor_model_parallel_region(sums, self.cp_group)
        parts = sums.split(list(self.shared.values()), -1)
        normed = [norm(part) for norm, part in zip(self.norms.values(), parts, strict=True)]
        return [
            mappings.copy_to_tensor_model_parallel_region(part, self.tp_group) for part in normed
        ]

    def state_shapes(self) -> list[StateShape]:
        """Return the shapes of a text's states: last inputs of the convolution, and the state of the scan."""
        width = self.d_inner_local_tp
        history = StateShape((self.conv1d_weight.size(-1) - 1, width), self.config.params_dtype)
        return [history, StateShape((width, self.states), torch.float32)]
