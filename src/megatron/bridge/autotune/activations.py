# SPDX-License-Identifier: Apache-2.0
"""Estimate the activation memory of a rank from the modules that the rank would build.

The count follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4: the tensors that autograd saves for the backward pass, module by module (docs/tuner.md). It differs in:

* widths: they come from the real modules (grouped queries, latents, experts, gates), not from multiples of one size;
* attention: its kernels save no scores (scaled_dot_product_attention, Transformer Engine), so no term grows with the
  square of the sequence length, and recomputing only core attention saves nothing;
* experts: the estimate assumes that the router distributes tokens evenly over them.

The rank holds a chunk of layers once for each microbatch in flight (see ``time.schedule``). Full recomputation saves
the input of each layer (with the uniform method, of each group of ``recompute_num_layers`` layers), and during the
backward pass of one layer or group it also holds everything that this layer or group saves.

Memory peaks at one of these moments. Each counts the saved activations plus the temporary tensors of:

* the backward pass of a chunk: the gathered input of its widest layer and the gradients of the residual stream, of
  the widest output and, without ``gradient_accumulation_fusion``, of its weight. For experts: the gradients of the
  inputs and of all weights on the rank, or those of the product with the router's probabilities in fp32;
* the loss: T x vocabulary/t x bytes per logit. The torch backend writes the gradient over the logits (4 bytes on
  a CPU, measured 2026-11-20). Megatron-Core's own loss and Transformer Engine's (``cross_entropy_forward``, 2026)
  hold the logits and an fp32 tensor of their size.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from megatron.bridge.autotune.activation_sizes import (
    ActivationSizes,
    logits_of,
    pads_values,
    sizes_of,
)
from megatron.bridge.autotune.layers import (
    INTO_RESIDUAL,
    is_dispatched,
    is_undivided,
    keeps_input,
    layers_of,
    trained,
    weight_shape,
)
from megatron.bridge.autotune.time.schedule import (
    Kind,
    Pipeline,
    distinct_moments,
    most_held,
    pipeline_of,
    short_pipeline,
)
from megatron.bridge.autotune.vision_tower import NO_TOWER, TowerCounts, tower_counts
from megatron.bridge.backends.attention.block_mask import MASKED_ROWS
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.models.features.host_activations import layers_on_host
from megatron.bridge.models.features.registry import feature_of
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.training.config import ConfigContainer

_FP32 = 4
_BLOCKS = ("self_attention", "mlp", "mixer")


@dataclass(frozen=True)
class LayerCounts:
    """Activation bytes of a layer for one microbatch."""

    full: int  # saved for the backward pass without recomputation
    kept: int  # saved with selective recomputation
    working: int  # temporary tensors of the backward pass


@dataclass(frozen=True)
class ChunkCounts:
    """The layers of a chunk, whether the loss follows them, and the vision tower before them."""

    layers: list[LayerCounts]
    has_loss: bool
    tower: TowerCounts = NO_TOWER


def activation_bytes(
    config: ConfigContainer, chunks: list[Any], stage: int, world_size: int
) -> int:
    """Return the activation bytes of a rank of pipeline stage ``stage`` at the peak of a step.

    ``config`` is validated for ``world_size``; ``chunks`` are the rank's chunks from ``meta_model.stage_chunks``.
    """
    return max(moment.total for moment in moments(config, chunks, stage, world_size))


@dataclass(frozen=True)
class Moment:
    """The bytes that chunks hold for the microbatches in flight, and the temporary bytes of one pass."""

    name: str
    held: int
    working: int

    @property
    def total(self) -> int:
        return self.held + self.working


def moments(
    config: ConfigContainer, chunks: list[Any], stage: int, world_size: int
) -> list[Moment]:
    """Return the peak of each kind on a rank of ``stage``; the arguments are those of ``activation_bytes``."""
    sizes = sizes_of(config)
    counted = [chunk_counts(chunk, sizes) for chunk in chunks]
    return stage_moments(config.model, counted, sizes, pipeline_of(config, world_size), stage)


def stage_moments(
    model: ModelProvider,
    chunks: list[ChunkCounts],
    sizes: ActivationSizes,
    pipeline: Pipeline,
    stage: int,
) -> list[Moment]:
    """Return the peak of each kind on a rank of ``stage``, given the counts of its chunks."""
    chunk_sizes = [_chunk_bytes(model, chunk, sizes) for chunk in chunks]
    held_sizes = np.array([held for held, _ in chunk_sizes], dtype=np.int64)
    working = [temporary for _, temporary in chunk_sizes]
    # those of multi-token prediction are computed first and keep their gradients
    bytes_per_gradient = sizes.bytes_per_logit - sizes.bytes_per_element
    ahead = (model.mtp_num_layers or 0) * max(sizes.bytes_per_element, bytes_per_gradient)
    loss = logits_of(model, sizes) * (sizes.bytes_per_logit + ahead)
    if sizes.sp_tokens < sizes.tokens:  # its gathered input
        loss += sizes.tokens * sizes.hidden_size * sizes.bytes_per_element
    losses = [loss if chunk.has_loss else 0 for chunk in chunks]
    received = 0
    if model.pipeline_model_parallel_size > 1:
        # an input that arrived before its pass, a gradient, and what an interleaved schedule has not replaced yet
        held_tensors = 5 if len(chunks) > 1 else 2
        received = held_tensors * sizes.stream_bytes
    received += sum(rotary_bytes(model, sizes, len(chunk.layers)) for chunk in chunks)
    fullest: dict[str, Moment] = {}
    for (kind, index), counts in _held_by_pass(short_pipeline(pipeline), stage).items():
        if kind == "forward" and not losses[index]:
            continue
        name = "loss" if kind == "forward" else f"backward of chunk {index}"
        held = int((counts @ held_sizes).max())
        temporary = losses if kind == "forward" else working
        moment = Moment(name, held, temporary[index] + received)
        if name not in fullest or moment.total > fullest[name].total:
            fullest[name] = moment
    return list(fullest.values())


@lru_cache(maxsize=4096)
def _held_by_pass(pipeline: Pipeline, stage: int) -> dict[tuple[Kind, int], np.ndarray]:
    """Return, by kind and chunk of a pass, the microbatches that each chunk holds, a row for each different moment."""
    rows: dict[tuple[Kind, int], list[tuple[int, ...]]] = {}
    for kind, index, counts in distinct_moments(pipeline, stage):
        rows.setdefault((kind, index), []).append(counts)
    return {key: np.array(held, dtype=np.int64) for key, held in rows.items()}


def teacher_bytes(config: ConfigContainer, chunks: list[Any], stage: int, world_size: int) -> int:
    """Return the bytes that a teacher adds on a rank of pipeline stage ``stage``; it only runs forward passes.

    Only one layer runs at a time. A later stage also holds the teacher's input, next to its own, for each microbatch
    in flight. The last stage holds the teacher's logits until the loss is computed. The gradient of the divergence then
    replaces them, and its backward pass needs a wider type: T x vocabulary/t x (4 + e) bytes.
    ``config`` is the config of the run with the teacher as its model.
    """
    sizes = sizes_of(config)
    widest = max(
        (_working_bytes(layer, sizes) for chunk in chunks for layer in layers_of(chunk)), default=0
    )
    held = sum(microbatches_in_flight(config, stage, world_size)) if stage else 0
    total = widest + held * sizes.stream_bytes
    if chunks[-1].post_process:
        total += logits_of(config.model, sizes) * (_FP32 + sizes.bytes_per_element)
    return total


def rotary_bytes(model: Any, sizes: ActivationSizes, layers: int = 1) -> int:
    """Return the bytes of fp32 angles, cosines and sines of a chunk; latent attention stores them for each layer."""
    if model.multi_latent_attention:
        elements = sizes.tokens * model.qk_pos_emb_head_dim * layers
        return elements * (_FP32 + 4 * sizes.bytes_per_element)
    if not sizes.has_rope:
        return 0
    copies = 4 if model.recompute_granularity == "full" else 2  # recomputed layers have their own
    elements = sizes.tokens * (model.kv_channels or 0)
    return elements * (_FP32 + copies * sizes.bytes_per_element)


def microbatches_in_flight(config: ConfigContainer, stage: int, world_size: int) -> list[int]:
    """Return how many microbatches each chunk of a rank of ``stage`` holds at once, if all chunks have equal size."""
    return list(most_held(short_pipeline(pipeline_of(config, world_size)), stage))


def chunk_counts(chunk: Any, sizes: ActivationSizes) -> ChunkCounts:
    layers = layers_of(chunk)
    # nothing needs a gradient before the first trained parameters
    parts = [chunk.embedding, *layers] if chunk.pre_process and not hasattr(chunk, "vision") else []
    frozen = [not any(parameter.requires_grad for parameter in part.parameters()) for part in parts]
    idle = max(0, [*frozen, False].index(False) - 1)
    counts = [LayerCounts(0, 0, 0)] * idle + [
        counts_of_layer(layer, sizes) for layer in layers[idle:]
    ]
    for index in range(min(layers_on_host(chunk.config), len(counts))):
        counts[index] = replace(counts[index], kept=0)  # they come back one layer at a time
    return ChunkCounts(counts, bool(chunk.post_process), counts_of_tower(chunk, sizes.image_tokens))


def counts_of_tower(chunk: Any, tokens: int) -> TowerCounts:
    """Count the bytes that the vision tower of ``chunk`` (on the meta device) needs for ``tokens`` image tokens."""
    tower = getattr(chunk, "vision", None)
    return NO_TOWER if tower is None else tower_counts(tower, tokens)


def counts_of_layer(layer: nn.Module, sizes: ActivationSizes) -> LayerCounts:
    """Count the activation bytes of ``layer``, which is on the meta device."""
    return LayerCounts(
        _kept_bytes(layer, sizes, recomputed=()),
        _kept_bytes(layer, sizes, sizes.recomputed_modules),
        max(
            count(layer, sizes)
            for count in (
                _working_bytes,
                _scored_bytes,
                _scanned_bytes,
                _summed_bytes,
                _ring_bytes,
            )
        ),
    )


def _chunk_bytes(
    model: ModelProvider, chunk: ChunkCounts, sizes: ActivationSizes
) -> tuple[int, int]:
    """Return the bytes that a chunk saves for one microbatch, and the temporary bytes of its backward pass."""
    last = 0
    if chunk.has_loss:  # inputs of the final norm and of the output layer
        last = 2 * sizes.stream_bytes
    ends = last + _output_bytes(model, sizes) + chunk.tower.kept
    held = peak = freed = 0
    for saved, again, working in reversed(_recomputed_pieces(model, chunk.layers, sizes)):
        peak = max(peak, again + working - freed)
        held += saved
        # later layers have freed their tensors; with full recomputation, an output replaces them
        if not again or model.recompute_granularity != "full":
            freed += saved
    norm = 0
    if chunk.has_loss and sizes.bytes_per_element < _FP32 and not has_cuda():
        # on a CPU, the final norm's backward pass holds its input and gradients in fp32, too, and frees what it read
        norm = 7 * sizes.stream_bytes
    # the layers run their backward pass after the output layer's, and the tower after the layers
    return ends + held, max(norm, max(peak, chunk.tower.working - held) - last)


def _recomputed_pieces(
    model: ModelProvider, layers: list[LayerCounts], sizes: ActivationSizes
) -> list[tuple[int, int, int]]:
    """Return the saved, the recomputed and the temporary bytes of layers that are recomputed together."""
    count = model.recompute_num_layers or 1
    if model.recompute_granularity != "full":
        return [(layer.kept, layer.full - layer.kept, layer.working) for layer in layers]
    if model.recompute_method == "block":  # the first layers of a chunk
        first = [(sizes.stream_bytes, layer.full, layer.working) for layer in layers[:count]]
        return first + [(layer.full, 0, layer.working) for layer in layers[count:]]
    parts = [layers[start : start + count] for start in range(0, len(layers), count)]
    return [
        (
            sizes.stream_bytes,
            sum(layer_counts.full for layer_counts in part),
            max(layer_counts.working for layer_counts in part),
        )
        for part in parts
    ]


def _output_bytes(model: ModelProvider, sizes: ActivationSizes) -> int:
    """Return the bytes of a chunk's output, which is held until its backward pass unless it is deallocated."""
    if model.pipeline_model_parallel_size == 1 or model.deallocate_pipeline_outputs:
        return 0
    return sizes.stream_bytes


