# SPDX-License-Identifier: Apache-2.0
"""The parts of layers that Megatron fuses, queries, keys and values or gates and values, and their adapters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.bridge.models.conversion.adapters.adapted_layers import LowRankPart
from megatron.bridge.peft.low_rank import LoRAShape, LowRank
from megatron.bridge.peft.targets import Site
from megatron.bridge.utils.errors import UserError

QKV = {"q": "linear_q", "k": "linear_k", "v": "linear_v"}
GATED = {"gate": "linear_fc1_gate", "up": "linear_fc1_up"}


def parts_of(site: Site) -> dict[str, str]:
    """Role -> the name of a part of a fused layer in targets; empty for other layers."""
    before, _, leaf = site.name.rpartition(".")
    if leaf == "linear_qkv":
        return {role: f"{before}.{QKV[role]}" for role in _projected_roles(site)}
    if leaf == "linear_fc1" and site.halves == 2:
        return {role: f"{before}.{name}" for role, name in GATED.items()}
    return {}


def rows_of(site: Site) -> dict[str, int]:
    """Role -> outputs of that part on this rank."""
    rows = site.weights[0].shape[0]
    if site.halves == 2:
        return dict.fromkeys(GATED, rows // 2)
    config = site.config
    width = config.num_query_groups // site.group.size() * config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups  # of a group
    return {role: width * (queries if role == "q" else 1) for role in _projected_roles(site)}


def _projected_roles(site: Site) -> str:
    """The roles of ``qkv`` that a layer projects: some layers have no separate keys or values."""
    config = site.config
    rows = site.weights[0].shape[0] * site.group.size()
    return "qkv"[
        : 1 + (rows // config.kv_channels - config.num_attention_heads) // config.num_query_groups
    ]


def check_queries(site: Site) -> None:
    if getattr(site.config, "attention_output_gate", False):
        raise UserError(
            f"peft.target_modules: the queries of {site.name} come with gates that cannot be adapted apart: name "
            "linear_qkv with peft=LoRA, which adapts queries, keys and values together"
        )
    groups = site.config.num_query_groups
    ranks = site.group.size()
    if groups < ranks:
        raise UserError(
            f"peft.target_modules: model.tensor_model_parallel_size={ranks} cuts the {groups} groups of heads of "
            f"{site.name}, but separate adapters of queries, keys or values need complete groups: name "
            "linear_qkv with peft=LoRA, or use fewer ranks"
        )


def _split_rows(rows: dict[str, int], head_width: int | None) -> dict[str, Tensor]:
    """Return role -> indices of the rows of a fused weight that compute it, in the order of the part's outputs.

    Args:
        rows: Role -> number of its outputs on this rank.
        head_width: Outputs of a head, if the roles alternate by key-value group; None if one follows another.
    """
    sizes = list(rows.values())
    groups = 1
    if head_width is not None:
        groups = rows.get("k", head_width) // head_width
    by_group = torch.arange(sum(sizes)).unflatten(0, (groups, -1))
    parts = by_group.split([size // groups for size in sizes], dim=1)
    return {role: part.flatten(0, 1) for role, part in zip(rows, parts, strict=True)}


class CanonicalAdapter(nn.ModuleDict):
    """Low-rank paths for parts of one layer, by role; other parts are unchanged."""

    scales_outputs = False

    def __init__(
        self,
        site: Site,
        shapes: dict[str, LoRAShape],
        make_path: Callable[[Site, LoRAShape, str, Tensor], LowRank] = LowRank,
    ) -> None:
        """Adapt parts of ``site``.

        Args:
            site: The layer.
            shapes: Role -> hyperparameters of the part.
            make_path: Makes the path of a part from the layer, its shape, its role and its rows.
        """
        self.rows = rows_of(site)
        head_width = None if site.halves == 2 else site.config.kv_channels
        row_indices = _split_rows(self.rows, head_width)
        factors = {
            role: make_path(site, shape, role, row_indices[role]) for role, shape in shapes.items()
        }
        super().__init__(factors)
        self.head_width = head_width

    @property
    def total_rank(self) -> int:
        """Numbers per token between the factors of all parts."""
        return sum(adapter.total_rank for _, adapter in self._paths())

    def forward(
        self, base: Tensor, x: Tensor, counts: Sequence[int] | None, weights: Sequence[Tensor]
    ) -> Tensor:
        parts = {role: adapter(x, counts) for role, adapter in self._paths()}
        return base + self._fused(parts, base)

    def merged_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """``W + scaling * B A`` part by part, in fp32."""
        stacked = torch.stack([weight.float() for weight in weights])
        parts = {role: adapter.stacked_delta().mT for role, adapter in self._paths()}
        return list(stacked + self._fused(parts, stacked.mT).mT)

    def negate(self) -> None:
        """Change the sign of what is added to the weights."""
        for _, adapter in self._paths():
            adapter.negate()

    def parts(self, expert: int) -> list[LowRankPart]:
        return [adapter.part(expert, role) for role, adapter in self._paths()]

    def _paths(self) -> Iterable[tuple[str, LowRank]]:
        return cast("Iterable[tuple[str, LowRank]]", self.items())

    def _fused(self, parts: dict[str, Tensor], like: Tensor) -> Tensor:
        """The parts in the order of the layer's outputs: by key-value group, or gates before values."""
        ordered = [
            parts[role] if role in parts else like.new_zeros(*like.shape[:-1], rows)
            for role, rows in self.rows.items()
        ]
        if self.head_width is None:
            return torch.cat(ordered, dim=-1)
        groups = self.rows.get("k", self.head_width) // self.head_width
        by_group = [part.unflatten(-1, (groups, -1)) for part in ordered]
        return torch.cat(by_group, dim=-1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for role, adapter in self._paths():
            state |= adapter.sharded_state_dict(f"{prefix}{role}.", sharded_offsets, metadata)
        return state
