# SPDX-License-Identifier: Apache-2.0
"""What the testbench knows of an operator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron.bridge.autotune import activations
from megatron.bridge.autotune.layers import is_dispatched, layer_shape
from megatron.bridge.autotune.time.step import operations_per_token
from scripts.testbench.bench import Bench, Target

OPS: dict[str, "TestOp"] = {}
"""All operators by name."""


@dataclass
class Call:
    """A function with arguments that were prepared for it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


class TestOp:
    """An operator: what it runs, and the theory of its memory and work. Theory of None is not compared."""

    __test__ = False  # for pytest, which would collect it by its name

    backward = True  # whether it has a backward pass

    def is_in(self, bench: Bench) -> bool:
        """Whether the model and layout of ``bench`` have it."""
        return True

    def prepare_input(self, bench: Bench) -> Call:
        """The forward pass, ready to be called. Each call of this prepares new leaves."""
        raise NotImplementedError

    def weights(self, bench: Bench) -> int:
        """Bytes of its parameters on this rank."""
        return 0

    def calc_theoretical_memory(self, bench: Bench) -> dict[str, float | None]:
        """Bytes of ``weights``, and of the ``activations`` that autograd keeps for its backward pass."""
        return {"weights": 0, "activations": None}

    def calc_theoretical_flops(self, bench: Bench) -> dict[str, float | None]:
        """Operations of its ``forward`` and ``backward`` pass on this rank."""
        return {"forward": None, "backward": None}


class TestWithHiddenInputs(TestOp):
    """A part of a model, with the inputs that it gets there: hidden states, mask, rotary embedding, boundaries.

    Args:
        matches: Whether a module, by its path in the chunk, is the part; the first one is taken.
        method: Name of the method that runs.
    """

    def __init__(self, matches: Callable[[str, Any], bool], method: str = "forward") -> None:
        self.matches, self.method = matches, method

    def find(self, chunk: MegatronModule) -> tuple[str, nn.Module] | None:
        """Path and module of the part in ``chunk``."""
        return next(
            (
                (path, module)
                for path, module in chunk.named_modules()
                if self.matches(path, module)
            ),
            None,
        )

    def part(self, chunk: MegatronModule) -> tuple[str, Any]:
        found = self.find(chunk)
        assert found is not None, "is_in was not asked"
        return found

    def is_in(self, bench: Bench) -> bool:
        return self.find(bench.chunk) is not None

    def target(self, bench: Bench) -> Target:
        return self.part(bench.chunk)[1], self.method

    def prepare_input(self, bench: Bench) -> Call:
        owner, name = self.target(bench)
        args, kwargs = bench.inputs((owner, name))
        return Call(getattr(owner, name), args, kwargs)

    def weights(self, bench: Bench) -> int:
        return _bytes(self.part(bench.chunk)[1])

    def calc_theoretical_memory(self, bench: Bench) -> dict[str, float | None]:
        return {"weights": _bytes(self.part(bench.meta)[1]), "activations": self.activations(bench)}

    def activations(self, bench: Bench) -> float | None:
        path, module = self.part(bench.meta)
        return activations.kept_inside(path, module, bench.sizes)

    def calc_theoretical_flops(self, bench: Bench) -> dict[str, float | None]:
        found = [
            _operations(module, path, bench) for path, module in self.worked(*self.part(bench.meta))
        ]
        forward, backward = (
            (bench.run.tokens * sum(each) for each in zip(*found, strict=True))
            if found
            else (0.0, 0.0)
        )
        return {"forward": forward, "backward": backward}

    def worked(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules that its work is counted on, by path."""
        yield path, module


def _bytes(module: Any) -> int:
    return (
        sum(parameter.nbytes for parameter in module.parameters())
        if isinstance(module, nn.Module)
        else 0
    )


def _operations(module: nn.Module, path: str, bench: Bench) -> tuple[float, float]:
    """Forward and backward operations of a token, counted as in a layer, whose paths tell experts from other weights.

    The backward kernel of attention computes the scores again: five products where the forward pass has two.
    """
    layer = nn.Module()
    layer.add_module(
        "experts" if is_dispatched(path) else "router" if path.endswith("router") else "part",
        module,
    )
    shape = layer_shape(layer, bench.config.model.hidden_size, bench.case.seqlen)
    forward = operations_per_token(shape, bench.run)
    return forward, 2 * forward + 0.5 * shape.between * shape.quadratic


def register(name: str, op: TestOp) -> TestOp:
    """Add an operator, or replace the one of that name."""
    OPS[name] = op
    return op


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
