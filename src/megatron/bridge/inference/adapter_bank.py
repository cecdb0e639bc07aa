# SPDX-License-Identifier: Apache-2.0
"""Use several adapters on one base model: each text of a step uses its own adapter."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.bridge.backends.decoding.step import padded_rows
from megatron.bridge.inference.scheduler import StepPlan
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.peft import layers
from megatron.bridge.peft.base import bare_chunks
from megatron.bridge.peft.lora import LowRankPEFT
from megatron.bridge.peft.targets import TOWER
from megatron.bridge.utils.errors import UserError, did_you_mean


class AdapterNames:
    """The adapters of a model, and the rows of the current step that use each adapter."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.parts: list[tuple[str, Tensor | None, int]] = []
        """Name, rows (None for all rows), and the number of rows that are not padding."""

    def check(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            have = (
                f"one of {', '.join(self.names)}"
                if self.names
                else "none: this model has no named adapters"
            )
            raise UserError(f"adapter_name={name!r}{did_you_mean(name, self.names)}: give {have}")

    def begin(self, plan: StepPlan, device: torch.device) -> None:
        """Prepare for a forward pass over ``plan``."""
        rows: dict[str | None, list[int]] = {}
        for work in plan.work:
            rows.setdefault(work.text.adapter, []).extend(range(work.row, work.row + work.count))
        alone = len(rows) == 1
        self.parts = [
            (name, None if alone else _pad_rows(row_indices, device), len(row_indices))
            for name, row_indices in rows.items()
            if name is not None
        ]


def _pad_rows(rows: list[int], device: torch.device) -> Tensor:
    """Pad the rows to a number for which matrix products compute each row identically in any batch."""
    return torch.tensor(rows + [0] * (padded_rows(len(rows)) - len(rows)), device=device)


class AdapterBank(nn.Module):
    """The adapters of one layer, with the interface of a single adapter; an adapter may not change this layer."""

    scales_outputs = False

    def __init__(self, names: AdapterNames, adapters: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = names
        self._index = {name: index for index, name in enumerate(adapters)}
        self._adapters = nn.ModuleList(adapters.values())

    def forward(
        self, base: Tensor, x: Tensor, counts: Sequence[int] | None, weights: Sequence[Tensor]
    ) -> Tensor:
        """Add each row's adapter to ``base``, the layer's outputs [rows, 1, outputs] without adapters."""
        # PyTorch uses different kernels for a transposed view and for rows selected from it
        x = x.reshape(len(x), -1)[:, None]
        for name, rows, count in self._names.parts:
            if name not in self._index:
                continue
            adapter = self._adapters[self._index[name]]
            if rows is None:
                return adapter(base, x, counts, weights)
            part = adapter(base[rows], x[rows], counts, weights)
            base = base.index_copy(0, rows[:count], part[:count])
        return base


def add_adapters(
    chunks: Sequence[Any], adapters: Mapping[str, str], add: Callable[[Path], None]
) -> AdapterNames:
    """Attach several adapters (directories by name) to this rank's chunks; ``add`` attaches and loads one."""
    names = AdapterNames(tuple(adapters))
    adapters_by_module: dict[Any, dict[str, tuple[Any, nn.Module]]] = {}
    for name, path in adapters.items():
        add(Path(path))
        for chunk in bare_chunks(list(chunks)):
            info = chunk_info(chunk)
            method = info.peft
            info.peft = None
            if not isinstance(method, LowRankPEFT) or method.modules_to_save:
                raise UserError(
                    f"adapter {name} replaces complete layers: merge it, or load it alone with --adapter"
                )
            for module in list(layers.adapted(chunk)):
                _refuse_alone(name, module)
                adapters_by_module.setdefault(module, {})[name] = (
                    module.adapted_site,
                    module.adapter,
                )
                layers.detach(module)
    for by_name in adapters_by_module.values():
        site = next(iter(by_name.values()))[0]
        layers.attach(
            site, AdapterBank(names, {name: adapter for name, (_, adapter) in by_name.items()})
        )
    return names


def _refuse_alone(name: str, module: Any) -> None:
    site = module.adapted_site
    biased = module.adapter.scales_outputs and getattr(module, "bias", None) is not None
    if (
        site.experts is not None
        or ".layers." not in site.name
        or site.name.startswith(TOWER)
        or biased
    ):
        layer_kind = "experts" if site.experts is not None else "this layer"
        raise UserError(
            f"adapter {name} changes {site.name}, and {layer_kind} cannot have a different "
            "adapter for each text: load it "
            "alone with --adapter, or merge it"
        )