def _kept_bytes(layer: nn.Module, sizes: ActivationSizes, recomputed: tuple[str, ...]) -> int:
    total = 2 * sizes.sp_tokens * sizes.hidden_size if sizes.has_dropout_masks else 0
    for name, part in layer.named_children():
        if name in _BLOCKS and not isinstance(part, IdentityOp):
            has_router = hasattr(part, "router")
            if "layernorm" not in recomputed and _keeps_own_input(part, sizes):
                bytes_per_element = sizes.bytes_per_saved_input
                if has_router:
                    bytes_per_element = sizes.bytes_per_element
                total += int(sizes.sp_tokens * sizes.hidden_size * bytes_per_element)
            block_name = "moe" if has_router else name
            if name == "mlp" and block_name in recomputed:
                continue  # it saves nothing inside
            total += _bytes_inside_block(part, sizes, recomputed)
        elif name == "mtp_model_layer":
            total += _kept_bytes(part, sizes, recomputed)
        else:  # a norm or a linear layer
            total += sum(
                _of_module(path, module, sizes) for path, module in part.named_modules(prefix=name)
            )
    return total


def _keeps_own_input(block: nn.Module, sizes: ActivationSizes) -> bool:
    """Return whether a layer that reads the input of ``block`` saves this input."""
    modules = [module for path, module in block.named_modules() if not is_dispatched(path)]
    readers = [
        module for module in modules if (weight_shape(module) or ())[1:] == (sizes.hidden_size,)
    ]
    return any(map(keeps_input, readers)) or not readers or hasattr(block, "router")


