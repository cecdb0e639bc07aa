# SPDX-License-Identifier: Apache-2.0
"""Linear maps from the student's hidden states to the teacher's, trained with the student.

They live on the last pipeline stage, whole on each tensor-parallel rank, and are saved and resumed with the model.
They are no part of it: conversion leaves them out, and a checkpoint with them loads into a model without.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.bridge.checkpoint.model_io import DISTILLATION, unwrap
from megatron.bridge.models.conversion.adapted import ADAPTER


def add_projections(
    chunks: Sequence[MegatronModule], layers: Iterable[int], widths: tuple[int, int], seed: int
) -> None:
    """Give the last stage a map for each of the student's ``layers``.

    Args:
        chunks: Bare chunks of the student.
        layers: Numbers of layers.
        widths: Of the student's and of the teacher's hidden states.
        seed: Of the first values, which do not depend on the layout.
    """
    last: Any = chunks[-1]
    if last.post_process:
        maps = nn.ModuleDict({str(layer): _map(widths, seed + layer, last.config) for layer in layers})
        # under the name of what is added to a model, so that conversion passes it by
        last.add_module(DISTILLATION, nn.ModuleDict({ADAPTER: maps}))


def projected(model: nn.Module, layer: int, states: Tensor) -> Tensor:
    """The student's hidden states in the teacher's width."""
    maps: Any = getattr(unwrap(model), DISTILLATION, None)
    return states if maps is None else maps[ADAPTER][str(layer)](states)


def _map(widths: tuple[int, int], seed: int, config: Any) -> nn.Linear:
    made = nn.Linear(*widths, bias=False, dtype=config.params_dtype)
    values = torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        made.weight.copy_(values / widths[0] ** 0.5)  # keeps the size of a component
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(made.weight)
    made.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] - each rank sees a part
    return made
