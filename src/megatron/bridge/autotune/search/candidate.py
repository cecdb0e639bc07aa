# SPDX-License-Identifier: Apache-2.0
"""Layouts to compare, as values of config keys."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

NAMES = ("tensor", "context", "pipeline", "virtual", "expert", "expert_tensor", "micro_batch")
"""Dimensions that a user can fix."""

FREE: dict[str, tuple[Any, ...]] = {"gradients": (None, "bf16"), "batch": (None, 2, 4)}
"""Dimensions that change the results of a run, and their values: None keeps the config's value."""

SWITCHES: tuple[tuple[str, Any], ...] = (
    ("ddp.overlap_grad_reduce", True),
    ("ddp.overlap_param_gather", True),
    *(("ddp.bucket_size", size) for size in (20_000_000, 160_000_000)),
    ("model.tp_comm_overlap", True),
    *(("model.cp_comm_type", kind) for kind in ("p2p", "a2a", "all_gather")),
)
"""Communication settings that do not change the results of a run."""

Recompute = tuple[str | None, str | None, int | None, tuple[str, ...] | None]
"""Granularity, method, number of layers, and modules."""

NO_RECOMPUTE: Recompute = (None, None, None, None)
FULL_RECOMPUTE: Recompute = ("full", "uniform", 1, None)


@dataclass(frozen=True)
class Candidate:
    tensor: int = 1  # tensor-parallel ranks; with two or more, sequence parallelism is on
    context: int = 1  # context-parallel ranks
    pipeline: int = 1  # pipeline stages
    virtual: int = 1  # model chunks on each stage
    expert: int = 1  # expert-parallel ranks
    # expert-tensor-parallel ranks; None for the value of ``tensor``, and for a dense model
    expert_tensor: int | None = None
    micro_batch: int = 1  # samples per microbatch
    recompute: Recompute = NO_RECOMPUTE  # recomputation in the backward pass
    gradients: str | None = (
        None  # bf16 reduces and accumulates gradients in bf16; None keeps the config's type
    )
    batch: int | None = None  # factor of the config's global batch size
    switches: tuple[tuple[str, Any], ...] = ()  # keys of ``SWITCHES`` and their values
    layout: str | None = (
        None  # layers of each chunk in Megatron-Core's notation; None splits them evenly
    )

    def settings(self) -> dict[str, Any]:
        """Return the values of all config keys that a candidate sets."""
        granularity, method, layers, modules = self.recompute
        return {
            "model.tensor_model_parallel_size": self.tensor,
            "model.sequence_parallel": self.tensor > 1,
            "model.context_parallel_size": self.context,
            "model.pipeline_model_parallel_size": self.pipeline,
            "model.virtual_pipeline_model_parallel_size": self.virtual
            if self.virtual > 1
            else None,
            "model.pipeline_model_parallel_layout": self.layout,
            "model.num_layers_in_first_pipeline_stage": None,
            "model.num_layers_in_last_pipeline_stage": None,
            "model.account_for_embedding_in_pipeline_split": False,
            "model.account_for_loss_in_pipeline_split": False,
            "model.expert_model_parallel_size": self.expert,
            "model.expert_tensor_parallel_size": self.expert_tensor,
            "train.micro_batch_size": self.micro_batch,
            "model.recompute_granularity": granularity,
            "model.recompute_method": method,
            "model.recompute_num_layers": layers,
            "model.recompute_modules": None if modules is None else list(modules),
            **({"ddp.grad_reduce_in_fp32": False} if self.gradients else {}),
            **dict(self.switches),
        }

    def label(self) -> str:
        """Describe the layout in short form, such as ``TP8 PP4 VP5 DP..``, without sizes of 1."""
        sizes = {
            "TP": self.tensor,
            "CP": self.context,
            "PP": self.pipeline,
            "VP": self.virtual,
            "EP": self.expert,
            "ETP": self.expert_tensor or 1,
        }
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words.append(f"MBS{self.micro_batch}")
        granularity, method, layers, modules = self.recompute
        if granularity:
            words.append("recompute " + (granularity if modules is None else "+".join(modules)))
        if method == "block":
            words.append(f"of {layers} layers a chunk")
        if self.batch:
            words.append(f"batch x{self.batch}")
        if self.gradients:
            words.append(f"gradients {self.gradients}")
        words += [
            name.rpartition(".")[2] + (f"={value}" if value is not True else "")
            for name, value in self.switches
        ]
        return " ".join(words)

    def changes(self, reference: "Candidate") -> list[tuple[str, Any]]:
        """Return the fields in which this candidate differs from ``reference``, with the values of this candidate."""
        names = [field.name for field in fields(self) if field.name != "layout"]
        return [
            (name, getattr(self, name))
            for name in names
            if getattr(self, name) != getattr(reference, name)
        ]


@dataclass(frozen=True)
class Space:
    """The values that a search tries for each field of ``Candidate``; a field with a single value is fixed."""

    sizes: Mapping[str, tuple[Any, ...]]

    def candidates(self) -> Iterator[Candidate]:
        names = list(self.sizes)
        for values in itertools.product(*self.sizes.values()):
            candidate = Candidate(**dict(zip(names, values, strict=True)))
            twice = candidate.tensor == 1 and len(self.sizes["expert_tensor"]) > 1
            if candidate.expert_tensor is not None or not twice:
                yield candidate

    def fixed(self, **values: Any) -> "Space":
        """Return the same space with some fields fixed."""
        return replace(
            self, sizes={**self.sizes, **{name: (value,) for name, value in values.items()}}
        )


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to ``limit``."""
    return tuple(1 << bits for bits in range(max(limit, 1).bit_length()))


def as_overrides(config: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` for each setting that differs from the value in ``config``."""
    return [
        f"{key}={as_yaml(value)}"
        for key, value in settings.items()
        if attrgetter(key)(config) != value
    ]


def as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return value if isinstance(value, str) else json.dumps(value)