def kept_inside(path: str, block: nn.Module, sizes: ActivationSizes) -> int:
    """Return the bytes that a part of a layer saves without recomputation; ``path`` is its name in the layer."""
    return sum(_of_module(name, module, sizes) for name, module in block.named_modules(prefix=path))


def _bytes_inside_block(
    block: nn.Module, sizes: ActivationSizes, recomputed: tuple[str, ...]
) -> int:
    total = 0
    for path, module in block.named_modules():
        name = path.rpartition(".")[2]
        if "shared_experts" in path and "shared_experts" in recomputed:
            continue
        total += _of_module(path, module, sizes)
        if isinstance(module, Attention) and "mla_up_proj" in recomputed:
            total -= _rotated_bytes(module, sizes)
        if name == "linear_fc2" and is_dispatched(path) and "moe_act" in recomputed:
            total -= _of_module(path, module, sizes)
    return total


def _rotated_bytes(attention: Any, sizes: ActivationSizes) -> int:
    """Return the bytes of the rotated queries and keys of latent attention."""
    config = attention.config
    heads = attention.num_attention_heads_per_partition
    elements = 2 * heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    return sizes.tokens * elements * sizes.bytes_per_element


def _of_module(path: str, module: Any, sizes: ActivationSizes) -> int:
    """Return the bytes that one module saves without its children."""
    saved = _beside_matrices(module, sizes)
    if saved is not None:
        return saved
    shape = weight_shape(module)
    if shape is None or len(shape) == 3:  # a convolution's result is recomputed
        return 0
    if len(shape) == 1:  # a norm; norms of heads and latents read tensors that are saved anyway
        if shape[0] != sizes.hidden_size:
            return 0
        return sizes.sp_tokens * (sizes.hidden_size * sizes.bytes_per_norm_input + _FP32)
    if type(module).__name__.endswith("Router"):
        return sizes.sp_tokens * shape[0] * 12
    outputs = 2 * shape[0] if is_dispatched(path) else shape[0]
    of_adapter = _tokens_of_path(path, sizes) * _of_adapter(module, outputs)
    inputs, other_elements = _linear_elements(path, shape, sizes, keeps_input(module))
    return int(inputs * sizes.bytes_per_saved_input) + (
        (other_elements + of_adapter) * sizes.bytes_per_element
    )


