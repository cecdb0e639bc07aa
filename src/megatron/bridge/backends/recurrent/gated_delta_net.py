# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets in plain PyTorch, for machines without the kernels of flash-linear-attention (``fla``).

A head has a state S, a matrix from key features to value features. A token decays it and corrects the value that it
recalls for the key by a fraction beta of the error (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464):

    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1})^T,    o_t = S_t^T q_t / sqrt(key width)

Shapes: b is the batch, t the sequence, h the heads of this rank, k and d their key and value features.
"""

import copy
import dataclasses
import functools
import logging
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.bridge.backends.attention.block_mask import host_values, positions_in_sequences
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.decoding.recurrent_cache import (
    RecurrentCache,
    StateShape,
    with_history,
)
from megatron.bridge.backends.kernels.eager import upcast

CHUNK = 64  # tokens of a chunk; as in fla
CHANNEL_CHUNK = (
    16  # if each key feature has its own decay, each pair of tokens needs one number per feature
)
_log = logging.getLogger(__name__)

recomputed: Any = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Calls a function whose intermediate tensors are recomputed in the backward pass, as the kernels do."""


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` along ``dim``."""
    wide = upcast(x)
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Compute the weighted sum of each feature over the last tokens of its sequence.

    ``x`` and the result are [b, t, features], ``weight`` is [features, taps] with the tap of the current token last,
    ``bias`` [features]. ``cu_seqlens`` [sequences + 1] are the bounds of the sequences of a packed row; None means
    one sequence per row.
    """
    taps = weight.shape[-1]
    length = x.shape[1]
    position = None if cu_seqlens is None else positions_in_sequences(cu_seqlens, length)
    total = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for back in range(taps):
        before = F.pad(x, (0, 0, back, 0))[:, :length]
        if position is not None:
            before = before * (position >= back).unsqueeze(-1)
        total = total + before * weight[:, taps - 1 - back]
    return total


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """``causal_convolution`` and SiLU with the signature of fla's kernel; states are not supported."""
    assert initial_state is None
    assert not output_final_state
    assert activation in ("silu", "swish")
    return F.silu(causal_convolution(x, weight, bias, cu_seqlens)), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the output of each query, chunk by chunk in fp32 (or fp64).

    With U the corrections of a chunk, one row per token, G the cumulative sums of g, and S the state before the chunk:

        U_i = beta_i (v_i - k_i^T (exp(G_i) S + sum_{j<i} exp(G_i - G_j) k_j U_j^T))

    is a unit lower triangular system in U. Everything else is matrix products.

    Args:
        q: [b, t, h, k].
        k: [b, t, h, k].
        v: [b, t, h, d].
        g: Logarithm of the decay, at most 0; [b, t, h], or [b, t, h, k] if each key feature has its own decay.
        beta: [b, t, h].
        initial_state: State before the tokens [b, h, k, d], not with ``cu_seqlens``; zero when None.
        output_final_state: Also return the state after the tokens.
        use_qk_l2norm_in_kernel: Not supported, because Megatron-Core normalizes queries and keys itself.
        cu_seqlens: [sequences + 1], the bounds of the sequences of a packed row; None means one sequence per row.

    Returns:
        [b, t, h, d], and the state or None.
    """
    assert initial_state is None or cu_seqlens is None
    assert not use_qk_l2norm_in_kernel
    bounds = [0, q.shape[1]] if cu_seqlens is None else host_values(cu_seqlens)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    scale = q.shape[-1] ** -0.5
    dtype = q.dtype
    size = CHUNK if g.dim() == 3 else CHANNEL_CHUNK
    size = size if initial_state is None else min(size, lengths[0])
    q, k, v, g, beta = (_split_into_chunks(x, lengths, size) for x in (q, k, v, g, beta))
    log_decay = (g if g.dim() > q.dim() - 1 else g.unsqueeze(-1)).cumsum(3)
    faded = log_decay.exp()
    recalled, within = _decayed_products(q, k, log_decay)
    system = recalled * beta.unsqueeze(-1)
    fresh, reads_of_state = (
        torch.linalg.solve_triangular(
            system, right * beta.unsqueeze(-1), upper=False, unitriangular=True
        )
        for right in (v, k * faded)
    )
    to_end = k * (log_decay[..., -1:, :] - log_decay).exp()
    parts = (
        fresh,
        reads_of_state,
        within * scale,
        q * faded * scale,
        to_end,
        faded[..., -1, :, None],
    )
    firsts = _first_chunks(lengths, size) if initial_state is None else set[int]()
    out, state = _scan_chunks(
        *parts, firsts, q.new_empty(0) if initial_state is None else initial_state
    )
    return _from_chunks(out, lengths, size).to(dtype), state if output_final_state else None


def _decayed_products(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Compute products of keys and of queries with the earlier keys, weighted by the decay."""
    size = q.shape[-2]
    queries = (k, q)
    keys = k
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
    decay = (log_decay.unsqueeze(-2) - log_decay.unsqueeze(-3)).masked_fill(later, -torch.inf).exp()
    if log_decay.shape[-1] == 1:
        first, second = (rows @ keys.mT * decay.squeeze(-1) for rows in queries)
    else:
        decayed = decay * keys.unsqueeze(-3)
        first, second = ((decayed @ rows.unsqueeze(-1)).squeeze(-1) for rows in queries)
    return first, second


def _scan_chunks(
    fresh: Tensor,
    reads_of_state: Tensor,
    within: Tensor,
    reads: Tensor,
    to_end: Tensor,
    decay: Tensor,
    firsts: set[int],
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry the state from chunk to chunk; it is zero before the chunks in ``firsts``."""
    outputs: list[Tensor] = []
    for index in range(fresh.shape[2]):
        corrections = fresh[:, :, index]
        recalled = within[:, :, index]
        if index in firsts:
            outputs.append(recalled @ corrections)
            state = to_end[:, :, index].mT @ corrections
            continue
        corrections = corrections - reads_of_state[:, :, index] @ state
        outputs.append(recalled @ corrections + reads[:, :, index] @ state)
        state = state * decay[:, :, index] + to_end[:, :, index].mT @ corrections
    return torch.stack(outputs, 2), state


def _split_into_chunks(x: Tensor, lengths: list[int], size: int) -> Tensor:
    """[b, t, h, ...] -> [b, h, chunks, size, ...]; the last chunk of each sequence is padded with zeros."""
    padding = [0, 0] * (x.dim() - 2)
    parts = [
        F.pad(part, [*padding, 0, -part.shape[1] % size]) for part in upcast(x).split(lengths, 1)
    ]
    return torch.cat(parts, 1).unflatten(1, (-1, size)).movedim(3, 1)


def _from_chunks(x: Tensor, lengths: list[int], size: int) -> Tensor:
    """The inverse of ``_split_into_chunks``."""
    rows = x.movedim(1, 3).flatten(1, 2)
    parts = rows.split([length + -length % size for length in lengths], 1)
    return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], 1)


def _first_chunks(lengths: list[int], size: int) -> set[int]:
    firsts = set[int]()
    start = 0
    for length in lengths:
        firsts.add(start)
        start += -(-length // size)
    return firsts


@torch.no_grad()
def init_conv_weight(weight: Tensor, group: dist.ProcessGroup) -> None:
    """Initialize the weight of a convolution, drawn for all tensor-parallel ranks: ranks alone would draw the same.

    It is [features of this rank, 1, taps], uniform within 1 / sqrt(taps) as in PyTorch; the random number generators of
    ``group`` agree.
    """
    ranks = group.size()
    bound = weight.shape[-1] ** -0.5
    all_ranks = torch.empty(ranks * weight.shape[0], *weight.shape[1:]).uniform_(-bound, bound)
    weight.copy_(all_ranks.chunk(ranks)[group.rank()])


def install() -> None:
    """Replace fla's functions in Megatron-Core, unless fla and a GPU are available; safe to call again."""
    if common.HAVE_FLA and has_cuda():
        return
    if has_cuda():
        _log.warning(
            "flash-linear-attention is not installed, so gated delta nets compute in PyTorch, chunk by chunk"
        )
    common.HAVE_FLA = True  # Megatron-Core checks this before it builds the layer
    common.l2norm = functools.partial(recomputed, l2norm)
    gdn.causal_conv1d = functools.partial(recomputed, causal_conv1d)
    gdn.chunk_gated_delta_rule = functools.partial(recomputed, chunk_gated_delta_rule)


class DeltaNet(GatedDeltaNet):
    """Megatron-Core's gated delta net with the numerics of Hugging Face's.

    The gain of the output norm is not zero-centered, even if the other norms of the model are. The decay is
    computed in fp32. The gradient of the output norm is summed over tensor-parallel ranks, which have different
    heads, also without sequence parallelism.

    Attributes:
        cache: states of the texts while the model decodes, else None.
    """

    cache: RecurrentCache | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        install()
        norm = ModuleSpec(module=_PlainNormBuilder, params={"norm": submodules.out_norm})
        super().__init__(config, dataclasses.replace(submodules, out_norm=norm), *args, **kwargs)
        convolution: Any = self.conv1d
        convolution.config = config  # conversion reads the number of heads from it
        if self.tp_size > 1 and not config.sequence_parallel:
            self.out_norm.weight.register_hook(self._sum_over_ranks)

    def reset_parameters(self) -> None:
        """Initialize the weights, with different ones on each tensor-parallel rank."""
        super().reset_parameters()
        if self.config.perform_initialization:
            init_conv_weight(self.conv1d.weight, self.tp_group)

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix hidden states [s, b, h]; the arguments are Megatron-Core's."""
        if self.cache is None:
            return super().forward(hidden_states, *args, **kwargs)
        projected, _ = self.in_proj(hidden_states)
        return self.out_proj(self.cache.run(projected, self.v_dim_local_tp, self._advance))

    def _gated_norm_and_a2a(self, *args: Any, **kwargs: Any) -> Tensor:
        return recomputed(super()._gated_norm_and_a2a, *args, **kwargs)

    def _advance(
        self, projected: Tensor, history: Tensor, state: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute outputs [b, s, values] of continued texts, and their new states."""
        batch, length, _ = projected.shape
        qkv, gate, beta, alpha = projected.split(self.feat_dim_split, dim=-1)
        extended, history = with_history(qkv, history)
        bias = self.conv1d.bias if self.conv_bias else None
        mixed = F.silu(causal_convolution(extended, self.conv1d.weight.squeeze(1), bias, None))
        width: Any = self.value_head_dim
        gate = gate.reshape(batch, length, -1, width)
        prepare: Any = self._prepare_input_for_gated_delta_rule
        q, k, v, gate, beta, alpha = prepare(
            mixed[:, history.size(1) :], gate, batch, length, beta, alpha
        )
        g, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        out, after = chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True
        )
        assert after is not None, "it was asked for"
        return self._apply_gated_norm(out, gate).view(batch, length, -1), (history, after)

    def scan_numbers(self, tokens: int) -> int:
        """Like that of ``TorchMambaMixer``, without ``fla``."""
        state: Any = self.state_shapes()[1].shape
        return tokens * state[0] * (7 * CHUNK + 10 * sum(state[1:]))

    def state_shapes(self) -> list[StateShape]:
        """Return the shapes of a text's states: last inputs of the convolution, and the state of each head."""
        taps = self.conv1d.weight.shape[-1]
        channels = self.conv1d.weight.shape[0]
        heads: Any = (self.num_v_heads_local_tp, self.key_head_dim, self.value_head_dim)
        return [
            StateShape((taps - 1, channels), self.config.params_dtype),
            StateShape(heads, torch.float32),
        ]

    def _sum_over_ranks(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.tp_group)
        return total

    def _compute_g_and_beta(
        self, rate: Tensor, bias: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the logarithm of the decay, and beta; both [b, t, h]."""
        return -rate.float().exp() * F.softplus(alpha.float() + bias.float()), beta.sigmoid()


class _PlainNormBuilder:
    """Builds a norm whose gain is not zero-centered, independent of the config."""

    def __new__(cls, norm: Any, config: TransformerConfig, **sizes: Any) -> Any:
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        return norm(config=plain, **sizes)
