# SPDX-License-Identifier: Apache-2.0
"""What a family declares to be tested: a tiny model of a transformers class, and the layouts it must run under."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

Rewrite = Callable[[Path], Mapping[str, Tensor] | None]


@dataclass(frozen=True)
class Row:
    """One variant of a family.

    Attributes:
        name: unique, such as ``gemma2`` or ``qwen3_moe_dense_layers``.
        model: the transformers class, or its name in transformers.
        config: arguments of its config class: tiny and awkward (head width is not hidden / heads, a vocabulary
            that divides by nothing, windows shorter than the test's 40 tokens, biases where the family has them).
        layouts: names in ``reference.LAYOUTS`` that run on two processes.
        four: the same, on four processes.
        slow: layouts on two processes that only slow tests try.
        brief: everything on one process is proven with one build of the model, in one test; for families that are
            made of what other rows prove in full.
        provider: attributes of the provider that the test sets.
        rewrite: rewrites the saved checkpoint in place. If the numbers change by that (quantization), it returns
            all tensors that the checkpoint stands for now: they become the reference, and what is exported must
            equal them. None says that the numbers are the same: the export must equal the rewritten files.
        seed: of the random numbers; another one if two experts tie by chance.
        attention: transformers' kind of attention for the reference. ``eager`` has every feature of every
            architecture, but adds ALiBi twice in Falcon.
    """

    name: str
    model: Any
    config: dict[str, Any]
    layouts: tuple[str, ...] = ("tp2", "pp2", "vp2")
    four: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    brief: bool = False
    provider: dict[str, Any] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    seed: int = 0
    attention: str = "eager"
