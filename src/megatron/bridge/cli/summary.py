# SPDX-License-Identifier: Apache-2.0
"""What a config amounts to, worked out from its numbers: nothing is built."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from megatron.bridge.data.config import MockGPTDatasetConfig

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.bridge.training.config import ConfigContainer


def parameter_count(model: "GPTModelProvider") -> int:
    """Parameters of the whole model, tied embeddings counted once, without rows and heads of padding."""
    hidden = model.hidden_size
    vocabulary = (model.vocab_size or 0) * hidden
    ends = vocabulary if model.share_embeddings_and_output_weights else 2 * vocabulary
    if model.position_embedding_type == "learned_absolute":
        ends += model.seq_length * hidden
    norm = hidden if model.normalization == "RMSNorm" else 2 * hidden
    layers = sum(_attention(model) + _feed_forward(model, sparse) + 2 * norm for sparse in _sparse_layers(model))
    return ends + layers + norm


def describe(config: "ConfigContainer", world_size: int) -> list[str]:
    """Lines for a person: the model, the layout, the data and the work of a step."""
    model, train = config.model, config.train
    replicas = config.data_parallel_size(world_size)
    tokens = train.global_batch_size * config.dataset.seq_length
    microbatches = train.global_batch_size // (train.micro_batch_size * replicas)
    return [
        f"model: {parameter_count(model):,} parameters, {model.num_layers} layers, "
        f"hidden size {model.hidden_size}",
        f"layout: {world_size} process{'es' if world_size > 1 else ''} = {_layout(config, replicas)}",
        f"step: {train.global_batch_size} samples x {config.dataset.seq_length} tokens = {tokens:,} tokens, in "
        f"{microbatches} microbatches of {train.micro_batch_size} on each of {replicas} replicas",
        f"run: {train.train_iters:,} steps, {train.train_iters * tokens:,} tokens",
        f"data: {_data(config)}",
    ]


def warnings(config: "ConfigContainer") -> Iterator[str]:
    """What a person may not expect, before a run of hours."""
    if isinstance(config.dataset, MockGPTDatasetConfig):
        yield "no data was given: this run trains on made-up samples (--data PATH for real ones)"
    if config.checkpoint.save is None:
        yield "checkpoint.save is not set: this run keeps no checkpoint (checkpoint.save=DIR)"


def _layout(config: "ConfigContainer", replicas: int) -> str:
    model = config.model
    virtual = model.virtual_pipeline_model_parallel_size
    sequence = " with sequence parallelism" if model.sequence_parallel else ""
    interleaved = f" of {virtual} interleaved stages" if virtual else ""
    parts = [
        f"tensor {model.tensor_model_parallel_size}{sequence}",
        f"pipeline {model.pipeline_model_parallel_size}{interleaved}",
        f"context {model.context_parallel_size}",
        f"data {replicas}",
    ]
    return " x ".join(parts)


def _data(config: "ConfigContainer") -> str:
    kind = type(config.dataset).__name__
    return f"made-up samples ({kind})" if isinstance(config.dataset, MockGPTDatasetConfig) else kind


def _attention(model: "GPTModelProvider") -> int:
    if model.multi_latent_attention:
        return _latent_attention(cast("MLAModelProvider", model))
    hidden, heads = model.hidden_size, model.num_attention_heads
    channels = model.kv_channels or hidden // heads
    query, keys = heads * channels, (model.num_query_groups or heads) * channels
    biased = model.add_bias_linear and model.attention_bias is not False
    count = hidden * (query + 2 * keys) + query * hidden
    count += (query + 2 * keys) * (biased or model.add_qkv_bias) + hidden * biased
    return count + 2 * channels * model.qk_layernorm * (1 if model.normalization == "RMSNorm" else 2)


def _latent_attention(model: "MLAModelProvider") -> int:
    hidden, heads, rank, rotated = (
        model.hidden_size,
        model.num_attention_heads,
        model.kv_lora_rank,
        model.qk_pos_emb_head_dim,
    )
    queries, norms = heads * (model.qk_head_dim + rotated), rank
    count = hidden * queries
    if model.q_lora_rank is not None:
        count, norms = model.q_lora_rank * (hidden + queries), norms + model.q_lora_rank
    count += hidden * (rank + rotated) + rank * heads * (model.qk_head_dim + model.v_head_dim)
    return count + heads * model.v_head_dim * hidden + norms * model.qk_layernorm


def _feed_forward(model: "GPTModelProvider", sparse: bool) -> int:
    biased = model.add_bias_linear and model.mlp_bias is not False
    width = model.ffn_hidden_size or 4 * model.hidden_size
    if not sparse:
        return _mlp(model, width, biased)
    experts = model.num_moe_experts or 0
    router = experts * model.hidden_size
    shared = _mlp(model, model.moe_shared_expert_intermediate_size, biased)
    return router + experts * _mlp(model, model.moe_ffn_hidden_size or width, biased) + shared


def _mlp(model: "GPTModelProvider", width: int | None, biased: bool) -> int:
    if not width:
        return 0
    inner = width * (2 if model.gated_linear_unit else 1)
    return model.hidden_size * (inner + width) + (inner + model.hidden_size) * biased


def _sparse_layers(model: "GPTModelProvider") -> list[bool]:
    """For each layer, whether it holds experts."""
    if not model.num_moe_experts:
        return [False] * model.num_layers
    frequency = model.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(model.num_layers)]
    return [bool(entry) for entry in frequency]