def _beside_matrices(module: Any, sizes: ActivationSizes) -> int | None:
    """Return the bytes that a module saves in addition to what its linear layers save; None if it is none of those."""
    if isinstance(module, MoELayer):
        return _dispatcher_bytes(module, sizes)
    if isinstance(module, Attention):
        return _attention_bytes(module, sizes)
    feature = feature_of(type(module))
    elements = None if feature is None else feature.saved_elements(module)
    return None if elements is None else sizes.tokens * elements * sizes.bytes_per_element


def _linear_elements(
    path: str, shape: tuple[int, ...], sizes: ActivationSizes, keeps: bool
) -> tuple[int, int]:
    """Return the input elements that a linear layer saves, and its other elements; its weight is [out, in]."""
    tokens = _tokens_of_path(path, sizes)
    dispatched = is_dispatched(path)
    inputs = tokens * shape[1]
    saved_inputs = inputs if keeps else 0
    if path.endswith("linear_fc2"):
        tensors = sizes.activation_tensors
        if dispatched:
            tensors += sizes.weighting_tensors
        return saved_inputs, inputs * tensors
    if path.endswith(INTO_RESIDUAL):  # the attention kernel saves its output in any case
        has_copy = path.endswith(sizes.quantized_copies)
        return saved_inputs if has_copy else 0, inputs
    if dispatched:
        return saved_inputs, tokens * shape[0]
    if path.endswith(sizes.copied_outputs):
        return sizes.sp_tokens * shape[1], 0
    if (
        shape[1] == sizes.hidden_size or not keeps
    ):  # the caller counts the input of the block itself
        return 0, tokens * shape[0]
    return sizes.sp_tokens * shape[1], tokens * shape[0]


