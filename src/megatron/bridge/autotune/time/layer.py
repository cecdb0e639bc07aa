# SPDX-License-Identifier: Apache-2.0
"""Predict the time of a layer's forward and backward pass on one rank."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.bridge.autotune.efficiency import MXFP8_BYTES, Direction
from megatron.bridge.autotune.time.collectives import AlphaBeta, CollectiveGroup, reached
from megatron.bridge.autotune.time.kernels import (
    GROUPED_EFFICIENCY,
    GROUPED_GRADIENT_EFFICIENCY,
    Roofline,
)
from megatron.bridge.autotune.time.work import (
    Cost,
    LayerSettings,
    LayerShape,
    Matrix,
    operations_per_token,
)

# Scans of Mamba-2 and gated delta nets reach a lower fraction of the peak rate than attention (an assumption).
SCAN_EFFICIENCY = 0.25

# Numbers that Megatron-Core moves per element, a third of them forward: clamping before the fused activation, and
# output biases of experts one by one in fp32 (``weighted_bias_quick_geglu_impl``, ``TEGroupedMLP._apply_bias``).
_CLAMP = 9 / 3
_OUTPUT_BIAS = 34 / 3
_OUTPUT_BIAS_KERNELS = 9 // 3  # of each expert

_QUANTIZED_BYTES = {"fp8": MXFP8_BYTES, "fp4": 9 / 16}  # of a number with its share of a scale


@dataclass(frozen=True)
class LayerTime:
    """Costs of a layer's two passes."""

    forward: Cost
    backward: Cost


@lru_cache(maxsize=65536)
def layer_time(shape: LayerShape, run: LayerSettings, kernels: Roofline) -> LayerTime:
    operations = run.tokens * operations_per_token(shape, run)
    forward = kernels.measured(
        f"{shape.kind} forward", operations, _forward_cost(shape, run, kernels)
    )
    backward = kernels.measured(
        f"{shape.kind} backward", operations, _backward_cost(shape, run, kernels)
    )
    forward = forward + _exchange_cost(shape, run, kernels, "forward")
    backward = backward + _exchange_cost(shape, run, kernels, "backward")
    again = replace(forward, tensor=0.0, context=0.0, expert=0.0).total * run.recompute
    repeated = Cost(
        recompute=again,
        tensor=forward.tensor * run.recompute,
        expert=forward.expert * run.recompute,
    )
    return LayerTime(forward, backward + repeated)


def _forward_cost(shape: LayerShape, run: LayerSettings, kernels: Roofline) -> Cost:
    matrix = sum(
        kernels.matrix(run.tokens, product.rows, product.columns) for product in shape.matrices
    )
    matrix += sum(
        kernels.matrix(run.between, product.rows, product.columns, quantized=False)
        for product in shape.router
    )
    matrix += sum(_grouped_time(product, run, kernels) for product in shape.experts)
    moved = _memory_bound_time(shape, run, kernels) + _quantization_time(
        shape, run, kernels, "forward"
    )
    return Cost(
        matrix=matrix,
        attention=_time_between_products(shape, run, kernels, "forward"),
        memory=moved,
    )


def _backward_cost(shape: LayerShape, run: LayerSettings, kernels: Roofline) -> Cost:
    matrix = sum(
        _gradient_time(product, kernels.matrix(run.tokens, product.columns, product.rows))
        for product in shape.matrices
    )
    matrix += 2 * sum(
        kernels.matrix(run.between, product.columns, product.rows, quantized=False)
        for product in shape.router
    )
    of_weight = GROUPED_EFFICIENCY / GROUPED_GRADIENT_EFFICIENCY
    matrix += sum(
        _gradient_time(product, _grouped_time(product, run, kernels), of_weight)
        for product in shape.experts
    )
    moved = 2 * _memory_bound_time(shape, run, kernels) + _quantization_time(
        shape, run, kernels, "backward"
    )
    return Cost(
        matrix=matrix,
        attention=_time_between_products(shape, run, kernels, "backward"),
        memory=moved,
    )


def _gradient_time(matrix: Matrix, seconds: float, of_weight: float = 1.0) -> float:
    """Add the gradients of the input and, if it is trained, of the weight, which takes ``of_weight`` times as long."""
    return seconds * (1 + matrix.trained * of_weight)


def _grouped_time(matrix: Matrix, run: LayerSettings, kernels: Roofline) -> float:
    tokens_per_expert = run.chosen / run.local_experts
    return kernels.matrix(tokens_per_expert, matrix.rows, matrix.columns, count=run.local_experts)


def _time_between_products(
    shape: LayerShape, run: LayerSettings, kernels: Roofline, direction: Direction
) -> float:
    operations = shape.between * run.tokens
    if not operations:
        return 0.0
    if shape.quadratic:
        # the backward kernel recomputes the scores: five products instead of two
        factor = 1.0 if direction == "forward" else 2.5
        return kernels.attention(operations * factor, direction, shape.seen, shape.head)
    scan = max(
        operations / (kernels.card.bf16 * SCAN_EFFICIENCY),
        kernels.moved(shape.scan_bytes * run.tokens),
    )
    return scan * (1 if direction == "forward" else shape.backward_scans)


