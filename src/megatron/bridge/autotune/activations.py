# SPDX-License-Identifier: Apache-2.0
"""Activations of a rank, estimated from the modules that it would build.

The count follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4: what autograd keeps for the backward pass, module by module (docs/tuner.md), with these differences:

* widths are those of the real modules (grouped queries, latents, experts, gates), not multiples of one size;
* attention runs in kernels that keep no scores (scaled_dot_product_attention, Transformer Engine), so there is no
  term with the square of the sequence, and recomputing the core of attention alone saves nothing;
* tokens are taken to be shared out evenly over the experts.

A chunk of layers is held once for each microbatch in flight, as ``time.schedule`` lists them. Full recomputation
keeps the input of each layer (with the uniform method, of each ``recompute_num_layers`` layers) and holds what one
such piece keeps while it runs backward.

The most memory is needed at one of these moments; each counts what is held then, and what works beside it:

* the backward pass of a chunk: its widest layer's gathered input, the gradients of the residual
  stream, of its widest output and, without ``gradient_accumulation_fusion``, of its weight; of experts, the gradients
  of inputs and of all weights on the rank, or those of the product with their weights in fp32;
* the loss: T x vocabulary/t x bytes of a logit. The torch backend writes the gradient over the logits (4 bytes on
  a CPU, measured 2026-11-20); Megatron-Core's own loss holds logits, and exponentials in fp32 (2 + 4).

Without the kernels of mamba-ssm and flash-linear-attention, PyTorch keeps several times as much of such layers.
"""

import math
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from torch import nn

from megatron.bridge.autotune.layers import INTO_RESIDUAL, is_dispatched, keeps_input, layers_of, trained, weight_shape
from megatron.bridge.autotune.time.schedule import Pipeline, distinct_moments, most_held, pipeline_of, short_pipeline
from megatron.bridge.autotune.vision_tower import NO_TOWER, TowerCounts, tower_counts
from megatron.bridge.backends.attention.torch_attention import CUDA_SCORES
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.training.config import ConfigContainer

_FP32 = 4
_BLOCKS = ("self_attention", "mlp", "mixer")


@dataclass(frozen=True)
class Sizes:
    """The symbols of the formulas above, and what decides which of them apply."""

    tokens: int
    images: int  # tokens of images that a rank encodes
    between: int
    number: int
    saved: float  # bytes of a number in the input that a linear layer keeps
    copied: tuple[str, ...]  # linear layers that keep a quantized input beside the one that another module keeps
    tensor: int
    hidden: int
    chosen: int  # tokens of all experts of a rank
    experts: int  # on a rank
    together: int  # of them, with one kernel for all
    activation: int  # tensors that the activation of an MLP keeps beside its result
    weighting: int  # the same of the product with an expert's weight
    wide: bool  # that weight is in fp32
    norm: int  # bytes of a number of a norm's input
    rotates: bool  # whether queries and keys have rotary embeddings
    separate_gradients: bool  # kernels do not add weight gradients to the buffer themselves
    logit: int  # bytes of a logit while the loss is computed
    masks: bool  # of dropout
    scores: int  # that soft-capped attention computes at a time
    joined: tuple[str, ...]  # linear layers whose output is put together anew, by attention
    gathered: int  # context ranks whose keys and values are kept
    recomputed: tuple[str, ...]  # modules

    @property
    def stream(self) -> int:
        """Bytes of the residual stream, between two layers."""
        return self.between * self.hidden * self.number


@dataclass(frozen=True)
class LayerCounts:
    """Bytes of a layer for one microbatch."""

    full: int  # kept for the backward pass without recomputation
    kept: int  # kept with selective recomputation
    working: int  # held by the backward pass beside them


@dataclass(frozen=True)
class ChunkCounts:
    """The layers of a chunk, whether the loss follows them, and the vision tower in front of them."""

    layers: list[LayerCounts]
    has_loss: bool
    tower: TowerCounts = NO_TOWER


