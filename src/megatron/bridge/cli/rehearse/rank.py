# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --rehearse-rank``: one rank of a large job in this process, without memory.

The real setup and one step run on a process group that sends nothing and on parameters of the meta device. The output
is the cost of each part on this rank, what the first rank does for all others, and all messages.
"""

import copy
import json
import pickle
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

from megatron.bridge import AutoBridge
from megatron.bridge.backends.cpu.without_memory import (
    Message,
    Traffic,
    one_rank,
    recorded_messages,
)
from megatron.bridge.checkpoint import model_io, saving
from megatron.bridge.checkpoint.hashing_writer import gc_paused
from megatron.bridge.cli.support.text_format import columns, say, write_file
from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.data.samplers import MegatronPretrainingSampler
from megatron.bridge.training import setup
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import samples_of
from megatron.bridge.training.config.resolve.precision import without_quantization
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.loop import train_step
from megatron.bridge.training.optim.optimizer import allocate_state
from megatron.bridge.training.optim.optimizer_state import sharded_optimizer_state
from megatron.bridge.training.setup import build_optimizer, build_scheduler, connect
from megatron.bridge.training.state import Run
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.errors import UserError

VOCAB_SIZE = 128 * 1024  # for a recipe whose vocabulary size comes from the tokenizer
PLANS = 256  # plans that are merged, to estimate the time to merge those of all ranks


@dataclass(frozen=True)
class RehearsedPart:
    name: str
    wall: float  # seconds
    cpu: float  # CPU seconds of this process, which do not depend on other processes
    memory: float  # megabytes by which the peak memory of the process grew
    received: float  # megabytes of Python objects that other ranks would send to this one
    facts: str


@dataclass
class Clock:
    """Measures the parts of a setup, one after another."""

    report: Callable[[RehearsedPart], None]  # called after each part
    traffic: Traffic

    def measure[T](self, name: str, action: Callable[[], T], describe: Callable[[T], str]) -> T:
        """Run ``action``, report it as part ``name``, and return its result."""
        before = self._now()
        result = action()
        wall, cpu, memory, received = (
            after - start for start, after in zip(before, self._now(), strict=True)
        )
        self.report(RehearsedPart(name, wall, cpu, memory, received, describe(result)))
        return result

    def _now(self) -> tuple[float, float, float, float]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return time.perf_counter(), time.process_time(), peak, self.traffic.received / 1e6


def rehearse_rank(job: TrainJob, rank: int, asked: int | None, file: Path | None) -> int:
    """Rehearse one rank of the job, with ``asked`` processes if given; prints the cost of each part and the messages.

    Each message is also written to ``file``, in order, as a line of JSON.
    """
    world_size = asked or job.world_size or 1
    if not 0 <= rank < world_size:
        raise UserError(
            f"--rehearse-rank {rank}, but the ranks of --world-size {world_size} are 0 to {world_size - 1}"
        )
    config = resolved_config(job, world_size)
    say(
        f"rank {rank} of {world_size} of {job.source}: simulated, with no parameters allocated and no peers started"
    )
    say(f"{'part':<24}{'seconds':>9}{'cpu':>9}{'MB':>9}{'received':>10}")
    messages = rehearse_parts(config, rank, world_size, lambda part: say(_line(part)))
    for line in ("", *message_table(messages), ""):
        say(line)
    if file is not None:
        write_file(
            "--messages", file, "".join(json.dumps(asdict(message)) + "\n" for message in messages)
        )
    say("not rehearsed: NCCL's connections, the network, the file system, and the time of a step")
    return 0


def resolved_config(job: TrainJob, world_size: int) -> ConfigContainer:
    """The config that the rank runs, without its data, weights and adapters."""
    config = job.resolve(world_size).config
    for name in ("peft", "distill", "dpo", "grpo"):
        if getattr(config, name) is not None:
            raise UserError(
                f"--rehearse-rank does not support {name} of {job.source}: rehearse a pretrain recipe"
            )
    if getattr(config.model, "vision", None) is not None:
        raise UserError(
            f"--rehearse-rank does not support the vision tower of {job.source}: use --dry-run"
        )
    if config.dist.use_torch_fsdp2 or config.ddp.use_megatron_fsdp:
        raise UserError(
            f"--rehearse-rank does not support the sharded weights of {job.source}: unset FSDP"
        )
    config.model = without_quantization(
        config.model
    )  # its products need Transformer Engine and a GPU
    config.model.vocab_size = config.model.vocab_size or VOCAB_SIZE
    config.model.perform_initialization = False
    return config


def rehearse_parts(
    config: ConfigContainer, rank: int, world_size: int, report: Callable[[RehearsedPart], None]
) -> list[Message]:
    """Set up the rank and run a step, with a result of ``resolved_config``; ``report`` gets the cost of each part.

    Returns:
        The messages of the step, in order.
    """
    with one_rank(rank, world_size) as traffic:
        clock = Clock(report, traffic)
        try:
            clock.measure("process groups", lambda: setup.initialize(config), lambda _: _place())
            model = clock.measure("model chunks", lambda: setup.build_model(config), _parameters)
            if config.model.declared.hf_config is not None:
                clock.measure("conversion plan", lambda: _conversion(config, model), str)
            optimizer = clock.measure(
                "optimizer", lambda: _optimizer(config, model), lambda _: "with its state"
            )
            clock.measure("data position", lambda: _first_samples(config), str)
            _checkpoint(clock, model, optimizer, world_size)
            return _step(clock, config, model, optimizer)
        finally:
            parallel_state.destroy_model_parallel()


def _place() -> str:
    ranks = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
        "expert": parallel_state.get_expert_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
    }
    member = len(distributed_c10d._world.pg_map)
    return ", ".join(f"{name} {rank}" for name, rank in ranks.items()) + f"; in {member} groups"


def _parameters(model: list[Any]) -> str:
    count = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    return f"{count / 1e9:.2f} billion parameters on this rank, {len(model)} chunks"


def _conversion(config: ConfigContainer, model: list[Any]) -> str:
    """Other stages are assumed to be like this one, so the number of tasks is an estimate."""
    tasks = AutoBridge.from_hf_config(config.model.declared.hf_config).get_conversion_tasks(model)
    own_tensors = {
        task.global_param_name: task.mapping.hf_names
        for task in tasks
        if task.megatron_module is not None
    }
    count = sum(map(len, own_tensors.values()))
    return f"{count:,} tensors of the checkpoint, in {len(own_tensors):,} of {len(tasks):,} tasks"


def _optimizer(config: ConfigContainer, model: list[Any]) -> Any:
    optimizer = build_optimizer(config.optimizer, model)
    allocate_state(optimizer)
    return optimizer


def _first_samples(config: ConfigContainer) -> str:
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    total = samples_of(config.train)
    micro = config.train.micro_batch_size
    rounds = config.train.global_batch_size // (micro * ranks)
    sampler = MegatronPretrainingSampler(total, 0, micro, rank, ranks)
    ids = [sample_id for part in islice(sampler, rounds) for sample_id in part]
    return f"{len(ids)} of {config.train.global_batch_size} samples of a step, first {ids[0]}, last {ids[-1]}"


def _checkpoint(clock: Clock, model: list[Any], optimizer: Any, world_size: int) -> None:
    def describe() -> dict[str, Any]:
        state = model_io.model_state(model, model_io.MODEL_METADATA)
        state["optimizer"] = sharded_optimizer_state(optimizer, state)
        return state

    def plan_mine(state: dict[str, Any]) -> bytes:
        planner = saving.save_planner()
        planner.set_up_planner(saving.torch_state(state), storage_meta=None, is_coordinator=False)
        return pickle.dumps(planner.create_local_plan())

    @gc_paused()
    def merge() -> Any:
        return create_default_global_save_plan([_slices_only(plan) for _ in range(PLANS)])

    state = clock.measure(
        "checkpoint state", describe, lambda state: f"{len(state['optimizer'])} slices of states"
    )
    plan = clock.measure(
        "checkpoint plan", lambda: plan_mine(state), lambda plan: f"of {len(plan) / 1e3:.0f} kB"
    )
    clock.measure(
        f"rank 0 merges {PLANS} plans",
        merge,
        lambda _: f"it gets {world_size} of them, {len(plan) * world_size / 1e9:.2f} GB",
    )


def _step(clock: Clock, config: ConfigContainer, model: list[Any], optimizer: Any) -> list[Message]:
    replicas = parallel_state.get_data_parallel_world_size()
    count, of_real_step = microbatches(config, replicas)
    config = copy.copy(config)
    config.train = replace(
        config.train, global_batch_size=count * config.train.micro_batch_size * replicas
    )
    return clock.measure(
        "step",
        lambda: messages_of_step(config, model, optimizer),
        lambda step_messages: (
            f"{count} of {of_real_step} microbatches, {len(step_messages):,} messages"
        ),
    )


def _slices_only(plan: bytes) -> Any:
    """A plan without full tensors and objects, which only one rank may have."""
    save_plan = pickle.loads(plan)
    return replace(save_plan, items=[item for item in save_plan.items if item.type.name == "SHARD"])


def _line(part: RehearsedPart) -> str:
    line = (
        f"{part.name:<24}{part.wall:>9.2f}{part.cpu:>9.2f}{part.memory:>9.0f}{part.received:>10.1f}"
    )
    return f"{line}  {part.facts}".rstrip()


def microbatches(config: ConfigContainer, replicas: int) -> tuple[int, int]:
    """Count the microbatches of a rehearsed and of a real step: after two per stage, the schedule repeats."""
    of_real_step = config.train.global_batch_size // (config.train.micro_batch_size * replicas)
    return min(of_real_step, 2 * config.model.pipeline_model_parallel_size), of_real_step


def messages_of_step(config: ConfigContainer, model: list[Any], optimizer: Any) -> list[Message]:
    """The messages of one training step with ``config``'s batch, in their order."""
    connect(model, optimizer, config.ddp, config.dist.align_grad_reduce)
    run = Run(
        config=config,
        origins=Origins({}),
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        tokenizer=None,
        forward_step=forward_step,
        callbacks=CallbackManager([]),
        train_batches=[repeat(_batch(config)) for _ in model],
    )
    experts = config.model.num_moe_experts
    with recorded_messages(
        (config.model.moe_router_topk or 1) / experts if experts else 1.0
    ) as messages:
        train_step(run)
    return messages


def _batch(config: ConfigContainer) -> dict[str, Any]:
    shape = config.train.micro_batch_size, config.dataset.seq_length
    tokens = torch.zeros(shape, dtype=torch.long, device="cpu")
    mask = torch.ones(shape, device="cpu")
    return {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": tokens,
        "loss_mask": mask,
        "attention_mask": None,
    }


def message_table(messages: Sequence[Message]) -> Iterator[str]:
    """Messages by kind and group, those with the most bytes first."""
    kinds: dict[tuple[str, str, int], list[int]] = {}
    for message in messages:
        kinds.setdefault((message.kind, message.group, message.ranks), []).append(message.bytes)
    rows = [("times", "MB each", "GB", "ranks", "messages")]
    for (kind, group, ranks), sizes in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        low = f"{min(sizes) / 1e6:.3g}"
        high = f"{max(sizes) / 1e6:.3g}"
        span = low if low == high else f"{low} to {high}"
        name = group.lower().removesuffix("_group").replace("_", " ")
        rows.append(
            (f"{len(sizes):,}", span, f"{sum(sizes) / 1e9:.3g}", str(ranks), f"{kind}, {name}")
        )
    yield from columns(rows)