def _of_adapter(module: Any, outputs: int) -> int:
    """Return the elements per token that an adapter saves: between its factors, and the outputs that DoRA scales."""
    adapter = getattr(module, "adapter", None)
    if adapter is None:
        return 0
    scaled = outputs if adapter.scales_outputs else 0
    return adapter.total_rank + scaled


def _has_parts(module: Any) -> bool:
    """Return whether a layer has several adapters, whose gradients are scaled one by one, each in a copy."""
    adapter = getattr(module, "adapter", None)
    return isinstance(adapter, nn.ModuleDict) and len(adapter) > 1


def _tokens_of_path(path: str, sizes: ActivationSizes) -> int:
    if "local_experts" in path:  # experts run one after another
        return sizes.expert_tokens // sizes.local_experts
    if is_dispatched(path):
        return sizes.expert_tokens
    return sizes.sp_tokens if is_undivided(path) else sizes.tokens


def _attention_bytes(attention: Any, sizes: ActivationSizes) -> int:
    """Return the bytes that attention saves in addition to the inputs and outputs of its linear layers."""
    config = attention.config
    heads = attention.num_attention_heads_per_partition
    groups = attention.num_query_groups_per_partition
    width = attention.hidden_size_per_attention_head
    head_elements = 0  # per token and dimension of a head
    if config.multi_latent_attention:
        groups = heads
        width = config.qk_head_dim + config.qk_pos_emb_head_dim
        head_elements += 2 * heads if pads_values(config) else 0
    elif config.qk_layernorm:
        head_elements += heads  # normalized queries
        if sizes.bytes_per_norm_input > sizes.bytes_per_element:
            head_elements += 2 * (heads + groups)  # the norms read copies instead of views
    if sizes.has_rope:  # copies of queries and keys
        head_elements += heads + groups
    elif heads > groups and not config.qk_layernorm:  # queries lie apart between keys and values
        head_elements += heads
    if sizes.kv_ranks > 1:  # keys and values of all context ranks instead of a rank's own
        head_elements += 2 * sizes.kv_ranks * groups
        if sizes.has_rope:
            head_elements -= heads + 3 * groups
    sums = 2 * heads + groups if config.qk_layernorm else heads
    bytes_per_token = head_elements * width * sizes.bytes_per_element + sums * _FP32
    return _attention_tile_bytes(attention, sizes) + sizes.tokens * bytes_per_token


