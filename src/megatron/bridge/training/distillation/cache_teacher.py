# SPDX-License-Identifier: Apache-2.0
"""Run the teacher alone, with its own parallel sizes, over the training data of a run."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import batched, islice
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.loaders import Batch, DataIterator
from megatron.bridge.data.tokenizer import build_tokenizer
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistillConfig,
    Resolved,
)
from megatron.bridge.training.config.batch_size import samples_of
from megatron.bridge.training.config.rules import SIZE_RULES, violations
from megatron.bridge.training.distillation.cache import (
    TeacherCache,
    check_header,
    header_of,
    read_header,
)
from megatron.bridge.training.distillation.divergence import top_tokens
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.distillation.teacher import load_teacher, teacher_provider
from megatron.bridge.training.gpt_step import next_batch
from megatron.bridge.training.setup import build_data, count_rows, initialize
from megatron.bridge.utils import distributed
from megatron.bridge.utils.config.serialize import copy_config
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, refuse

MICROBATCHES_PER_ROUND = 8  # between two checks of what is cached; enough to fill a pipeline
PROGRESS_LINES = 20  # number of progress messages


def precompute(config: ConfigContainer) -> Path:
    """Write the teacher's top tokens for all training samples of a run to ``distill.cache``.

    The teacher uses the parallel sizes of ``config.model``; the run that reads the cache may have others. Existing
    entries are kept, so an interrupted call can be repeated.

    Args:
        config: The config of the distillation, with ``distill.cache`` and ``distill.top_k``.

    Returns:
        The folder of the cache.

    Raises:
        UserError: The config is invalid, or the folder holds a cache of another teacher.
    """
    resolved = teacher_run(config)
    alone = resolved.config
    settings = cast(DistillConfig, resolved.config.distill)
    folder = Path(cast(str, settings.cache))
    initialize(alone)
    data = build_data(alone, resolved.tokenizer).train
    assert data is not None, "the run has no training data"
    cache = _open_or_create(folder, alone, _sample_count(alone, data))
    model = load_teacher(alone.model)
    samples = cache.header.samples
    printed = -1
    for batches in _microbatch_rounds(alone, data):
        if not all(distributed.all_gather_object(all(cache.has(ids) for ids, _ in batches))):
            _forward(cache, alone, batches, model)
        distributed.barrier()
        part = cache.done * PROGRESS_LINES // samples
        if part > printed:
            printed = part
            print_rank_0(f"{cache.done:,} of {samples:,} samples in {cache.folder}")
    return folder


def teacher_run(
    config: ConfigContainer, world_size: int | None = None
) -> Resolved[ConfigContainer]:
    if config.distill is None or config.distill.cache is None or config.distill.teacher is None:
        raise UserError(
            "--mode cache-teacher needs distill.teacher and distill.cache: set the teacher and a folder"
        )
    tokenizer = build_tokenizer(config.tokenizer)
    processes = world_size or distributed.world_size()
    alone = copy_config(config)
    alone.peft = None
    alone.checkpoint = CheckpointConfig()
    if alone.model.vocab_size is None:
        alone.model.vocab_size = tokenizer.vocab_size
    if alone.model.context_parallel_size > 1:
        raise UserError(
            f"model.context_parallel_size={alone.model.context_parallel_size} is not supported with --mode "
            "cache-teacher: use tensor, pipeline and data parallelism"
        )
    alone.model.virtual_pipeline_model_parallel_size = None
    refuse(violations(SIZE_RULES, alone, processes))
    alone.model = teacher_provider(alone, processes)
    if not alone.model.num_moe_experts:
        alone.model.expert_tensor_parallel_size = (
            None  # set with the student's sizes, refused without experts
        )
    return replace(alone.resolve(world_size, count_rows=count_rows), tokenizer=tokenizer)


def _sample_count(config: ConfigContainer, data: DataIterator) -> int:
    drawn = samples_of(config.train)
    if config.dataset.dataloader_type != "cyclic":
        return drawn
    samples = len(cast(Any, data).dataset)
    if drawn < samples:
        raise UserError(
            f"dataset.dataloader_type=cyclic uses {drawn} of {samples} samples in random order: use single, or "
            "train on all of them"
        )
    return samples


def _open_or_create(folder: Path, config: ConfigContainer, samples: int) -> TeacherCache:
    def prepare() -> TeacherCache:
        if not (folder.exists() and any(folder.iterdir())):
            TeacherCache(folder, header_of(config, samples)).create()
        header = read_header(folder)
        check_header(folder, header, config)
        if header.samples != samples:
            raise UserError(
                f"distill.cache={folder} is for {header.samples} samples, this run uses {samples}: choose "
                "another folder"
            )
        return TeacherCache(folder, header)

    return on_first_rank(prepare).open("r+")


def _microbatch_rounds(
    config: ConfigContainer, data: DataIterator
) -> Iterator[list[tuple[list[int], Batch]]]:
    """All microbatches of this rank in rounds, with the indices of their samples."""
    train = config.train
    replicas = parallel_state.get_data_parallel_world_size()
    count = samples_of(train) // (train.micro_batch_size * replicas)
    numbered = ((data.sample_ids, batch) for batch in data)
    return map(list, batched(islice(numbered, count), MICROBATCHES_PER_ROUND))


@torch.no_grad()
def _forward(
    cache: TeacherCache,
    config: ConfigContainer,
    batches: list[tuple[list[int], Batch]],
    model: list[MegatronModule],
) -> None:
    distill: Any = config.distill
    group: Any = parallel_state.get_tensor_model_parallel_group()
    numbers = iter([ids for ids, _ in batches])

    def step(iterator: Iterator[Batch], chunk: MegatronModule) -> tuple[Tensor, Any]:
        batch = next_batch(iterator)

        def keep(logits: Tensor, non_loss_data: bool = True) -> None:
            top = top_tokens(logits, distill.top_k, distill.temperature, group)
            ids = next(numbers)
            if group.rank() == 0:
                cache.write(ids, batch["tokens"], top)

        return chunk(**model_inputs(batch, chunk)), keep

    schedule = cast(Any, get_forward_backward_func())
    schedule(
        forward_step_func=step,
        data_iterator=iter([batch for _, batch in batches]),
        model=model,
        num_microbatches=len(batches),
        seq_length=config.dataset.seq_length,
        micro_batch_size=config.train.micro_batch_size,
        forward_only=True,
        collect_non_loss_data=True,
    )
