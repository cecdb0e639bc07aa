# SPDX-License-Identifier: Apache-2.0
"""Run a chunk of the student and a chunk of the teacher together in one pipeline schedule.

A stage sends one tensor to the next: the concatenated activations of the student and of the teacher, and those
hidden states of both that are compared on the last stage. So both models process the same microbatch under any
schedule, and no stage keeps more than the microbatches in flight. The gradients of the teacher's part are zero.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.bridge.checkpoint.model_io import DISTILLATION, unwrap
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import ADAPTER
from megatron.bridge.models.conversion.engine import exchange

Side = Literal["student", "teacher"]
WatchedLayer = tuple[Side, int]  # a model and one of its layers, numbered from 1


@dataclass
class ChunkPair:
    """The chunks of student and teacher on one stage."""

    student: MegatronModule  # the student's unwrapped chunk
    teacher: MegatronModule  # the teacher's chunk on the same stage
    places: Sequence[WatchedLayer]  # layers of both models whose outputs are compared
    stage_of: dict[WatchedLayer, int]  # the stage that computes each of these layers
    stage: int
    widths: dict[Side, int]  # hidden size of each model, the student first
    # outputs of compared layers that this stage has computed or received for the current microbatch
    states: dict[WatchedLayer, Tensor] = field(default_factory=dict[WatchedLayer, Tensor])

    def run(self, model: MegatronModule, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """What student and teacher make of a microbatch: logits [batch, sequence, shard], before them hidden states."""
        self.states = {}
        self._receive()
        ours = model(**inputs)
        with torch.no_grad():
            theirs = self.teacher(**inputs)
        return ours, theirs

    def joined(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """The tensor for the next stage, [sequence, batch, sum of widths]."""
        parts = [ours, theirs, *(self.states[place] for place in self._sent(self.stage))]
        return torch.cat([part.to(ours.dtype) for part in parts], dim=-1)

    def take_states(self) -> dict[WatchedLayer, Tensor]:
        """Return and release the hidden states of the last microbatch."""
        states = self.states
        self.states = {}
        return states

    def _receive(self) -> None:
        """Split the tensor of the previous stage, which the schedule passed to the student."""
        received: Tensor | None = bare_decoder(self.student).input_tensor
        if received is None:
            return
        places = self._sent(self.stage - 1)
        widths = [*self.widths.values(), *(self.widths[side] for side, _ in places)]
        ours, theirs, *states = (part.contiguous() for part in received.split(widths, dim=-1))
        set_input(self.student, ours)
        set_input(self.teacher, theirs.detach())
        self.states = dict(zip(places, states, strict=True))

    def _sent(self, stage: int) -> list[WatchedLayer]:
        return [place for place in self.places if self.stage_of[place] <= stage]


def bind(
    students: Sequence[MegatronModule], teachers: Sequence[MegatronModule], layers: dict[int, int]
) -> None:
    """Attach the teacher's chunks to the student's unwrapped ones.

    They are not submodules, so wrappers, the optimizer and checkpoints ignore them. ``layers`` gives the teacher's
    layer that each layer of the student learns from.
    """
    places: list[WatchedLayer] = [("student", layer) for layer in layers]
    places.extend(("teacher", layer) for layer in dict.fromkeys(layers.values()))
    for student, wrapped in zip(students, teachers, strict=True):
        teacher = unwrap(wrapped)
        here = [*_watched("student", student, places), *_watched("teacher", teacher, places)]
        stage_of = {
            place: stage
            for stage, found in enumerate(exchange.all_gather_stages(here))
            for place in found
        }
        widths: dict[Side, int] = {"student": width(student), "teacher": width(teacher)}
        pair = ChunkPair(student, wrapped, places, stage_of, exchange.stage(), widths)
        chunk_info(student).student_teacher = pair
        _watch(pair, "student", student)
        _watch(pair, "teacher", teacher)


def pair_of(model: nn.Module) -> ChunkPair | None:
    """The pair of a chunk, wrapped or not; None without a teacher."""
    return chunk_info(model).student_teacher


def set_input(model: nn.Module, received: Tensor) -> None:
    """Set the input of a chunk from the previous stage."""
    unwrap(model).set_input_tensor([received])  # type: ignore[operator]


def bare_decoder(model: nn.Module) -> Any:
    return unwrap(model).decoder


def width(model: nn.Module) -> int:
    config: Any = unwrap(model).config
    return config.hidden_size


def _layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    return ((layer.layer_number, layer) for layer in bare_decoder(model).layers)


def _watched(side: Side, model: nn.Module, places: Sequence[WatchedLayer]) -> list[WatchedLayer]:
    return [(side, number) for number, _ in _layers(model) if (side, number) in places]


def _watch(pair: ChunkPair, side: Side, model: nn.Module) -> None:
    for number, layer in _layers(model):
        if (side, number) in pair.places:
            layer.register_forward_hook(partial(_keep, pair, (side, number)))


def _keep(
    pair: ChunkPair, layer: WatchedLayer, _module: nn.Module, _inputs: Any, outputs: Any
) -> None:
    pair.states[layer] = outputs[0] if isinstance(outputs, tuple) else outputs


def add_projections(
    chunks: Sequence[MegatronModule], layers: Iterable[int], widths: tuple[int, int], seed: int
) -> None:
    """Add a projection for each of the student's ``layers`` to the last stage; ``widths`` are of both models.

    Its initial values depend on ``seed`` alone, not on the parallel sizes. It is replicated on tensor-parallel
    ranks, trained with the student, and saved and resumed with the model. Conversion ignores it, and a checkpoint
    with projections loads into a model without them.
    """
    last: Any = chunks[-1]
    if last.post_process:
        maps = nn.ModuleDict(
            {str(layer): _projection(widths, seed + layer, last.config) for layer in layers}
        )
        # named like an adapter, so that conversion ignores it
        last.add_module(DISTILLATION, nn.ModuleDict({ADAPTER: maps}))


def projected(model: nn.Module, layer: int, states: Tensor) -> Tensor:
    """The student's hidden states, projected to the teacher's width."""
    maps: Any = getattr(unwrap(model), DISTILLATION, None)
    return states if maps is None else maps[ADAPTER][str(layer)](states)


def _projection(widths: tuple[int, int], seed: int, config: Any) -> nn.Linear:
    projection = nn.Linear(*widths, bias=False, dtype=config.params_dtype)
    values = torch.randn(projection.weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        projection.weight.copy_(values / widths[0] ** 0.5)  # keeps the scale of the components
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(projection.weight)
    projection.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] - each rank sees a part
    return projection
