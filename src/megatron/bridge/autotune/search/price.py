# SPDX-License-Identifier: Apache-2.0
"""Predict memory and time of a candidate from layers that are counted once for each split of their weights."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron.bridge.autotune import activations, meta_model
from megatron.bridge.autotune.forward_memory import forward_bytes
from megatron.bridge.autotune.layers import layer_shape, layers_of
from megatron.bridge.autotune.memory import optimizer_bytes, quantized_bytes
from megatron.bridge.autotune.predict import roofline_of, run_of, setting_of
from megatron.bridge.autotune.profile import Profile
from megatron.bridge.autotune.reserve import Reserve, reserve_of
from megatron.bridge.autotune.search.candidate import NO_RECOMPUTE, Candidate
from megatron.bridge.autotune.time.layer import layer_time
from megatron.bridge.autotune.time.schedule import Pipeline, pipeline_of
from megatron.bridge.autotune.time.simulate import PassTimes, bound
from megatron.bridge.autotune.time.step import Chunk, Plan, Prediction, predict_step, stage_weights
from megatron.bridge.autotune.time.work import LayerShape
from megatron.bridge.autotune.vision_tower import TowerCounts
from megatron.bridge.models import model_provider
from megatron.bridge.models.model_provider import silenced
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.precision import without_quantization

# With this many layers per chunk, the output layer and the loss cost too little to divide layers unevenly.
_MANY = 4
_SAME = 1e-6  # stages whose times differ by less are equal


@dataclass(frozen=True)
class Price:
    """The predicted cost of a candidate: its layers per stage, bytes of each stage's fullest GPU, and its step."""

    candidate: Candidate
    memory: tuple[int, ...]
    prediction: Prediction

    @property
    def fullest(self) -> int:
        return max(self.memory)

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def seconds_per_token(self) -> float:
        return 1 / self.prediction.tokens_per_second


@dataclass(frozen=True)
class CountedLayers:
    """The layers of a model, split over tensor and expert tensor ranks, with a single expert per layer."""

    decoder: tuple[tuple[LayerShape, Any], ...]
    ahead: tuple[tuple[LayerShape, Any], ...]


