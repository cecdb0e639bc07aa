# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --dry-run``: a report on a run, computed on any machine in seconds.

The report is YAML for ``--config`` with the origin of each value, followed by a summary in comments, so that a
terminal shows the summary last.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.activation_sizes import images_of_row, sizes_of
from megatron.bridge.autotune.gpus import GPUS, gpu, gpu_name
from megatron.bridge.autotune.memory import RankMemory, fullest_stage, memory_per_rank
from megatron.bridge.autotune.predict import predict
from megatron.bridge.autotune.priced import unpriced
from megatron.bridge.autotune.report import page, time_lines
from megatron.bridge.autotune.reserve import reserve_of
from megatron.bridge.autotune.search.candidate import as_overrides
from megatron.bridge.autotune.search.explain import nearest_fit
from megatron.bridge.autotune.search.search import Search
from megatron.bridge.autotune.vision_tower import tower_flops
from megatron.bridge.checkpoint import model_io
from megatron.bridge.cli.support import summary
from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.models.flops import local_flops_per_token
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.models.vision.audio import (
    seconds_of_stretch,
    takes_audio,
    tokens_of_stretch,
)
from megatron.bridge.recipes.teachers import critic_of, teacher_of
from megatron.bridge.training.checkpointing.save_load import export_problem
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import BatchSize
from megatron.bridge.training.inputs import (
    count_rows_here,
    elsewhere,
    input_problems,
    notes_on_weights,
    with_vocabulary,
)
from megatron.bridge.utils.config.keys import leaf_values
from megatron.bridge.utils.config.origins import DEFAULT, annotated_yaml


@dataclass(frozen=True)
class Report:
    """What a dry run finds."""

    config: str  # the resolved config as YAML, with the origin of each value
    summary: str  # comments on the run
    runs: bool = True  # whether the run would start, and fit into memory


def report(job: TrainJob, asked: int | None) -> Report:
    """Return what a dry run prints for ``asked`` processes, or without a number for those of the recipe."""
    given = asked or int(os.environ.get("WORLD_SIZE", "0"))
    world_size = given or job.world_size or 1
    if job.mode == "cache-teacher":
        return _teacher_report(job, world_size)
    resolved = with_vocabulary(job.resolve(world_size, count_rows_here))
    config = resolved.config
    lines = [
        f"{job.mode} from {job.source}",
        *_differences(job),
        *summary.describe(config, world_size),
    ]
    if not given:
        lines.append(f"(for {world_size} processes; set another number with --world-size N)")
    lines += ["", *summary.rank_table(config, world_size), ""]
    teacher = teacher_of(config, world_size)
    critic = critic_of(config, world_size)
    memory = memory_per_rank(config, world_size, teacher, critic)
    lines += [*_memory(config, memory), *_verdict(config, world_size, memory, job.gpu_kind)]
    lines += ["", *_compute(config, world_size, job.gpu_kind, teacher), ""]
    notes = [
        *resolved.notes,
        *summary.warnings(config),
        *elsewhere(config),
        *notes_on_weights(config),
        *_caveats(config, teacher, critic),
    ]
    problems = [*input_problems(resolved), *_save_problems(config, notes)]
    lines += [
        *(f"note: {note}" for note in notes),
        *(f"the run would be refused: {problem}" for problem in problems),
    ]
    runs = not problems and _fits(config, world_size, memory, job.gpu_kind)
    return Report(annotated_yaml(resolved.config, resolved.origins), _comments(lines), runs)


def timeline_page(job: TrainJob, asked: int | None) -> str:
    """The HTML page of ``--timeline``, for ``asked`` processes: the pipeline of a step, and where its time goes."""
    world_size = asked or job.world_size or 1
    config = job.resolve(world_size, count_rows_here).config
    kind = gpu_name(job.gpu_kind)
    prediction = predict(config, world_size, kind)
    lines = list(time_lines(prediction, config.train.train_iters, f"{world_size} x {kind}"))
    return page(
        f"{job.source} on {world_size} x {kind}", prediction, [("Summary", f"<p>{lines[0]}</p>")]
    )


