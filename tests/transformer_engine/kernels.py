# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine's modules compute, in plain PyTorch, after its documentation.

Constructors, parameters and attributes stay Transformer Engine's own; only ``forward`` is replaced.
"""

import functools
from unittest import mock

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def install() -> None:
    """Replace the ``forward`` of the modules that Megatron-Core's layer specs use."""
    te.Linear.forward = _linear
    te.LayerNormLinear.forward = _layer_norm_linear
    te.GroupedLinear.forward = _grouped_linear
    te.LayerNorm.forward = lambda module, values: _norm(module, values, module.weight, module.bias)
    te.RMSNorm.forward = lambda module, values: _norm(module, values, module.weight, None)
    te.DotProductAttention.forward = _attention
    moe_utils.te_general_gemm = _gemm
    moe_utils.fused_permute = None  # a kernel of Triton, which the backend would choose
    create = TransformerEngineBaseModule.__init__

    @functools.wraps(create)
    def create_without_cuda(module, *arguments, **options):
        with mock.patch.object(
            torch.cuda, "is_available", return_value=True
        ):  # all that it asks of the hardware
            create(module, *arguments, **options)

    TransformerEngineBaseModule.__init__ = create_without_cuda


def _norm(module, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight + 1 if module.zero_centered_gamma else weight
    if bias is None:
        return F.rms_norm(values, weight.shape, weight, module.eps)
    return F.layer_norm(values, weight.shape, weight, bias, module.eps)


def _layer_norm_linear(
    module, values: Tensor, is_first_microbatch=None, fp8_output=False, fp8_grad=False
):
    bias = module.layer_norm_bias if module.normalization == "LayerNorm" else None
    normed = _norm(module, values, module.layer_norm_weight, bias)
    out = _linear(module, normed)
    if not module.return_layernorm_output:
        return out
    if module.return_layernorm_output_gathered and module.sequence_parallel and module.tp_size > 1:
        normed = mappings.gather_from_sequence_parallel_region(normed, group=module.tp_group)
    return (*out, normed) if module.return_bias else (out, normed)


def _linear(module, values: Tensor, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
    group, parallel = module.tp_group, module.parallel_mode if module.tp_size > 1 else None
    if parallel == "column":
        if module.sequence_parallel:
            values = mappings.gather_from_sequence_parallel_region(values, group=group)
        else:
            values = mappings.copy_to_tensor_model_parallel_region(values, group=group)
    out = F.linear(values, module.weight)
    if parallel == "row":
        if module.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=group)
        else:
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=group)
    bias = module.bias if module.use_bias else None
    if module.return_bias:
        return out, bias
    return out if bias is None else out + bias


def _grouped_linear(module, values: Tensor, m_splits, is_first_microbatch=None, **rest):
    parts = values.split(list(map(int, m_splits)))
    outs = []
    for index, part in enumerate(parts):
        bias = (
            getattr(module, f"bias{index}") if module.use_bias and not module.return_bias else None
        )
        outs.append(F.linear(part, getattr(module, f"weight{index}"), bias))
    out = torch.cat(outs)
    if not module.return_bias:
        return out
    return out, [getattr(module, f"bias{index}") for index in range(len(parts))]


def _attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask=None,
    *,
    attn_mask_type,
    qkv_format="sbhd",
    **rest,
) -> Tensor:
    """Causal attention of texts of equal length; all are [sequence, batch, heads, channels]."""
    assert qkv_format == "sbhd", qkv_format
    assert attn_mask_type == "causal", attn_mask_type
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * module.softmax_scale
    positions = torch.arange(query.shape[2])
    distance = positions[:, None] - positions
    left, right = module.window_size
    assert right in (0, -1), module.window_size
    hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
    scores = scores.masked_fill(hidden, float("-inf"))
    out = _softmax(module, scores) @ value
    return out.permute(2, 0, 1, 3).flatten(2)


def _softmax(module, scores: Tensor) -> Tensor:
    if module.softmax_type == "vanilla":
        return scores.softmax(-1)
    offset = (
        module.softmax_offset
        if module.softmax_type == "learnable"
        else scores.new_zeros(scores.shape[1])
    )
    offset = offset.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.cat([scores, offset], -1).softmax(-1)[..., :-1]


def _gemm(
    first: Tensor,
    second: Tensor,
    out_dtype: torch.dtype,
    layout: str = "TN",
    bias: Tensor | None = None,
    **rest,
) -> tuple[Tensor]:
    """The product as cuBLAS sees it: column by column, so the second matrix stands on the left."""
    first = first.T if layout[0] == "T" else first
    second = second.T if layout[1] == "T" else second
    out = second.to(out_dtype) @ first.to(out_dtype)
    return (out if bias is None else out + bias.to(out_dtype),)