def activation_bytes(config: ConfigContainer, chunks: list[Any], stage: int, world_size: int) -> int:
    """Bytes of activations on a rank of pipeline stage ``stage`` at the fullest moment of a step.

    ``config`` is validated for ``world_size``; ``chunks`` are what the rank holds, of ``meta_model.stage_chunks``.
    """
    return max(moment.total for moment in moments(config, chunks, stage, world_size))


@dataclass(frozen=True)
class Moment:
    """The bytes that chunks hold for the microbatches in flight, and those that one pass needs beside them."""

    name: str
    held: int
    working: int

    @property
    def total(self) -> int:
        return self.held + self.working


def moments(config: ConfigContainer, chunks: list[Any], stage: int, world_size: int) -> list[Moment]:
    """The fullest moment of each kind on a rank of pipeline stage ``stage``; arguments as ``activation_bytes``."""
    sizes = sizes_of(config)
    counted = [chunk_counts(chunk, sizes) for chunk in chunks]
    return stage_moments(config.model, counted, sizes, pipeline_of(config, world_size), stage)


def stage_moments(
    model: ModelProvider, chunks: list[ChunkCounts], sizes: Sizes, pipeline: Pipeline, stage: int
) -> list[Moment]:
    """The fullest moment of each kind on a rank of ``stage``, from the counts of its chunks."""
    kept, working = zip(*(_chunk(model, chunk, sizes) for chunk in chunks), strict=True)
    losses = [logits_of(model, sizes) * sizes.logit if chunk.has_loss else 0 for chunk in chunks]
    # the input that arrived ahead of its pass and a gradient, and outputs where they are not deallocated
    received = 2 * sizes.stream if model.pipeline_model_parallel_size > 1 else 0
    received += sum(rotary_bytes(model, sizes, len(chunk.layers)) for chunk in chunks)
    fullest: dict[str, Moment] = {}
    for kind, index, counts in distinct_moments(short_pipeline(pipeline), stage):
        if kind == "forward" and not losses[index]:
            continue
        name = "loss" if kind == "forward" else f"backward of chunk {index}"
        held = sum(count * size for count, size in zip(counts, kept, strict=True))
        beside = losses if kind == "forward" else working
        found = Moment(name, held, beside[index] + received)
        if name not in fullest or found.total > fullest[name].total:
            fullest[name] = found
    return list(fullest.values())


def teacher_bytes(config: ConfigContainer, chunks: list[Any], stage: int, world_size: int) -> int:
    """What a teacher adds on a rank of pipeline stage ``stage``: it runs forward only, and keeps nothing of it.

    One layer works at a time. A later stage holds what it received of the teacher, beside its own, for each
    microbatch in flight. The last stage holds the teacher's logits until the loss is known, then the gradient of
    the divergence in their place, which its backward pass makes wider: T x vocabulary/t x (4 + e).
    ``config`` is that of the run, with the teacher as its model.
    """
    sizes = sizes_of(config)
    widest = max((_working_bytes(layer, sizes) for chunk in chunks for layer in layers_of(chunk)), default=0)
    held = sum(microbatches_in_flight(config, stage, world_size)) if stage else 0
    total = widest + held * sizes.stream
    if chunks[-1].post_process:
        total += logits_of(config.model, sizes) * (_FP32 + sizes.number)
    return total


def rotary_bytes(model: Any, sizes: Sizes, layers: int = 1) -> int:
    """Angles in fp32, their cosines and sines: once for a chunk; the angles for each layer with latent attention."""
    if model.multi_latent_attention:
        return sizes.tokens * model.qk_pos_emb_head_dim * _FP32 * layers
    return sizes.tokens * (model.kv_channels or 0) * (_FP32 + 2 * sizes.number) * sizes.rotates


def microbatches_in_flight(config: ConfigContainer, stage: int, world_size: int) -> list[int]:
    """How many microbatches each chunk of a rank of ``stage`` holds at once, if chunks are equal."""
    return list(most_held(short_pipeline(pipeline_of(config, world_size)), stage))


