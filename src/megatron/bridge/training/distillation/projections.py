# SPDX-License-Identifier: Apache-2.0
"""Linear projections from the student's hidden states to the teacher's width, trained with the student.

They are on the last pipeline stage, replicated on tensor-parallel ranks, and are saved and resumed with the model.
Conversion ignores them, and a checkpoint with projections loads into a model without them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron.bridge.checkpoint.model_io import DISTILLATION, unwrap
from megatron.bridge.models.conversion.adapters.adapted_layers import ADAPTER


def add_projections(
    chunks: Sequence[MegatronModule], layers: Iterable[int], widths: tuple[int, int], seed: int
) -> None:
    """Add a projection for each of the student's ``layers`` to the last stage; ``widths`` are of both models.

    Its initial values depend on ``seed`` alone, not on the parallel sizes.
    """
    last: Any = chunks[-1]
    if last.post_process:
        maps = nn.ModuleDict({str(layer): _projection(widths, seed + layer, last.config) for layer in layers})
        # named like an adapter, so that conversion ignores it
        last.add_module(DISTILLATION, nn.ModuleDict({ADAPTER: maps}))


def projected(model: nn.Module, layer: int, states: Tensor) -> Tensor:
    """The student's hidden states, projected to the teacher's width."""
    maps: Any = getattr(unwrap(model), DISTILLATION, None)
    return states if maps is None else maps[ADAPTER][str(layer)](states)


def _projection(widths: tuple[int, int], seed: int, config: Any) -> nn.Linear:
    made = nn.Linear(*widths, bias=False, dtype=config.params_dtype)
    values = torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        made.weight.copy_(values / widths[0] ** 0.5)  # keeps the scale of the components
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(made.weight)
    made.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] - each rank sees a part
    return made
