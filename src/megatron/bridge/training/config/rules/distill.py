# SPDX-License-Identifier: Apache-2.0
"""Rules on distillation."""

from collections.abc import Iterator

from megatron.bridge.training.config.blocks.distill import DistillConfig
from megatron.bridge.training.config.run_config import RunConfig


def distill_settings_are_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The values of ``distill`` are valid, and fit the other blocks."""
    if config.distill is not None:
        for check in (_values, _hidden_states, _cache):
            yield from check(config.distill, config)


def _values(distill: DistillConfig, config: RunConfig) -> Iterator[str]:
    if distill.teacher is None and distill.cache is None:
        yield "distill.teacher is not set: give a Hugging Face directory, a hub id or a Megatron checkpoint"
    if not (distill.kl_weight or distill.hidden_weight):
        yield (
            "distill.kl_weight=0 and distill.hidden_weight=0 leave nothing to learn: raise one of them, "
            "or unset distill"
        )
    vocabulary = config.model.vocab_size or float("inf")
    if distill.top_k is not None and not 0 < distill.top_k < vocabulary:
        yield f"distill.top_k={distill.top_k}: must lie between 1 and the vocabulary of {vocabulary}, or be unset"
    if config.model.mtp_num_layers:
        yield (
            f"distill with model.mtp_num_layers={config.model.mtp_num_layers}: the teacher gives no logits for "
            "MTP layers, unset it"
        )


def _hidden_states(distill: DistillConfig, config: RunConfig) -> Iterator[str]:
    model = config.model
    if bool(distill.hidden_layers) != (distill.hidden_weight > 0):
        yield (
            f"distill.hidden_weight={distill.hidden_weight} with hidden_layers={distill.hidden_layers}: set both, "
            "or none"
        )
    if not distill.hidden_layers:
        return
    for layer in distill.hidden_layers:
        if not 1 <= layer <= model.num_layers:
            yield f"distill.hidden_layers: the student has layers 1 to {model.num_layers}, not {layer}"
    if model.recompute_granularity == "full":
        yield (
            "distill.hidden_layers with model.recompute_granularity=full: hidden states of recomputed layers have "
            "no gradient, use selective"
        )
    if model.virtual_pipeline_model_parallel_size is not None:
        yield (
            "distill.hidden_layers with model.virtual_pipeline_model_parallel_size="
            f"{model.virtual_pipeline_model_parallel_size}: leave the virtual stages out"
        )
    if config.peft is not None:
        yield (
            f"distill.hidden_layers with peft={type(config.peft).__name__}: an adapter checkpoint cannot hold "
            "the trained projection, learn from logits only"
        )


def _cache(distill: DistillConfig, config: RunConfig) -> Iterator[str]:
    if distill.cache is None:
        return
    if distill.top_k is None:
        yield "distill.cache holds only the most likely tokens: set distill.top_k to the cache's value"
    if distill.hidden_layers:
        yield "distill.cache holds no hidden states: unset distill.hidden_layers, or let the teacher run"
    if getattr(config.dataset, "padding_free", False):
        yield "distill.cache with dataset.padding_free=True: rows must have equal length, pad or pack them"
