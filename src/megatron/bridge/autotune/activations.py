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
from dataclasses import dataclass
from typing import Any, cast

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from megatron.bridge.autotune.efficiency import MXFP8_BYTES
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
    Pipeline,
    distinct_moments,
    most_held,
    pipeline_of,
    short_pipeline,
)
from megatron.bridge.autotune.vision_tower import NO_TOWER, TowerCounts, tower_counts
from megatron.bridge.backends.attention.block_mask import MASKED_ROWS
from megatron.bridge.backends.attention.torch_attention import CUDA_SCORES
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.models.features.registry import feature_of
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.training.config import ConfigContainer

_FP32 = 4
_BLOCKS = ("self_attention", "mlp", "mixer")


@dataclass(frozen=True)
class Sizes:
    """Per-rank sizes of a layer's activations, and the settings that decide which terms apply.

    docs/tuner.md has the formulas, in which T, R, t and e stand for ``tokens``, ``between``, ``tensor`` and ``number``.
    """

    tokens: int  # tokens of a microbatch on this rank, after context parallelism
    images: int  # image tokens that a rank encodes
    between: int  # tokens of the residual stream on this rank, which sequence parallelism splits
    number: int  # bytes per element of an activation
    saved: float  # bytes per element of the input that a linear layer saves
    copied: tuple[
        str, ...
    ]  # linear layers that save a quantized copy of an input that another module also saves
    tensor: int  # tensor-parallel size
    hidden: int  # hidden size
    chosen: int  # token copies that the experts of a rank process
    experts: int  # experts on a rank
    together: int  # experts that one grouped kernel runs
    activation: (
        int  # tensors that the activation function of an MLP saves in addition to its output
    )
    weighting: int  # tensors that the product with the router's probabilities saves in addition to its output
    wide: bool  # the router's probabilities are in fp32
    norm: int  # bytes per element of a norm's input
    rotates: bool  # whether queries and keys have rotary embeddings
    separate_gradients: bool  # weight gradients are separate tensors: kernels do not add them to the gradient buffer
    logit: int  # bytes per logit while the loss is computed
    masks: bool  # dropout saves masks
    scores: int  # attention scores that soft-capped attention computes at a time
    joined: tuple[str, ...]  # linear layers whose output attention copies into a new tensor
    gathered: int  # context-parallel ranks whose keys and values are saved
    recomputed: tuple[str, ...]  # modules that selective recomputation recomputes

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between two layers."""
        return self.between * self.hidden * self.number


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
    model: ModelProvider, chunks: list[ChunkCounts], sizes: Sizes, pipeline: Pipeline, stage: int
) -> list[Moment]:
    """Return the peak of each kind on a rank of ``stage``, given the counts of its chunks."""
    held_sizes, working = zip(*(_chunk_bytes(model, chunk, sizes) for chunk in chunks), strict=True)
    # those of multi-token prediction are computed first and keep their gradients
    ahead = (model.mtp_num_layers or 0) * max(sizes.number, sizes.logit - sizes.number)
    loss = logits_of(model, sizes) * (sizes.logit + ahead)
    loss += (
        sizes.tokens * sizes.hidden * sizes.number * (sizes.between < sizes.tokens)
    )  # its gathered input
    losses = [loss * chunk.has_loss for chunk in chunks]
    # an input that arrived before its pass, a gradient, and what an interleaved schedule has not replaced yet
    received = (
        (2 + 3 * (len(chunks) > 1)) * sizes.stream if model.pipeline_model_parallel_size > 1 else 0
    )
    received += sum(rotary_bytes(model, sizes, len(chunk.layers)) for chunk in chunks)
    fullest: dict[str, Moment] = {}
    for kind, index, counts in distinct_moments(short_pipeline(pipeline), stage):
        if kind == "forward" and not losses[index]:
            continue
        name = "loss" if kind == "forward" else f"backward of chunk {index}"
        held = sum(count * size for count, size in zip(counts, held_sizes, strict=True))
        temporary = losses if kind == "forward" else working
        moment = Moment(name, held, temporary[index] + received)
        if name not in fullest or moment.total > fullest[name].total:
            fullest[name] = moment
    return list(fullest.values())


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
    total = widest + held * sizes.stream
    if chunks[-1].post_process:
        total += logits_of(config.model, sizes) * (_FP32 + sizes.number)
    return total


def rotary_bytes(model: Any, sizes: Sizes, layers: int = 1) -> int:
    """Return the bytes of fp32 angles, cosines and sines of a chunk; latent attention stores them for each layer."""
    if model.multi_latent_attention:
        return sizes.tokens * model.qk_pos_emb_head_dim * (_FP32 + 4 * sizes.number) * layers
    copies = 4 if model.recompute_granularity == "full" else 2  # recomputed layers have their own
    return sizes.tokens * (model.kv_channels or 0) * (_FP32 + copies * sizes.number) * sizes.rotates


def microbatches_in_flight(config: ConfigContainer, stage: int, world_size: int) -> list[int]:
    """Return how many microbatches each chunk of a rank of ``stage`` holds at once, if all chunks have equal size."""
    return list(most_held(short_pipeline(pipeline_of(config, world_size)), stage))


def sizes_of(config: ConfigContainer) -> Sizes:
    model = config.model
    tensor = model.tensor_model_parallel_size
    tokens = (
        config.train.micro_batch_size * config.dataset.seq_length // model.context_parallel_size
    )
    sp_tokens = tokens // tensor if model.sequence_parallel else tokens
    gathers = not _uses_engine(model) and model.cp_comm_type in (None, "all_gather")
    selective = model.recompute_granularity == "selective"
    bytes_per_element = 2 if model.bf16 or model.fp16 else _FP32
    quantized = _is_quantized(model)
    return Sizes(
        tokens=tokens,
        images=_image_tokens(config),
        between=sp_tokens,
        number=bytes_per_element,
        saved=MXFP8_BYTES if quantized else bytes_per_element,
        copied=(INTO_RESIDUAL if model.fp8_recipe == "delayed" else ("out_proj",))
        if quantized
        else (),
        tensor=tensor,
        hidden=model.hidden_size,
        chosen=sp_tokens * (model.moe_router_topk or 0) * model.expert_tensor_ranks,
        experts=(experts := (model.num_moe_experts or 1) // model.expert_model_parallel_size),
        together=experts if model.moe_grouped_gemm else 1,
        activation=_of_activation(model),
        weighting=0 if _is_fused(model) else 1,
        wide=model.moe_router_dtype is not None,
        norm=_FP32 if model.layernorm_zero_centered_gamma and not has_cuda() else bytes_per_element,
        rotates=model.multi_latent_attention
        or model.position_embedding_type in ("rope", "mrope", "yarn"),
        separate_gradients=not model.gradient_accumulation_fusion,
        logit=_FP32 + bytes_per_element * _uses_engine(model),
        masks=model.hidden_dropout > 0,
        scores=_scores_of_tile(config, tokens),
        joined=_layers_copied_for_rotation(model),
        gathered=model.context_parallel_size if gathers else 1,
        recomputed=tuple(model.recompute_modules or ("core_attn",)) if selective else (),
    )


def _is_quantized(model: Any) -> bool:
    """Return whether all linear layers save inputs that Transformer Engine has quantized to FP8 or FP4."""
    return bool(model.fp8 or model.fp4) and not model.first_last_layers_bf16


def _scores_of_tile(config: ConfigContainer, tokens: int) -> int:
    """Return how many scores the torch backend computes at a time with soft-capping, or 0 if a kernel computes them."""
    model: Any = config.model
    if getattr(model, "attn_logit_softcapping", None) is None:
        return 0
    heads, batch = (
        model.num_attention_heads // model.tensor_model_parallel_size,
        config.train.micro_batch_size,
    )
    row = batch * heads * config.dataset.seq_length
    return row * min(tokens // batch, max(16, CUDA_SCORES // row))


def images_of_row(config: ConfigContainer) -> int:
    """Return the maximum number of image tokens in a row."""
    return getattr(config.dataset, "max_image_tokens", None) or config.dataset.seq_length


def _image_tokens(config: ConfigContainer) -> int:
    """Return the maximum image tokens per rank: split evenly over ranks that share images, but at least one image."""
    model: Any = config.model
    if getattr(model, "vision", None) is None:
        return 0
    images_per_row = images_of_row(config)
    ranks = (
        model.tensor_model_parallel_size * model.context_parallel_size if model.share_images else 1
    )
    return max(
        -(-config.train.micro_batch_size * images_per_row // ranks),
        min(images_per_row, _tokens_of_image(config)),
    )


def _tokens_of_image(config: ConfigContainer) -> int:
    """Return the tokens of the largest image that ``dataset.max_pixels`` allows, or 0 if that limit is unknown."""
    model: Any = config.model
    tower, limit = (
        model.vision.get("vision_config") or {},
        getattr(config.dataset, "max_pixels", None),
    )
    if limit is None or "patch_size" not in tower:
        return 0
    # GLM's limit counts the pixels of all frames in a patch
    frames = tower["temporal_patch_size"] if "glm4v" in model.vision["model_type"] else 1
    return limit // (frames * (tower["patch_size"] * tower.get("spatial_merge_size", 1)) ** 2)


def _is_fused(model: ModelProvider) -> bool:
    return model.bias_activation_fusion or model.use_te_activation_func


def _uses_engine(model: ModelProvider) -> bool:
    return resolve_backend(model.backend) == "transformer_engine"


def _layers_copied_for_rotation(model: Any) -> tuple[str, ...]:
    """Return the layers whose outputs attention copies to append rotated parts; values are views unless padded."""
    if not model.multi_latent_attention:
        return ()
    keys = ("linear_kv_up_proj",) if pads_values(model) else ()
    return ("linear_q_up_proj", "linear_q_proj", *keys)


def pads_values(model: Any) -> bool:
    return model.v_head_dim < model.qk_head_dim + model.qk_pos_emb_head_dim


def _of_activation(model: ModelProvider) -> int:
    """Return how many tensors Megatron-Core's unfused gate saves: value, offset input, and two clamped ones if any."""
    if _is_fused(model) or not model.gated_linear_unit:
        return 0
    return 2 if model.activation_func_clamp_value is None else 4


