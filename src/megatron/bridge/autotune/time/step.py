# SPDX-License-Identifier: Apache-2.0
"""Predict the time of a training step: layers, pipeline, data-parallel communication and the optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.bridge.autotune.time.collectives import CollectiveGroup
from megatron.bridge.autotune.time.kernels import Roofline
from megatron.bridge.autotune.time.layer import layer_time
from megatron.bridge.autotune.time.schedule import Pipeline
from megatron.bridge.autotune.time.simulate import PassSpan, PassTimes, makespan, simulate
from megatron.bridge.autotune.time.work import Cost, LayerSettings, LayerShape, operations_per_token

# Ends of the interval that contains the measured step in about 80 of 100 cases, as multiples of the predicted step, for
# dense models and mixtures of experts: about where 10 and 90 % of published steps are (docs/tuner.md).
INTERVAL = {False: (0.88, 1.20), True: (0.88, 1.47)}

# Bytes that AdamW reads and writes per parameter that a rank owns: gradient, fp32 weight and two moments
# (16 read, 12 written), the bf16 weight (2), and the gradient again for its norm and its scale (8).
OPTIMIZER_BYTES = 38

FIXED = 5e-3  # seconds outside of kernels: reading the loss and the gradient norm, logging, loading the next batch


@dataclass(frozen=True)
class Chunk:
    """Layers of one virtual stage."""

    layers: tuple[LayerShape, ...]  # in order
    embedding: bool = False  # whether the chunk has the embedding
    losses: int = 0  # number of output layers and losses: 0, or 1 plus one for each multi-token prediction layer


Plan = tuple[tuple[Chunk, ...], ...]  # the chunks of each pipeline stage


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step other than its layers."""

    pipeline: Pipeline  # the schedule
    run: LayerSettings  # sizes that decide a layer's work, without recomputation
    # fraction of each layer's forward pass that is recomputed, by its shape and its index in its chunk
    recompute: Callable[[LayerShape, int], float]
    vocabulary: int  # rows of the output layer on a rank
    embedding_weights: (
        int  # parameters of the embedding on a rank, same as those of the output layer
    )
    tied: bool  # whether embedding and output layer share their weight
    world_size: int  # GPUs
    replicas: int  # ranks that hold the same dense weights
    expert_replicas: int  # ranks that hold the same experts
    sharded: bool  # the optimizer's state is sharded over replicas
    bucket: int  # parameters in one message of gradients or weights
    gradient: int  # bytes of a gradient in messages
    parameter: int  # bytes of a weight in messages
    overlap_gradients: bool  # whether gradients are reduced during the backward pass
    overlap_parameters: bool  # whether weights are gathered during the forward pass
    overlap_messages: bool  # whether messages between stages overlap with passes
    launches_kernels: bool  # whether the CPU launches each kernel, without CUDA graphs
    tokens: int  # of all GPUs in a step


@dataclass(frozen=True)
class Prediction:
    seconds: float  # of a step
    low: float  # the measured step is slower than this in about nine of ten cases
    high: float  # the measured step is faster than this in about nine of ten cases
    split: dict[str, float]  # seconds by kind on the busiest stage; they add up to ``seconds``
    busy: tuple[float, ...]  # seconds of each stage in forward and backward passes
    tokens_per_second: float  # of all GPUs
    operations: float  # of the model in a step on all GPUs, without recomputation
    mfu: float  # fraction of the bf16 peak that ``operations`` reach
    times: PassTimes  # of the passes, for the timeline
    pipeline: Pipeline  # their schedule

    @property
    def bubble(self) -> float:
        """Fraction of the step in which the busiest stage is idle."""
        return self.split["bubble"] / self.seconds

    def scaled(self, factor: float) -> "Prediction":
        """Return the same step with all times multiplied by ``factor``."""
        longer = {name: getattr(self, name) * factor for name in ("seconds", "low", "high")}
        split = {kind: seconds * factor for kind, seconds in self.split.items()}
        rates = {name: getattr(self, name) / factor for name in ("tokens_per_second", "mfu")}
        return replace(self, split=split, **longer, **rates)

    def timeline(self) -> list[PassSpan]:
        return simulate(self.pipeline, self.times)


