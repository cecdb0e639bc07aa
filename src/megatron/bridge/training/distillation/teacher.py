# SPDX-License-Identifier: Apache-2.0
"""The teacher: found and checked before anything is built, loaded in the student's layout, and never changed."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.checkpoint import layout, manifest, model_io
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.models.model_provider import PARALLEL_SIZES
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.finetune import TOKENIZER_FILES, compare_tokenizers
from megatron.bridge.training.rules import RULES, violations
from megatron.bridge.training.rules import layout as layout_rules
from megatron.bridge.utils.config.serialize import from_plain
from megatron.bridge.utils.errors import UserError

# What the teacher has in common with the student, because it runs in its place.
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
SAMPLE = 1 << 20  # bytes at both ends of a file of weights that tell it from others
_LAYOUT_RULES = [rule for rule in RULES if rule.__module__ == layout_rules.__name__]


def teacher_provider(config: ConfigContainer, world_size: int) -> GPTModelProvider:
    """The teacher's model in the layout of ``config.model``; its weights are loaded when it is built.

    Args:
        config: A validated config that distills.
        world_size: Processes of the run.

    Raises:
        UserError: there is no such teacher, its vocabulary is not the student's, or it does not fit the layout.
    """
    assert config.distill is not None, "asked for a run that distills"
    assert config.distill.teacher is not None, "a rule asks for a teacher"
    name = config.distill.teacher
    provider = in_layout(declared(name, config.distill.trust_remote_code), name, config, world_size)
    _compare_tokenizers(config, name)
    return provider


def in_layout(provider: Any, name: str, config: ConfigContainer, world_size: int) -> GPTModelProvider:
    """``provider``, changed to run beside ``config.model``.

    Raises:
        UserError: its vocabulary is not the student's, or it does not fit the layout.
    """
    for field in SHARED:
        setattr(provider, field, getattr(config.model, field))
    tensor = provider.tensor_model_parallel_size
    groups = provider.num_query_groups or provider.num_attention_heads
    if tensor > 1 and groups % tensor and tensor % groups:
        provider.make_query_groups_divisible_by = tensor
    _refuse(name, [*_unlike_the_student(provider, config), *_unfit_for_the_layout(provider, config, world_size)])
    return provider


def load_teacher(provider: GPTModelProvider) -> list[MegatronModule]:
    """Build this rank's chunks with their weights: no gradients, no dropout, no wrapper for training."""
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    return chunks


def identity(teacher: str) -> str:
    """A hash that tells teachers apart without reading all of them.

    Of a Megatron checkpoint it covers every byte, by way of its manifest; of a Hugging Face model its config and
    names, sizes and both ends of the files of weights.
    """
    found = xxhash.xxh3_64()
    for path in _identifying(teacher):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            found.update(file.read())
    return found.hexdigest()


def is_megatron(teacher: str) -> bool:
    """Whether it is a Megatron checkpoint: any other directory, and any hub id, is a Hugging Face model."""
    path = Path(teacher)
    return path.is_dir() and not (path / "config.json").is_file()


def _identifying(teacher: str) -> list[Path]:
    if not is_megatron(teacher):
        directory = hub.resolve(teacher, weights=True)
        return [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    directory = layout.resolve(Path(teacher))
    listed = directory / manifest.NAME
    return [listed] if listed.is_file() else sorted(path for path in directory.iterdir() if path.is_file())


def declared(name: str, trust_remote_code: bool) -> Any:
    """The provider that a Hugging Face model or a Megatron checkpoint declares; building it loads the weights."""
    if not is_megatron(name):
        return AutoBridge.from_hf_pretrained(name, trust_remote_code=trust_remote_code).to_megatron_provider()
    provider: Any = from_plain(model_io.read_run_config(name)["model"])
    provider.register_pre_wrap_hook(_loads(name))
    return provider


def _loads(path: str) -> Callable[[list[Any]], None]:
    def load(chunks: list[Any]) -> None:
        model_io.load_model(chunks, path)

    load.fills_every_parameter = True  # type: ignore[attr-defined]
    return load


def _unlike_the_student(provider: Any, config: ConfigContainer) -> Iterator[str]:
    if provider.vocab_size != config.model.vocab_size:
        yield (
            f"it has a vocabulary of {provider.vocab_size}, the student one of {config.model.vocab_size}: both "
            "must be equal"
        )
    if config.dataset.seq_length > provider.seq_length:
        yield (
            f"it knows {provider.seq_length} positions, fewer than dataset.seq_length="
            f"{config.dataset.seq_length}: shorten the samples"
        )
    layers = config.distill.hidden_layers.values() if config.distill else ()
    wrong = sorted({layer for layer in layers if not 1 <= layer <= provider.num_layers})
    if wrong:
        yield f"distill.hidden_layers names its layers {wrong}, it has 1 to {provider.num_layers}"
    if provider.mtp_num_layers:
        yield (
            f"it predicts {provider.mtp_num_layers} more tokens, which is not supported of a teacher: export it "
            "without these layers"
        )


def _unfit_for_the_layout(provider: Any, config: ConfigContainer, world_size: int) -> Iterator[str]:
    inside = dataclasses.replace(config, model=provider)
    found = violations(_LAYOUT_RULES, inside, world_size)
    if not found:
        try:
            provider.finalize()
        except (ValueError, AssertionError) as error:
            found = [str(error)]
    if found:
        yield (
            f"it cannot run in the student's layout ({'; '.join(found)}): choose a layout for both, or keep its "
            "logits first, in a layout of its own, with --mode cache-teacher and distill.cache"
        )


def _refuse(name: str, problems: list[str]) -> None:
    if problems:
        raise UserError("\n".join(f"distill.teacher={name}: {problem}" for problem in problems))


def _compare_tokenizers(config: ConfigContainer, name: str) -> None:
    """Refuse a teacher whose tokens have other numbers, if it comes with a tokenizer."""
    beside = model_io.tokenizer_dir(name) if is_megatron(name) else hub.resolve(name, weights=False)
    if beside is not None and any((beside / file).is_file() for file in TOKENIZER_FILES):
        compare_tokenizers(config.tokenizer, beside)
