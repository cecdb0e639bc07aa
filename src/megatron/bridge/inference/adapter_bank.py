# SPDX-License-Identifier: Apache-2.0
"""Use several adapters on one base model: each text of a step uses its own adapter."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from megatron.bridge.peft.targets import OUTPUT_LAYER, TOWER, Site
from megatron.bridge.utils.errors import UserError, did_you_mean


class AdapterNames:
    """The adapters of a model, and the rows of the current step that use each adapter."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.parts: list[tuple[str, Tensor | None, int]] = []
        """Name, rows (None for all rows), and the number of rows that are not padding."""
        self.logit_parts: list[tuple[str, Tensor | None, int]] = []
        """The same among the rows of the output layer, which computes only some of the rows."""
        self.row_masks: dict[str, Tensor] = {}
        """In replayed steps instead of ``parts``: a boolean [rows, 1, 1] for each adapter."""
        self.changes = 0
        """Number of times that the adapters of the layers were replaced."""

    def add(self, name: str) -> None:
        """Let texts choose another adapter."""
        self.names = (*self.names, name)

    def close(self, name: str) -> None:
        """Refuse new texts with an adapter."""
        self.names = tuple(other for other in self.names if other != name)

    def check(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            have = (
                f"one of {', '.join(self.names)}"
                if self.names
                else "none: this model has no named adapters"
            )
            raise UserError(f"adapter_name={name!r}{did_you_mean(name, self.names)}: give {have}")

    def begin(self, plan: StepPlan, device: torch.device, logit_rows: Sequence[int]) -> None:
        """Prepare for a forward pass over ``plan``.

        Args:
            plan: The step.
            device: Device of the activations.
            logit_rows: Rows whose logits the output layer computes.
        """
        names = {
            row: work.text.adapter
            for work in plan.work
            for row in range(work.row, work.row + work.count)
        }
        self.row_masks = {}
        self.parts = _group_rows(list(names.values()), list(names), device)
        logit_names = [names[row] for row in logit_rows]
        self.logit_parts = _group_rows(logit_names, range(len(logit_names)), device)

    def begin_for_all_rows(self, name: str | None) -> None:
        """Prepare for a forward pass in which all rows have the adapter ``name``, or none."""
        self.row_masks = {}
        self.parts = [] if name is None else [(name, None, 0)]
        self.logit_parts = self.parts

    def begin_with_masks(self, names: Sequence[str], numbers: Tensor) -> None:
        """Prepare for a forward pass that can be replayed with other adapters for the rows.

        Args:
            names: The adapters that a row may have.
            numbers: [rows], the index in ``names`` of each row's adapter, or another number for none. It may change
                in place before a replay.
        """
        self.parts = []
        self.logit_parts = []
        self.row_masks = {
            name: (numbers == index)[:, None, None] for index, name in enumerate(names)
        }


def _group_rows(
    names: Sequence[str | None], rows: Sequence[int], device: torch.device
) -> list[tuple[str, Tensor | None, int]]:
    """Return the rows of each adapter, given the adapter of each row."""
    rows_of: dict[str | None, list[int]] = {}
    for name, row in zip(names, rows, strict=True):
        rows_of.setdefault(name, []).append(row)
    alone = len(rows_of) == 1
    return [
        (name, None if alone else _pad_rows(indices, device), len(indices))
        for name, indices in rows_of.items()
        if name is not None
    ]


def _pad_rows(rows: list[int], device: torch.device) -> Tensor:
    """Pad the rows to a number for which matrix products compute each row identically in any batch."""
    return torch.tensor(rows + [0] * (padded_rows(len(rows)) - len(rows)), device=device)


class AdapterBank(nn.Module):
    """The adapters of one layer, with the interface of a single adapter; an adapter may not change this layer.

    Args:
        names: The adapters of the model, and the rows of each.
        adapters: The adapters of the layer.
        is_output: Whether it is the output layer.
    """

    scales_outputs = False

    def __init__(
        self, names: AdapterNames, adapters: Mapping[str, nn.Module], is_output: bool
    ) -> None:
        super().__init__()
        self._names = names
        self._is_output = is_output
        self.by_name = dict(adapters)
        self._adapters = nn.ModuleList(adapters.values())

    def forward(
        self, base: Tensor, x: Tensor, counts: Sequence[int] | None, weights: Sequence[Tensor]
    ) -> Tensor:
        """Add each row's adapter to ``base``, the layer's outputs [rows, 1, outputs] without adapters."""
        # PyTorch uses different kernels for a transposed view and for rows selected from it
        x = x.reshape(len(x), -1)[:, None]
        for name, mask in self._names.row_masks.items():
            if name in self.by_name:
                adapted = self.by_name[name](base, x, counts, weights)
                base = torch.where(mask, adapted, base)
        parts = self._names.logit_parts if self._is_output else self._names.parts
        for name, rows, count in parts:
            adapter = self.by_name.get(name)
            if adapter is None:
                continue
            if rows is None:
                return adapter(base, x, counts, weights)
            part = adapter(base[rows], x[rows], counts, weights)
            base = base.index_copy(0, rows[:count], part[:count])
        return base


AddAdapter = Callable[[Path, Callable[[Any], None]], None]
"""Attaches and loads the adapter at a path, unless the function refuses its method."""
AdaptersOfLayers = dict[Any, tuple[Site, dict[str, nn.Module]]]
"""For each layer with adapters, its site and its adapters by name."""


def add_adapters(
    chunks: Sequence[Any], adapters: Mapping[str, str], add: AddAdapter
) -> AdapterNames:
    """Attach several adapters (directories by name) to this rank's chunks; ``add`` attaches and loads one."""
    names = AdapterNames(tuple(adapters))
    adapters_of_layers: AdaptersOfLayers = {}
    for name, path in adapters.items():
        _load_one(chunks, name, Path(path), add, adapters_of_layers)
    _attach_banks(adapters_of_layers, names)
    return names


def add_adapter(
    chunks: Sequence[Any], names: AdapterNames, name: str, path: Path, add: AddAdapter
) -> None:
    """Attach one more adapter; if it cannot be used, the layers are as before.

    Args:
        chunks: This rank's chunks.
        names: The adapters that they have.
        name: Name of the new adapter.
        path: Its directory.
        add: Attaches and loads the adapter at a path.
    """
    adapters_of_layers = _detach_banks(chunks)
    before = {layer: (site, dict(by_name)) for layer, (site, by_name) in adapters_of_layers.items()}
    try:
        _load_one(chunks, name, path, add, adapters_of_layers)
    except BaseException:
        _detach_all(chunks)
        _attach_banks(before, names)
        raise
    _attach_banks(adapters_of_layers, names)


def remove_adapter(chunks: Sequence[Any], names: AdapterNames, name: str) -> None:
    """Remove an adapter that no text uses."""
    adapters_of_layers = _detach_banks(chunks)
    for _, by_name in adapters_of_layers.values():
        by_name.pop(name, None)
    left = {layer: entry for layer, entry in adapters_of_layers.items() if entry[1]}
    _attach_banks(left, names)


def has_single_adapter(chunks: Sequence[Any]) -> bool:
    """Return whether a layer of this rank has an adapter that applies to all texts."""
    return any(
        not isinstance(module.adapter, AdapterBank)
        for chunk in bare_chunks(list(chunks))
        for module in layers.adapted(chunk)
    )


def _load_one(
    chunks: Sequence[Any],
    name: str,
    path: Path,
    add: AddAdapter,
    adapters_of_layers: AdaptersOfLayers,
) -> None:
    """Load an adapter, and move it from the layers into ``adapters_of_layers``."""
    add(path, partial(_refuse_complete_layers, name))
    for chunk in bare_chunks(list(chunks)):
        chunk_info(chunk).peft = None
        for module in list(layers.adapted(chunk)):
            _refuse_alone(name, module)
            _, by_name = adapters_of_layers.setdefault(module, (module.adapted_site, {}))
            by_name[name] = module.adapter.eval()
            layers.detach(module)


def _refuse_complete_layers(name: str, method: Any) -> None:
    """Refuse an adapter that would change the base model."""
    if not isinstance(method, LowRankPEFT) or method.modules_to_save:
        raise UserError(
            f"adapter {name} replaces complete layers: merge it, or load it alone with --adapter"
        )


def _detach_banks(chunks: Sequence[Any]) -> AdaptersOfLayers:
    """Remove the adapters of all layers and return them."""
    adapters_of_layers: AdaptersOfLayers = {}
    for chunk in bare_chunks(list(chunks)):
        for module in list(layers.adapted(chunk)):
            adapters_of_layers[module] = (module.adapted_site, dict(module.adapter.by_name))
            layers.detach(module)
    return adapters_of_layers


def _detach_all(chunks: Sequence[Any]) -> None:
    """Remove what a failed load has attached."""
    for chunk in bare_chunks(list(chunks)):
        chunk_info(chunk).peft = None
        for module in list(layers.adapted(chunk)):
            layers.detach(module)


def _attach_banks(adapters_of_layers: AdaptersOfLayers, names: AdapterNames) -> None:
    names.changes += 1
    for site, by_name in adapters_of_layers.values():
        layers.attach(site, AdapterBank(names, by_name, site.name == OUTPUT_LAYER))


def _refuse_alone(name: str, module: Any) -> None:
    site = module.adapted_site
    biased = module.adapter.scales_outputs and getattr(module, "bias", None) is not None
    has_rows = ".layers." in site.name or site.name == OUTPUT_LAYER
    if site.experts is not None or not has_rows or site.name.startswith(TOWER) or biased:
        layer_kind = "experts" if site.experts is not None else "this layer"
        raise UserError(
            f"adapter {name} changes {site.name}, and {layer_kind} cannot have a different "
            "adapter for each text: load it "
            "alone with --adapter, or merge it"
        )