def predict_step(
    plan: Plan,
    setting: StepSettings,
    kernels: Roofline,
    span: Callable[[Pipeline, PassTimes], float] = makespan,
) -> Prediction:
    """Predict the time of a step; ``plan`` contains the layers of all stages.

    ``span`` computes the seconds of the pipeline: ``makespan`` simulates, ``bound`` estimates.
    """
    different = {id(chunk): chunk for chunks in plan for chunk in chunks}
    known = {key: _chunk_cost(chunk, setting, kernels) for key, chunk in different.items()}
    costs = [[known[id(chunk)] for chunk in chunks] for chunks in plan]
    times = PassTimes(
        forward=tuple(tuple(forward.total for forward, _ in chunks) for chunks in costs),
        backward=tuple(tuple(backward.total for _, backward in chunks) for chunks in costs),
        message=_pipeline_message_time(setting, kernels),
        blocking=not (setting.overlap_messages and kernels.overlaps)
        and setting.pipeline.stages > 1,
    )
    stages = setting.pipeline.stages
    busy = tuple(times.busy(stage) * setting.pipeline.microbatches for stage in range(stages))
    passes = _microbatch_cost(costs, busy, kernels.crowding) * setting.pipeline.microbatches
    split = passes.parts()
    # if processes share cores, other processes compute while a stage waits, but not while it sends
    messages = 2 * setting.pipeline.chunks * setting.pipeline.microbatches * times.blocking
    sending = 0.0 if kernels.crowding == 1.0 else messages * times.message
    split["bubble"] = max(span(setting.pipeline, times) - passes.total, sending)
    split |= _times_after_passes(plan, setting, kernels, times)
    return _make_prediction(plan, setting, kernels, times, busy, split)


def _microbatch_cost(
    costs: list[list[tuple[Cost, Cost]]], busy: tuple[float, ...], crowding: float
) -> Cost:
    """Return the cost of a microbatch on the busiest stage, or the average cost if processes share cores."""
    both = [sum((forward + backward for forward, backward in chunks), Cost()) for chunks in costs]
    if crowding == 1.0:
        return both[max(range(len(busy)), key=busy.__getitem__)]
    return (sum(both, Cost()) * (1 / len(both))).slowed(crowding)


def _make_prediction(
    plan: Plan,
    setting: StepSettings,
    kernels: Roofline,
    times: PassTimes,
    busy: tuple[float, ...],
    split: dict[str, float],
) -> Prediction:
    seconds = sum(split.values())
    has_experts = any(
        layer.experts for chunks in plan for chunk in chunks for layer in chunk.layers
    )
    low, high = INTERVAL[has_experts]
    operations = model_operations(plan, setting)
    return Prediction(
        seconds=seconds,
        low=seconds * low,
        high=seconds * high,
        split=split,
        busy=busy,
        tokens_per_second=setting.tokens / seconds,
        operations=operations,
        mfu=operations / seconds / (kernels.card.bf16 * setting.world_size),
        times=times,
        pipeline=setting.pipeline,
    )


def model_operations(plan: Plan, setting: StepSettings) -> float:
    """Return the operations of a step on all GPUs: three times those of the forward pass."""
    run = setting.run
    operations = 0.0
    for chunks in plan:
        for chunk in chunks:
            operations += (
                sum(operations_per_token(layer, run) for layer in chunk.layers) * run.tensor
            )
            operations += chunk.losses * 2 * setting.vocabulary * run.hidden * run.tensor
    return 3 * operations * setting.tokens


def _chunk_cost(chunk: Chunk, setting: StepSettings, kernels: Roofline) -> tuple[Cost, Cost]:
    forward, backward = _end_cost(chunk, setting, kernels)
    runs: dict[tuple[LayerShape, float], int] = {}
    for index, layer in enumerate(chunk.layers):
        key = (layer, setting.recompute(layer, index))
        runs[key] = runs.get(key, 0) + 1
    for (layer, again), count in runs.items():
        cost = layer_time(
            layer, replace(setting.run, recompute=again) if again else setting.run, kernels
        )
        forward = forward + cost.forward * count
        backward = backward + cost.backward * count
    slowest = kernels.slowest(setting.world_size)
    forward, backward = forward.slowed(slowest), backward.slowed(slowest)
    if setting.launches_kernels:
        forward_host, backward_host = _host_seconds(runs, kernels)
        forward = _wait_for_host(forward, forward_host)
        backward = _wait_for_host(backward, backward_host)
    return forward, backward


def _host_seconds(
    runs: dict[tuple[LayerShape, float], int], kernels: Roofline
) -> tuple[float, float]:
    """Return the CPU seconds in which the layers' passes are launched, from layers and recomputed shares to counts."""
    forward = backward = 0.0
    for (layer, recomputed), count in runs.items():
        layer_forward = kernels.host(layer, "forward")
        forward += count * layer_forward
        backward += count * (kernels.host(layer, "backward") + recomputed * layer_forward)
    return forward, backward


def _wait_for_host(cost: Cost, host: float) -> Cost:
    return replace(cost, host=max(0.0, host - cost.total))


