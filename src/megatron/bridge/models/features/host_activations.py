# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory without Transformer Engine: what layers save for the backward pass is copied there.

``cpu_offloading`` and ``cpu_offloading_num_layers`` are Megatron-Core's settings, which only Transformer Engine's
layers support. On the ``torch`` backend, PyTorch's hooks on saved tensors do the same, also with pipeline stages and
selective recomputation. Values do not change. On a machine without a GPU the copies stay in the same memory.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.bridge.models.features.feature import LayerFeature

MIN_ELEMENTS = 1024
"""Smaller tensors stay where they are: a copy would take longer than the memory is worth."""


class HostActivationsFeature(LayerFeature):
    pricing = {"cpu_offloading": "counted", "cpu_offloading_num_layers": "counted"}

    def notes(self, config: Any) -> Iterator[str]:
        if config.cpu_offloading:
            yield (
                "copies of activations to the host are not in the predicted time, and without a GPU they take the "
                "memory that they free"
            )

    def check(self, config: Any) -> Iterator[str]:
        for name in (
            "cpu_offloading_weights",
            "cpu_offloading_double_buffering",
            "cpu_offloading_retain_pinned_cpu_buffers",
        ):
            if config.cpu_offloading and config.backend == "torch" and getattr(config, name):
                yield f"{name}=True needs Transformer Engine: leave it out, or use its backend"

    def derive(self, config: Any) -> None:
        """Keep the settings from Megatron-Core, which would ask for Transformer Engine and one stage."""
        if config.backend == "torch" and config.cpu_offloading:
            config.layers_on_host = config.cpu_offloading_num_layers
            config.cpu_offloading = False

    def change_model(self, model: nn.Module, config: Any) -> None:
        count = getattr(config, "layers_on_host", 0)
        layers: Any = getattr(model.get_submodule("decoder"), "layers", [])
        for layer in list(layers)[:count]:
            layer.forward = with_activations_on_host(layer.forward)


def with_activations_on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` of a layer with its activations in host memory until the backward pass."""

    @wraps(forward)
    def on_host(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        copies = _HostCopies()
        try:
            with saved_tensors_hooks(copies.pack, unpack):
                return forward(*inputs, **options)
        finally:
            copies.forget_tensors()  # autograd keeps ``pack``, and with it this object

    return on_host


class _HostCopies:
    """The copies of a forward pass of a layer. A tensor that several operations save is copied once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor, torch.device]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps for ``tensor``: itself, or its copy and its device."""
        if _stays(tensor):
            return tensor
        key = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor._version,  # an operation in place makes another value at the same address
        )
        if key not in self._copies:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(tensor.detach())
            # the tensor is kept as long as the forward pass, so that its address is not used again
            self._copies[key] = (tensor.detach(), copy, tensor.device)
        _, copy, device = self._copies[key]
        return copy, device

    def forget_tensors(self) -> None:
        """Let the tensors go that were copied."""
        self._copies.clear()


def _stays(tensor: Tensor) -> bool:
    """Return whether a tensor takes no memory of its own, or little: weights and their views, and small tensors."""
    base: Any = tensor if tensor._base is None else tensor._base
    is_weight = isinstance(base, nn.Parameter) or hasattr(base, "main_grad")
    return is_weight or tensor.numel() < MIN_ELEMENTS or tensor.layout != torch.strided


def unpack(packed: Any) -> Tensor:
    """Return the tensor of which ``_HostCopies.pack`` made ``packed``, on the device where it was."""
    if isinstance(packed, Tensor):
        return packed
    copy, device = packed
    if device.type == "cpu":
        return copy
    return copy.to(device, non_blocking=True)


def layers_on_host(config: Any) -> int:
    """Return how many of the first layers of a chunk have their activations in host memory, on any backend."""
    if config.cpu_offloading:  # by Transformer Engine
        return config.cpu_offloading_num_layers
    return getattr(config, "layers_on_host", 0)
