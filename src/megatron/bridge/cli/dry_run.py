# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --dry-run``: what a run would be, worked out on any machine in seconds.

First comes YAML that ``--config`` reads again, with the origin of each value; then, where a terminal shows it, the
summary as comments.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from megatron.bridge.autotune import ranks
from megatron.bridge.autotune.gpus import GPUS, fits
from megatron.bridge.autotune.memory import RankMemory, fullest, memory_per_rank
from megatron.bridge.cli import picture
from megatron.bridge.cli.summary import describe, warnings
from megatron.bridge.models.flops import local_flops_per_token
from megatron.bridge.recipes.teachers import teacher_of
from megatron.bridge.training.batch_size import BatchSize
from megatron.bridge.utils.config import origins
from megatron.bridge.utils.config.overrides import check_sticks

if TYPE_CHECKING:
    from megatron.bridge.cli.train import Job
    from megatron.bridge.models.model_provider import ModelProvider
    from megatron.bridge.training.config import ConfigContainer

UTILISATION = 0.4
"""Part of the peak of its GPUs that a run is taken to reach; well-tuned dense ones reach 0.35 to 0.45."""


def report(job: "Job", asked: int | None) -> str:
    """The text that a dry run prints.

    Args:
        job: A config that is not resolved yet; it is resolved here.
        asked: Number of processes that the user gave.

    Raises:
        UserError: the config cannot be run.
    """
    config = job.config
    given = asked or int(os.environ.get("WORLD_SIZE", "0"))
    world_size = given or job.world_size or 1
    if job.mode == "cache-teacher":
        return _teacher_alone(job, world_size)
    before = origins.values(config)
    notes = config.validate(world_size)
    origins.mark_derived(config, before)
    check_sticks(config, job.changes)
    lines = [f"{job.mode} from {job.source}", *_differences(job, before), *describe(config, world_size)]
    if not given:
        lines.append(f"(for {world_size} processes; --world-size N assumes another number)")
    lines += ["", *picture.ranks(config, world_size), ""]
    teacher = teacher_of(config, world_size)
    memory = memory_per_rank(config, world_size, teacher)
    lines += [*_memory(job, memory), "", *_work(job, world_size, teacher), ""]
    lines += [f"note: {note}" for note in [*notes, *warnings(config), *_left_out(config, teacher)]]
    return origins.annotated_yaml(config) + _comments(lines)


def _teacher_alone(job: "Job", world_size: int) -> str:
    """The config as it was given, and what the teacher's run over its data would be."""
    from megatron.bridge.data.tokenizer import build_tokenizer
    from megatron.bridge.training.distillation.precompute import teachers_run

    alone = teachers_run(job.config, build_tokenizer(job.config.tokenizer), world_size)
    lines = [
        f"cache-teacher from {job.source}",
        *describe(alone, world_size),
        "",
        *picture.ranks(alone, world_size),
    ]
    return origins.annotated_yaml(job.config) + _comments(lines)


def _comments(lines: list[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _differences(job: "Job", before: dict[str, Any]) -> Iterator[str]:
    """What files and the command line made of the recipe."""
    if job.recipe is None:
        return
    theirs = origins.values(job.recipe.build())
    for key, value in before.items():
        if key not in theirs:
            yield f"not in the recipe: {key}={value!r}"
        elif repr(theirs[key]) != repr(value):
            yield f"changed: {key}={theirs[key]!r} -> {value!r}"
    gone = [key for key in theirs if key not in before]
    if gone:
        yield f"no longer there: {', '.join(gone)}"


def _memory(job: "Job", memory: list[RankMemory]) -> Iterator[str]:
    yield "memory of a rank: states counted on the sharded model, activations estimated"
    yield from picture.table(memory, _held(job.config))
    most = fullest(memory)
    kind = job.gpu_kind
    if kind not in GPUS:
        return
    verdict = "fits, a tenth left free" if fits(most.total, kind) else "does NOT fit with a tenth left free"
    yield f"the fullest rank, of stage {most.stage}, needs {picture.gigabytes(most.total)} GB of {kind}: {verdict}"


def _held(config: "ConfigContainer") -> list[str]:
    """The layers of each stage, numbered from 0, and what else it holds."""
    held: list[str] = []
    for chunks in ranks.stages(config.model):
        first: Any = chunks[0]
        last: Any = chunks[-1]
        spans = [_span([layer.layer_number - 1 for layer in chunk.decoder.layers]) for chunk in cast(Any, chunks)]
        layers = ", ".join(span for span in spans if span)
        parts = ["embedding" if first.pre_process else "", f"layers {layers}" if layers else ""]
        held.append(", ".join(part for part in [*parts, "loss" if last.post_process else ""] if part))
    return held


def _span(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    return f"{numbers[0]}-{numbers[-1]}"


def _work(job: "Job", world_size: int, teacher: "ModelProvider | None") -> Iterator[str]:
    config = job.config
    length = config.dataset.seq_length
    teachers = [] if teacher is None else [ranks.whole(teacher)]
    token = local_flops_per_token([_trained(config)], length)
    token += local_flops_per_token(teachers, length, backward=False)
    step = config.train.global_batch_size * length * token
    total = BatchSize(config.train).samples_after(config.train.train_iters) * length * token
    yield f"work: {step:.3g} floating-point operations a step, {total:.3g} in all (of the model; none done twice)"
    card = GPUS.get(job.gpu_kind)
    if card is not None:
        speed = card.bf16 * UTILISATION * world_size
        yield (
            f"time: {_duration(step / speed)} a step, {_duration(total / speed)} in all, if {world_size} x "
            f"{job.gpu_kind} reach {UTILISATION:.0%} of their peak in bf16, {card.bf16 / 1e12:.0f} TFLOP/s"
        )


def _trained(config: "ConfigContainer") -> Any:
    """The whole model on the meta device, with its adapters."""
    import torch

    model = ranks.whole(config.model)
    if config.peft is not None:
        with ranks.alone(config.model), torch.device("meta"):
            config.peft([model])
    return model


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s"


def _left_out(config: "ConfigContainer", teacher: "ModelProvider | None") -> Iterator[str]:
    symbols = getattr(config.model, "layer_kinds", "")
    package = "mamba-ssm" if "M" in symbols else None
    if config.model.experimental_attention_variant == "gated_delta_net":
        package = "flash-linear-attention"
    if config.distill is not None and config.distill.cache is None and teacher is None:
        yield (
            f"distill.teacher={config.distill.teacher} is not on this machine: memory and work are those of the "
            "student, the teacher's come on top"
        )
    if package:
        yield f"activations are those with the kernels of {package}; PyTorch alone keeps several times as much"
