# SPDX-License-Identifier: Apache-2.0
"""Several trained adapters on one frozen base: each row of a microbatch goes through one of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn

from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import in_adapter
from megatron.bridge.peft import layers, targets
from megatron.bridge.peft.base import bare_chunks
from megatron.bridge.peft.hf_names import HFModules
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.targets import TOWER, Site
from megatron.bridge.utils.distributed import all_gather_object
from megatron.bridge.utils.errors import UserError

AdaptersOfLayers = dict[Any, tuple[Site, dict[str, nn.Module]]]
"""For each adapted layer, its site and its adapters by name."""


class RowChoice:
    """The rows of the next forward pass that use each adapter."""

    def __init__(self) -> None:
        self.rows_of: dict[str, Tensor | None] = {}
        """Name -> indices of its rows; None for all rows."""
        self.row_count = 0

    def choose(self, names: Sequence[str], device: torch.device | int) -> None:
        """Set the adapter of each row.

        Args:
            names: The name of the adapter of each row.
            device: Device of the activations.
        """
        self.row_count = len(names)
        indices: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            indices.setdefault(name, []).append(index)
        if len(indices) == 1:
            self.rows_of = {names[0]: None}
            return
        self.rows_of = {name: torch.tensor(rows, device=device) for name, rows in indices.items()}


class RowAdapters(nn.Module):
    """The adapters of one layer, with the interface of a single adapter.

    Rows are copied out and in by index. A mask would multiply the numbers of other rows by zero, which leaves NaN.
    """

    scales_outputs = False

    def __init__(self, choice: RowChoice, by_name: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._choice = choice
        self.by_name = dict(by_name)

    def forward(
        self, base: Tensor, x: Tensor, counts: Sequence[int] | None, weights: Sequence[Tensor]
    ) -> Tensor:
        """Add the adapter of each row to ``base``.

        Args:
            base: The layer's outputs without adapters, [sequence, rows, outputs].
            x: The layer's inputs, [sequence, rows, inputs].
            counts: None, because experts are refused.
            weights: The layer's weight.
        """
        for name, rows in self._choice.rows_of.items():
            adapter = self.by_name.get(name)
            if adapter is None:
                continue
            if rows is None:
                return adapter(base, x, counts, weights)
            if x.ndim != 3 or x.shape[1] != self._choice.row_count:
                raise UserError(
                    f"adapter {name!r} changes a layer with inputs of shape {list(x.shape)}, not [sequence, "
                    f"{self._choice.row_count} rows, inputs]: leave the layer out, or use micro_batch_size=1"
                )
            rows_of_base = base.index_select(1, rows)
            rows_of_x = x.index_select(1, rows)
            adapted_rows = adapter(rows_of_base, rows_of_x, counts, weights)
            base = base.index_copy(1, rows, adapted_rows)
        return base


class AdapterSet:
    """The named adapters of a model's chunks.

    Args:
        chunks: This rank's chunks, with the weights of the base and without adapters.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.chunks = bare_chunks(chunks)
        self.choice = RowChoice()
        self.methods: dict[str, LoRA] = {}
        self._of_layers: AdaptersOfLayers = {}
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def add(self, name: str, method: LoRA) -> None:
        """Add an adapter; all ranks of a replica call this.

        Raises:
            UserError: The adapter cannot be trained next to others; nothing changes.
        """
        if name in self.methods:
            raise UserError(f"adapter {name!r} exists: remove it first, or choose another name")
        _check_method(name, method)
        with self.set_aside():
            try:
                method(self.chunks)
                new_adapters = self._take_adapters(name)
            finally:
                for chunk in self.chunks:
                    chunk_info(chunk).peft = None
                    for layer in list(layers.adapted(chunk)):
                        layers.detach(layer)
            for layer, (site, adapter) in new_adapters.items():
                _, by_name = self._of_layers.setdefault(layer, (site, {}))
                by_name[name] = adapter
            self.methods[name] = method

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        self.check(name)
        with self.set_aside():
            del self.methods[name]
            for layer, (_, by_name) in list(self._of_layers.items()):
                by_name.pop(name, None)
                if not by_name:
                    del self._of_layers[layer]

    def rename(self, name: str, new_name: str) -> None:
        """Give an adapter another name, in place of the adapter that has it, if any."""
        self.check(name)
        if new_name in self.methods:
            self.remove(new_name)
        self.methods[new_name] = self.methods.pop(name)
        with self.set_aside():
            for _, by_name in self._of_layers.values():
                if name in by_name:
                    by_name[new_name] = by_name.pop(name)

    def check(self, name: str) -> None:
        """Refuse an unknown name."""
        if name not in self.methods:
            names = ", ".join(self.methods) or "none"
            raise UserError(f"adapter {name!r} does not exist: use one of these ({names})")

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return this rank's parameters of an adapter, in the order of the model."""
        parameters: list[nn.Parameter] = []
        for chunk in self.chunks:
            for layer in layers.adapted(chunk):
                if name in layer.adapter.by_name:
                    parameters += layer.adapter.by_name[name].parameters()
        return parameters

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Make the model one with this adapter only, as ``PEFT`` leaves it, inside the context."""
        self.check(name)
        with self.set_aside():
            for layer, (site, by_name) in self._of_layers.items():
                del layer
                if name in by_name:
                    layers.attach(site, by_name[name])
            for chunk in self.chunks:
                info = chunk_info(chunk)
                info.peft = self.methods[name]
                info.trained = frozenset(
                    key for key, _ in chunk.named_parameters() if in_adapter(key)
                )
            try:
                yield
            finally:
                for chunk in self.chunks:
                    info = chunk_info(chunk)
                    info.peft = None
                    info.trained = frozenset()
                    for layer in list(layers.adapted(chunk)):
                        layers.detach(layer)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Remove all adapters from the layers inside the context, and attach those of ``_of_layers`` after it."""
        for layer in self._of_layers:
            layers.detach(layer)
        try:
            yield
        finally:
            for site, by_name in self._of_layers.values():
                layers.attach(site, RowAdapters(self.choice, by_name))

    def _take_adapters(self, name: str) -> dict[Any, tuple[Site, nn.Module]]:
        new_adapters: dict[Any, tuple[Site, nn.Module]] = {}
        for chunk in self.chunks:
            for layer in layers.adapted(chunk):
                _check_site(name, layer.adapted_site)
                # masters of the optimizer in fp32, whatever the base has
                new_adapters[layer] = (layer.adapted_site, layer.adapter.float())
        return new_adapters


