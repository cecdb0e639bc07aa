# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm that compute in fp32 and support sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from megatron.bridge.backends.kernels import compiled
from megatron.bridge.backends.kernels.eager import rms_norm


class TorchNorm:
    """Builds the norm that ``config.normalization`` names, for layer specs of the torch backend."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> "RMSNorm | LayerNorm":
        """Return the norm instead of an instance of this class, as Megatron-Core's builders do."""
        norms = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        assert config.normalization in norms, (
            f"normalization is {config.normalization}, not one of {list(norms)}"
        )
        return norms[config.normalization](config, hidden_size, eps)


class _Norm(nn.Module):
    """A norm with a replicated gain; ``sequence_parallel`` makes Megatron-Core sum the ranks' parts of its gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        gain = replicated(config, hidden_size)
        if getattr(config, "norm_gain", True):
            self.weight = gain
        else:
            self.register_buffer("weight", gain.data, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the gain to one; a zero-centered gain is stored as its difference from one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def _gain(self) -> Tensor:
        # 1 + w would lose the last bits of w in bf16
        return self.weight.float() + 1.0 if self.zero_centered_gamma else self.weight


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * gain``, in the dtype of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return compiled.rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)
        gain = self._gain()
        if gain.dtype != x.dtype:  # zero-centered in low precision, or an fp32 residual stream
            gain = gain.float()
            x = x.float()
        return rms_norm(x, gain, self.eps).to(self.weight.dtype)


class LayerNorm(_Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) * gain + bias`` in the dtype of the weight, or without bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = (
            replicated(config, hidden_size) if getattr(config, "layernorm_bias", True) else None
        )
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        gain = self._gain()
        bias = self.bias
        if gain.dtype != x.dtype:
            gain = gain.float()
            bias = None if bias is None else bias.float()
            x = x.float()
        return F.layer_norm(x, (x.shape[-1],), gain, bias, self.eps).to(self.weight.dtype)


class SplitNorm(nn.Module):
    """A norm whose gain tensor-parallel ranks split along its first dimension."""

    weight: Tensor
    tp_group: Any

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class HeadsNorm(SplitNorm):
    """A norm of queries or keys with a gain for each feature of this rank's heads, padding included."""

    def __init__(
        self,
        config: TransformerConfig,
        heads: int,
        true_heads: int,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None, (
            "Megatron-Core derives kv_channels from the hidden size"
        )
        self.config = config  # conversion reads the number of heads from it
        self.tp_group = group
        self.true_width = true_heads * config.kv_channels
        self.weight = self._make_gain(heads // group.size(), config.kv_channels)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def _make_gain(self, heads: int, width: int) -> nn.Parameter:
        raise TypeError(
            f"{type(self).__name__} is abstract: it has no gain for {heads} heads of {width}"
        )


class ByHeadNorm(HeadsNorm):
    """LayerNorm over the width of each attention head, with a gain [heads, width]."""

    def _make_gain(self, heads: int, width: int) -> nn.Parameter:
        gain = _make_parameter(self.config, heads, width)
        nn.init.ones_(gain)
        return gain

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [..., heads of this rank, head width]."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.config.layernorm_epsilon)
        return (normed * self.weight.float()).to(self.weight.dtype)


class AcrossHeadsNorm(HeadsNorm):
    """RMSNorm over the width of all attention heads together, split over tensor-parallel ranks.

    Each rank sums squares with the other ranks. Padding heads are zero and stay zero; the mean is over the real
    heads only.
    """

    def _make_gain(self, heads: int, width: int) -> nn.Parameter:
        assert self.config.normalization == "RMSNorm", "LayerNorm has no form over all heads"
        gain = _make_parameter(self.config, heads * width)
        nn.init.constant_(gain, 0.0 if self.config.layernorm_zero_centered_gamma else 1.0)
        return gain

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [s, b, heads of this rank, head width]."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if (
            self.tp_group.size() > 1
        ):  # each output depends on the squares of all ranks: sum forward and backward
            squares = tensor_parallel.reduce_from_tensor_model_parallel_region(
                squares, group=self.tp_group
            )
            squares = tensor_parallel.copy_to_tensor_model_parallel_region(
                squares, group=self.tp_group
            )
        gain = self.weight.float() + float(self.config.layernorm_zero_centered_gamma)
        normed = (
            wide * torch.rsqrt(squares / self.true_width + self.config.layernorm_epsilon) * gain
        )
        return normed.to(self.weight.dtype).view_as(x)


def replicated(config: TransformerConfig, *shape: int) -> nn.Parameter:
    """Create an uninitialized parameter that is replicated over tensor-parallel ranks."""
    parameter = _make_parameter(config, *shape)
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _make_parameter(config: TransformerConfig, *shape: int) -> nn.Parameter:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