def sizes_of(config: ConfigContainer) -> Sizes:
    model = config.model
    tensor = model.tensor_model_parallel_size
    tokens = config.train.micro_batch_size * config.dataset.seq_length // model.context_parallel_size
    between = tokens // tensor if model.sequence_parallel else tokens
    gathers = model.backend != "transformer_engine" and model.cp_comm_type in (None, "all_gather")
    selective = model.recompute_granularity == "selective"
    number = 2 if model.bf16 or model.fp16 else _FP32
    quantized = _is_quantized(model)
    return Sizes(
        tokens=tokens,
        images=_image_tokens(config),
        between=between,
        number=number,
        saved=33 / 32 if quantized else number,
        copied=(INTO_RESIDUAL if model.fp8_recipe == "delayed" else ("out_proj",)) if quantized else (),
        tensor=tensor,
        hidden=model.hidden_size,
        chosen=between * (model.moe_router_topk or 0) * model.expert_tensor_ranks,
        experts=(experts := (model.num_moe_experts or 1) // model.expert_model_parallel_size),
        together=experts if model.moe_grouped_gemm else 1,
        activation=_of_activation(model),
        weighting=0 if _is_fused(model) else 1,
        wide=model.moe_router_dtype is not None,
        norm=_FP32 if model.layernorm_zero_centered_gamma else number,
        rotates=_has_rotary(model),
        separate_gradients=not model.gradient_accumulation_fusion,
        logit=_logit_bytes(model),
        masks=model.hidden_dropout > 0,
        scores=_scores_of_tile(config, tokens),
        joined=_joined(model),
        gathered=model.context_parallel_size if gathers else 1,
        recomputed=tuple(model.recompute_modules or ("core_attn",)) if selective else (),
    )


def _is_quantized(model: Any) -> bool:
    """Whether all linear layers of ``model`` keep their inputs in FP8 or FP4.

    Transformer Engine quantizes them before it saves them, in MXFP8 with one byte of scale for 32 numbers; FP4 takes
    less. Megatron-Core lets attention's last layer save what the kernel keeps anyway, but not with delayed scaling.
    """
    return bool(model.fp8 or model.fp4) and not model.first_last_layers_bf16


def _scores_of_tile(config: ConfigContainer, tokens: int) -> int:
    """Scores that the torch backend computes at a time where they are soft-capped; 0 where a kernel computes them."""
    model: Any = config.model
    if getattr(model, "attn_logit_softcapping", None) is None:
        return 0
    heads, batch = model.num_attention_heads // model.tensor_model_parallel_size, config.train.micro_batch_size
    row = batch * heads * config.dataset.seq_length
    return row * min(tokens // batch, max(16, CUDA_SCORES // row))


def images_of_row(config: ConfigContainer) -> int:
    """Tokens of images that a row may have."""
    return getattr(config.dataset, "max_image_tokens", None) or config.dataset.seq_length


def _image_tokens(config: ConfigContainer) -> int:
    """As many as samples may have, shared out evenly over the ranks that share images; at least one whole image."""
    model: Any = config.model
    if getattr(model, "vision", None) is None:
        return 0
    most = images_of_row(config)
    ranks = model.tensor_model_parallel_size * model.context_parallel_size if model.share_images else 1
    return max(-(-config.train.micro_batch_size * most // ranks), min(most, _tokens_of_image(config)))


def _tokens_of_image(config: ConfigContainer) -> int:
    """Tokens of the largest image where ``dataset.max_pixels`` tells them, else 0."""
    model: Any = config.model
    tower, limit = model.vision.get("vision_config") or {}, getattr(config.dataset, "max_pixels", None)
    if limit is None or "patch_size" not in tower:
        return 0
    # the limit of GLM counts the pixels of all frames in a patch
    frames = tower["temporal_patch_size"] if "glm4v" in model.vision["model_type"] else 1
    return limit // (frames * (tower["patch_size"] * tower.get("spatial_merge_size", 1)) ** 2)


def _is_fused(model: ModelProvider) -> bool:
    return model.bias_activation_fusion or model.use_te_activation_func


def _has_rotary(model: Any) -> bool:
    return model.multi_latent_attention or model.position_embedding_type in ("rope", "mrope", "yarn")


def _logit_bytes(model: ModelProvider) -> int:
    if model.backend != "transformer_engine":
        return _FP32
    fused = model.cross_entropy_loss_fusion and model.cross_entropy_fusion_impl == "te"
    return (2 if fused else 2 + _FP32) if model.bf16 or model.fp16 else 2 * _FP32


def _joined(model: Any) -> tuple[str, ...]:
    """Rotated parts are put behind the others; values stay views unless they are padded."""
    if not model.multi_latent_attention:
        return ()
    keys = ("linear_kv_up_proj",) if _pads_values(model) else ()
    return ("linear_q_up_proj", "linear_q_proj", *keys)


def _pads_values(model: Any) -> bool:
    return model.v_head_dim < model.qk_head_dim + model.qk_pos_emb_head_dim


def _of_activation(model: ModelProvider) -> int:
    """Megatron-Core's plain gate: a value, an offset input, and two clamped ones where there is a clamp."""
    if _is_fused(model) or not model.gated_linear_unit:
        return 0
    return 2 if model.activation_func_clamp_value is None else 4


# --------------------------------------------------------------------------------------------------------- chunks


def chunk_counts(chunk: Any, sizes: Sizes) -> ChunkCounts:
    layers = [counts_of_layer(layer, sizes) for layer in layers_of(chunk)]
    return ChunkCounts(layers, bool(chunk.post_process), counts_of_tower(chunk, sizes.images))


def counts_of_tower(chunk: Any, tokens: int) -> TowerCounts:
    """What the vision tower of ``chunk``, on the meta device, keeps and holds for ``tokens`` tokens of images."""
    tower = getattr(chunk, "vision", None)
    return NO_TOWER if tower is None else tower_counts(tower, tokens)


def counts_of_layer(layer: nn.Module, sizes: Sizes) -> LayerCounts:
    """What ``layer``, on the meta device, keeps and holds."""
    return LayerCounts(
        _kept_bytes(layer, sizes, recomputed=()),
        _kept_bytes(layer, sizes, sizes.recomputed),
        max(_working_bytes(layer, sizes), _scored_bytes(layer, sizes)),
    )


def _chunk(model: ModelProvider, chunk: ChunkCounts, sizes: Sizes) -> tuple[int, int]:
    """Bytes that the layers of a chunk keep for one microbatch, and those that one holds while it runs backward."""
    full, kept = [layer.full for layer in chunk.layers], [layer.kept for layer in chunk.layers]
    last = 2 * sizes.stream * chunk.has_loss  # inputs of the final norm and of the output layer
    ends = last + _output(model, sizes) + chunk.tower.kept
    gradients = max((layer.working for layer in chunk.layers), default=0)
    again = max((before - after for before, after in zip(full, kept, strict=True)), default=0)
    count = model.recompute_num_layers or 1
    if model.recompute_granularity != "full":
        held = sum(kept)
    elif model.recompute_method == "block":  # the first layers of a chunk
        held, again = len(full[:count]) * sizes.stream + sum(full[count:]), max(full[:count], default=0)
    else:
        pieces = [full[start : start + count] for start in range(0, len(full), count)]
        held, again = len(pieces) * sizes.stream, max(map(sum, pieces), default=0)
    # the layers run backward when what follows them has, and the tower after them
    return ends + held, max(gradients + again, chunk.tower.working - held) - last


def _output(model: ModelProvider, sizes: Sizes) -> int:
    """The output of a chunk, until its backward pass, unless it is deallocated after it has been sent."""
    if model.pipeline_model_parallel_size == 1 or model.deallocate_pipeline_outputs:
        return 0
    return sizes.stream


def logits_of(model: Any, sizes: Sizes) -> int:
    """Numbers in the logits of a rank."""
    return sizes.tokens * model.padded_vocab_size // sizes.tensor


# --------------------------------------------------------------------------------------------------------- layers


def _kept_bytes(layer: nn.Module, sizes: Sizes, recomputed: tuple[str, ...]) -> int:
    total = 2 * sizes.between * sizes.hidden if sizes.masks else 0
    for name, part in layer.named_children():
        if name in _BLOCKS and not isinstance(part, IdentityOp):
            own = sizes.number if hasattr(part, "router") else sizes.saved
            keeps = "layernorm" not in recomputed and _keeps_own_input(part, sizes)
            total += int(sizes.between * sizes.hidden * own) * keeps
            whole = "moe" if hasattr(part, "router") else name  # the module of which nothing inside is kept
            total += 0 if name == "mlp" and whole in recomputed else _inside(part, sizes, recomputed)
        elif name == "mtp_model_layer":
            total += _kept_bytes(part, sizes, recomputed)
        else:  # a norm, or a linear layer
            total += sum(_of_module(path, module, sizes) for path, module in part.named_modules(prefix=name))
    return total


def _keeps_own_input(block: nn.Module, sizes: Sizes) -> bool:
    """Whether a layer that reads the input of ``block`` keeps it."""
    modules = [module for path, module in block.named_modules() if not is_dispatched(path)]
    readers = [module for module in modules if (weight_shape(module) or ())[1:] == (sizes.hidden,)]
    return any(map(keeps_input, readers)) or not readers or hasattr(block, "router")


def kept_inside(path: str, block: nn.Module, sizes: Sizes) -> int:
    """Return the bytes that a part of a layer keeps without recomputation; ``path`` is its name in the layer."""
    return sum(_of_module(name, module, sizes) for name, module in block.named_modules(prefix=path))


def _inside(block: nn.Module, sizes: Sizes, recomputed: tuple[str, ...]) -> int:
    total = 0
    for path, module in block.named_modules():
        name = path.rpartition(".")[2]
        if "shared_experts" in path and "shared_experts" in recomputed:
            continue
        if name in ("linear_q_up_proj", "linear_kv_up_proj") and "mla_up_proj" in recomputed:
            continue
        total += _of_module(path, module, sizes)
        if name == "linear_fc2" and "experts" in path and "moe_act" in recomputed:
            total -= _of_module(path, module, sizes)
    return total


def _of_module(path: str, module: Any, sizes: Sizes) -> int:
    """Bytes that one module keeps, its children left out."""
    for mark, count in _BY_ATTRIBUTE.items():
        if hasattr(module, mark):
            return count(module, sizes)
    shape = weight_shape(module)
    if shape is None:
        return 0
    if len(shape) == 1:  # a norm; those of heads and latents read what is kept anyway
        return sizes.between * sizes.hidden * sizes.norm if shape[0] == sizes.hidden else 0
    if type(module).__name__.endswith("Router"):
        return sizes.between * shape[0] * 12
    beside = _tokens(path, sizes) * _of_adapter(module, shape[0] * (1 + is_dispatched(path)))
    inputs, others = _linear(path, shape, sizes, keeps_input(module))
    return int(inputs * sizes.saved) + (others + beside) * sizes.number


def _linear(path: str, shape: tuple[int, ...], sizes: Sizes, keeps: bool) -> tuple[int, int]:
    """Numbers of its input that a linear layer keeps, and numbers beside it; its weight is [out, in]."""
    tokens, dispatched = _tokens(path, sizes), is_dispatched(path)
    if path.endswith("linear_fc2"):
        return tokens * shape[1] * keeps, tokens * shape[1] * (sizes.activation + sizes.weighting * dispatched)
    if path.endswith(INTO_RESIDUAL):  # attention's kernel keeps its output in any case
        return tokens * shape[1] * (keeps and path.endswith(sizes.copied)), tokens * shape[1]
    if dispatched:
        return tokens * shape[1] * keeps, tokens * shape[0]
    if path.endswith(sizes.joined):
        return sizes.between * shape[1], 0
    # the block's own is counted with it
    inputs = 0 if shape[1] == sizes.hidden or not keeps else sizes.between * shape[1]
    return inputs, tokens * shape[0]


def _of_adapter(module: Any, outputs: int) -> int:
    """Numbers of a token that an adapter keeps: those between its factors, and DoRA's outputs with experts' scales."""
    adapter = getattr(module, "adapter", None)
    return 0 if adapter is None else adapter.shape.rank + outputs * adapter.scales_outputs


def _tokens(path: str, sizes: Sizes) -> int:
    if "local_experts" in path:  # one after the other
        return sizes.chosen // sizes.experts
    return sizes.chosen if is_dispatched(path) else sizes.tokens


def _attention(attention: Any, sizes: Sizes) -> int:
    """What attention keeps beside the inputs and outputs of its linear layers."""
    config = attention.config
    heads = attention.num_attention_heads_per_partition
    groups = attention.num_query_groups_per_partition
    width = attention.hidden_size_per_attention_head
    numbers = 0
    if config.multi_latent_attention:
        groups, width = heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        numbers += 2 * heads * width if _pads_values(config) else 0
    elif config.qk_layernorm:
        numbers += heads * width
    if sizes.rotates:  # copies of queries and keys
        numbers += heads * width + groups * width
    elif heads > groups and not config.qk_layernorm:  # queries lie apart between keys and values
        numbers += heads * width
    if sizes.gathered > 1:  # keys and values of all context ranks
        numbers += groups * width * (2 * sizes.gathered - int(sizes.rotates))
    return sizes.tokens * (numbers * sizes.number + heads * _FP32)


def _mamba(mixer: Any, sizes: Sizes) -> int:
    """What the scan returns, gated; the convolution and the states are computed again."""
    return sizes.tokens * 2 * mixer.d_inner_local_tp * sizes.number


def _delta_net(net: Any, sizes: Sizes) -> int:
    """The convolved, queries and keys for each value head, the inverse of each chunk's system, the recalled."""
    heads = net.num_v_heads_local_tp
    numbers = net.conv_dim_local_tp + heads * (2 * net.key_head_dim + 64) + net.v_dim_local_tp
    return sizes.tokens * numbers * sizes.number


def _dispatcher(layer: Any, sizes: Sizes) -> int:
    """The map of tokens to experts, their order, and their weights."""
    return sizes.between * (layer.router.weight.size(0) * 8 + layer.router.topk * 16)


_BY_ATTRIBUTE = {
    "token_dispatcher": _dispatcher,
    "core_attention": _attention,
    "d_inner_local_tp": _mamba,
    "num_v_heads_local_tp": _delta_net,
}
"""Modules that keep more than inputs and outputs of linear layers, by an attribute that only they have."""


def _working_bytes(layer: nn.Module, sizes: Sizes) -> int:
    """The gathered input, the gradient of the residual stream, and those of the widest linear layer."""
    stream = (sizes.tokens + sizes.between) * sizes.hidden * sizes.number
    return stream + max((_gradients(path, module, sizes) for path, module in layer.named_modules()), default=0)


def _scored_bytes(layer: Any, sizes: Sizes) -> int:
    """Gradients of soft-capped attention, when the MLP behind it has freed what it kept.

    Results of tanh and softmax, and gradients of both, in fp32.
    """
    if not sizes.scores:
        return 0
    return 2 * sizes.stream + 4 * _FP32 * sizes.scores - kept_inside("mlp", layer.mlp, sizes)


def _gradients(path: str, module: nn.Module, sizes: Sizes) -> int:
    """Bytes of gradients of a linear layer: of output and weight, before that is added up; an expert's input, too."""
    shape, tokens = weight_shape(module), _tokens(path, sizes)
    if shape is None:
        return 0
    own = math.prod(shape) * sizes.separate_gradients * trained(module)
    if not is_dispatched(path):  # behind the first layer of an MLP, the activation's result and a factor of it
        return (tokens * shape[0] + max(own, tokens * shape[0] // 2 * path.endswith("linear_fc1"))) * sizes.number
    inner = 1 + sizes.activation + sizes.weighting  # what is kept behind the first layer, freed before its turn
    freed = 0 if path.endswith("linear_fc2") else tokens * (shape[0] // 2) * inner
    beside = tokens * shape[1] * hasattr(module, "adapter")  # the adapter's gradient of the input, before the sum
    found = (tokens * sum(shape) + beside + own * sizes.together - freed) * sizes.number
    # of the product with weights in fp32: its gradient, and those of both factors, when the layer's input is freed
    weighting = tokens * shape[1] * 3 * _FP32 * sizes.weighting if path.endswith("linear_fc2") and sizes.wide else 0
    return max(found, weighting)
