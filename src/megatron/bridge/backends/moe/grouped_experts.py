# SPDX-License-Identifier: Apache-2.0
"""Grouped experts without Transformer Engine.

Tokens arrive sorted by expert. One autograd node multiplies the rows of each expert into one output buffer, so
nothing is split, concatenated or padded. Parameters have Transformer Engine's names (``linear_fc1.weight0``
...), and checkpoints have the same keys and shapes as with Megatron-Core's other expert layers. Megatron-Core's
``TEGroupedMLP`` supplies activation, routing weights, biases and recomputation around these linear layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from megatron.bridge.backends.decoding.packed_linear import PackedWeight
from megatron.bridge.backends.low_bit.weight import LowBitWeight, full_weight


class _GroupedMatmul(torch.autograd.Function):
    """Computes ``x[rows of expert i] @ weight[i].T + bias[i]`` for each expert, in one tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: list[int], biased: bool, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Compute [tokens, out] from x [tokens, in], weights [out, in] and, if ``biased``, biases [out]."""
        weights = parameters[: len(counts)]
        biases = parameters[len(counts) :]
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        ctx.biased = biased
        if not biased and can_use_grouped_mm(x, weights[0]):
            return torch._grouped_mm(
                x, stack_weights(weights).transpose(1, 2), offs=_group_offsets(counts, x.device)
            )
        out = x.new_empty(x.size(0), weights[0].size(0))
        for index, rows in enumerate(_expert_slices(counts)):
            if rows.start == rows.stop:
                continue  # a low-bit weight would be dequantized for nothing
            if biased:
                torch.addmm(biases[index], x[rows], weights[index].t(), out=out[rows])
            else:
                torch.mm(x[rows], weights[index].t(), out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return gradients of x, of each weight, and of each bias; zeros for an expert without tokens."""
        (grad,) = grad_outputs
        x, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if not ctx.biased and can_use_grouped_mm(x, weights[0]):
            return _grouped_gradients(
                grad.contiguous(), x, weights, ctx.counts, ctx.needs_input_grad
            )
        slices = _expert_slices(ctx.counts)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for weight, rows in zip(weights, slices, strict=True):
                if rows.start < rows.stop:
                    torch.mm(grad[rows], weight, out=grad_x[rows])
        grad_weights = [
            grad[rows].t() @ x[rows] if need else None
            for rows, need in zip(slices, needed, strict=False)
        ]
        biases = slices if ctx.biased else []
        grad_biases = [
            grad[rows].sum(0) if need else None
            for rows, need in zip(biases, needed[len(slices) :], strict=True)
        ]
        return (grad_x, None, None, *grad_weights, *grad_biases)


