# SPDX-License-Identifier: Apache-2.0
"""Load received weights into a transformers model in place."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.inference.refit.stream import WeightInfo
from megatron.bridge.utils.errors import UserError, first_few

# transformers stores the experts of a layer in one parameter, checkpoints store them separately
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class TransformersReceiver:
    """Load tensors into the parameters of ``model`` in place, so that existing references see them."""

    def __init__(self, model: Any) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._state: dict[str, Tensor] = parameters | dict(model.named_buffers())
        self._needed = {name: id(parameter) for name, parameter in parameters.items()}

    def begin(self, infos: Sequence[WeightInfo], partial: bool = False) -> None:
        """Prepare for tensors.

        Args:
            partial: only changed tensors arrive; the rest keep their values.

        Raises:
            UserError: the tensors do not match the model; no value has changed.
        """
        filled: set[int] = set()
        problems: list[str] = []
        self._expected = {info.name for info in infos}
        for info in infos:
            target = self._target(info.name)
            if target is None or tuple(target.shape) != info.shape:
                problems.append(f"{info.name} {list(info.shape)}")
            filled |= {id(tensor) for tensor in self._parameters_of(info.name)}
        missing = [
            name
            for name, identity in self._needed.items()
            if identity not in filled and not partial
        ]
        if problems or missing:
            difference = (
                f"have {first_few(problems)} in addition"
                if problems
                else f"lack {first_few(missing)}"
            )
            raise UserError(
                f"the weights of the trainer {difference}: transformers stores this model "
                "differently, so load an export"
            )

    @torch.no_grad()
    def receive(self, name: str, weight: Tensor) -> None:
        """Take a tensor, which the caller may overwrite after the call."""
        target = self._target(name)
        assert target is not None
        target.copy_(weight)
        self._expected.discard(name)

    def finish(self) -> None:
        if self._expected:
            raise UserError(
                f"the weights ended before {first_few(sorted(self._expected))}: send all tensors of begin()"
            )

    def _target(self, name: str) -> Tensor | None:
        if name in self._state:
            return self._state[name]
        expert_name = _EXPERT.fullmatch(name)
        (stack, *_) = [*self._parameters_of(name), None]
        if expert_name is None or stack is None:
            return None
        expert = stack.detach()[int(expert_name[2])]
        if expert_name[3] == "down":
            return expert
        return expert.chunk(2)[0 if expert_name[3] == "gate" else 1]

    def _parameters_of(self, name: str) -> Iterator[Tensor]:
        if name in self._state:
            yield self._state[name]
        elif expert_name := _EXPERT.fullmatch(name):
            kind = "down_proj" if expert_name[3] == "down" else "gate_up_proj"
            if f"{expert_name[1]}.{kind}" in self._state:
                yield self._state[f"{expert_name[1]}.{kind}"]
