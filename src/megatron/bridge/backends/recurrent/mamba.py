# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers: Megatron-Core's with the kernels of mamba-ssm, and an equal one in plain PyTorch.

Megatron-Core's mixer hard-codes two values that differ between models: the epsilon of the gated norm, and no
bounds for the step size. Both mixers here read them from the config.
"""

import functools
import logging
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.bridge.backends.attention import context_parallel
from megatron.bridge.backends.attention.block_mask import (
    host_values,
    packed_segments,
    padded_cu_seqlens,
)
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.decoding.recurrent_cache import (
    RecurrentCache,
    StateShape,
    with_history,
)
from megatron.bridge.backends.kernels.norms import SplitNorm
from megatron.bridge.backends.recurrent import ssd
from megatron.bridge.backends.recurrent.gated_delta_net import causal_convolution, recomputed
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.patching import patched

_log = logging.getLogger(__name__)


def mixer_class() -> type[MambaMixer]:
    """Return the fastest mixer that runs on this machine."""
    if not has_cuda():
        return TorchMambaMixer
    if mamba_mixer.HAVE_MAMBA_SSM and mamba_mixer.causal_conv1d_fn is not None:
        return FusedMambaMixer
    _say_that_kernels_are_missing()
    return TorchMambaMixer


def step_limit(config: Any) -> tuple[float, float]:
    """Return the smallest and the largest step size."""
    largest = getattr(config, "mamba_largest_step", None)
    return getattr(config, "mamba_smallest_step", 0.0), math.inf if largest is None else largest


@functools.cache
def _say_that_kernels_are_missing() -> None:
    _log.warning(
        "mamba-ssm or causal-conv1d is not installed, so Mamba layers compute in PyTorch, chunk by chunk"
    )


class FusedMambaMixer(MambaMixer):
    """Megatron-Core's mixer with the step limits and the epsilon of ``config``."""

    def __init__(
        self, config: TransformerConfig, submodules: MambaMixerSubmodules, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, **kwargs)
        self.step_limit = step_limit(config)
        self.norm.eps = config.layernorm_epsilon

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: Any = None) -> Tensor:  # noqa: N803 - Megatron-Core's name
        """Compute normalized outputs [s, b, inner] of projected inputs [s, b, z + x + B + C + dt]."""
        cp = self.cp
        config = self.config
        dtype = {"state_dtype": config.mamba_training_ssm_states_dtype or config.params_dtype}
        y = mamba_mixer.mamba_split_conv1d_scan_combined(
            zxBCdt.transpose(0, 1).contiguous(),
            cp.get_conv1d_weight().squeeze(1),
            cp.get_conv1d_bias(),
            cp.get_dt_bias().float(),
            -torch.exp(cp.get_A_log().float()),
            D=cp.get_D(),
            chunk_size=self.chunk_size,
            seq_idx=None
            if packed_seq_params is None
            else _sequence_indices(packed_seq_params, zxBCdt),
            dt_limit=self.step_limit,
            activation=self.activation,
            headdim=self.headdim,
            ngroups=cp.ngroups_local_tpcp,
            norm_before_gate=False,
            **(dtype if mamba_mixer.MAMBA_HAS_STATE_DTYPE else {}),
        )
        return self.norm(cp.post_conv_ssm(y.transpose(0, 1).contiguous(), packed_seq_params))


