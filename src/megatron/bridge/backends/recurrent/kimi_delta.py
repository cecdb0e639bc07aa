# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (KDA) in plain PyTorch: a gated delta net whose decay is one number for each key feature.

Decay and output gate come from narrow projections that all heads share (Kimi Team, "Kimi Linear", 2025,
arXiv:2510.26692). Tensor-parallel ranks split the heads; the gradients of shared parameters are summed.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from megatron.bridge.backends.attention.block_mask import padded_cu_seqlens
from megatron.bridge.backends.decoding.recurrent_cache import StateShape, with_history
from megatron.bridge.backends.recurrent.gated_delta_net import (
    CHANNEL_CHUNK,
    causal_convolution,
    chunk_gated_delta_rule,
    l2norm,
)
from megatron.bridge.backends.recurrent.tensor_parallel_mixer import TensorParallelMixer

_QKV = ("q", "k", "v")


class KimiDeltaAttention(TensorParallelMixer):
    """The layer; packed sequences are independent."""

    b_proj: Tensor
    dt_bias: Tensor
    A_log: Tensor
    q_conv1d: Tensor

    cut: ClassVar[dict[str, int]] = {
        **dict.fromkeys([f"{name}_proj" for name in (*_QKV, "b", "f_b", "g_b")], 0),
        **dict.fromkeys([f"{name}_conv1d" for name in _QKV], 0),
        "dt_bias": 0,
        "A_log": 1,
    }

    def prepare(self, submodules: Any) -> int:
        config: Any = self.config
        self.width = config.linear_key_head_dim
        heads = config.linear_num_key_heads
        self.heads = heads // self.tp_group.size()
        inner = self.heads * self.width
        hidden = config.hidden_size
        taps = config.linear_conv_kernel_dim
        shapes: dict[str, tuple[int, ...]] = {}
        shapes |= {f"{name}_proj": (inner, hidden) for name in _QKV} | {
            f"{n}_conv1d": (inner, 1, taps) for n in _QKV
        }
        shapes |= {"b_proj": (self.heads, hidden), "dt_bias": (inner,), "A_log": (1, self.heads, 1)}
        for name in ("f", "g"):
            shapes |= {
                f"{name}_a_proj": (self.width, hidden),
                f"{name}_b_proj": (inner, self.width),
            }
        self.make_parameters(shapes | {"o_norm": (self.width,)})
        if config.perform_initialization:
            with torch.no_grad():
                spread = torch.linspace(1, 16, heads, **self.like).log()
                self.A_log.copy_(
                    spread.chunk(self.tp_group.size())[self.tp_group.rank()].view_as(self.A_log)
                )
        return heads * self.width

    @property
    def operations(self) -> float:
        """Count a token's operations: 6 K V for the state; in a chunk, products, the system, and decays of pairs."""
        return self.heads * self.width * (6.0 * self.width + CHANNEL_CHUNK * (3 + 2 + 4))

    def scan_numbers(self, tokens: int) -> int:
        return 89 * tokens * self.features

    def part_widths(self) -> list[int]:
        return [self.heads * self.width] * 5 + [self.heads]

    def project(self, hidden_states: Tensor) -> Tensor:
        """Project to queries, keys, values, and the inputs of decays, gates and beta, in one tensor."""
        if self.config.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(hidden_states, self.tp_group)
        parts = [F.linear(x, getattr(self, f"{name}_proj")) for name in _QKV]
        low = [
            F.linear(F.linear(x, self._whole(f"{name}_a_proj")), getattr(self, f"{name}_b_proj"))
            for name in "fg"
        ]
        return torch.cat((*parts, *low, F.linear(x, self.b_proj)), -1)

    def _whole(self, name: str) -> Tensor:
        """Return a parameter that all ranks have; its gradient is from this rank's heads."""
        return mappings.copy_to_tensor_model_parallel_region(getattr(self, name), self.tp_group)

    def mix_packed(self, projected: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        bounds = None if packed_seq_params is None else padded_cu_seqlens(packed_seq_params)
        return self.mix(projected, bounds=bounds)[0]

    def mix(
        self,
        projected: Tensor,
        history: Tensor | None = None,
        state: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Any]]:
        heads = self.heads // (1 if self.cp_group is None else self.cp_group.size())
        inner = heads * self.width
        history_length = 0 if history is None else history.size(1)
        qkv, decay, gate, beta = projected.split([3 * inner, inner, inner, heads], -1)
        extended, history = with_history(qkv, qkv[:, :0] if history is None else history)
        taps = torch.cat([self.share(f"{name}_conv1d") for name in _QKV]).squeeze(1)
        mixed = F.silu(causal_convolution(extended, taps, None, bounds)[:, history_length:])
        q, k, v = (part.unflatten(-1, (heads, -1)).float() for part in mixed.chunk(3, -1))
        steps = F.softplus(decay.float() + self.share("dt_bias").float())
        g = steps.unflatten(-1, (heads, -1)) * -self.share("A_log").float().exp()
        options: Any = {
            "initial_state": state,
            "output_final_state": state is not None,
            "cu_seqlens": bounds,
        }
        out, state = chunk_gated_delta_rule(l2norm(q), l2norm(k), v, g, beta.sigmoid(), **options)
        out = out * (out.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon).rsqrt()
        out = (out * self._whole("o_norm").float()).flatten(-2) * gate.float().sigmoid()
        return out.to(projected.dtype), (history, state)

    def state_shapes(self) -> list[StateShape]:
        """Return the shapes of a text's states: last inputs of the convolutions, and the state of each head."""
        taps = self.q_conv1d.shape[-1]
        inner = self.heads * self.width
        history = StateShape((taps - 1, 3 * inner), self.config.params_dtype)
        return [history, StateShape((self.heads, self.width, self.width), torch.float32)]
