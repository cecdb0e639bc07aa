# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm that compute in fp32 and take part in sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from megatron.bridge.backends import compiled_kernels
from megatron.bridge.backends.torch_kernels import rms_norm


class TorchNorm:
    """Builds the norm that ``config.normalization`` names; what layer specs of the torch backend refer to."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> "RMSNorm | LayerNorm":
        """The norm itself, not an instance of this class, as Megatron-Core's builders do."""
        norms = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
        assert config.normalization in norms, f"normalization is {config.normalization}, not one of {list(norms)}"
        return norms[config.normalization](config, hidden_size, eps)


class _Norm(torch.nn.Module):
    """A norm over the last dimension with a learned gain, replicated over tensor parallel ranks.

    Under sequence parallelism each rank norms its part of the sequence and so has a part of the gain's gradient;
    the ``sequence_parallel`` mark makes Megatron-Core sum these parts.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = _replicated(config, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A gain of one; a zero-centred gain is stored as its distance from one."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def _gain(self) -> torch.Tensor:
        # 1 + w would lose w's last bits in bf16
        return self.weight.float() + 1.0 if self.zero_centered_gamma else self.weight


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * gain``, in the dtype of the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normed ``x``, any shape ending in the hidden size."""
        if x.is_cuda:
            return compiled_kernels.rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)
        gain = self._gain()
        if gain.dtype != x.dtype:  # zero-centred in low precision, or an fp32 residual stream
            gain, x = gain.float(), x.float()
        return rms_norm(x, gain, self.eps).to(self.weight.dtype)


class LayerNorm(_Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) * gain + bias``, in the dtype of the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = _replicated(config, hidden_size)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normed ``x``, any shape ending in the hidden size."""
        gain, bias = self._gain(), self.bias
        if gain.dtype != x.dtype:
            gain, bias, x = gain.float(), bias.float(), x.float()
        return F.layer_norm(x, (x.shape[-1],), gain, bias, self.eps).to(self.weight.dtype)


class AcrossHeadsNorm(torch.nn.Module):
    """RMSNorm over the width of all attention heads together, which tensor parallel ranks share.

    Each rank has its heads' part of the gain and sums squares with the others. Heads of padding are zero and stay
    zero, and the mean is over the true heads only.

    Args:
        config: gives head width, epsilon, dtype and the kind of gain.
        heads: of all ranks, those of padding included.
        true_heads: the same without padding.
        group: the tensor parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, heads: int, true_heads: int, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", "LayerNorm has no form over all heads"
        assert config.kv_channels is not None, "Megatron-Core derives kv_channels from the hidden size"
        self.config = config  # conversion reads the number of heads from it
        self.group = group
        self.width = true_heads * config.kv_channels
        self.weight = _parameter(config, heads // group.size() * config.kv_channels)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        torch.nn.init.constant_(self.weight, 0.0 if config.layernorm_zero_centered_gamma else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normed ``x`` [s, b, this rank's heads, head width]."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.group.size() > 1:  # each rank's output depends on all ranks' squares: sum forward and backward
            squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares, group=self.group)
        gain = self.weight.float() + float(self.config.layernorm_zero_centered_gamma)
        normed = wide * torch.rsqrt(squares / self.width + self.config.layernorm_epsilon) * gain
        return normed.to(self.weight.dtype).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The gain, split over tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def _replicated(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    parameter = _parameter(config, size)
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _parameter(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
