# SPDX-License-Identifier: Apache-2.0
"""Adapted layers: a layer keeps its parameters, names and class, and gains a child ``adapter``.

The layer becomes an instance of a subclass of its class. Nothing is wrapped, so Megatron-Core, checkpoints and
conversion plans find the base weight in its usual place.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn

from megatron.bridge.models.conversion.adapters.adapted_layers import (
    ADAPTER,
    AdaptedModule,
    LowRankPart,
)
from megatron.bridge.peft.targets import Site


class _Adapted:
    """The methods that a layer's class gains; not a base class, because an instance cannot gain a second base."""

    adapter: Any  # ``LoRAAdapter`` or what has the same methods
    adapted_site: Site
    adapter_is_on: bool  # only on instances; False lets the layer compute without its adapter

    def merged_weight(self, weight: Tensor) -> Tensor:
        """The weight of a model without adapters that computes the same; collective over its shards' ranks."""
        index = self._index(weight)
        return (
            weight
            if index is None
            else self.adapter.merged_weights(self.adapted_site.weights)[index].to(weight.dtype)
        )

    def low_rank_parts(self, weight: Tensor) -> list[LowRankPart]:
        """The adapter's contribution to ``weight``; nothing for a bias or a norm."""
        index = self._index(weight)
        return [] if index is None else self.adapter.parts(index)

    def _outputs(
        self,
        base: Tensor,
        bias: Tensor | None,
        x: Tensor,
        counts: Sequence[int] | None,
        weights: Sequence[Tensor],
    ) -> Tensor:
        """Add the adapter to the layer's own outputs, which include ``bias``."""
        if not vars(self).get("adapter_is_on", True):
            return base
        if bias is None or not self.adapter.scales_outputs:
            return self.adapter(base, x, counts, weights)
        return self.adapter(base - bias, x, counts, weights) + bias

    def _index(self, parameter: Tensor) -> int | None:
        weights = self.adapted_site.weights
        return next((index for index, weight in enumerate(weights) if weight is parameter), None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The states of the layer, without the child, and of the adapter."""
        with _set_aside(self):  # type: ignore[arg-type]
            state = _base_class(self).sharded_state_dict(self, prefix, sharded_offsets, metadata)  # type: ignore[misc]
        state |= self.adapter.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata)
        return state


class _AdaptedLinear(_Adapted):
    def forward(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """(outputs, bias to be added later)."""
        base, bias, normalized = _unpack_outcome(
            _base_class(self).forward(self, x, *args, **options), x
        )  # type: ignore[misc]
        weight = options.get("weight", args[0] if args and isinstance(args[0], Tensor) else None)
        weights = self.adapted_site.weights if weight is None else [weight]
        gathered = (
            base.shape[-1] != self.adapted_site.weights[0].shape[0]
            and self.adapted_site.kind == "column"
        )
        if gathered:
            rows = base.shape[-1] // self.adapted_site.group.size()
            base = base.narrow(-1, self.adapted_site.group.rank() * rows, rows)
        out = self._outputs(base, _included_bias(self, bias), normalized, None, weights)
        return (
            gather_from_tensor_model_parallel_region(out, self.adapted_site.group)
            if gathered
            else out
        ), bias


class _AdaptedExperts(_Adapted):
    def forward(
        self, x: Tensor, tokens_per_expert: Sequence[int], *args: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """(outputs [tokens, out], biases to be added later)."""
        base, later = _base_class(self).forward(self, x, tokens_per_expert, *args, **options)  # type: ignore[misc]
        counts = [int(count) for count in tokens_per_expert]
        # one for each token, which only some adapters are worth
        biases = _included_biases(self, later, counts) if self.adapter.scales_outputs else None
        return self._outputs(base, biases, x, counts, self.adapted_site.weights), later


class _AdaptedPlain(_Adapted):
    def forward(self, x: Tensor) -> Tensor:
        """Outputs of a layer that is PyTorch's own."""
        base = _base_class(self).forward(self, x)  # type: ignore[misc]
        return self._outputs(base, getattr(self, "bias", None), x, None, self.adapted_site.weights)


class _AdaptedRouter(_Adapted):
    def gating(self, x: Tensor) -> Tensor:
        """Logits [tokens, experts], in the dtype that the router computes in."""
        base = _base_class(self).gating(self, x)  # type: ignore[misc]
        return self._outputs(
            base, getattr(self, "bias", None), x.to(base.dtype), None, self.adapted_site.weights
        )


def attach(site: Site, adapter: nn.Module) -> None:
    module = cast(Any, site.module)
    mixin: type = _AdaptedLinear
    if site.experts is not None:
        mixin = _AdaptedExperts
    elif isinstance(module, Router):
        mixin = _AdaptedRouter
    elif isinstance(module, nn.Linear):
        mixin = _AdaptedPlain
        for parameter in adapter.parameters():  # images are shared out over these ranks
            parameter.average_gradients_across_tp_domain = getattr(  # type: ignore[attr-defined]
                module.weight, "average_gradients_across_tp_domain", False
            )
    elif hasattr(module, "return_layernorm_output"):
        module.return_layernorm_output = True  # a fused norm: the adapter sees what the matrix sees
    module.adapter = adapter
    vars(module)["adapted_site"] = site
    module.__class__ = _adapted_class(type(site.module), mixin)


def detach(module: nn.Module) -> None:
    """Remove the adapter of a layer."""
    layer = cast(Any, module)
    if hasattr(layer, "return_layernorm_output"):
        layer.return_layernorm_output = False
    layer.__class__ = _base_class(layer)
    del layer.adapter, layer.adapted_site


def adapted(chunk: nn.Module) -> Iterator[Any]:
    """The layers of a chunk that have an adapter of this package."""
    return (module for module in chunk.modules() if isinstance(module, AdaptedModule))


@cache
def _adapted_class(kind: type, mixin: type) -> type:
    gained = {
        name: value for name, value in {**vars(_Adapted), **vars(mixin)}.items() if callable(value)
    }
    return type(f"Adapted{kind.__name__}", (kind,), {**gained, "__module__": __name__})


def _base_class(module: Any) -> Any:
    """The class that an adapted layer had."""
    return type(module).__bases__[0]


@contextmanager
def _set_aside(module: nn.Module) -> Iterator[None]:
    children = module._modules
    adapter = children.pop(ADAPTER)
    try:
        yield
    finally:
        children[ADAPTER] = adapter


def _unpack_outcome(outcome: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Outputs, bias to add later, and input of the matrix, for a layer with or without a fused norm."""
    if len(outcome) == 3:  # Transformer Engine returns the bias between its two outputs
        return outcome
    out, bias = outcome
    return (out[0], bias, out[1]) if isinstance(out, tuple) else (out, bias, x)


def _included_bias(module: Any, later: Tensor | None) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias if later is None and isinstance(bias, Tensor) and bias.numel() else None


def _included_biases(module: Any, later: Any, counts: Sequence[int]) -> Tensor | None:
    """The bias of each token's expert, [tokens, out]."""
    biases: list[Any] = [getattr(module, f"bias{index}", None) for index in range(len(counts))]
    if later is not None or not all(isinstance(bias, Tensor) and bias.numel() for bias in biases):
        return None
    return torch.cat([bias.expand(count, -1) for bias, count in zip(biases, counts, strict=True)])