def chunk_counts(chunk: Any, sizes: Sizes) -> ChunkCounts:
    layers = layers_of(chunk)
    # nothing needs a gradient before the first trained parameters
    parts = [chunk.embedding, *layers] if chunk.pre_process and not hasattr(chunk, "vision") else []
    frozen = [not any(parameter.requires_grad for parameter in part.parameters()) for part in parts]
    idle = max(0, [*frozen, False].index(False) - 1)
    counts = [LayerCounts(0, 0, 0)] * idle + [
        counts_of_layer(layer, sizes) for layer in layers[idle:]
    ]
    return ChunkCounts(counts, bool(chunk.post_process), counts_of_tower(chunk, sizes.images))


def counts_of_tower(chunk: Any, tokens: int) -> TowerCounts:
    """Count the bytes that the vision tower of ``chunk`` (on the meta device) needs for ``tokens`` image tokens."""
    tower = getattr(chunk, "vision", None)
    return NO_TOWER if tower is None else tower_counts(tower, tokens)


def counts_of_layer(layer: nn.Module, sizes: Sizes) -> LayerCounts:
    """Count the activation bytes of ``layer``, which is on the meta device."""
    return LayerCounts(
        _kept_bytes(layer, sizes, recomputed=()),
        _kept_bytes(layer, sizes, sizes.recomputed),
        max(
            count(layer, sizes)
            for count in (_working_bytes, _scored_bytes, _scanned_bytes, _summed_bytes)
        ),
    )