def _memory_bound_time(shape: LayerShape, run: LayerSettings, kernels: Roofline) -> float:
    """Return the time of memory-bound kernels: norms, and additions to the residual stream."""
    stream = (2 * shape.norms + 3 * 2) * run.between * run.hidden
    inner = 1.5 * shape.inner * run.tokens
    experts = _permuted_elements(run) * run.chosen * shape.dispatched if shape.experts else 0.0
    experts += sum(1.5 * expert_matrix.rows * run.chosen for expert_matrix in shape.experts)
    gates = sum(
        expert_matrix.rows for expert_matrix in shape.experts if expert_matrix.name == "linear_fc1"
    )
    experts += _CLAMP * gates * run.chosen * shape.clamped
    experts += _OUTPUT_BIAS * run.chosen * shape.dispatched * shape.expert_biases
    launched = 8 + _OUTPUT_BIAS_KERNELS * run.local_experts * shape.expert_biases
    if shape.experts:
        launched += 40
    return kernels.moved((stream + inner + experts) * run.number, kernels=launched)


def _permuted_elements(run: LayerSettings) -> float:
    """Return the elements that are read and written, per element of a dispatched token, to permute it and back.

    Tokens are copied into the buffers of an all-to-all and sorted by expert, and back: four reads and four writes.
    With the flex dispatcher, a rank receives each of its tokens once, and copies it for each of its experts.
    """
    return 2 * (1 + reached(run.expert, run.top_k) / run.top_k) if run.flex else 8.0


def _quantization_time(
    shape: LayerShape, run: LayerSettings, kernels: Roofline, direction: Direction
) -> float:
    """Return the time to quantize inputs and gradients of outputs: reads in bf16, writes by rows and by columns."""
    if kernels.precision == "bf16":
        return 0.0
    width = "columns" if direction == "forward" else "rows"
    numbers = sum(getattr(product, width) for product in shape.matrices) * run.tokens
    numbers += sum(getattr(product, width) for product in shape.experts) * run.chosen
    return kernels.moved(numbers * (run.number + 2 * _QUANTIZED_BYTES[kernels.precision]))


def _exchange_cost(
    shape: LayerShape, run: LayerSettings, kernels: Roofline, direction: Direction
) -> Cost:
    links = kernels.links
    forward = direction == "forward"
    tensor = shape.blocks * _around_block(run, kernels, forward)
    if run.tensor_overlap:
        tensor /= run.tensor  # all parts but the first arrive during the products of others
    context = _context_time(
        shape,
        run,
        links,
        _time_between_products(shape, run, kernels, direction),
        1.0 if forward else 2.0,
    )
    return Cost(tensor=tensor, context=context, expert=_expert_message_time(shape, run, links))


def _around_block(run: LayerSettings, kernels: Roofline, forward: bool) -> float:
    """Return the time of an all-gather before a block and a reduce-scatter after it, or of one all-reduce.

    The backward pass first gathers the gradient of the block's output. It then gathers the block's input again for the
    gradient of the weight and scatters the gradient of the input; both overlap with products if the device allows it.
    """
    links = kernels.links
    size = run.tokens * run.hidden * run.number
    group = CollectiveGroup(run.tensor)
    gather = links.all_gather(size, group)
    if not forward and kernels.overlaps:
        return gather
    if not run.sequence_parallel:
        return links.all_reduce(size, group)
    return gather * (1 if forward else 2) + links.reduce_scatter(size, group)


def _context_time(
    shape: LayerShape, run: LayerSettings, links: AlphaBeta, attention: float, factor: float
) -> float:
    if run.context == 1 or not shape.keys:
        return 0.0
    group = CollectiveGroup(run.context, run.tensor)
    size = factor * run.tokens * shape.keys * run.number
    if run.context_kind in (None, "all_gather"):
        return links.all_gather(size * run.context, group)
    if str(run.context_kind).startswith("a2a"):
        return links.all_to_all(3 * size, group)
    steps = run.context - 1
    message = links.send(size, run.tensor * (run.context - 1))
    return max(0.0, steps * message - attention * steps / run.context)


def _expert_message_time(shape: LayerShape, run: LayerSettings, links: AlphaBeta) -> float:
    """Return the time to send tokens to their experts and back."""
    if not shape.experts:
        return 0.0
    group = CollectiveGroup(run.expert, run.expert_tensor)
    copies = run.chosen / run.expert_tensor
    width = shape.dispatched * run.number
    if run.flex:
        there = links.dispatch(copies / run.top_k, width, run.top_k, group)
    else:
        there = links.all_to_all(copies * width, group)
    there += links.all_gather(
        run.chosen * shape.dispatched * run.number, CollectiveGroup(run.expert_tensor)
    )
    return 2 * there * (0.2 if run.expert_overlap else 1.0)
