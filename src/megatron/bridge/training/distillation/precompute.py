# SPDX-License-Identifier: Apache-2.0
"""The teacher alone, in a layout of its own, over the training data of a run."""

import copy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.loaders import Batch, Batches
from megatron.bridge.data.tokenizer import Tokenizer, build_tokenizer
from megatron.bridge.training.batch_size import samples_of
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.distillation.cache import Cache, check_header, header_of, read_header
from megatron.bridge.training.distillation.divergence import top_tokens
from megatron.bridge.training.distillation.step import model_inputs
from megatron.bridge.training.distillation.teacher import load_teacher, teacher_provider
from megatron.bridge.training.gpt_step import next_batch
from megatron.bridge.training.rules import SIZES, violations
from megatron.bridge.training.setup import build_data, initialize
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

ROUND = 8  # microbatches between two looks at what is done: enough to fill a pipeline
TOLD = 20  # times that progress is told


def precompute(config: ConfigContainer) -> Path:
    """Write what the teacher says of all training samples of a run to ``distill.cache``.

    The parallel sizes of ``config.model`` are those of the teacher here; the run that reads the cache may have
    others. What is there already is kept: an interrupted call is simply repeated.

    Args:
        config: The run that will learn from it, with ``distill.cache`` and ``distill.top_k``.

    Returns:
        The folder.

    Raises:
        UserError: something in the config cannot be, or the folder holds the logits of another teacher.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    alone = teachers_run(config, tokenizer, dist.world_size())
    assert alone.distill is not None, "checked"
    folder = Path(cast(str, alone.distill.cache))
    initialize(alone)
    data = build_data(alone, tokenizer).train
    assert data is not None, "a run without data"
    cache = _opened(folder, alone, _samples(alone, data))
    model = load_teacher(alone.model)
    _run(cache, alone, data, model)
    return folder


def teachers_run(config: ConfigContainer, tokenizer: Tokenizer, world_size: int) -> ConfigContainer:
    """A resolved config whose model is the teacher, for so many processes.

    Raises:
        UserError: there is no such teacher, or it does not fit the parallel sizes of ``config.model``.
    """
    if config.distill is None or config.distill.cache is None or config.distill.teacher is None:
        raise UserError(
            "--mode cache-teacher needs distill.teacher and distill.cache: name the teacher and a folder"
        )
    alone = copy.deepcopy(config)
    alone.peft, alone.checkpoint = None, CheckpointConfig()
    if alone.model.vocab_size is None:
        alone.model.vocab_size = tokenizer.vocab_size
    if alone.model.context_parallel_size > 1:
        raise UserError(
            f"model.context_parallel_size={alone.model.context_parallel_size} with --mode cache-teacher: share "
            "the teacher over tensor, pipeline and data parallel processes"
        )
    alone.model.virtual_pipeline_model_parallel_size = None
    if found := violations(SIZES, alone, world_size):
        raise UserError("\n".join(found))
    alone.model = teacher_provider(alone, world_size)
    alone.validate(None if world_size == dist.world_size() else world_size)
    return alone


def _samples(config: ConfigContainer, data: Batches) -> int:
    """How many different ones a run draws."""
    drawn = samples_of(config.train)
    if config.dataset.dataloader_type != "cyclic":
        return drawn
    whole = len(cast(Any, data).dataset)
    if drawn < whole:
        raise UserError(
            f"dataset.dataloader_type=cyclic draws {drawn} of {whole} samples in an order of its own: use single, "
            "or train on all of them"
        )
    return whole


def _opened(folder: Path, config: ConfigContainer, samples: int) -> Cache:
    def prepare() -> Cache:
        if not (folder.exists() and any(folder.iterdir())):
            Cache(folder, header_of(config, samples)).create()
        header = read_header(folder)
        check_header(folder, header, config)
        if header.samples != samples:
            raise UserError(
                f"distill.cache={folder} is for {header.samples} samples, this run draws {samples}: choose "
                "another folder"
            )
        return Cache(folder, header)

    return on_first_rank(prepare).open("r+")


def _run(cache: Cache, config: ConfigContainer, data: Batches, model: list[MegatronModule]) -> None:
    samples, told = cache.header.samples, -1
    for batches in _rounds(config, data):
        if not all(dist.all_gather_object(all(cache.has(ids) for ids, _ in batches))):
            _forward(cache, config, batches, model)
        dist.barrier()
        part = cache.done * TOLD // samples
        if part > told:
            told = part
            console().print(f"{cache.done:,} of {samples:,} samples in {cache.folder}", markup=False)


def _rounds(config: ConfigContainer, data: Batches) -> Iterator[list[tuple[list[int], Batch]]]:
    """All microbatches of this rank, some at a time, with the numbers of their samples."""
    train = config.train
    replicas = parallel_state.get_data_parallel_world_size()
    left = samples_of(train) // (train.micro_batch_size * replicas)
    numbered = ((data.sample_ids, batch) for batch in data)
    while left > 0:
        found = list(islice(numbered, min(ROUND, left)))
        left -= len(found)
        yield found


@torch.no_grad()
def _forward(
    cache: Cache, config: ConfigContainer, batches: list[tuple[list[int], Batch]], model: list[MegatronModule]
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

        return chunk(**model_inputs(batch)), keep

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
