# SPDX-License-Identifier: Apache-2.0
"""Sizes of a layer's activations on one rank, and the settings that decide which of them are saved."""

from dataclasses import dataclass
from typing import Any

from megatron.bridge.autotune.efficiency import MXFP8_BYTES
from megatron.bridge.autotune.layers import INTO_RESIDUAL
from megatron.bridge.backends.attention.block_mask import CUDA_SCORES
from megatron.bridge.backends.attention.torch_attention import RING_KINDS
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.models.vision.audio import takes_audio, tokens_of_stretch
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.context_sharing import (
    microbatch_tokens,
    ranks_of_longest_sample,
)

_FP32 = 4  # bytes


@dataclass(frozen=True)
class ActivationSizes:
    """Per-rank sizes of a layer's activations, and the settings that decide which terms apply.

    docs/tuner.md has the formulas, in which T, R, t and e stand for ``tokens``, ``sp_tokens``, ``tensor_ranks`` and
    ``bytes_per_element``.
    """

    tokens: int  # of a microbatch on this rank, after context parallelism
    image_tokens: int  # that a rank encodes
    sp_tokens: int  # tokens of the residual stream on this rank, which sequence parallelism splits
    bytes_per_element: int  # of an activation
    bytes_per_saved_input: float  # of an element of the input that a linear layer saves
    quantized_copies: tuple[
        str, ...
    ]  # linear layers that save a quantized copy of an input saved elsewhere
    tensor_ranks: int  # tensor-parallel size
    hidden_size: int
    expert_tokens: int  # token copies that the experts of a rank process
    local_experts: int  # experts on a rank
    experts_per_kernel: int  # experts that one grouped kernel runs
    activation_tensors: int  # that an MLP's activation function saves in addition to its output
    weighting_tensors: (
        int  # that the product with the router's probabilities saves in addition to its output
    )
    has_fp32_router: bool  # the router's probabilities are in fp32
    bytes_per_norm_input: int  # of an element
    has_rope: bool  # queries and keys have rotary embeddings
    separate_gradients: (
        bool  # weight gradients are tensors that kernels do not add to the gradient buffer
    )
    bytes_per_logit: int  # while the loss is computed
    has_dropout_masks: bool  # dropout saves masks
    scores_per_tile: int  # attention scores that soft-capped attention computes at a time
    copied_outputs: tuple[str, ...]  # linear layers whose output attention copies into a new tensor
    kv_ranks: int  # context-parallel ranks whose keys and values are saved
    passes_keys: bool  # keys and values travel around the context-parallel ranks
    recomputed_modules: tuple[str, ...]  # that selective recomputation recomputes

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream between two layers."""
        return self.sp_tokens * self.hidden_size * self.bytes_per_element


def sizes_of(config: ConfigContainer) -> ActivationSizes:
    """Return the sizes of a rank; ``config`` is validated."""
    model = config.model
    tensor_ranks = model.tensor_model_parallel_size
    tokens = microbatch_tokens(config)
    sp_tokens = tokens // tensor_ranks if model.sequence_parallel else tokens
    bytes_per_element = 2 if model.bf16 or model.fp16 else _FP32
    local_experts = (model.num_moe_experts or 1) // model.expert_model_parallel_size
    experts_per_token = model.moe_router_topk or 0
    norms_in_fp32 = model.layernorm_zero_centered_gamma and not has_cuda()
    rotated_kinds = ("rope", "mrope", "yarn")
    gathers_keys = not _uses_engine(model) and model.cp_comm_type in (None, "all_gather")
    return ActivationSizes(
        tokens=tokens,
        image_tokens=_image_tokens(config),
        sp_tokens=sp_tokens,
        bytes_per_element=bytes_per_element,
        bytes_per_saved_input=MXFP8_BYTES if _is_quantized(model) else bytes_per_element,
        quantized_copies=_layers_with_quantized_copies(model),
        tensor_ranks=tensor_ranks,
        hidden_size=model.hidden_size,
        expert_tokens=sp_tokens * experts_per_token * model.expert_tensor_ranks,
        local_experts=local_experts,
        experts_per_kernel=local_experts if model.moe_grouped_gemm else 1,
        activation_tensors=_count_activation_tensors(model),
        weighting_tensors=0 if _is_fused(model) else 1,
        has_fp32_router=model.moe_router_dtype is not None,
        bytes_per_norm_input=_FP32 if norms_in_fp32 else bytes_per_element,
        has_rope=model.multi_latent_attention or model.position_embedding_type in rotated_kinds,
        separate_gradients=not model.gradient_accumulation_fusion,
        bytes_per_logit=_FP32 + bytes_per_element if _uses_engine(model) else _FP32,
        has_dropout_masks=model.hidden_dropout > 0,
        scores_per_tile=_scores_of_tile(config, tokens),
        copied_outputs=_layers_copied_for_rotation(model),
        kv_ranks=ranks_of_longest_sample(config) if gathers_keys else 1,
        passes_keys=_has_ring(model),
        recomputed_modules=_selectively_recomputed(model),
    )


def _selectively_recomputed(model: Any) -> tuple[str, ...]:
    if model.recompute_granularity != "selective":
        return ()
    return tuple(model.recompute_modules or ("core_attn",))


def _layers_with_quantized_copies(model: Any) -> tuple[str, ...]:
    """Return the linear layers that save a quantized copy of an input that another module also saves."""
    if not _is_quantized(model):
        return ()
    return INTO_RESIDUAL if model.fp8_recipe == "delayed" else ("out_proj",)


def _is_quantized(model: Any) -> bool:
    """Return whether all linear layers save inputs that Transformer Engine has quantized to FP8 or FP4."""
    return bool(model.fp8 or model.fp4) and not model.first_last_layers_bf16


def _has_ring(model: Any) -> bool:
    kinds = model.cp_comm_type
    is_ring = any(kind in RING_KINDS for kind in (kinds if isinstance(kinds, list) else [kinds]))
    splits = model.context_parallel_size > 1 or model.hybrid_context_parallel
    return splits and is_ring and not _uses_engine(model)


def _scores_of_tile(config: ConfigContainer, tokens: int) -> int:
    """Return how many scores the torch backend computes at a time with soft-capping, or 0 if a kernel computes them."""
    model: Any = config.model
    if getattr(model, "attn_logit_softcapping", None) is None and not model.qk_clip:
        return 0
    heads = model.num_attention_heads // model.tensor_model_parallel_size
    batch = config.train.micro_batch_size
    if _has_ring(model):
        chunk = tokens // batch // 2
        return batch * heads * chunk * min(chunk, max(16, CUDA_SCORES // (batch * heads * chunk)))
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
    """Return the tokens of the largest image that ``dataset.max_pixels`` allows, or 0 if that limit is unknown.

    Of a model for audio, those of the stretch that its encoder takes at once.
    """
    model: Any = config.model
    if takes_audio(model.vision):
        return tokens_of_stretch(model.vision)
    tower = model.vision.get("vision_config") or {}
    limit = getattr(config.dataset, "max_pixels", None)
    if limit is None or "patch_size" not in tower:
        return 0
    # GLM's limit counts the pixels of all frames in a patch
    frames = tower["temporal_patch_size"] if model.vision["model_type"].startswith("glm4") else 1
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


def _count_activation_tensors(model: ModelProvider) -> int:
    """Return how many tensors Megatron-Core's unfused gate saves: value, offset input, and two clamped ones if any."""
    if _is_fused(model) or not model.gated_linear_unit:
        return 0
    return 2 if model.activation_func_clamp_value is None else 4


def logits_of(model: Any, sizes: ActivationSizes) -> int:
    """Return the number of logits on a rank."""
    return sizes.tokens * model.padded_vocab_size // sizes.tensor_ranks
