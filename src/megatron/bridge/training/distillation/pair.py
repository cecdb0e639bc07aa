# SPDX-License-Identifier: Apache-2.0
"""A chunk of the student and the chunk of the teacher that runs beside it, in one pipeline schedule.

What one stage sends to the next is one tensor: the student's activations, the teacher's, and those hidden states
of both that are compared on the last stage, side by side. So both models are always at the same microbatch,
under any schedule, and no stage keeps more than the microbatches in flight. Gradients of the teacher's part are
zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.conversion import exchange

Side = Literal["student", "teacher"]
Place = tuple[Side, int]
"""A model, and one of its layers, from 1."""

_PAIR = "distillation_pair"


@dataclass
class Pair:
    """What runs on one stage.

    Attributes:
        student: The bare chunk.
        teacher: The teacher's chunk of the same stage.
        places: Layers of both whose outputs are compared.
        stage_of: The stage that computes each of them.
        stage: This one.
        widths: Of a hidden state of each model, the student first.
        states: Outputs of layers that this stage has computed or received for the microbatch that runs.
    """

    student: MegatronModule
    teacher: MegatronModule
    places: Sequence[Place]
    stage_of: dict[Place, int]
    stage: int
    widths: dict[Side, int]
    states: dict[Place, Tensor] = field(default_factory=dict[Place, Tensor])

    def run(self, model: MegatronModule, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The outputs of student and teacher for one microbatch.

        Args:
            model: The student as the schedule knows it, wrapped.
            inputs: Arguments of both models.

        Returns:
            Logits [batch, sequence, part of the vocabulary] on the last stage, elsewhere hidden states.
        """
        self.states = {}
        self._receive()
        ours = model(**inputs)
        with torch.no_grad():
            theirs = self.teacher(**inputs)
        return ours, theirs

    def joined(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """What goes to the next stage, [sequence, batch, all widths]."""
        parts = [ours, theirs, *(self.states[place] for place in self._sent(self.stage))]
        return torch.cat([part.to(ours.dtype) for part in parts], dim=-1)

    def take_states(self) -> dict[Place, Tensor]:
        """The hidden states of the microbatch that just ran; they are not kept."""
        states, self.states = self.states, {}
        return states

    def _receive(self) -> None:
        """Share out what the stage before sent; the schedule gave all of it to the student."""
        received: Tensor | None = bare_decoder(self.student).input_tensor
        if received is None:
            return
        places = self._sent(self.stage - 1)
        widths = [*self.widths.values(), *(self.widths[side] for side, _ in places)]
        ours, theirs, *states = (part.contiguous() for part in received.split(widths, dim=-1))
        set_input(self.student, ours)
        set_input(self.teacher, theirs.detach())
        self.states = dict(zip(places, states, strict=True))

    def _sent(self, stage: int) -> list[Place]:
        return [place for place in self.places if self.stage_of[place] <= stage]


def bind(students: Sequence[MegatronModule], teachers: Sequence[MegatronModule], layers: dict[int, int]) -> None:
    """Put the teacher's chunks beside the student's.

    They are no submodules: wrappers, optimizer and checkpoints do not see them.

    Args:
        students: Bare chunks of this rank.
        teachers: Chunks of the teacher, one for each.
        layers: Layer of the student -> layer of the teacher.
    """
    places: list[Place] = [("student", layer) for layer in layers]
    places.extend(("teacher", layer) for layer in dict.fromkeys(layers.values()))
    for student, wrapped in zip(students, teachers, strict=True):
        teacher = unwrap(wrapped)
        here = [*_watched("student", student, places), *_watched("teacher", teacher, places)]
        stage_of = {place: stage for stage, found in enumerate(exchange.all_stages(here)) for place in found}
        widths: dict[Side, int] = {"student": width(student), "teacher": width(teacher)}
        pair = Pair(student, wrapped, places, stage_of, exchange.stage(), widths)
        student.__dict__[_PAIR] = pair
        _watch(pair, "student", student)
        _watch(pair, "teacher", teacher)


def pair_of(model: nn.Module) -> Pair | None:
    """The pair of a chunk, wrapped or not; None where no teacher runs."""
    return unwrap(model).__dict__.get(_PAIR)


def set_input(model: nn.Module, received: Tensor) -> None:
    """Give a chunk what the stage before computed."""
    unwrap(model).set_input_tensor([received])  # type: ignore[operator]


def bare_decoder(model: nn.Module) -> Any:
    """The layers of a chunk."""
    return unwrap(model).decoder


def width(model: nn.Module) -> int:
    """Of a hidden state."""
    config: Any = unwrap(model).config
    return config.hidden_size


def _layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    return ((layer.layer_number, layer) for layer in bare_decoder(model).layers)


def _watched(side: Side, model: nn.Module, places: Sequence[Place]) -> list[Place]:
    return [(side, number) for number, _ in _layers(model) if (side, number) in places]


def _watch(pair: Pair, side: Side, model: nn.Module) -> None:
    for number, layer in _layers(model):
        if (side, number) in pair.places:
            layer.register_forward_hook(_keeper(pair, (side, number)))


def _keeper(pair: Pair, place: Place) -> Any:
    def keep(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        pair.states[place] = outputs[0] if isinstance(outputs, tuple) else outputs

    return keep