def _check_method(name: str, method: LoRA) -> None:
    if type(method) is not LoRA:
        raise UserError(
            f"adapter {name!r} is {type(method).__name__}: only LoRA can be trained next to other adapters"
        )
    settings = {
        "modules_to_save": method.modules_to_save,
        "base_precision": method.base_precision,
        "loraplus_lr_ratio": method.loraplus_lr_ratio,
        "dropout": method.dropout,
    }
    for key, value in settings.items():
        if value:
            raise UserError(
                f"adapter {name!r} has {key}={value}, which would depend on the other adapters or change the base: "
                "leave it out, or train this adapter alone"
            )


@dataclass(frozen=True)
class AdaptableLayers:
    """Targets of an adapter, each for that layer in all blocks: ``self_attn.q_proj``.

    Attributes:
        attention: Linear layers of attention and of other mixers of tokens.
        mlp: Linear layers of MLPs.
        output: The output layer, unless its weight is the embedding's.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    output: tuple[str, ...]

    @classmethod
    def of(cls, chunks: Sequence[nn.Module]) -> "AdaptableLayers":
        """Return the layers that an adapter may change next to others; all ranks call this together.

        Layers have their names in transformers, where parts of fused layers have separate factors.
        """
        own_layers = list(_name_layers(chunks))
        names: dict[str, set[str]] = {"attention": set(), "mlp": set(), "output": set()}
        for layers_of_rank in all_gather_object(own_layers):
            for kind, name in layers_of_rank:
                names[kind].add(name)
        return cls(**{kind: tuple(sorted(named)) for kind, named in names.items()})


def _name_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each target of this rank."""
    bare = bare_chunks(chunks)
    modules = HFModules(bare[0].config)
    for chunk in bare:
        for site in targets.sites(chunk):
            if not _has_rows(site) or isinstance(site.module, Router):
                continue
            if site.name == targets.OUTPUT_LAYER:
                if not chunk.share_embeddings_and_output_weights:
                    yield "output", site.name
                continue
            candidates = LoRA().candidates(site, modules)
            parts = [candidate for candidate in candidates if candidate.is_part]
            if not all(part.can_be_apart for part in parts):
                parts = []
            names = [name for part in parts or candidates[:1] for name in part.hf_names]
            for name in names or [site.name]:
                kind = "mlp" if ".mlp." in site.name else "attention"
                yield kind, name.split(".layers.")[-1].partition(".")[2]


def _has_rows(site: Site) -> bool:
    """Return whether the inputs of a layer are rows of the batch."""
    is_in_decoder = ".layers." in site.name and not site.name.startswith(TOWER)
    is_expert = site.experts is not None or ".local_experts." in site.name
    return site.name == targets.OUTPUT_LAYER or (is_in_decoder and not is_expert)


def _check_site(name: str, site: Site) -> None:
    if not _has_rows(site):
        raise UserError(
            f"adapter {name!r} changes {site.name}, whose inputs are not rows of the batch: leave it out of "
            "target_modules, or train this adapter alone"
        )