class Pricer:
    """Predicts the costs of candidates, whose values replace those of a resolved config, on GPUs named ``card``.

    Args:
        config: The config.
        world_size: Number of GPUs.
        card: Their name in ``gpus.GPUS``.
        profile: Measured times of a device, which replace its data sheet.
        layers: Layers that other pricers have counted, which this one reads and adds to. They must be of configs that
            differ only in layout, batch, precision and GPUs, and have the same sequence length.
    """

    def __init__(
        self,
        config: ConfigContainer,
        world_size: int,
        card: str,
        profile: Profile | None = None,
        layers: dict[tuple[int, int], "CountedLayers"] | None = None,
    ) -> None:
        self.config = config
        self.world_size = world_size
        self.card = card
        self.profile = profile
        self.length = config.dataset.seq_length  # of a sample, for attention
        self.factor = 1.0  # measured over predicted time
        self.further_losses = 0  # output layers and losses beside those of the config's layers
        self.imbalance = 1.0  # tokens of the busiest expert rank divided by the average
        self.microbatches: Callable[[Candidate], int] | None = (
            None  # replaces the microbatches of the config's batch
        )
        self._layers: dict[tuple[int, int], CountedLayers] = {} if layers is None else layers
        self._counted: dict[Any, activations.LayerCounts] = {}
        self._towers: dict[int, TowerCounts] = {}
        self._divided: dict[Candidate, list[int] | None] = {}
        self._shapes: dict[LayerShape, LayerShape] = {}

    def use_layers(self, layers: CountedLayers) -> None:
        """Price models whose layers this package does not build, with one tensor rank."""
        self._layers[1, 1] = layers

    @cached_property
    def kernels(self) -> Any:
        return roofline_of(self.config, self.card, self.profile, self.world_size)

    def shapes(self, candidate: Candidate) -> set[tuple[int, int, int]]:
        """Return tokens, rows and columns of the matrix products of a candidate's layers, forward and backward."""
        run = run_of(self.configured(candidate))
        shapes: set[tuple[int, int, int]] = set()
        for layer, _ in self._of(candidate).decoder:
            sizes = [(run.tokens, matrix) for matrix in layer.matrices]
            sizes += [(int(run.between), matrix) for matrix in layer.router]
            sizes += [
                (max(1, int(run.chosen / run.local_experts)), matrix) for matrix in layer.experts
            ]
            shapes |= {(tokens, matrix.rows, matrix.columns) for tokens, matrix in sizes}
        return shapes | {(tokens, columns, rows) for tokens, rows, columns in shapes}

    def configured(self, candidate: Candidate) -> ConfigContainer:
        """Return the config with the values of ``candidate``; blocks without layout settings are shared."""
        config = copy.copy(self.config)
        for block in ("model", "train", "ddp"):
            setattr(config, block, copy.copy(getattr(config, block)))
        for key, value in candidate.settings().items():
            block, _, name = key.partition(".")
            setattr(getattr(config, block), name, value)
        if candidate.batch:
            config.train.global_batch_size = self.config.train.global_batch_size * candidate.batch
        model: Any = config.model
        model.microbatch_group_size_per_vp_stage = candidate.pipeline
        model.overlap_p2p_comm = candidate.virtual > 1
        replicas = self.world_size // (candidate.tensor * candidate.pipeline)
        can_shard = config.optimizer.optimizer == "adam" and not config.dist.use_torch_fsdp2
        sharded = config.ddp.use_distributed_optimizer or can_shard
        config.ddp.use_distributed_optimizer = sharded and replicas > 1
        return config

    def states(self, candidate: Candidate, config: ConfigContainer) -> float:
        """Return a lower bound of the bytes of weights, gradients and optimizer state on the fullest stage."""
        return sum(self.parts(candidate, config))

    def parts(
        self, candidate: Candidate, config: ConfigContainer | None = None
    ) -> tuple[float, float, float]:
        """Return the bytes of the layers' weights, gradients and optimizer state on an average stage."""
        config = config or self.configured(candidate)
        shapes = [shape for shape, _ in self._of(candidate).decoder]
        local = (config.model.num_moe_experts or 0) / candidate.expert
        held = [
            (shape.weights / candidate.pipeline, shape.expert_weights * local / candidate.pipeline)
            for shape in shapes
        ]
        trained = [
            (d * shape.trained, e * shape.trained)
            for (d, e), shape in zip(held, shapes, strict=True)
        ]
        return self._state_bytes(np.sum(held, 0), np.sum(trained, 0), candidate, config)

    def memory(self, candidate: Candidate) -> tuple[int, ...] | None:
        """Return the bytes of each stage's fullest GPU, or None if there are too few layers for the stages."""
        divided = self.divide(candidate)
        if divided is None:
            return None
        return self._memory(divided[0], self.configured(divided[0]), *self._plan(*divided))

    def price(
        self,
        candidate: Candidate,
        span: Callable[[Pipeline, PassTimes], float] = bound,
        memory: tuple[int, ...] | None = None,
    ) -> Price | None:
        """Predict time and, unless given, memory of a candidate; None if there are too few layers for the stages."""
        divided = self.divide(candidate)
        if divided is None:
            return None
        candidate, counts = divided
        config = self.configured(candidate)
        setting = setting_of(config, self.world_size)
        setting = replace(setting, run=replace(setting.run, imbalance=self.imbalance))
        if self.microbatches is not None:
            setting = replace(
                setting,
                pipeline=replace(setting.pipeline, microbatches=self.microbatches(candidate)),
            )
        plan, modules = self._plan(candidate, counts)
        memory = memory or self._memory(candidate, config, plan, modules)
        return Price(
            candidate, memory, predict_step(plan, setting, self.kernels, span).scaled(self.factor)
        )

    def divide(self, candidate: Candidate) -> tuple[Candidate, list[int]] | None:
        """Return the candidate with its pipeline layout, and the layers per chunk; None if there are too few layers."""
        if candidate.layout is not None:
            return candidate, [part.count("t") for part in candidate.layout.split("|")]
        parts = candidate.pipeline * candidate.virtual
        layers = self._of(candidate)
        count = len(layers.decoder)
        ahead = len(layers.ahead)
        is_hybrid = hasattr(
            self.config.model, "has_own_stages"
        )  # its pattern defines the stages, or they are equal
        if parts == 1 or (
            count % parts == 0 and not ahead and (is_hybrid or count // parts >= _MANY)
        ):
            return candidate, [count // parts] * parts
        if count < parts - 2 or is_hybrid:
            return None
        if count == parts - 2:  # as Llama 3.1 405B was trained: 126 layers in 128 chunks
            layers_per_chunk = [0, *[1] * count, 0]
            return replace(candidate, layout=spelled(layers_per_chunk, ahead)), layers_per_chunk
        key = replace(candidate, pipeline=parts, virtual=1, recompute=NO_RECOMPUTE, layout=None)
        if key not in self._divided:
            self._divided[key] = self._balanced(candidate, layers, parts)
        layers_per_chunk = self._divided[key]
        if layers_per_chunk is None or (len(set(layers_per_chunk)) == 1 and not ahead):
            return None if layers_per_chunk is None else (candidate, layers_per_chunk)
        return replace(candidate, layout=spelled(layers_per_chunk, ahead)), layers_per_chunk

    def _balanced(
        self, candidate: Candidate, layers: "CountedLayers", parts: int
    ) -> list[int] | None:
        setting = setting_of(self.configured(candidate), self.world_size)
        run = setting.run
        kernels = self.kernels
        times = [_both_totals(layer_time(shape, run, kernels)) for shape, _ in layers.decoder]
        head = 3 * kernels.matrix(run.tokens, setting.vocabulary, run.hidden, quantized=False)
        end = head + sum(
            _both_totals(layer_time(shape, run, kernels)) + head for shape, _ in layers.ahead
        )
        return balanced(times, parts, end)

    def _plan(self, candidate: Candidate, counts: list[int]) -> tuple[Plan, list[list[list[Any]]]]:
        """Return the shapes and the modules of all chunks by stage."""
        layers = self._of(candidate)
        plan: list[list[Chunk]] = [[] for _ in range(candidate.pipeline)]
        equal: dict[Any, Chunk] = {}
        modules: list[list[list[Any]]] = [[] for _ in range(candidate.pipeline)]
        start = 0
        for position, count in enumerate(counts):
            inside = layers.decoder[start : start + count]
            last = position == len(counts) - 1
            inside = (*inside, *(layers.ahead if last else ()))
            start += count
            stage = position % candidate.pipeline
            chunk = Chunk(
                tuple(shape for shape, _ in inside),
                position == 0,
                (1 + len(layers.ahead) + self.further_losses) if last else 0,
            )
            key = (
                *map(id, chunk.layers),
                chunk.embedding,
                chunk.losses,
            )  # faster than hashing all layers
            plan[stage].append(equal.setdefault(key, chunk))
            modules[stage].append([module for _, module in inside])
        return tuple(map(tuple, plan)), modules

    def _memory(
        self,
        candidate: Candidate,
        config: ConfigContainer,
        plan: Plan,
        modules: list[list[list[Any]]],
    ) -> tuple[int, ...]:
        setting = setting_of(config, self.world_size)
        sizes = replace(activations.sizes_of(config), local_experts=1)
        sizes = replace(sizes, expert_tokens=int(sizes.expert_tokens * self.imbalance))
        pipeline = pipeline_of(config, self.world_size)
        stage_bytes = []
        different = {
            id(module): module for stages in modules for inside in stages for module in inside
        }
        counts = {module_id: self._count(module, sizes) for module_id, module in different.items()}
        for stage, chunks in enumerate(plan):
            front = None if stage else self._with_tower
            counted = [
                activations.ChunkCounts([counts[id(module)] for module in inside], chunk.losses > 0)
                for chunk, inside in zip(chunks, modules[stage], strict=True)
            ]
            if front is not None:
                counted[0] = replace(counted[0], tower=self._count_tower(sizes.image_tokens))
            peak = max(
                moment.total
                for moment in activations.stage_moments(
                    config.model, counted, sizes, pipeline, stage
                )
            )
            tower = (0 if front is None else sum(map(torch.numel, front.vision.parameters())), 0)
            held = np.sum([stage_weights(chunks, setting, frozen=True), tower], 0)
            trained = np.sum([stage_weights(chunks, setting), tower], 0)
            stage_bytes.append(int(sum(self._state_bytes(held, trained, candidate, config)) + peak))
        return tuple(map(self.reserve(candidate, config).around, stage_bytes))

    def reserve(self, candidate: Candidate, config: ConfigContainer | None = None) -> Reserve:
        """Return the memory outside of tensors; CPUs of a profile have no CUDA context and no NCCL."""
        if self.profile is not None and self.profile.cores:
            return Reserve({})
        return reserve_of(config or self.configured(candidate), self.world_size, self.card)

    def forward_only(self, candidate: Candidate) -> int:
        """Return the peak bytes of a forward-only pass without weights."""
        config = self.configured(candidate)
        layers = {id(module): module for _, module in self._of(candidate).decoder}
        sizes = replace(activations.sizes_of(config), local_experts=1)
        return forward_bytes(config.model, list(layers.values()), sizes)

    @cached_property
    def _with_tower(self) -> Any:
        """The full model on one rank if it has a vision tower, else None."""
        return (
            meta_model.whole_model(self.config.model)
            if getattr(self.config.model, "vision", None)
            else None
        )

    def _count_tower(self, tokens: int) -> TowerCounts:
        if tokens not in self._towers:
            self._towers[tokens] = activations.counts_of_tower(self._with_tower, tokens)
        return self._towers[tokens]

    def _count(self, module: Any, sizes: Any) -> activations.LayerCounts:
        key = (id(module), sizes)
        if key not in self._counted:
            self._counted[key] = activations.counts_of_layer(module, sizes)
        return self._counted[key]

    def _state_bytes(
        self, held: np.ndarray, trained: np.ndarray, candidate: Candidate, config: ConfigContainer
    ) -> tuple[float, float, float]:
        """Return the bytes of weights, gradients and optimizer state; arrays hold dense, then expert parameters."""
        model = config.model
        ddp = config.ddp
        bytes_per_element = 2 if model.bf16 or model.fp16 else 4
        copies = quantized_bytes(model)
        gradient = 4 if ddp.grad_reduce_in_fp32 or bytes_per_element == 4 else 2
        replicas = self.world_size // (candidate.tensor * candidate.pipeline)
        expert_ranks = (
            (candidate.expert_tensor or candidate.tensor) * candidate.expert * candidate.pipeline
        )
        expert_replicas = max(1, self.world_size // expert_ranks)
        moments = optimizer_bytes(
            config, torch.bfloat16 if bytes_per_element == 2 else torch.float32
        )
        if not ddp.use_distributed_optimizer:
            replicas = expert_replicas = 1
        owned = trained[0] / replicas + trained[1] / expert_replicas
        return sum(held) * (bytes_per_element + copies), sum(trained) * gradient, moments * owned

    def _of(self, candidate: Candidate) -> CountedLayers:
        key = (candidate.tensor, candidate.expert_tensor or candidate.tensor)
        if key not in self._layers:
            self._layers[key] = self._build(*key)
        return self._layers[key]

    def _build(self, tensor: int, expert_tensor: int) -> CountedLayers:
        """Build the full model on the meta device with one expert; equal layers share one module and one shape."""
        model = meta_model.unsplit(without_quantization(self.config.model))
        for name in ("should_pad_vocab", "make_query_groups_divisible_by"):
            setattr(model, name, getattr(self.config.model, name))
        model.tensor_model_parallel_size = tensor
        model.sequence_parallel = tensor > 1
        if model.num_moe_experts:
            model.expert_model_parallel_size = model.num_moe_experts
            model.expert_tensor_parallel_size = expert_tensor
        with silenced(model_provider):  # each build would warn about missing kernels
            (chunk,) = meta_model.stage_chunks(model, self.config.peft)[0]
        first: dict[LayerShape, Any] = {}
        decoder = []
        ahead = []
        decoder_layers: Any = chunk.decoder
        count = len(decoder_layers.layers)
        for index, layer in enumerate(layers_of(chunk)):
            shape = layer_shape(layer, model.hidden_size, self.length)
            shape = self._shapes.setdefault(shape, shape)
            (decoder if index < count else ahead).append((shape, first.setdefault(shape, layer)))
        return CountedLayers(tuple(decoder), tuple(ahead))


def _both_totals(counts: Any) -> float:
    return counts.forward.total + counts.backward.total


def balanced(times: Sequence[float], parts: int, last: float) -> list[int] | None:
    """Distribute layers so that the slowest part is as fast as possible.

    Args:
        times: Seconds of each layer, in order.
        parts: Number of chunks of all stages.
        last: Seconds of the output layer, the loss, and the multi-token prediction layers.

    Returns:
        The layers per part, at least 1 for all but the last, or None if there are too few layers.

    Example:
        >>> balanced([1.0] * 10, 4, 1.0)
        [3, 3, 3, 1]
    """
    if len(times) < parts - 1 or not parts:
        return None
    low = max([*times, last])
    high = sum(times) + last
    while high > low * (1 + _SAME):
        middle = (low + high) / 2
        low, high = (low, middle) if _fill_parts(times, parts, last, middle) else (middle, high)
    return _fill_parts(times, parts, last, high * (1 + 1e-9))


def _fill_parts(times: Sequence[float], parts: int, last: float, limit: float) -> list[int] | None:
    """Fill parts in order up to ``limit`` seconds, but leave at least one layer for each later part except the last."""
    counts = []
    index = 0
    for part in range(parts):
        end = part == parts - 1
        used = last if end else 0.0
        count = 0
        spare = len(times) - index - max(parts - part - 2, 0)
        while (
            index < len(times)
            and used + times[index] <= limit
            and count < (len(times) if end else spare)
        ):
            used = used + times[index]
            count = count + 1
            index = index + 1
        if used > limit or (not count and not end):
            return None
        counts.append(count)
    return counts if index == len(times) else None


def spelled(counts: Sequence[int], ahead: int) -> str:
    """Return the layout in Megatron-Core's notation: E embedding, t layer, m multi-token prediction, L loss.

    Example:
        >>> spelled([2, 2, 1], 1)
        'Ett|tt|tmL'
        >>> spelled([0, 1, 1, 0], 0)
        'E|t|t|L'
    """
    parts = ["t" * count for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * ahead + "L"
    return "|".join(parts)