def grouped_matmul(
    x: torch.Tensor,
    counts: list[int],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute ``x[rows of expert i] @ weights[i].T + biases[i]`` [tokens, out].

    ``x`` [tokens, in] has the tokens sorted by expert, ``counts`` for each. Weights are [out, in]; a GPU with a grouped
    kernel multiplies with all of them in one launch. Biases are [out], or there are none.
    """
    out = _GroupedMatmul.apply(x, counts, bool(biases), *weights, *biases)
    assert isinstance(out, torch.Tensor)
    return out


def _grouped_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    counts: list[int],
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``_GroupedMatmul`` without biases, each in one kernel for all experts."""
    ends = _group_offsets(counts, x.device)
    grad_x = torch._grouped_mm(grad, stack_weights(weights), offs=ends) if needed[0] else None
    if not any(needed[3:]):
        return (grad_x, None, None, *[None] * len(weights))
    grad_weights = torch._grouped_mm(grad.t(), x, offs=ends).unbind()
    for grad_weight, count in zip(grad_weights, counts, strict=True):
        if not count:  # the kernel may leave the gradient of an expert without tokens uninitialized
            grad_weight.zero_()
    return (grad_x, None, None, *grad_weights)


def can_use_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether PyTorch's grouped kernel applies: bf16 on Hopper or later, rows aligned to 16 bytes."""
    bf16 = x.dtype is weight.dtype is torch.bfloat16
    aligned = x.is_contiguous() and not any(size % 8 for size in weight.shape)
    return (
        x.is_cuda
        and bf16
        and aligned
        and len(x) > 0
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def stack_weights(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack weights to [experts, out, in]: a view if they are evenly spaced in one storage, else a copy.

    Low-bit weights are dequantized.
    """
    if isinstance(weights[0], LowBitWeight):
        return torch.stack([full_weight(weight) for weight in weights])
    first = weights[0]
    size = weights[0].numel()
    starts = [weight.data_ptr() for weight in weights]
    step = (starts[1] - starts[0]) // first.element_size() if len(starts) > 1 else size
    even = all(
        later - earlier == step * first.element_size() for earlier, later in pairwise(starts)
    )
    shared = all(
        weight.is_contiguous()
        and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for weight in weights
    )
    if even and shared and step >= size:
        return first.detach().as_strided((len(weights), *first.shape), (step, *first.stride()))
    return torch.stack([weight.detach() for weight in weights])


def _group_offsets(counts: list[int], device: torch.device) -> torch.Tensor:
    """Return the end of the rows of each expert."""
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)


def _expert_slices(counts: list[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


class GroupedLinear(torch.nn.Module):
    """One linear layer per local expert (``weight{i}``, ``bias{i}``), split over expert-tensor-parallel ranks."""

    split: int  # the dimension of a weight that is split: 0 for column-parallel, 1 for row-parallel layers
    packed: list[PackedWeight] | None = (
        None  # packed weights for decoding; then the parameters are empty
    )
    row_multiple = 1
    """The rows of an expert are padded to this multiple, so that decoding gives the same bits in any batch."""

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        pg_collection: ProcessGroupCollection,
        tp_comm_buffer_name: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert is_expert, "grouped layers are for experts"
        assert not bias or pg_collection.expt_tp.size() == 1, (
            "Megatron-Core's configs refuse such a bias"
        )
        self.config = config
        self.count = num_local_experts
        self.groups = pg_collection
        self.tp_group = pg_collection.expt_tp
        self.has_bias = bias
        self.skip_bias_add = skip_bias_add
        shape = [output_size, input_size]
        shape[self.split] = divide(shape[self.split], self.tp_group.size())
        self.output_size = shape[0]
        # in reverse, because Megatron-Core's buffers begin with the parameter that was registered last
        for index, weight in reversed(list(enumerate(self._weight_slices(shape)))):
            self.register_parameter(f"weight{index}", self._parameter(weight))
            if bias:
                self.register_parameter(f"bias{index}", self._bias(shape[0]))
        self._initialize(output_size, input_size, init_method)

    def _weight_slices(self, shape: list[int]) -> list[torch.Tensor]:
        """Memory for all weights in one tensor, which `stack_weights` finds again without a copy."""
        stacked = self._empty(self.count, *shape)
        if stacked.is_meta:  # a conversion without memory distinguishes parameters by their storage
            return [self._empty(*shape) for _ in range(self.count)]
        return [part.data for part in stacked]

    def _empty(self, *shape: int) -> torch.Tensor:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        return torch.empty(shape, device=device, dtype=self.config.params_dtype)

    def _parameter(self, values: torch.Tensor) -> torch.nn.Parameter:
        config = self.config
        parameter = torch.nn.Parameter(values)
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        parameter.allreduce = not own_groups  # type: ignore[attr-defined] - selects the ranks with replicas
        return parameter

    def _bias(self, size: int) -> torch.nn.Parameter:
        bias = self._parameter(self._empty(size))
        torch.nn.init.zeros_(bias)
        # the experts of each rank are different parameters, which count in the gradient norm
        set_tensor_model_parallel_attributes(bias, True, 0, self._stride())
        return bias

    def _stride(self) -> int:
        """Split the outputs of a gated layer into gates and values, each sharded over the ranks."""
        return 2 if self.split == 0 and self.config.gated_linear_unit else 1

    def _initialize(
        self, rows: int, columns: int, init_method: Callable[[torch.Tensor], Any]
    ) -> None:
        config = self.config
        stride = self._stride()
        if not config.perform_initialization:
            for weight in self.weights():
                set_tensor_model_parallel_attributes(weight, True, self.split, stride)
            return
        if not config.use_cpu_initialization:
            for weight in self.weights():
                _initialize_affine_weight_gpu(
                    weight, init_method, self.split, stride=stride, is_expert=True
                )
            return
        # every rank draws all experts and keeps its own, so the model is the same under any layout
        local_weights = {
            self.groups.ep.rank() * self.count + index: weight
            for index, weight in enumerate(self.weights())
        }
        for expert in range(self.groups.ep.size() * self.count):
            if expert in local_weights:
                _initialize_affine_weight_cpu(
                    local_weights[expert],
                    rows,
                    columns,
                    local_weights[expert].size(self.split),
                    self.split,
                    init_method,
                    stride=stride,
                    params_dtype=config.params_dtype,
                    rank=self.tp_group.rank(),
                    world_size=self.tp_group.size(),
                )
            else:
                init_method(torch.empty(rows, columns))

    def weights(self) -> list[torch.nn.Parameter]:
        return [getattr(self, f"weight{index}") for index in range(self.count)]

    def biases(self) -> list[torch.nn.Parameter]:
        return (
            [getattr(self, f"bias{index}") for index in range(self.count)] if self.has_bias else []
        )

    def forward(
        self, x: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Return outputs [tokens, out] and, if the caller adds them, the biases."""
        later = self.has_bias and self.skip_bias_add
        biases = [] if later else self.biases()
        if self.row_multiple > 1:
            return self._padded(x, tokens_per_expert, biases), list(
                self.biases()
            ) if later else None
        out = grouped_matmul(x, tokens_per_expert, self.weights(), biases)
        return out, list(self.biases()) if later else None

    def _padded(
        self, x: torch.Tensor, counts: list[int], biases: list[torch.nn.Parameter]
    ) -> torch.Tensor:
        """Return outputs [tokens, out], without a gradient."""
        weights = self.weights()
        outputs: list[torch.Tensor] = []
        for index, rows in enumerate(_expert_slices(counts)):
            if counts[index]:
                padded = torch.nn.functional.pad(
                    x[rows], (0, 0, 0, -counts[index] % self.row_multiple)
                )
                bias = biases[index] if biases else None
                packed = None if self.packed is None else self.packed[index]
                out = (
                    torch.nn.functional.linear(padded, weights[index], bias)
                    if packed is None
                    else packed(padded, bias)
                )
                outputs.append(out[: counts[index]])
        return torch.cat(outputs) if outputs else x.new_empty(0, self.output_size)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the experts of all ranks under one key, stacked along a leading axis, as in Megatron-Core."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        alone = metadata.get("singleton_local_shards", False)
        experts = self.groups.ep.size() * self.count
        sharded: dict[str, Any] = {}
        for index in range(self.count):
            expert = self.groups.ep.rank() * self.count + index
            tensors = {"expert.weight": getattr(self, f"weight{index}")}
            if self.has_bias:
                tensors["expert.bias"] = getattr(self, f"bias{index}")
            part = make_sharded_tensors_for_checkpoint(
                tensors,
                "",
                {"expert.weight": self.split} | ({"expert.bias": 0} if self.split == 0 else {}),
                sharded_offsets
                if alone
                else (*sharded_offsets, (len(sharded_offsets), expert, experts)),
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, "expert.", f"{expert}.{prefix}" if alone else prefix)
            for kind in ("weight", "bias"):
                if f"expert.{kind}" in part:
                    sharded[f"{prefix}{kind}{index}"] = part[f"expert.{kind}"]
        for tensor in sharded.values():
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
        return sharded


class ColumnParallelGroupedLinear(GroupedLinear):
    """The first layer of experts: each rank has a part of the outputs of every expert."""

    split = 0


class RowParallelGroupedLinear(GroupedLinear):
    """The second layer of experts: each rank has a part of the inputs; the dispatcher sums the outputs."""

    split = 1


def grouped_experts() -> ExpertsBuilder:
    submodules = GroupedMLPSubmodules(
        linear_fc1=ColumnParallelGroupedLinear,  # type: ignore[arg-type] - their protocol is positional-only
        linear_fc2=RowParallelGroupedLinear,  # type: ignore[arg-type]
        activation_func=None,
    )
    return partial(TEGroupedMLP, submodules=submodules)