def _chunk_bytes(model: ModelProvider, chunk: ChunkCounts, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes that a chunk saves for one microbatch, and the temporary bytes of its backward pass."""
    last = 2 * sizes.stream * chunk.has_loss  # inputs of the final norm and of the output layer
    ends = last + _output_bytes(model, sizes) + chunk.tower.kept
    held = peak = freed = 0
    for saved, again, working in reversed(_recomputed_pieces(model, chunk.layers, sizes)):
        peak = max(peak, again + working - freed)
        held += saved
        # later layers have freed their tensors; with full recomputation, an output replaces them
        freed += saved * (not again or model.recompute_granularity != "full")
    # on a CPU, the final norm's backward pass holds its input and gradients in fp32, too, and frees what it has read
    norm = 7 * sizes.stream * chunk.has_loss * (sizes.number < _FP32 and not has_cuda())
    # the layers run their backward pass after the output layer's, and the tower after the layers
    return ends + held, max(norm, max(peak, chunk.tower.working - held) - last)


def _recomputed_pieces(
    model: ModelProvider, layers: list[LayerCounts], sizes: Sizes
) -> list[tuple[int, int, int]]:
    """Return the saved, the recomputed and the temporary bytes of layers that are recomputed together."""
    count = model.recompute_num_layers or 1
    if model.recompute_granularity != "full":
        return [(layer.kept, layer.full - layer.kept, layer.working) for layer in layers]
    if model.recompute_method == "block":  # the first layers of a chunk
        first = [(sizes.stream, layer.full, layer.working) for layer in layers[:count]]
        return first + [(layer.full, 0, layer.working) for layer in layers[count:]]
    parts = [layers[start : start + count] for start in range(0, len(layers), count)]
    return [
        (
            sizes.stream,
            sum(layer_counts.full for layer_counts in part),
            max(layer_counts.working for layer_counts in part),
        )
        for part in parts
    ]


def _output_bytes(model: ModelProvider, sizes: Sizes) -> int:
    """Return the bytes of a chunk's output, which is held until its backward pass unless it is deallocated."""
    if model.pipeline_model_parallel_size == 1 or model.deallocate_pipeline_outputs:
        return 0
    return sizes.stream


def logits_of(model: Any, sizes: Sizes) -> int:
    """Return the number of logits on a rank."""
    return sizes.tokens * model.padded_vocab_size // sizes.tensor


def _kept_bytes(layer: nn.Module, sizes: Sizes, recomputed: tuple[str, ...]) -> int:
    total = 2 * sizes.between * sizes.hidden if sizes.masks else 0
    for name, part in layer.named_children():
        if name in _BLOCKS and not isinstance(part, IdentityOp):
            bytes_per_element = sizes.number if hasattr(part, "router") else sizes.saved
            keeps = "layernorm" not in recomputed and _keeps_own_input(part, sizes)
            total += int(sizes.between * sizes.hidden * bytes_per_element) * keeps
            block_name = (
                "moe" if hasattr(part, "router") else name
            )  # saves nothing inside if it is recomputed
            total += (
                0
                if name == "mlp" and block_name in recomputed
                else _bytes_inside_block(part, sizes, recomputed)
            )
        elif name == "mtp_model_layer":
            total += _kept_bytes(part, sizes, recomputed)
        else:  # a norm or a linear layer
            total += sum(
                _of_module(path, module, sizes) for path, module in part.named_modules(prefix=name)
            )
    return total


def _keeps_own_input(block: nn.Module, sizes: Sizes) -> bool:
    """Return whether a layer that reads the input of ``block`` saves this input."""
    modules = [module for path, module in block.named_modules() if not is_dispatched(path)]
    readers = [module for module in modules if (weight_shape(module) or ())[1:] == (sizes.hidden,)]
    return any(map(keeps_input, readers)) or not readers or hasattr(block, "router")


def kept_inside(path: str, block: nn.Module, sizes: Sizes) -> int:
    """Return the bytes that a part of a layer saves without recomputation; ``path`` is its name in the layer."""
    return sum(_of_module(name, module, sizes) for name, module in block.named_modules(prefix=path))


def _bytes_inside_block(block: nn.Module, sizes: Sizes, recomputed: tuple[str, ...]) -> int:
    total = 0
    for path, module in block.named_modules():
        name = path.rpartition(".")[2]
        if "shared_experts" in path and "shared_experts" in recomputed:
            continue
        total += _of_module(path, module, sizes)
        if (
            hasattr(module, "core_attention") and "mla_up_proj" in recomputed
        ):  # rotated queries and keys
            heads, config = (
                cast(Any, module).num_attention_heads_per_partition,
                cast(Any, module.config),
            )
            total -= (
                2
                * sizes.tokens
                * heads
                * (config.qk_head_dim + config.qk_pos_emb_head_dim)
                * sizes.number
            )
        if name == "linear_fc2" and is_dispatched(path) and "moe_act" in recomputed:
            total -= _of_module(path, module, sizes)
    return total


def _of_module(path: str, module: Any, sizes: Sizes) -> int:
    """Return the bytes that one module saves without its children."""
    saved = _beside_matrices(module, sizes)
    if saved is not None:
        return saved
    shape = weight_shape(module)
    if shape is None or len(shape) == 3:  # a convolution's result is recomputed
        return 0
    if len(shape) == 1:  # a norm; norms of heads and latents read tensors that are saved anyway
        return (
            sizes.between * (sizes.hidden * sizes.norm + _FP32) if shape[0] == sizes.hidden else 0
        )
    if type(module).__name__.endswith("Router"):
        return sizes.between * shape[0] * 12
    adapter_elements = _tokens_of_path(path, sizes) * _of_adapter(
        module, shape[0] * (1 + is_dispatched(path))
    )
    inputs, other_elements = _linear_elements(path, shape, sizes, keeps_input(module))
    return int(inputs * sizes.saved) + (other_elements + adapter_elements) * sizes.number


def _beside_matrices(module: Any, sizes: Sizes) -> int | None:
    """Return the bytes that a module saves in addition to what its linear layers save; None if it is none of those."""
    if isinstance(module, MoELayer):
        return _dispatcher_bytes(module, sizes)
    if isinstance(module, Attention):
        return _attention_bytes(module, sizes)
    feature = feature_of(type(module))
    elements = None if feature is None else feature.saved_elements(module)
    return None if elements is None else sizes.tokens * elements * sizes.number


def _linear_elements(
    path: str, shape: tuple[int, ...], sizes: Sizes, keeps: bool
) -> tuple[int, int]:
    """Return the input elements that a linear layer saves, and its other elements; its weight is [out, in]."""
    tokens, dispatched = _tokens_of_path(path, sizes), is_dispatched(path)
    if path.endswith("linear_fc2"):
        return tokens * shape[1] * keeps, tokens * shape[1] * (
            sizes.activation + sizes.weighting * dispatched
        )
    if path.endswith(INTO_RESIDUAL):  # the attention kernel saves its output in any case
        return tokens * shape[1] * (keeps and path.endswith(sizes.copied)), tokens * shape[1]
    if dispatched:
        return tokens * shape[1] * keeps, tokens * shape[0]
    if path.endswith(sizes.joined):
        return sizes.between * shape[1], 0
    # the caller counts the input of the block itself
    inputs = 0 if shape[1] == sizes.hidden or not keeps else sizes.between * shape[1]
    return inputs, tokens * shape[0]


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


def _tokens_of_path(path: str, sizes: Sizes) -> int:
    if "local_experts" in path:  # experts run one after another
        return sizes.chosen // sizes.experts
    if is_dispatched(path):
        return sizes.chosen
    return sizes.between if is_undivided(path) else sizes.tokens


def _attention_bytes(attention: Any, sizes: Sizes) -> int:
    """Return the bytes that attention saves in addition to the inputs and outputs of its linear layers."""
    config = attention.config
    heads = attention.num_attention_heads_per_partition
    groups = attention.num_query_groups_per_partition
    width = attention.hidden_size_per_attention_head
    numbers = 0
    if config.multi_latent_attention:
        groups, width = heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        numbers += 2 * heads * width if pads_values(config) else 0
    elif (
        config.qk_layernorm
    ):  # normalized queries, and what the norms read if they do not read views
        numbers += heads * width + 2 * (heads + groups) * width * (sizes.norm > sizes.number)
    if sizes.rotates:  # copies of queries and keys
        numbers += heads * width + groups * width
    elif heads > groups and not config.qk_layernorm:  # queries lie apart between keys and values
        numbers += heads * width
    if sizes.gathered > 1:  # keys and values of all context ranks, in the place of a rank's own
        numbers += (
            groups * width * (2 * sizes.gathered - sizes.rotates)
            - (heads + 2 * groups) * width * sizes.rotates
        )
    sums = heads
    if config.qk_layernorm:
        sums += heads + groups
    return _attention_tile_bytes(attention, sizes) + sizes.tokens * (
        numbers * sizes.number + sums * _FP32
    )


def _attention_tile_bytes(attention: Any, sizes: Sizes) -> int:
    """Return the bytes of the mask of attention's tiles on a CPU, and of their outputs before they are joined."""
    window, skipped = attention.config.window_size, attention.config.window_attn_skip_freq
    visible_keys = keys = sizes.tokens * sizes.gathered
    if is_layer_window_attention(window, skipped, attention.layer_number):
        visible_keys = min(visible_keys, window[0] + 1)
    if has_cuda() or (visible_keys == keys and sizes.gathered == 1):
        return 0
    rows = min(MASKED_ROWS, sizes.tokens // 2 if visible_keys == keys else max(128, visible_keys))
    outputs = attention.num_attention_heads_per_partition * attention.hidden_size_per_attention_head
    return (rows * min(keys, rows + visible_keys) + sizes.tokens * outputs) * sizes.number


def _dispatcher_bytes(layer: Any, sizes: Sizes) -> int:
    """Return the bytes of the token-to-expert map, the permutation, and the router's probabilities."""
    return sizes.between * (layer.router.weight.size(0) * 8 + layer.router.topk * 16)


def _working_bytes(layer: nn.Module, sizes: Sizes) -> int:
    """Return the bytes of the gathered input and of the gradients of the residual stream and the widest layer."""
    stream = (sizes.tokens + sizes.between) * sizes.hidden * sizes.number
    return stream + max(
        (_gradient_bytes(path, module, sizes) for path, module in layer.named_modules()), default=0
    )


def _scored_bytes(layer: Any, sizes: Sizes) -> int:
    """Return the fp32 bytes that the backward pass of soft-capped attention adds, less the freed tensors of the MLP."""
    if not sizes.scores:
        return 0
    return 2 * sizes.stream + 4 * _FP32 * sizes.scores - kept_inside("mlp", layer.mlp, sizes)


def _scanned_bytes(layer: Any, sizes: Sizes) -> int:
    """Return the bytes that the backward pass of PyTorch's scan needs beyond the MLP's freed tensors."""
    scans = (_scan_elements(module, sizes.tokens) for module in layer.modules())
    elements = next((count for count in scans if count), 0)
    if not elements:
        return 0
    freed = kept_inside("mlp", layer.mlp, sizes) if hasattr(layer, "mlp") else 0
    return 2 * sizes.stream + elements * _FP32 - freed


def _scan_elements(module: nn.Module, tokens: int) -> int:
    feature = feature_of(type(module))
    return 0 if feature is None else feature.scan_elements(module, tokens)


def _summed_bytes(layer: Any, sizes: Sizes) -> int:
    """Return the bytes of experts' outputs while expert tensor ranks add them up, with two copies for gloo."""
    ranks = layer.config.expert_tensor_parallel_size or 1
    if ranks == 1 or not any("router" in path for path, _ in layer.named_modules()):
        return 0
    size, copies = (
        (_FP32 if sizes.wide else sizes.number),
        sizes.wide + 1 / ranks + 2 * (not has_cuda()),
    )
    return int(sizes.chosen * sizes.hidden * ((2 + 2 / ranks) * sizes.number + copies * size))


def _gradient_bytes(path: str, module: nn.Module, sizes: Sizes) -> int:
    """Return the bytes of a linear layer's gradients: of output, weight and, for experts, input."""
    shape, tokens = weight_shape(module), _tokens_of_path(path, sizes)
    if shape is None:
        return 0
    weight_gradient = math.prod(shape) * sizes.separate_gradients * trained(module)
    if not is_dispatched(
        path
    ):  # after linear_fc1: the activation's output and one factor of it, freed before ``weight_gradient``
        factor = tokens * shape[0] // 2 * path.endswith("linear_fc1")
        scaled = tokens * shape[0] // 2 if _has_parts(module) else 0
        return (tokens * shape[0] + max(weight_gradient - factor, factor) + scaled) * sizes.number
    inner = (
        1 + sizes.activation + sizes.weighting
    )  # saved after linear_fc1 and freed before its backward pass
    freed = 0 if path.endswith("linear_fc2") else tokens * (shape[0] // 2) * inner
    adapter_gradient = (
        tokens * shape[1] * hasattr(module, "adapter")
    )  # the adapter's input gradient before the sum
    gradient_bytes = (
        tokens * sum(shape) + adapter_gradient + weight_gradient * sizes.together - freed
    ) * sizes.number
    # in fp32: the gradient of the product with probabilities and of both factors; the input of linear_fc2 is freed
    weighting = (
        tokens * shape[1] * 3 * _FP32 * sizes.weighting
        if path.endswith("linear_fc2") and sizes.wide
        else 0
    )
    return max(gradient_bytes, weighting)
