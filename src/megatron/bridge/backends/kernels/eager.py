# SPDX-License-Identifier: Apache-2.0
"""Small operations of a layer on CPUs, in fewer passes over memory.

Each is exact up to rounding, forward and backward. Nothing is compiled at run time, because that takes at least
16 s and a C++ compiler.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel, utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.bridge.backends.kernels import c_kernels

CHUNK = 1 << 18  # elements: 1 MB in fp32, so a chunk stays in the cache of a core

core_cross_entropy = tensor_parallel.vocab_parallel_cross_entropy  # before ``install`` replaces it
core_rotary = rope_utils._apply_rotary_pos_emb_bshd
_core_load_state_dict = DistributedOptimizer.load_state_dict


class _RMSNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * gain`` in fp32 (or fp64), rounded once at the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        out, scale = _normalize_rows(x, gain, eps)
        ctx.save_for_backward(x, gain, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, gain, scale = ctx.saved_tensors
        wide, grad, weight = (upcast(tensor) for tensor in (x, grads[0], gain))
        # LayerNorm's kernel with a mean of zero; RMSNorm does not subtract the mean of the gradient
        needs_gradient = (True, ctx.needs_input_grad[1], False)
        mean = torch.zeros_like(scale)
        backward = torch.ops.aten.native_layer_norm_backward
        grad_x, along_gain, _ = backward(
            grad, wide, gain.shape, mean, scale, weight, None, needs_gradient
        )
        grad_x.add_((grad @ weight).unsqueeze(-1).mul_(scale).div_(x.shape[-1]))
        return (
            grad_x.to(x.dtype),
            along_gain.to(gain.dtype) if ctx.needs_input_grad[1] else None,
            None,
        )


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; ``gain`` has the dtype of ``x``."""
    if c_kernels.takes(x):
        return torch.ops.megatron_bridge.rms_norm(x, gain, eps)
    return _RMSNorm.apply(x, gain, eps) if _is_recording() else _normalize_rows(x, gain, eps)[0]  # pyright: ignore


