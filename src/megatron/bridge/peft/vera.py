# SPDX-License-Identifier: Apache-2.0
"""VeRA (https://arxiv.org/abs/2310.11454): random factors that all layers share, scaled by trained vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from megatron.bridge.models.conversion.adapters.adapted_layers import LowRankPart
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.peft import targets
from megatron.bridge.peft.fused_parts import CanonicalAdapter, check_queries, parts_of, rows_of
from megatron.bridge.peft.lora import LoRAAdapter, SplitLoRA
from megatron.bridge.peft.low_rank import LoRAShape, LowRank
from megatron.bridge.peft.targets import Site

_WITHOUT_EFFECT = (
    "alpha",
    "use_rslora",
    "loraplus_lr_ratio",
    "lora_A_init_method",
    "lora_B_init_method",
    "init_lora_weights",
    "dim_by_module",
    "alpha_by_module",
)
"""Settings of LoRA that a method with shared factors and without scaling does not have."""


@dataclass(frozen=True)
class Projections:
    """The random factors of all layers, each of which takes the first columns of A and rows of B."""

    a: Tensor  # [rank, most inputs of a layer]
    b: Tensor  # [most outputs of a layer, rank]
    d_initial: float


def draw_projections(rank: int, inputs: int, outputs: int, key: int) -> tuple[Tensor, Tensor]:
    """Return A [rank, inputs] and B [outputs, rank] as ``peft`` draws them, in fp32 on the CPU."""
    generator = torch.Generator().manual_seed(key)
    factors = torch.empty(rank, inputs), torch.empty(outputs, rank)
    for factor in factors:
        nn.init.kaiming_uniform_(factor, nonlinearity="relu", generator=generator)
    return factors


class VeRAPath(LowRank):
    """``b * (B (d * (A x)))`` with frozen A and B, and trained vectors d and b.

    Attributes:
        d: [experts?, rank]; every rank has all of it.
        scale: The vector b, [experts?, halves?, outputs of this rank]; starts at zero.
    """

    projection_a: Tensor
    projection_b: Tensor

    def __init__(
        self,
        site: Site,
        shape: LoRAShape,
        projections: Projections,
        part: str = "",
        row_indices: Tensor | None = None,
    ) -> None:
        """Adapt ``site``, or the rows ``row_indices`` of its weights.

        Args:
            site: The layer.
            shape: Hyperparameters.
            projections: The factors of all layers.
            part: Has no effect: the first values are the same in all layers.
            row_indices: Rows of the weights on this rank that compute the adapted part; None is all.
        """
        del part
        nn.Module.__init__(self)
        a_size, b_size = self._set_layout(site, shape, row_indices)
        weight = site.weights[0]
        self.initial = None
        self.register_buffer("projection_a", self._shard_of_a(projections.a, a_size), False)
        self.register_buffer("projection_b", self._shard_of_b(projections.b, b_size), False)
        self.d = self._parameter(weight, *a_size[:-1])
        self.scale = self._parameter(weight, *b_size[:-1])
        self._mark(self.d, cut=False, dim=-1)
        self._mark(self.scale, cut=site.kind == "column", dim=self.scale.ndim - 1)
        if self.kind == "row":  # the gradient is complete when the ranks' parts are summed
            self.d.sequence_parallel = False  # type: ignore[attr-defined]
        with torch.no_grad():
            self.d.fill_(projections.d_initial)
            self.scale.zero_()

    def _shard_of_a(self, full_factor: Tensor, size: Sequence[int]) -> Tensor:
        columns = size[-1]
        first = self.group.rank() * columns if self.kind == "row" else 0
        return full_factor[:, first : first + columns]

    def _shard_of_b(self, full_factor: Tensor, size: Sequence[int]) -> Tensor:
        local_size = size if self.experts is None else size[1:]
        full_size = list(local_size)
        if self.kind == "column":
            full_size[-2] *= self.group.size()
        rows = full_factor[: full_size[0] if len(full_size) == 2 else full_size[0] * full_size[1]]
        stacked = rows.view(full_size)
        if self.kind != "column":
            return stacked
        return stacked.narrow(-2, self.group.rank() * local_size[-2], local_size[-2])

    @property
    def a(self) -> Tensor:  # type: ignore[override]
        """``d * A``, [experts?, rank, inputs of this rank]."""
        d: Tensor = self.d
        if self.kind == "row" and self.group.size() > 1:  # each rank has a part of the inputs
            d = tensor_parallel.copy_to_tensor_model_parallel_region(d, group=self.group)
        return d[..., None] * self.projection_a.to(d.dtype)

    @property
    def b(self) -> Tensor:  # type: ignore[override]
        """``b * B``, [experts?, halves?, outputs of this rank, rank]."""
        return self.scale[..., None] * self.projection_b.to(self.scale.dtype)

    def part(
        self, expert: int, role: str | None = None, magnitude: Tensor | None = None
    ) -> LowRankPart:
        """What is added to one of the weights, as an ordinary part."""
        return replace(super().part(expert, role, magnitude), is_view=False)

    @torch.no_grad()
    def negate(self) -> None:
        self.scale.neg_()


class VeRAAdapter(VeRAPath, LoRAAdapter):
    """The path of a complete layer, added to its outputs."""


@dataclass
class VeRA(SplitLoRA):
    """Trained vectors around frozen random factors that all layers share.

    Example:
        >>> VeRA(target_modules=["q_proj", "v_proj"], dim=64).d_initial
        0.1
    """

    adapts_parts: ClassVar[bool] = True

    dim: int = 256
    """Rank, of all layers."""
    d_initial: float = 0.1
    """First value of all elements of the vectors d."""
    projection_prng_key: int = 0
    """Seed of the shared factors, as in ``peft``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._projections: Projections | None = None

    def problems(self, training: bool = True) -> list[str]:
        return [*super().problems(training), *self._idle_problems()]

    def _idle_problems(self) -> Iterator[str]:
        defaults = VeRA()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _WITHOUT_EFFECT and value != getattr(defaults, field.name):
                yield (
                    f"peft.{field.name}={value} has no effect on VeRA, whose layers share their factors and have no "
                    "scaling: leave it out"
                )

    def prepare(self, chunks: Sequence[nn.Module]) -> None:
        """Choose the layers, and draw the factors for the largest of all stages."""
        super().prepare(chunks)
        sites = [site for chunk in chunks for site in targets.sites(chunk)]
        local_sizes = [size for site in sites for size in self._sizes_of(site)]
        sizes = [size for stage in exchange.all_gather_stages(local_sizes) for size in stage]
        weight = next(chunks[0].parameters())
        a, b = draw_projections(
            self.dim,
            inputs=max((inputs for inputs, _ in sizes), default=1),
            outputs=max((outputs for _, outputs in sizes), default=1),
            key=self.projection_prng_key,
        )
        self._projections = Projections(
            a.to(weight.device, weight.dtype), b.to(weight.device, weight.dtype), self.d_initial
        )

    def _sizes_of(self, site: Site) -> Iterator[tuple[int, int]]:
        """Yield (inputs, outputs) of the layer or the parts of it that are adapted, over all ranks."""
        rows, columns = site.weights[0].shape
        ranks = site.group.size()
        inputs = columns * (ranks if site.kind == "row" else 1)
        row_ranks = ranks if site.kind == "column" else 1
        if site.name in self._chosen:
            yield inputs, rows * row_ranks
        for role, name in parts_of(site).items():
            if name in self._chosen:
                yield inputs, rows_of(site)[role] * row_ranks

    def shape_for(self, name: str) -> LoRAShape:
        """Return the shape of a layer or part, whose path has no scaling."""
        return replace(super().shape_for(name), alpha=self.dim)

    def adapter_for(self, site: Site) -> nn.Module:
        """Return the vectors for the layer, or for each chosen part of it."""
        projections = self._projections
        assert projections is not None, "prepare draws them"
        if site.name in self._chosen:
            return VeRAAdapter(site, self.shape_for(site.name), projections)
        parts = parts_of(site)
        if "q" in parts:
            check_queries(site)
        shapes = {
            role: self.shape_for(name) for role, name in parts.items() if name in self._chosen
        }

        def make_path(site: Site, shape: LoRAShape, part: str, row_indices: Tensor) -> LowRank:
            return VeRAPath(site, shape, projections, part, row_indices)

        return CanonicalAdapter(site, shapes, make_path)