class TorchMambaMixer(MambaMixer):
    """Megatron-Core's mixer, with its parameters, checkpoint keys and context parallelism, but in plain PyTorch.

    Packed sequences are independent: the state and the convolution of each start from zero.

    Attributes:
        cache: states of the texts while the model decodes, else None.
    """

    cache: RecurrentCache | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        # without mamba-ssm, with the norm of this module
        here = {
            "HAVE_MAMBA_SSM": True,
            "MAMBA_HAS_STATE_DTYPE": True,
            "ExtendedRMSNorm": GroupRMSNorm,
        }
        with patched(mamba_mixer, **here), _MetaDeviceMode():
            super().__init__(config, submodules, **kwargs)
        self.step_limit = step_limit(config)
        self.norm.eps = config.layernorm_epsilon
        if config.perform_initialization:
            self._initialize(dt_min, dt_max, dt_init_floor)

    @torch.no_grad()
    def _initialize(self, dt_min: float, dt_max: float, dt_init_floor: float) -> None:
        """Draw the weights of all tensor-parallel ranks and keep this rank's: the same model under any layout."""
        states = self.ngroups * self.d_state
        kinds = [self.d_inner, self.d_inner, states, states, self.nheads]  # z, x, B, C, dt
        bound = self.d_conv**-0.5  # bound of the uniform distribution, as in PyTorch's convolutions

        def projection(all_ranks: Tensor) -> Tensor:
            assert self.config.init_method is not None, "a resolved config has one"
            self.config.init_method(all_ranks)
            return all_ranks

        def steps(logs: Tensor) -> Tensor:
            span = math.log(dt_max) - math.log(dt_min)
            dt = (logs.uniform_() * span + math.log(dt_min)).exp().clamp(min=dt_init_floor)
            return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus

        for parameter, sizes, draw in (
            (self.in_proj.weight, kinds, projection),
            (self.conv1d_weight, kinds[1:4], lambda all_ranks: all_ranks.uniform_(-bound, bound)),
            (self.conv1d_bias, kinds[1:4], lambda all_ranks: all_ranks.uniform_(-bound, bound)),
            (self.dt_bias, kinds[4:], steps),
            (self.A_log, kinds[4:], lambda all_ranks: all_ranks.uniform_(1, 16).log()),
        ):
            all_ranks = draw(torch.empty(sum(sizes), *parameter.shape[1:]))
            parts = [
                part.chunk(self.tp_group.size())[self.tp_group.rank()]
                for part in all_ranks.split(sizes)
            ]
            parameter.copy_(torch.cat(parts))

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix hidden states [s, b, h] along the sequence."""
        if inference_context is not None or inference_params is not None:
            raise UserError(
                "Megatron-Core's inference of Mamba layers needs the packages mamba-ssm and causal-conv1d: use "
                "megatron.bridge.inference.LLM, which does not"
            )
        self._share_parameters()
        projected, _ = self.in_proj(hidden_states)
        if self.cache is not None:
            width = self.cp.d_inner_local_tpcp
            return self.out_proj(
                self.norm(self.cache.run(projected, width, self._advance, torch.float32))
            )
        full_sequence = self._gather(projected, packed_seq_params)
        parts = full_sequence.split(lengths_of(packed_seq_params, len(full_sequence)))
        mixed = torch.cat([recomputed(self._mix, part) for part in parts])
        return self.out_proj(recomputed(self.norm, self._scatter(mixed, packed_seq_params)))

    def _share_parameters(self) -> None:
        """Give ``self.cp`` the parameters of this pass: fully sharded ones are replaced while they are gathered."""
        for name in ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"):
            setattr(self.cp, f"{name}_cp1", getattr(self, name))

    def _gather(self, local: Tensor, packed: Any) -> Tensor:
        """Exchange a part of the sequence with all heads for the whole, ordered sequence of this rank's heads."""
        full_sequence = self.cp.pre_conv_ssm(local)
        size = self.cp.cp_size
        if packed is None or size == 1:
            return full_sequence
        # without Transformer Engine, pre_conv_ssm orders chunks as if the row were one sequence: undo that
        by_rank = mamba_context_parallel._redo_attention_load_balancing(full_sequence, size)
        return context_parallel.to_natural_order(by_rank, packed_segments(packed)[0], size)

    def _scatter(self, full_sequence: Tensor, packed: Any) -> Tensor:
        """The inverse of ``_gather``."""
        size = self.cp.cp_size
        if packed is not None and size > 1:
            by_rank = context_parallel.to_rank_order(
                full_sequence, packed_segments(packed)[0], size
            )
            full_sequence = mamba_context_parallel._undo_attention_load_balancing(by_rank, size)
        return self.cp.post_conv_ssm(full_sequence)

    def _mix(self, projected: Tensor) -> Tensor:
        """Compute gated outputs [s, b, inner] in float32 of one sequence's projections [s, b, z + x + B + C + dt]."""
        gate, xbc, dt = self._split(projected.transpose(0, 1))
        convolved = self.cp.conv1d(xbc.transpose(1, 2))[..., : xbc.shape[1]].transpose(1, 2)
        return self._scan(gate, convolved, dt)[0].transpose(0, 1)

    def _advance(
        self, projected: Tensor, history: Tensor, state: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute gated outputs [b, s, inner] of continued texts, and their new states."""
        gate, xbc, dt = self._split(projected)
        extended, history = with_history(xbc, history)
        weight = self.cp.get_conv1d_weight().squeeze(1)
        bias = self.cp.get_conv1d_bias()
        mixed = causal_convolution(extended, weight, bias, None)[:, history.size(1) :]
        y, state = self._scan(gate, mixed, dt, state)
        return y, (history, state)

    def scan_numbers(self, tokens: int) -> int:
        """Return the fp32 numbers in memory in the backward pass of the scan (measured on a CPU, 2026-11-27)."""
        features = self.d_inner_local_tp + 2 * self.ngroups_local_tp * self.d_state
        return tokens * (2 * self.nheads_local_tp * self.chunk_size + 11 * features)

    def state_shapes(self) -> list[StateShape]:
        """Return the shapes of a text's states: last inputs of the convolution, and the state of the scan."""
        cp = self.cp
        groups = cp.ngroups_local_tpcp
        channels = cp.d_inner_local_tpcp + 2 * groups * self.d_state
        heads = (groups, cp.nheads_local_tpcp // groups, self.headdim, self.d_state)
        return [
            StateShape((self.d_conv - 1, channels), self.config.params_dtype),
            StateShape(heads, torch.float32),
        ]

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split projections [..., z + x + B + C + dt] into the gate, x with B and C, and dt."""
        cp = self.cp
        inner = cp.d_inner_local_tpcp
        states = cp.ngroups_local_tpcp * self.d_state
        return projected.split([inner, inner + 2 * states, cp.nheads_local_tpcp], dim=-1)

    def _scan(
        self, gate: Tensor, convolved: Tensor, dt: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute gated outputs [b, s, inner] in float32, and the state after them."""
        cp = self.cp
        inner = cp.d_inner_local_tpcp
        states = cp.ngroups_local_tpcp * self.d_state
        x, b, c = F.silu(convolved).split([inner, states, states], dim=-1)
        x = x.unflatten(-1, (-1, self.headdim))
        b = self._grouped(b)
        c = self._grouped(c)
        dt = F.softplus(dt.float() + cp.get_dt_bias().float()).clamp(*self.step_limit)
        y, state = ssd.scan(x, dt, -cp.get_A_log().float().exp(), b, c, self.chunk_size, state)
        y = y + cp.get_D().float()[:, None] * x
        return y.flatten(-2) * F.silu(gate.float()), state

    def _grouped(self, states: Tensor) -> Tensor:
        """Return B or C [b, s, groups, state size] of this rank's groups of heads."""
        return states.unflatten(-1, (-1, self.d_state))


class GroupRMSNorm(SplitNorm):
    """RMSNorm over each group of a mixer's gated outputs on this rank, with the signature of mamba-ssm's norm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "Megatron-Core's mixer normalizes gated outputs"
        self.eps = eps
        self.group_size = group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., hidden size]; the result has the dtype of the gain."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return normed.flatten(-2).to(self.weight.dtype) * self.weight


class _MetaDeviceMode(TorchFunctionMode):
    """Makes ``with torch.device("meta")`` apply to a mixer, although Megatron-Core passes the current device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.get_default_device().type == "meta":
            kwargs["device"] = None
        return function(*args, **kwargs)


def lengths_of(packed: Any, total: int) -> list[int]:
    """Return the lengths of the packed sequences; tokens after the last one count as one more sequence."""
    if packed is None:
        return [total]
    bounds = [*host_values(padded_cu_seqlens(packed)), total]
    return [stop - start for start, stop in pairwise(bounds) if stop > start]


def _sequence_indices(packed: Any, tokens: Tensor) -> Tensor:
    """Return the index of the sequence of each of ``tokens`` [s, ...], int32 [1, s], as the kernels expect it."""
    if packed.seq_idx is not None:
        return packed.seq_idx
    positions = torch.arange(len(tokens), device=tokens.device)
    return (
        torch.bucketize(positions, padded_cu_seqlens(packed).to(tokens.device), right=True) - 1
    ).int()[None]