def _is_recording() -> bool:
    """Return whether autograd records; if not, its calls would take longer than the operations on one token."""
    # Megatron-Core enables gradients around residual connections, also in inference mode
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _normalize_rows(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = upcast(x)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(gain).to(x.dtype), scale


class _Rotary(torch.autograd.Function):
    """``x * cos + rotate_half(x) * sin`` with the rounding of Megatron-Core; the rotated half is never stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin.roll(cos.shape[-1] // 2, dims=-1)), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + n / 2) of the last dimension, whose size is n."""
    out = x * cos
    (x1, x2), (out1, out2), (sin1, sin2) = (tensor.chunk(2, dim=-1) for tensor in (x, out, sin))
    out1.sub_(x2 * sin1)
    out2.add_(x1 * sin2)
    return out


def rotary(t: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Megatron-Core's ``_apply_rotary_pos_emb_bshd``; interleaved and partial embeddings use the original."""
    mscale = kwargs.pop("mscale", 1.0)
    if args or any(kwargs.values()) or freqs.shape[-1] != t.shape[-1] or freqs.requires_grad:
        return core_rotary(t, freqs, *args, mscale=mscale, **kwargs)
    known = vars(freqs).setdefault("cos_sin", {})  # all layers get the same angles
    if (mscale, t.dtype) not in known:
        known[mscale, t.dtype] = tuple(
            (turn(freqs) * mscale).to(t.dtype) for turn in (torch.cos, torch.sin)
        )
    if (
        c_kernels.takes(t)
        and t.dim() == 4
        and t.size(1) == t.stride(3) == 1
        and len(freqs) == len(t)
    ):
        return torch.ops.megatron_bridge.rotate(t, *known[mscale, t.dtype])
    apply = _Rotary.apply if _is_recording() else rotate
    return apply(t, *known[mscale, t.dtype])  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of the two halves of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gate_swiglu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: Tensor, bias: Tensor | None = None, *_: bool) -> Tensor:
    """Megatron-Core's ``bias_swiglu_impl``; its other options only save memory on GPUs."""
    x = x if bias is None else x + bias
    if c_kernels.takes(x):
        return torch.ops.megatron_bridge.swiglu(x)
    return _SwiGLU.apply(x) if _is_recording() else _gate_swiglu(x)  # pyright: ignore[reportReturnType]


def _gate_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy by blocks of rows; with ``reuse``, exponentials and then the gradient overwrite the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup, reuse: bool
    ) -> Tensor:
        rows, local, here = local_targets(logits, target, group)
        local = local.unsqueeze(-1)
        picked = upcast(rows.gather(1, local)).squeeze(-1) * here
        highest, total = (torch.empty_like(picked) for _ in range(2))
        for part in row_blocks(rows, CHUNK):
            block = rows[part] if reuse else rows[part].to(picked.dtype, copy=True)
            torch.amax(block, dim=-1, out=highest[part])
            torch.sum(block.sub_(highest[part].unsqueeze(-1)).exp_(), dim=-1, out=total[part])
        shift = reduce_statistics(highest, total, picked, group)
        log_sum = total.log() + highest
        ctx.save_for_backward(rows, local, here, shift / total if reuse else log_sum)
        ctx.reuse = reuse
        return (log_sum - picked).view_as(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, local, here, norm = ctx.saved_tensors
        grad = grads[0].flatten().unsqueeze(-1)
        norm = norm.unsqueeze(-1)
        shape = (*grads[0].shape, rows.shape[-1])
        if ctx.reuse:  # autograd refuses a second backward pass after the tensors have changed
            rows.mul_(grad * norm).scatter_add_(1, local, -grad * here.unsqueeze(-1))
            return rows.view(shape), None, None, None
        grad_logits = torch.empty_like(rows)
        for part in row_blocks(rows, CHUNK):
            block = (rows[part] - norm[part]).exp_()
            block.scatter_add_(1, local[part], here[part].unsqueeze(-1).to(block.dtype).neg_())
            grad_logits[part] = block.mul_(grad[part])
        return grad_logits.view(shape), None, None, None


def local_targets(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits as rows [n, v / tp], the local column of each target, and whether the target is on this rank."""
    rows = logits.detach().flatten(0, -2)
    local = target.flatten() - group.rank() * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    return rows, local.clamp(0, logits.shape[-1] - 1), here


def reduce_statistics(
    highest: Tensor, total: Tensor, picked: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Reduce the statistics over the vocabulary in place; return the factor for this rank's exponentials."""
    if group.size() == 1:
        return torch.ones_like(total)
    local = highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    shift = (local - highest).exp_()
    sums = torch.stack((total * shift, picked))
    dist.all_reduce(sums, group=group)
    total.copy_(sums[0])
    picked.copy_(sums[1])
    return shift


def cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Megatron-Core's ``vocab_parallel_cross_entropy``; label smoothing uses the original."""
    if label_smoothing:
        return core_cross_entropy(vocab_parallel_logits, target, label_smoothing, tp_group)
    group = tp_group or get_tensor_model_parallel_group()
    reuse = can_overwrite(vocab_parallel_logits) and vocab_parallel_logits.dtype is torch.float32
    return _CrossEntropy.apply(vocab_parallel_logits, target, group, reuse)  # pyright: ignore[reportReturnType]


def can_overwrite(logits: Tensor) -> bool:
    """Return whether nothing else needs these logits: they come from the output layer, which does not save them."""
    function = "" if logits.grad_fn is None else logits.grad_fn.name()
    return function.startswith("LinearWith") and logits.is_contiguous()


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in at least fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def row_blocks(rows: Tensor, elements: int) -> list[slice]:
    """Yield slices of ``rows`` with at most ``elements`` elements each, but at least one row."""
    step = max(1, elements // rows.shape[-1])
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def scale(_size: int, _flag: Any, tensors: list[list[Tensor]], factor: float) -> None:
    """Megatron-Core's ``local_multi_tensor_scale`` without a scaled copy of each source."""
    sources, targets = tensors
    if factor == 1.0:
        torch._foreach_copy_(targets, sources)
    elif all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, factor)
    else:
        utils.local_multi_tensor_scale(_size, _flag, tensors, factor)


def l2_norm(_size: int, _flag: Any, tensors: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Megatron-Core's ``local_multi_tensor_l2_norm`` without a synchronization for each tensor."""
    norms = [norm for part in tensors for norm in torch._foreach_norm(part)]
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


def fuses_activation(config: TransformerConfig) -> bool:
    return (
        config.activation_func == F.silu
        and config.gated_linear_unit
        and config.activation_func_clamp_value is None
        and not config.glu_linear_offset
        and config.num_moe_experts is None  # experts scale by the router's weight in the fused path
    )


def accumulate_by_parts(chunk: torch.nn.Module) -> None:
    """Add gradients in half precision to fp32 ``main_grad`` by parts that stay in the cache.

    A sum of two dtypes first writes an fp32 copy, which took a tenth of a training step. Where
    ``grad_added_to_main_grad`` is set, Megatron-Core skips its own sum.
    """
    for parameter in chunk.parameters():
        main_grad = getattr(parameter, "main_grad", None)
        if (
            main_grad is not None
            and main_grad.device.type == "cpu"
            and main_grad.dtype != parameter.dtype
        ):
            parameter.register_post_accumulate_grad_hook(_mark_accumulated)


def _mark_accumulated(parameter: Any) -> None:
    main_grad = parameter.main_grad.view(-1)
    grad = parameter.grad.reshape(-1)
    if not parameter.grad_added_to_main_grad:  # the first microbatch of a step: main_grad is zero
        main_grad.copy_(grad)
    else:
        for part, added in zip(main_grad.split(CHUNK), grad.split(CHUNK), strict=True):
            part.add_(added)
    parameter.grad_added_to_main_grad = True


def install() -> None:
    """Replace Megatron-Core's SwiGLU, cross entropy and rotary embedding; safe to call again."""
    mlp.bias_swiglu_impl = swiglu
    shared_experts.bias_swiglu_impl = swiglu
    tensor_parallel.vocab_parallel_cross_entropy = cross_entropy
    rope_utils._apply_rotary_pos_emb_bshd = rotary
    install_for_optimizer()


def install_for_optimizer() -> None:
    """Replace Megatron-Core's operations on lists of tensors, on any device; Apex's kernels stay."""
    modules: tuple[Any, ...] = (clip_grads, core_optimizer)
    for module in modules:
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = scale
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    DistributedOptimizer.load_state_dict = load_state_and_update_count  # type: ignore[method-assign]


def load_state_and_update_count(
    optimizer: DistributedOptimizer, state_dict: dict[str, Any]
) -> None:
    """Load the state of Megatron-Core's optimizer, also the number of updates of PyTorch's Adam.

    Megatron-Core saves this number with the groups of parameters, loads it into one tensor that all parameters share,
    and then loses it. A trainer that resumes would have another bias correction.
    """
    _core_load_state_dict(optimizer, state_dict)
    inner: Any = optimizer.optimizer
    if not isinstance(inner, torch.optim.Optimizer) or "optimizer" not in state_dict:
        return
    counts = {group.get("step") for group in state_dict["optimizer"]["param_groups"]} - {None}
    if len(counts) != 1:
        return
    (count,) = counts
    for state in inner.state.values():
        if isinstance(state.get("step"), Tensor):  # Transformer Engine's Adam counts in its groups
            state["step"] = torch.full_like(state["step"], float(count))