def _end_cost(chunk: Chunk, setting: StepSettings, kernels: Roofline) -> tuple[Cost, Cost]:
    """Return the cost of the embedding, and of the output layer (in bf16) with the loss."""
    run = setting.run
    forward = Cost()
    backward = Cost()
    if chunk.embedding:
        moved = kernels.moved(3 * run.tokens * run.hidden * run.number, kernels=3)
        forward = forward + Cost(memory=moved)
        backward = backward + Cost(memory=2 * moved)
    if chunk.losses:
        product = kernels.matrix(run.tokens, setting.vocabulary, run.hidden, quantized=False)
        logits = kernels.moved(12 * run.tokens * setting.vocabulary, kernels=8)
        operations = 2.0 * run.tokens * setting.vocabulary * run.hidden
        last = kernels.measured("ends forward", operations, Cost(matrix=product, memory=logits))
        forward = forward + last * chunk.losses
        last = kernels.measured(
            "ends backward", operations, Cost(matrix=2 * product, memory=logits / 2)
        )
        backward = backward + last * chunk.losses
    return forward, backward


def _pipeline_message_time(setting: StepSettings, kernels: Roofline) -> float:
    if setting.pipeline.stages == 1:
        return 0.0
    run = setting.run
    size = run.between * run.hidden * run.number
    return kernels.links.send(size, setting.world_size // setting.pipeline.stages)


def stage_weights(
    chunks: tuple[Chunk, ...], setting: StepSettings, frozen: bool = False
) -> tuple[float, float]:
    """Return a rank's trained parameters, or all with ``frozen``: dense parameters, then parameters of experts."""
    layers = [layer for chunk in chunks for layer in chunk.layers]
    parts = [1.0 if frozen else layer.trained for layer in layers]
    dense = sum(layer.weights * part for layer, part in zip(layers, parts, strict=True))
    experts = sum(layer.expert_weights * part for layer, part in zip(layers, parts, strict=True))
    experts *= setting.run.local_experts
    trained = parts[0] if parts else 1.0
    ends = sum(chunk.embedding for chunk in chunks) + sum(chunk.losses > 0 for chunk in chunks)
    if setting.tied and setting.pipeline.stages == 1:
        ends = 1
    return dense + (ends * setting.embedding_weights if trained == 1.0 else 0.0), experts


def _times_after_passes(
    plan: Plan, setting: StepSettings, kernels: Roofline, times: PassTimes
) -> dict[str, float]:
    """Return the times after the last pass, on the stage where they are longest."""
    times_by_stage = [
        _after_stage(stage, chunks, setting, kernels, times) for stage, chunks in enumerate(plan)
    ]
    longest = max(times_by_stage, key=lambda split: sum(split.values()))
    return longest | {"other": FIXED}


def _after_stage(
    stage: int,
    chunks: tuple[Chunk, ...],
    setting: StepSettings,
    kernels: Roofline,
    times: PassTimes,
) -> dict[str, float]:
    links = kernels.links
    run = setting.run
    dense, experts = stage_weights(chunks, setting)
    group = CollectiveGroup(setting.replicas, run.tensor)
    expert_group = CollectiveGroup(setting.expert_replicas, run.expert_tensor * run.expert)
    gather = links.all_gather if setting.sharded else links.all_reduce
    parts = ((dense, group), (experts, expert_group))
    hidden_behind = sum(times.backward[stage]) if setting.overlap_gradients else None
    reduce = _exposed_time(gather, parts, setting.gradient, setting.bucket, hidden_behind)
    hidden_behind = sum(times.forward[stage]) if setting.overlap_parameters else None
    spread = (
        _exposed_time(links.all_gather, parts, setting.parameter, setting.bucket, hidden_behind)
        if setting.sharded
        else 0.0
    )
    owned = dense / (setting.replicas if setting.sharded else 1)
    owned += experts / (setting.expert_replicas if setting.sharded else 1)
    return {
        "gradients": reduce,
        "parameters": spread,
        "optimizer": kernels.moved(OPTIMIZER_BYTES * owned, kernels=20) * kernels.crowding,
    }


def _exposed_time(
    gather: Callable[[float, CollectiveGroup], float],
    parts: tuple[tuple[float, CollectiveGroup], ...],
    bytes_per_parameter: int,
    bucket: int,
    hidden_behind: float | None,
) -> float:
    """Return the exposed time of messages in buckets of parameters; all but the last message overlap."""
    if hidden_behind is None:
        return sum(gather(size * bytes_per_parameter, group) for size, group in parts)
    messages = [
        (max(size / bucket, 1.0), gather(min(size, bucket) * bytes_per_parameter, group))
        for size, group in parts
    ]
    return max(
        sum(count * seconds for count, seconds in messages) - hidden_behind,
        sum(seconds for _, seconds in messages),
    )
