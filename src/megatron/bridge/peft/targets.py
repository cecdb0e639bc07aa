# SPDX-License-Identifier: Apache-2.0
"""Which layers get an adapter, and how each of them is sharded."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import Router
from torch import nn

from megatron.bridge.backends.moe.grouped_experts import GroupedLinear
from megatron.bridge.models.conversion.adapters.adapted_layers import in_adapter
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.plan import global_name
from megatron.bridge.models.conversion.param_mapping import ParallelKind, parallel_kind
from megatron.bridge.utils.errors import UserError, did_you_mean

Group = torch.distributed.ProcessGroup

# Transformer Engine's layers are known by name: it need not be installed.
_TE_LINEAR = frozenset(
    {"TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear"}
)
_TE_GROUPED = "TEGroupedLinear"
TOWER = "vision."  # how names of a vision tower's layers begin: they are transformers', whole on every rank
OUTPUT_LAYER = "output_layer"
ALL_LINEAR = (
    "all-linear"  # as in the peft library: all linear layers of the decoder but the output layer
)


@dataclass(frozen=True)
class Site:
    """A layer that can have an adapter."""

    name: str  # name in the whole model: layers are counted from its start, not from the pipeline stage's
    module: nn.Module
    kind: ParallelKind  # how its weight is cut over the tensor-parallel ranks
    experts: int | None  # experts on this rank, each with a separate weight; None is one weight
    halves: (
        int  # 2 where the outputs are gates above values, each cut over the ranks by itself; else 1
    )

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weight, or one for each expert: [outputs, inputs] of this rank."""
        if self.experts is None:
            return [self.module.weight]  # type: ignore[list-item]
        return [getattr(self.module, f"weight{index}") for index in range(self.experts)]

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def group(self) -> Group:
        """The ranks that the weight is cut over."""
        if self.experts is not None:
            return cast(Group, parallel_state.get_expert_tensor_parallel_group())
        return cast(Group, parallel_state.get_tensor_model_parallel_group())

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations outside of the sharded matrices are sharded along the sequence."""
        has_full_input = self.experts is not None or self.name.startswith(TOWER)
        return not has_full_input and self.config.sequence_parallel and self.group.size() > 1


def sites(chunk: nn.Module) -> Iterator[Site]:
    """The layers of a bare chunk that can have an adapter."""
    for path, module in chunk.named_modules():
        name = global_name(chunk, f"{path}.").removesuffix(".")
        if (site := _make_site(name, module)) is not None:
            yield site


def _make_site(name: str, module: nn.Module) -> Site | None:
    lineage = {cls.__name__ for cls in type(module).__mro__}
    grouped = isinstance(module, GroupedLinear) or _TE_GROUPED in lineage
    linear = (
        isinstance(module, (ColumnParallelLinear, RowParallelLinear, Router))
        or lineage & _TE_LINEAR
    )
    if isinstance(module, nn.Linear) and name.startswith(TOWER) and not in_adapter(name):
        return Site(name, module, "replicated", None, 1)
    if not grouped and not linear:
        return None
    experts = sum(1 for key in module._parameters if key.startswith("weight")) if grouped else None
    weight: Any = module.weight0 if grouped else module.weight
    gated = name.endswith("linear_fc1") and bool(module.config.gated_linear_unit)  # type: ignore[union-attr]
    return Site(name, module, parallel_kind(module, weight), experts, 2 if gated else 1)


def check(site: Site) -> None:
    """Refuse layers whose adapter would silently change something else."""
    config = site.config
    if site.name == OUTPUT_LAYER and getattr(config, "share_embeddings_and_output_weights", False):
        raise UserError(
            f"peft.target_modules: {site.name} shares its weight with the embedding, which has no adapter: leave "
            "it out, or train the weight with peft.modules_to_save=[word_embeddings]"
        )
    if ".shared_experts." in site.name and config.moe_shared_expert_overlap:
        raise UserError(
            f"peft.target_modules: {site.name} overlaps with the dispatcher and does not communicate by itself: set "
            "model.moe_shared_expert_overlap=false"
        )
    if ".local_experts." in site.name:
        raise UserError(
            f"peft.target_modules: {site.name} is a module of one expert: set model.moe_grouped_gemm=true"
        )
    if site.name.endswith(".in_proj") and site.group.size() > 1:
        raise UserError(
            f"peft.target_modules: the outputs of {site.name} are of several kinds, each cut over the ranks by "
            "itself: leave it out, or set model.tensor_model_parallel_size=1"
        )


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means the module ``name``.

    A pattern with a wildcard must match the whole name; one without matches the name's end. A pattern for layers
    of a vision tower begins with ``vision.``: their names may end like a decoder's.

    Example:
        >>> matches("linear_qkv", "decoder.layers.0.self_attention.linear_qkv")
        True
        >>> matches("*.layers.0.*.linear_qkv", "decoder.layers.1.self_attention.linear_qkv")
        False
    """
    if name.startswith(TOWER) and not pattern.startswith(TOWER):
        return False
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


