# SPDX-License-Identifier: Apache-2.0
"""The teacher: checked before anything is built, and loaded with the student's parallel sizes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.checkpoint import manifest, paths
from megatron.bridge.models.conversion.pretrained import is_megatron_checkpoint, provider_of
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.models.model_provider import PARALLEL_SIZES
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.rules import RULES, violations
from megatron.bridge.training.config.rules import layout as layout_rules
from megatron.bridge.training.finetune import compare_tokenizers
from megatron.bridge.utils.errors import refuse

# Settings that the teacher shares with the student, because it runs on the same ranks.
SHARED = (
    *PARALLEL_SIZES,
    "sequence_parallel",
    "cp_comm_type",
    "backend",
    "bf16",
    "fp16",
    "params_dtype",
    "should_pad_vocab",
    "make_vocab_size_divisible_by",
    "calculate_per_token_loss",
)
_MESSAGE_SETTINGS = (
    "variable_seq_lengths",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "moe_token_dispatcher_type",
)
SAMPLE = 1 << 20  # bytes at both ends of a weight file that are hashed to identify it
_LAYOUT_RULES = [rule for rule in RULES if rule.__module__ == layout_rules.__name__]


def teacher_provider(config: ConfigContainer, world_size: int) -> GPTModelProvider:
    """The teacher's provider with the parallel sizes of ``config.model``; building it loads the weights."""
    assert config.distill is not None, "distill is not set"
    assert config.distill.teacher is not None, "distill.teacher is not set"
    name = config.distill.teacher
    provider = set_shared_settings(
        provider_of(name, config.distill.trust_remote_code), name, config, world_size
    )
    compare_tokenizers(config.tokenizer, name)
    return provider


def set_shared_settings(
    provider: Any, name: str, config: ConfigContainer, world_size: int, key: str = "distill.teacher"
) -> GPTModelProvider:
    """Set the shared settings of ``config.model`` in ``provider``, which ``key`` names, and check it."""
    for field in SHARED:
        setattr(provider, field, getattr(config.model, field))
    # its process groups are the student's, whose default may be another one
    provider.expert_tensor_parallel_size = (
        config.model.expert_tensor_ranks if provider.num_moe_experts else None
    )
    tensor = provider.tensor_model_parallel_size
    groups = provider.num_query_groups or provider.num_attention_heads
    if tensor > 1 and groups % tensor and tensor % groups:
        provider.make_query_groups_divisible_by = tensor
    problems = [
        *_unlike_the_student(provider, config),
        *_unfit_for_the_layout(provider, config, world_size, key),
    ]
    refuse(f"{key}={name}: {problem}" for problem in problems)
    return provider


def share_message_settings(provider: GPTModelProvider, config: ConfigContainer) -> None:
    """Set how ranks exchange tensors of the policy's rows, for a model that runs on these rows."""
    for name in _MESSAGE_SETTINGS:
        setattr(provider, name, getattr(config.model, name))


def load_teacher(provider: GPTModelProvider) -> list[MegatronModule]:
    """Build this rank's chunks with their weights, without gradients, dropout and wrappers for training."""
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    return chunks


def identity(teacher: str) -> str:
    """A hash that identifies a teacher without reading all of its weights.

    For a Megatron checkpoint it covers every byte through the manifest. For a Hugging Face model it covers the
    config, and the names, the sizes and both ends of the weight files.
    """
    hasher = xxhash.xxh3_64()
    for path in _identifying(teacher):
        size = path.stat().st_size
        hasher.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            hasher.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            hasher.update(file.read())
    return hasher.hexdigest()


def _identifying(teacher: str) -> list[Path]:
    if not is_megatron_checkpoint(teacher):
        directory = hub.resolve(teacher, weights=True)
        return [directory / hub.CONFIG, *sorted(directory.glob("*.safetensors"))]
    directory = paths.resolve(Path(teacher))
    listed = directory / manifest.NAME
    return (
        [listed]
        if listed.is_file()
        else sorted(path for path in directory.iterdir() if path.is_file())
    )


def _unlike_the_student(provider: Any, config: ConfigContainer) -> Iterator[str]:
    if provider.vocab_size != config.model.vocab_size:
        yield (
            f"its vocabulary size is {provider.vocab_size}, the student's is {config.model.vocab_size}: both must "
            "be equal"
        )
    if config.dataset.seq_length > provider.seq_length:
        yield (
            f"it supports {provider.seq_length} positions, fewer than dataset.seq_length="
            f"{config.dataset.seq_length}: shorten the samples"
        )
    layers = config.distill.hidden_layers.values() if config.distill else ()
    wrong = sorted({layer for layer in layers if not 1 <= layer <= provider.num_layers})
    if wrong:
        yield f"distill.hidden_layers contains its layers {wrong}: use layers 1 to {provider.num_layers}"
    if provider.mtp_num_layers:
        yield (
            f"it has multi-token prediction (mtp_num_layers={provider.mtp_num_layers}), which a teacher does not "
            "support: export it without these layers"
        )


def _unfit_for_the_layout(
    provider: Any, config: ConfigContainer, world_size: int, key: str
) -> Iterator[str]:
    inside = dataclasses.replace(config, model=provider)
    problems = violations(_LAYOUT_RULES, inside, world_size)
    if not problems:
        try:
            provider.finalize()
        except (ValueError, AssertionError) as error:
            problems = [str(error)]
    if problems:
        remedy = "choose sizes for both"
        if key == "distill.teacher":
            remedy += ", or cache its logits with other sizes, with --mode cache-teacher and distill.cache"
        yield f"it does not support the parallel sizes of the run ({'; '.join(problems)}): {remedy}"