def _attention_tile_bytes(attention: Any, sizes: ActivationSizes) -> int:
    """Return the bytes of the mask of attention's tiles on a CPU, and of their outputs before they are joined."""
    window = attention.config.window_size
    skipped = attention.config.window_attn_skip_freq
    visible_keys = keys = sizes.tokens * sizes.kv_ranks
    if is_layer_window_attention(window, skipped, attention.layer_number):
        visible_keys = min(visible_keys, window[0] + 1)
    if has_cuda() or (visible_keys == keys and sizes.kv_ranks == 1):
        return 0
    rows = sizes.tokens // 2 if visible_keys == keys else max(128, visible_keys)
    rows = min(MASKED_ROWS, rows)
    mask = rows * min(keys, rows + visible_keys)
    width = attention.num_attention_heads_per_partition * attention.hidden_size_per_attention_head
    return (mask + sizes.tokens * width) * sizes.bytes_per_element


def _dispatcher_bytes(layer: Any, sizes: ActivationSizes) -> int:
    """Return the bytes of the token-to-expert map, the permutation, and the router's probabilities."""
    return sizes.sp_tokens * (layer.router.weight.size(0) * 8 + layer.router.topk * 16)


def _working_bytes(layer: nn.Module, sizes: ActivationSizes) -> int:
    """Return the bytes of the gathered input and of the gradients of the residual stream and the widest layer."""
    stream = (sizes.tokens + sizes.sp_tokens) * sizes.hidden_size * sizes.bytes_per_element
    gradients = [_gradient_bytes(path, module, sizes) for path, module in layer.named_modules()]
    return stream + max(gradients, default=0)


def _scored_bytes(layer: Any, sizes: ActivationSizes) -> int:
    """Return the fp32 bytes that the backward pass of soft-capped attention adds, less the freed tensors of the MLP."""
    if not sizes.scores_per_tile:
        return 0
    freed = kept_inside("mlp", layer.mlp, sizes)
    return 2 * sizes.stream_bytes + 4 * _FP32 * sizes.scores_per_tile - freed


def _ring_bytes(layer: Any, sizes: ActivationSizes) -> int:
    """Return the bytes of keys, values and gradients that travel in the backward pass, less the MLP's freed tensors."""
    attention: Any = getattr(layer, "self_attention", None)
    if not (sizes.passes_keys and hasattr(attention, "num_query_groups_per_partition")):
        return 0
    width = sizes.tokens * attention.hidden_size_per_attention_head
    queries = width * attention.num_attention_heads_per_partition
    keys_and_values = 2 * width * attention.num_query_groups_per_partition
    # three copies each: computed, sent and received
    passed = 3 * keys_and_values * (_FP32 + sizes.bytes_per_element)
    freed = kept_inside("mlp", layer.mlp, sizes)
    scores = 4 * _FP32 * sizes.scores_per_tile
    stream = (sizes.tokens + sizes.sp_tokens) * sizes.hidden_size * sizes.bytes_per_element
    return stream + _FP32 * queries + passed + scores - freed


