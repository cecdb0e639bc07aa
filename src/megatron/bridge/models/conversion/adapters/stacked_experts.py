# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts that Hugging Face stores in one tensor: as ``peft`` stores them, and one by one.

``peft`` adapts such a parameter (``target_parameters``) with A [experts * rank, inputs], where the ranks of an expert
are neighbors, and B [outputs, rank * experts], where the experts of a rank are neighbors. A module with two adapted
parameters is wrapped twice, so the tensors of the parameter that the module defines first lie under ``base_layer``.

Here, each expert has the name ``<parameter>[<index>]``, and A [rank, inputs] and B [outputs, rank] of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.bridge.utils.errors import UserError

_WRAPPED = ".base_layer"
_EXPERT = re.compile(r"(.+)\[(\d+)\]")
# in the order in which transformers' modules of experts define them
_PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


def expert_module(parameter: str, expert: int) -> str:
    """Return the name of one expert's part of a parameter."""
    return f"{parameter}[{expert}]"


def parameter_of(module: str) -> str | None:
    """Return the parameter of which a module is one expert's part; None for other modules."""
    found = _EXPERT.fullmatch(module)
    return None if found is None else found[1]


def wrapped_modules(parameters: Sequence[str]) -> dict[str, str]:
    """Return parameter -> the module under which ``peft`` stores its factors, given all adapted parameters."""
    by_module: dict[str, list[str]] = {}
    for parameter in parameters:
        module, _, name = parameter.rpartition(".")
        if name not in _PARAMETERS:
            raise UserError(
                f"the adapter of {parameter} has no form in the peft format, which depends on the order of the "
                "parameters in its module: merge it into the model instead"
            )
        by_module.setdefault(module, []).append(name)
    modules: dict[str, str] = {}
    for module, names in by_module.items():
        outermost_first = sorted(names, key=_PARAMETERS.index, reverse=True)
        for depth, name in enumerate(outermost_first):
            modules[f"{module}.{name}"] = module + depth * _WRAPPED
    return modules


def stack_factors(of_experts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return A and B of a parameter as ``peft`` stores them, from A and B of each expert in order."""
    a = torch.cat([a for a, _ in of_experts])
    b = torch.stack([b for _, b in of_experts], dim=-1)
    return a, b.flatten(1)


def unstack_factors(a: Tensor, b: Tensor, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return A and B of each expert; the inverse of ``stack_factors``."""
    of_experts = torch.split(a, rank)
    columns = b.view(len(b), rank, len(of_experts))
    return [(part, columns[..., expert]) for expert, part in enumerate(of_experts)]


def unstack_tensors(
    tensors: Mapping[str, Tensor],
    targets: Any,
    ends: tuple[str, str],
    rank_of: Callable[[str], int],
    directory: Path,
) -> dict[str, Tensor]:
    """Return the tensors of an adapter with those of ``target_parameters`` expert by expert.

    Args:
        tensors: As ``peft`` stores them.
        targets: ``target_parameters`` of the config.
        ends: Endings of the names of A and of B.
        rank_of: Returns the rank of a parameter.
        directory: Of the files, for messages.
    """
    targets = targets or []
    if not isinstance(targets, list) or not all(
        isinstance(name, str) for name in cast("list[Any]", targets)
    ):
        raise UserError(
            f"the adapter {directory} has target_parameters={targets!r}, but it is a list of texts: save it again"
        )
    if not targets:
        return dict(tensors)
    end_a, end_b = (f".{end}" for end in ends)
    roots = {_root(name.removesuffix(end_a)) for name in tensors if name.endswith(end_a)}
    remaining = dict(tensors)
    for root in sorted(roots):
        names = [
            name.rpartition(".")[2] for name in cast("list[str]", targets) if _is_in(root, name)
        ]
        for parameter, module in wrapped_modules([f"{root}.{name}" for name in names]).items():
            a = remaining.pop(f"{module}{end_a}", None)
            b = remaining.pop(f"{module}{end_b}", None)
            rank = rank_of(parameter)
            if a is None or b is None or a.shape[0] != b.shape[-1] or a.shape[0] % rank:
                raise UserError(
                    f"the adapter {directory} has no factors of rank {rank} for each expert of {parameter}, as "
                    f"{module}{end_a} and {module}{end_b}: save it again"
                )
            for expert, (of_a, of_b) in enumerate(unstack_factors(a, b, rank)):
                remaining[f"{expert_module(parameter, expert)}{end_a}"] = of_a.contiguous()
                remaining[f"{expert_module(parameter, expert)}{end_b}"] = of_b.contiguous()
    return remaining


def _root(module: str) -> str:
    """Return a module's name in transformers' model, without what ``peft`` wraps around it."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def _is_in(module: str, target: str) -> bool:
    """Return whether a target is a parameter of ``module``; it may be the end of its name."""
    of_target = target.rpartition(".")[0]
    return not of_target or module == of_target or module.endswith(f".{of_target}")