@dataclass(frozen=True)
class TargetCandidate:
    """A layer, or a part of a fused layer, that patterns can select."""

    name: str  # in the whole model; that of a part has the same parent as the layer
    layer: str  # name of the layer
    hf_names: tuple[str, ...] = ()  # modules of transformers' model that compute the same
    is_part: bool = False  # whether only names of Hugging Face select it
    is_linear: bool = True  # whether ``all-linear`` selects it
    can_be_apart: bool = True  # whether a part can have a separate adapter


def is_hidden(name: str) -> bool:
    """Return whether a layer is between the embedding and the output layer of the language model."""
    return name != OUTPUT_LAYER and not name.startswith(TOWER)


def gather(candidates: Sequence[TargetCandidate]) -> list[TargetCandidate]:
    """Return the candidates of all pipeline stages; all ranks of a replica call this together."""
    stages = exchange.all_gather_stages(list(candidates))
    return [candidate for stage in stages for candidate in stage]


def choose(
    candidates: Sequence[TargetCandidate], patterns: Sequence[str], excluded: Sequence[str]
) -> list[TargetCandidate]:
    """Return the ``candidates`` of all stages that are targeted and not excluded.

    Args:
        candidates: Layers and parts of the whole model.
        patterns: ``peft.target_modules``.
        excluded: ``peft.exclude_modules``.

    Raises:
        UserError: a pattern selects nothing, or nothing is left.
    """
    targeted = _named_candidates(candidates, select("peft.target_modules", patterns, candidates))
    left_out = _named_candidates(targeted, select("peft.exclude_modules", excluded, targeted))
    chosen = [candidate for candidate in targeted if candidate not in left_out]
    if targeted and not chosen:
        raise UserError(
            "peft.exclude_modules leaves no layer to adapt: exclude fewer, or target more"
        )
    return chosen


def _named_candidates(
    candidates: Sequence[TargetCandidate], selected: Mapping[str, Collection[str]]
) -> list[TargetCandidate]:
    names = {name for group in selected.values() for name in group}
    return [candidate for candidate in candidates if candidate.name in names]


def select(
    key: str, patterns: Iterable[str], candidates: Sequence[TargetCandidate]
) -> dict[str, set[str]]:
    """Return the names of the candidates that each pattern selects.

    A pattern that matches a name of Megatron means that; any other one is tried as a name of Hugging Face.

    Args:
        key: The setting with the patterns, for messages.
        patterns: Names or patterns of either side, or ``all-linear``.
        candidates: What can be selected.

    Raises:
        UserError: a pattern selects nothing.
    """
    selected = {pattern: _select_names(pattern, candidates) for pattern in patterns}
    for pattern, names in selected.items():
        if not names:
            _refuse_unmatched(key, pattern, candidates)
    return selected


def _select_names(pattern: str, candidates: Sequence[TargetCandidate]) -> set[str]:
    if pattern == ALL_LINEAR:
        return {candidate.name for candidate in candidates if candidate.is_linear}
    by_megatron_name = {
        candidate.name
        for candidate in candidates
        if not candidate.is_part and matches(pattern, candidate.name)
    }
    return by_megatron_name or {
        candidate.name
        for candidate in candidates
        if any(_matches_hf(pattern, hf_name) for hf_name in candidate.hf_names)
    }


def _matches_hf(pattern: str, hf_name: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(hf_name, pattern)
    return hf_name == pattern or hf_name.endswith(f".{pattern}")


def _refuse_unmatched(key: str, pattern: str, candidates: Sequence[TargetCandidate]) -> None:
    names = [candidate.name for candidate in candidates if not candidate.is_part]
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    hf_names = [hf_name for candidate in candidates for hf_name in candidate.hf_names]
    hf_leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in hf_names))
    hint = did_you_mean(pattern.rpartition(".")[2], [*leaves, *hf_leaves])
    if pattern in ("output_layer", "lm_head"):  # there is none if the embeddings are tied
        hint = ", whose output layer is its embedding: name word_embeddings"
    if not hint:
        of_hf = f" (in Hugging Face's names {', '.join(hf_leaves)})" if hf_leaves else ""
        hint = f"; there are {', '.join(leaves)}{of_hf}"
    raise UserError(f"{key}: {pattern!r} matches no layer of this model{hint}")