def _scanned_bytes(layer: Any, sizes: ActivationSizes) -> int:
    """Return the bytes that the backward pass of PyTorch's scan needs beyond the MLP's freed tensors."""
    scans = (_scan_elements(module, sizes.tokens) for module in layer.modules())
    elements = next((count for count in scans if count), 0)
    if not elements:
        return 0
    freed = kept_inside("mlp", layer.mlp, sizes) if hasattr(layer, "mlp") else 0
    return 2 * sizes.stream_bytes + elements * _FP32 - freed


def _scan_elements(module: nn.Module, tokens: int) -> int:
    feature = feature_of(type(module))
    return 0 if feature is None else feature.scan_elements(module, tokens)


def _summed_bytes(layer: Any, sizes: ActivationSizes) -> int:
    """Return the bytes of experts' outputs while expert tensor ranks add them up, with two copies for gloo."""
    ranks = layer.config.expert_tensor_parallel_size or 1
    if ranks == 1 or not any("router" in path for path, _ in layer.named_modules()):
        return 0
    summed_size = sizes.bytes_per_element
    copies = 1 / ranks
    if sizes.has_fp32_router:
        summed_size = _FP32
        copies = 1 + copies
    if not has_cuda():
        copies += 2
    bytes_per_output = (2 + 2 / ranks) * sizes.bytes_per_element + copies * summed_size
    return int(sizes.expert_tokens * sizes.hidden_size * bytes_per_output)


def _gradient_bytes(path: str, module: nn.Module, sizes: ActivationSizes) -> int:
    """Return the bytes of a linear layer's gradients: of output, weight and, for experts, input."""
    shape = weight_shape(module)
    if shape is None:
        return 0
    weight_gradient = 0
    if sizes.separate_gradients and trained(module):
        weight_gradient = math.prod(shape)
    if is_dispatched(path):
        return _expert_gradient_bytes(path, module, sizes, weight_gradient)
    outputs = _tokens_of_path(path, sizes) * shape[0]
    # after linear_fc1: the activation's output and one factor of it, freed before ``weight_gradient``
    factor = outputs // 2 if path.endswith("linear_fc1") else 0
    scaled = outputs // 2 if _has_parts(module) else 0
    elements = outputs + max(weight_gradient - factor, factor) + scaled
    return elements * sizes.bytes_per_element


def _expert_gradient_bytes(
    path: str, module: nn.Module, sizes: ActivationSizes, weight_gradient: int
) -> int:
    """Return the bytes of the gradients of experts; ``weight_gradient`` counts the elements of one expert's."""
    shape = weight_shape(module)
    tokens = _tokens_of_path(path, sizes)
    assert shape is not None, "experts have weights"
    is_last = path.endswith("linear_fc2")
    elements = tokens * sum(shape) + weight_gradient * sizes.experts_per_kernel
    if hasattr(module, "adapter"):  # the adapter's input gradient before the sum
        elements += tokens * shape[1]
    if not is_last:  # saved after linear_fc1 and freed before its backward pass
        tensors = 1 + sizes.activation_tensors + sizes.weighting_tensors
        elements -= tokens * (shape[0] // 2) * tensors
    weighting = 0
    if is_last and sizes.has_fp32_router:
        # in fp32: the gradient of the product with probabilities and of both factors; linear_fc2's input is freed
        weighting = 3 * tokens * shape[1] * _FP32 * sizes.weighting_tensors
    return max(elements * sizes.bytes_per_element, weighting)