def _teacher_report(job: TrainJob, world_size: int) -> Report:
    """The given config, and a summary of the teacher's run over its data."""
    from megatron.bridge.training.distillation.cache_teacher import teacher_run

    alone = teacher_run(job.config, world_size).config
    lines = [
        f"cache-teacher from {job.source}",
        *summary.describe(alone, world_size),
        "",
        *summary.rank_table(alone, world_size),
    ]
    return Report(annotated_yaml(job.config, job.origins), _comments(lines))


def _comments(lines: list[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _differences(job: TrainJob) -> Iterator[str]:
    if job.recipe is None:
        return
    recipe_values = leaf_values(job.recipe())
    run_values = leaf_values(job.config)
    for key, value in run_values.items():
        if key not in recipe_values and job.origins.get(key) != DEFAULT:
            yield f"not in the recipe: {key}={value!r}"
        elif key in recipe_values and repr(recipe_values[key]) != repr(value):
            yield f"changed: {key}={recipe_values[key]!r} -> {value!r}"
    gone = [key for key in recipe_values if key not in run_values]
    if gone:
        yield f"removed: {', '.join(gone)}"


def _memory(config: "ConfigContainer", memory: list[RankMemory]) -> Iterator[str]:
    yield "memory per rank: states counted on the sharded model, activations estimated"
    yield from _images(config)
    yield from summary.memory_table(memory, _stage_contents(config))


def _images(config: "ConfigContainer") -> Iterator[str]:
    """Name the number of images, or the audio, for which the tower's memory is estimated, if there is a tower."""
    vision = getattr(config.model, "vision", None)
    if vision is None:
        return
    tokens = sizes_of(config).image_tokens
    yield (
        f"each rank encodes up to {tokens:,} tokens of {_encoded(vision, tokens)} at once: dataset.max_image_tokens "
        "limits them, and model.recompute_vision_model=true stores fewer activations"
    )
    if takes_audio(vision):
        yield (
            f"audio is encoded in stretches of {seconds_of_stretch(vision):g} seconds: a shorter recording needs the "
            "memory and time of one"
        )


def _encoded(vision: dict[str, Any], tokens: int) -> str:
    """What a tower encodes, of audio with the seconds that have so many tokens."""
    if not takes_audio(vision):
        return "images"
    rate = tokens_of_stretch(vision) / seconds_of_stretch(vision)
    return f"audio ({tokens / rate:,.0f} seconds, {rate:g} tokens per second)"


def _fits(config: "ConfigContainer", world_size: int, memory: list[RankMemory], kind: str) -> bool:
    needed = reserve_of(config, world_size, kind).around(fullest_stage(memory).total)
    return kind not in GPUS or needed <= gpu(kind).memory


def _verdict(
    config: "ConfigContainer", world_size: int, memory: list[RankMemory], kind: str
) -> Iterator[str]:
    """Whether the model fits, and if not, the nearest settings with which it does."""
    if kind not in GPUS:
        return
    fullest = fullest_stage(memory)
    fits = _fits(config, world_size, memory, kind)
    reserve = reserve_of(config, world_size, kind)
    needed = reserve.around(fullest.total)
    verdict = f"{kind}: {'fits' if fits else 'does NOT fit'}"
    yield f"the fullest GPU, of stage {fullest.stage}, needs {summary.gigabytes(needed)} GB of {verdict}"
    yield from reserve.lines(needed, kind)
    if not fits and fullest.total == fullest.unsharded:
        host = "model.use_cpu_initialization=true, " if config.dist.use_torch_fsdp2 else ""
        yield f"the model needs this before it is sharded: use {host}tensor parallelism or the distributed optimizer"
    elif not fits:
        nearest = nearest_fit(Search(config, world_size, kind))
        changes = (
            "" if nearest is None else " ".join(as_overrides(config, nearest.candidate.settings()))
        )
        yield f"the nearest settings that fit: {changes or f'none on {world_size} GPUs, use more of them'}"


def _stage_contents(config: "ConfigContainer") -> list[str]:
    """The layers of each stage, numbered from 0, and its embedding and loss."""
    held: list[str] = []
    for chunks in meta_model.stage_chunks(config.model):
        first: Any = chunks[0]
        last: Any = chunks[-1]
        groups = [chunk.decoder.layers for chunk in cast(Any, chunks) if len(chunk.decoder.layers)]
        layers = ", ".join(summary.span(group[0].layer_number - 1, len(group)) for group in groups)
        parts = ["embedding" if first.pre_process else "", f"layers {layers}" if layers else ""]
        held.append(
            ", ".join(part for part in [*parts, "loss" if last.post_process else ""] if part)
        )
    return held


def _compute(
    config: "ConfigContainer", world_size: int, kind: str, teacher: "ModelProvider | None"
) -> Iterator[str]:
    length = config.dataset.seq_length
    teachers = [] if teacher is None else [meta_model.whole_model(teacher)]
    token = local_flops_per_token([_model_with_adapters(config)], length)
    token += local_flops_per_token(teachers, length, backward=False)
    step = config.train.global_batch_size * length * token
    total = BatchSize(config.train).samples_after(config.train.train_iters) * length * token
    yield f"compute: {step:.3g} model FLOPs per step, {total:.3g} in total, without recomputation"
    yield from _compute_of_tower(config)
    if kind in GPUS:
        steps = round(total / step)
        yield from time_lines(predict(config, world_size, kind), steps, f"{world_size} x {kind}")


def _compute_of_tower(config: "ConfigContainer") -> Iterator[str]:
    """Count the operations of the tower for samples with the maximum number of tokens of images or audio."""
    tower = getattr(meta_model.whole_model(config.model), "vision", None)
    if tower is None or not (flops := tower_flops(tower, tokens := images_of_row(config))):
        return
    batch = config.train.global_batch_size
    kind = "audio" if takes_audio(tower.config.to_dict()) else "images"
    yield f"tower: {flops * batch:.3g} FLOPs more per step, with {tokens:,} tokens of {kind} in each row"


def _save_problems(config: "ConfigContainer", notes: list[str]) -> list[str]:
    """Describe the checkpoint and the export of a run; return what it would refuse and add the rest to ``notes``."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return []
    model = _model_with_adapters(config)
    with meta_model.as_only_rank(config.model):
        model_io.model_state([model], model_io.MODEL_METADATA)
        problem = export_problem(config, [model])
    if problem is None:
        return []
    if checkpoint.also_save_hf_checkpoint:
        return [problem]
    notes.append(problem)
    return []


def _model_with_adapters(config: "ConfigContainer") -> Any:
    model = meta_model.whole_model(config.model)
    if config.peft is not None:
        with meta_model.as_only_rank(config.model), torch.device("meta"):
            config.peft([model])
    return model


def _caveats(
    config: "ConfigContainer",
    teacher: "ModelProvider | None",
    critic: "ConfigContainer | None",
) -> Iterator[str]:
    if ignored := ", ".join(unpriced(config)):
        yield f"time and memory are predicted without {ignored}"
    if config.distill is not None and config.distill.cache is None and teacher is None:
        yield (
            f"distill.teacher={config.distill.teacher} is not on this machine: memory and compute are those of "
            "the student, without the teacher's"
        )
    if teacher is not None:
        yield "the predicted time leaves out the teacher's forward pass"
    if config.grpo is not None:
        yield (
            "generation is not in time and memory: while it runs, its caches take up to "
            f"{config.grpo.kv_memory / 1e9:.1f} GB on each rank (grpo.kv_memory), and there are no activations of "
            "training"
        )
        if config.grpo.active_critic is not None:
            yield "the predicted time leaves out the critic"
            if critic is None:
                yield (
                    f"grpo.critic.model={config.grpo.active_critic.model} is not on this machine: the memory is "
                    "that of the policy, without the critic's"
                )
    yield from config.model.prediction_notes()
