# SPDX-License-Identifier: Apache-2.0
"""Plan a conversion: one task per Megatron parameter; the plan must cover both sides before anything is copied."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.backends.low_bit.weight import full_weight
from megatron.bridge.checkpoint import model_io
from megatron.bridge.models.conversion.adapters.adapted_layers import AdaptedModule, in_adapter
from megatron.bridge.models.conversion.declare.vocabulary import made_by
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.exchange import Owner
from megatron.bridge.models.conversion.engine.mtp_layers import MTPLayers
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.mappings import patterns
from megatron.bridge.models.conversion.param_mapping import (
    HFPart,
    MegatronParamMapping,
    ShardSpec,
    parallel_kind,
)
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.models.hf_pretrained.transformers_reads import wrapper_prefix
from megatron.bridge.utils.errors import UserError, first_problems, misspelling

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
OUTPUT_LAYER = "output_layer."
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.")
# experts.linear_fc1.weight3, or experts.local_experts.3.linear_fc1.weight
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|.*\.(?:weight|bias)))(\d+)(.*)")
_INDEX = re.compile(
    r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$"
)  # index of a layer or an expert
_NO_MTP = "layers of multi-token prediction are missing: set mtp_num_layers to None in the provider to skip them"
_SOME_MTP = "layers of multi-token prediction are incomplete: download the model again"


@dataclass(frozen=True)
class LocatedParameter:
    """A Megatron parameter and the ranks that hold it; equal on every rank of a model replica."""

    name: str  # name in the full model, with global indices of layers and experts
    local_name: str  # name in its chunk
    owner: Owner  # pipeline stage and, for an expert, expert-parallel rank
    chunk: int  # index of the chunk on that stage
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Any  # how it is sharded, as ``ShardSpec.kind``


@dataclass(frozen=True)
class WeightConversionTask:
    """One parameter to convert; the module and the value are None on ranks that do not hold it."""

    param_name: str  # name in its chunk
    global_param_name: str  # name in the full model
    mapping: MegatronParamMapping  # the mapping with concrete names
    shard: (
        ShardSpec  # shape and sharding of one shard on this rank or on its peer of the owning stage
    )
    dtype: torch.dtype
    owner: Owner  # the pipeline stage and, for an expert, the expert-parallel rank that hold it
    vp_stage: int  # index of the chunk on that stage
    is_copy: bool = False  # another task has the same Hugging Face tensors; this one is loaded, but not exported
    megatron_module: nn.Module | None = None  # the module that owns the parameter
    param_weight: Tensor | None = None
    merges: bool = False  # export the parameter with its layer's adapter merged

    @property
    def exported(self) -> Tensor | None:
        """The value to export; a collective if the parameter is sharded, or with ``merges``."""
        if (
            self.merges
            and self.param_weight is not None
            and isinstance(self.megatron_module, AdaptedModule)
        ):
            with sharded_rows.gathered(cast(nn.Module, self.megatron_module)) as gathered:
                weight = gathered.get(id(self.param_weight), self.param_weight)
                return full_weight(self.megatron_module.merged_weight(weight))
        if self.param_weight is None:
            return None
        return full_weight(sharded_rows.whole(self.param_weight))

    @property
    def pp_rank(self) -> int:
        """The pipeline stage that holds the parameter."""
        return self.owner.stage

    @property
    def ep_rank(self) -> int | None:
        """The expert-parallel rank that holds the parameter, or None if all ranks do."""
        return self.owner.expert_rank

    @property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this task's Hugging Face tensors by name."""
        return self.mapping.hf_shapes(self.shard)

    @cached_property
    def hf_slice_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same for a single expert's part, if a tensor holds all experts."""
        return self.mapping.hf_slice_shapes(self.shard)


@dataclass(frozen=True)
class ConversionPlan:
    tasks: tuple[
        WeightConversionTask, ...
    ]  # in the order of the model; equal on every rank of a model replica
    ties: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # Hugging Face name -> name of the equal tensor
    buffers: tuple[
        str, ...
    ] = ()  # Hugging Face tensors that are recomputed, or belong to other parts of the model
    copies: frozenset[str] = (
        frozenset()
    )  # names in ``ties`` that the architecture always stores a second time
    heads: frozenset[str] = (
        frozenset()
    )  # tensors of a head that replaces the output layer; a checkpoint may lack them
    replaced: frozenset[str] = (
        frozenset()
    )  # tensors of the output layer that a head replaces; neither read nor written
    unread: tuple[
        str, ...
    ] = ()  # those of ``buffers`` that transformers' model does not load either

    @property
    def hf_names(self) -> list[str]:
        """The Hugging Face tensors of all tasks, without duplicates."""
        return list(dict.fromkeys(name for task in self.tasks for name in task.mapping.hf_names))

    def __str__(self) -> str:
        rows = [
            (
                task.global_param_name,
                "x".join(map(str, task.shard.shape)) or "scalar",
                f"{task.shard.kind}/{task.shard.parts}",
                str(task.pp_rank)
                if task.ep_rank is None
                else f"{task.pp_rank}, experts {task.ep_rank}",
                type(task.mapping).__name__ + (" (copy)" if task.is_copy else ""),
                ", ".join(task.mapping.hf_names),
            )
            for task in self.tasks
        ]
        head = ("Megatron parameter", "shard", "cut", "stage", "mapping", "Hugging Face tensors")
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            for row in (head, *rows)
        ]
        lines += [f"{name} = {same} (tied)" for name, same in self.ties.items()]
        lines += [f"{name} (as in the source)" for name in self.buffers]
        return "\n".join(line.rstrip() for line in lines)


def build_plan(
    registry: MegatronMappingRegistry,
    chunks: Sequence[nn.Module],
    entries: Mapping[str, TensorEntry] | None = None,
    buffers: Sequence[str] = (),
    copies: Mapping[str, str] = MappingProxyType({}),
    left_out: MTPLayers | None = None,
    replaced: frozenset[str] = frozenset(),
    find_unread: Callable[[Iterable[str]], Iterable[str]] = lambda names: (),
) -> ConversionPlan:
    """Match every parameter of the model with tensors of a checkpoint.

    Args:
        chunks: this rank's model chunks without wrappers.
        entries: the checkpoint's tensors; None plans from the mappings alone.
        buffers: patterns of tensors that a checkpoint may have and that are not converted.
        copies: patterns of tensors that a checkpoint may store a second time, and their originals.
        left_out: layers that a checkpoint may have and that the model was built without.
        replaced: tensors that a checkpoint may have and that the model's head replaces.
        find_unread: returns those of some tensors that transformers' model does not load; an export copies them.
    """
    config = cast(Any, chunks[0]).config
    if entries is not None and replaced:
        entries = {name: entry for name, entry in entries.items() if name not in replaced}
    modules = _held_parameters(chunks)
    located = _locate_parameters(registry, modules, config)
    tied = bool(getattr(config, "share_embeddings_and_output_weights", False))
    heads = {
        item.name
        for item in located
        if item.name.startswith(OUTPUT_LAYER) and item.kind == "replicated"
    }
    tasks, problems = _match_parameters(registry, located, modules, config, tied)
    claimed = dict.fromkeys(name for task in tasks for name in task.mapping.hf_names)
    ties = _find_ties(registry, tied, entries)
    again = _stored_twice(entries or (), copies, claimed, ties)
    ties |= again
    carried = _recomputed_buffers(entries or (), buffers, claimed)
    of_heads = {
        name for task in tasks if task.global_param_name in heads for name in task.mapping.hf_names
    }
    unread: tuple[str, ...] = ()
    if entries is not None:
        names = [task.global_param_name for task in tasks]
        unbuilt = [] if left_out is None else left_out.tensors(names, config.num_layers)
        carried += tuple(name for name in unbuilt if name in entries)
        accounted = {*claimed, *ties, *carried}
        foreign = [
            name
            for name in entries
            if name not in accounted and registry.hf_to_megatron_lookup(name) is None
        ]
        # a tensor that is missing may be among them, under another name
        is_complete = all(name in entries for name in claimed if name not in of_heads)
        unread = tuple(find_unread(foreign)) if is_complete else ()
        carried += unread
        needed = {name: None for name in claimed if name in entries or name not in of_heads}
        problems += _plan_differences(registry, tasks, needed, entries, ties, carried)
        problems += _incomplete_layers(unbuilt, entries)
    if problems:
        raise UserError(f"the conversion plan is inconsistent: {first_problems(problems)}")
    return ConversionPlan(
        tuple(tasks), ties, carried, frozenset(again), frozenset(of_heads), replaced, unread
    )


def global_name(chunk: nn.Module, local_name: str) -> str:
    """Return the name of a chunk's parameter in the full model, with the layers' global indices."""
    layer_match = _LAYER.match(local_name)
    if not layer_match:
        return local_name
    layer = chunk.get_submodule(f"{layer_match[1]}.{layer_match[2]}")
    layer_number = getattr(layer, "layer_number", int(layer_match[2]) + 1)
    return f"{layer_match[1]}.{layer_number - 1}.{local_name[layer_match.end() :]}"


def megatron_local_name_to_global(
    models: Any, config: Any, param_name: str, vp_stage: int | None = None
) -> str:
    """Return the name of a parameter of this rank in the full model, as a task's ``global_param_name``.

    Args:
        models: A chunk or all chunks of this rank, wrapped or not.
        config: The model's config, which has the number of experts.
        param_name: The name in its chunk.
        vp_stage: Index of the chunk; None is the first one.
    """
    chunk = model_io.unwrap(model_io.as_chunks(models)[vp_stage or 0])
    name = global_name(chunk, param_name)
    expert = _EXPERT.fullmatch(name)
    if expert is None or in_adapter(name):
        return name
    rank, ranks = exchange.rank_and_size(exchange.expert_group())
    first = rank * (config.num_moe_experts // ranks)
    return f"{expert[1]}{first + int(expert[2])}{expert[3]}"


HeldParameters = dict[tuple[int, str], tuple[str, nn.Module, Tensor]]
"""(chunk, local name) -> name in the full model, owning module, parameter."""


def _held_parameters(chunks: Sequence[nn.Module]) -> HeldParameters:
    """Return this rank's parameters and persistent buffers, such as a router's correction bias."""
    held: HeldParameters = {}
    seen_ids: set[int] = set()
    for index, chunk in enumerate(chunks):
        for path, module in cast(Iterator[tuple[str, nn.Module]], chunk.named_modules()):
            if in_adapter(path):
                continue
            prefix = f"{path}." if path else ""
            within = global_name(chunk, prefix)
            for name, parameter in _own_state(module):
                if id(parameter) not in seen_ids:
                    seen_ids.add(id(parameter))
                    held[index, prefix + name] = (within + name, module, parameter)
    return held


def _own_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from sorted(
        module.named_parameters(recurse=False), key=lambda entry: _trailing_number(entry[0])
    )
    recomputed = cast(set[str], vars(module)["_non_persistent_buffers_set"])
    for name, buffer in module.named_buffers(recurse=False):
        if name not in recomputed:
            yield name, buffer


def _trailing_number(name: str) -> int:
    """Return the number at the end of a name; grouped experts are registered in reverse order."""
    digits = re.search(r"\d+$", name)
    return int(digits[0]) if digits else -1


def _match_parameters(
    registry: MegatronMappingRegistry,
    located: Sequence[LocatedParameter],
    modules: HeldParameters,
    config: Any,
    tied: bool,
) -> tuple[list[WeightConversionTask], list[str]]:
    """Return a task for each parameter, and problems: parameters without a mapping or with another's tensor."""
    problems: list[str] = []
    unmapped: list[str] = []
    tasks: list[WeightConversionTask] = []
    owner_of: dict[HFPart, str] = {}
    for item in located:
        mapping = _find_mapping(registry, item.name, tied)
        if mapping is None:
            unmapped.append(item.name)
            continue
        is_copy = _claim_tensors(mapping, item, owner_of, tied, problems)
        tasks.append(_make_task(item, mapping, config, is_copy, modules))
    known = [mapping.megatron_param for mapping in registry.get_all_mappings()]
    problems += [
        f"Megatron parameter {name} has no mapping{misspelling(kind, known)}{made_by(name)}{more}"
        for kind, name, more in _group_alike_names(unmapped)
    ]
    return tasks, problems


def _locate_parameters(
    registry: MegatronMappingRegistry, modules: HeldParameters, config: Any
) -> list[LocatedParameter]:
    owner = Owner(exchange.stage())
    local_parameters: list[LocatedParameter] = []
    for (chunk, local), (name, module, parameter) in modules.items():
        mapping = registry.megatron_to_hf_lookup(name)
        kind = (mapping.kind or parallel_kind(module, parameter)) if mapping else "replicated"
        dtype = sharded_rows.stored_dtype(parameter)
        local_parameters.append(
            LocatedParameter(name, local, owner, chunk, tuple(parameter.shape), dtype, kind)
        )
    stages = exchange.all_gather_stages(local_parameters)
    chunks = 1 + max((item.chunk for items in stages for item in items), default=0)
    # the order of the model: first chunks of all stages, then second chunks
    ordered = [
        item for chunk in range(chunks) for items in stages for item in items if item.chunk == chunk
    ]
    ranks = exchange.rank_and_size(exchange.expert_group())[1]
    return (
        ordered
        if ranks == 1
        else list(_with_all_experts(ordered, ranks, config.num_moe_experts // ranks))
    )


def _with_all_experts(
    items: Iterable[LocatedParameter], ranks: int, experts_per_rank: int
) -> Iterator[LocatedParameter]:
    """Add the experts of other ranks, whose indices differ from this rank's by multiples of ``experts_per_rank``."""
    for experts, run in groupby(items, lambda item: _experts_of(item.name)):
        if not experts:
            yield from run
            continue
        local_experts = [
            (item, cast(re.Match[str], _EXPERT.fullmatch(item.name)).groups()) for item in run
        ]
        for rank in range(ranks):
            for item, (before, expert, after) in local_experts:
                name = f"{before}{int(expert) + rank * experts_per_rank}{after}"
                owner = Owner(item.owner.stage, rank)
                yield LocatedParameter(
                    name, item.local_name, owner, item.chunk, item.shape, item.dtype, item.kind
                )


def _experts_of(name: str) -> str:
    """Return the module that holds this expert and others, or an empty string for other parameters."""
    expert_match = _EXPERT.fullmatch(name)
    return expert_match[1].rpartition(".")[0] if expert_match else ""


def _find_mapping(
    registry: MegatronMappingRegistry, name: str, tied: bool
) -> MegatronParamMapping | None:
    if tied and name == OUTPUT:
        # on the last stage, this is a copy of the embedding; its own mapping does not apply
        shared = registry.megatron_to_hf_lookup(EMBEDDING)
        return shared and type(shared)(OUTPUT, shared.hf_param)
    return registry.megatron_to_hf_lookup(name)


def _claim_tensors(
    mapping: MegatronParamMapping,
    item: LocatedParameter,
    owner_of: dict[HFPart, str],
    tied: bool,
    problems: list[str],
) -> bool:
    """Record the Hugging Face tensors as covered; return whether they already were, as for a tied output layer."""
    parts = mapping.parts
    owners = {owner_of[part] for part in parts if part in owner_of}
    if not owners:
        owner_of |= dict.fromkeys(parts, item.name)
        return False
    if not (owners == {item.name} or (tied and item.name == OUTPUT)):
        problems.append(
            f"Megatron parameters {item.name} and {', '.join(owners)} both claim {mapping.hf_names[0]}"
        )
    return True


def _make_task(
    item: LocatedParameter,
    mapping: MegatronParamMapping,
    config: Any,
    is_copy: bool,
    modules: HeldParameters,
) -> WeightConversionTask:
    rank, size = exchange.rank_and_size(exchange.shard_group(item.name))
    module = None
    parameter = None
    if item.owner.is_here:
        _, module, parameter = modules[item.chunk, item.local_name]
    return WeightConversionTask(
        param_name=item.local_name,
        global_param_name=item.name,
        mapping=mapping,
        shard=ShardSpec(item.shape, item.kind, rank, size, _layer_config(item.name, config)),
        dtype=item.dtype,
        owner=item.owner,
        vp_stage=item.chunk,
        is_copy=is_copy,
        megatron_module=module,
        param_weight=parameter,
    )


def _layer_config(name: str, config: Any) -> Any:
    layer_match = _LAYER.match(name)
    if layer_match is None or not getattr(config, "heterogeneous_block_specs", False):
        return config
    return config.get_config_for_layer(int(layer_match[2]) + 1)


def _find_ties(
    registry: MegatronMappingRegistry, tied: bool, entries: Mapping[str, TensorEntry] | None
) -> dict[str, str]:
    """Return the output layer of a tied model if the checkpoint stores it anyway."""
    if not tied or entries is None:
        return {}
    names = tied_names(registry)
    return {output: embedding for output, embedding in names.items() if output in entries}


def tied_names(registry: MegatronMappingRegistry) -> dict[str, str]:
    """Return the tensors of the output layer of a tied model, and the equal ones of the embedding."""
    embedding = registry.megatron_to_hf_lookup(EMBEDDING)
    output = registry.megatron_to_hf_lookup(OUTPUT)
    if embedding is None or output is None:
        return {}
    names = zip(output.hf_names, embedding.hf_names, strict=True)
    return {name: same for name, same in names if name != same}


def _stored_twice(
    names: Iterable[str],
    copies: Mapping[str, str],
    claimed: Mapping[str, None],
    ties: Mapping[str, str],
) -> dict[str, str]:
    duplicates: dict[str, str] = {}
    for name in names:
        for pattern, same in copies.items():
            origin = ties.get(same, same)
            if (
                name not in claimed
                and origin in claimed
                and patterns.match(pattern, name) is not None
            ):
                duplicates[name] = origin
    return duplicates


def _recomputed_buffers(
    names: Iterable[str], buffers: Sequence[str], claimed: Mapping[str, None]
) -> tuple[str, ...]:
    return tuple(
        name
        for name in names
        if name not in claimed
        and any(patterns.match(pattern, name) is not None for pattern in buffers)
    )


def _plan_differences(
    registry: MegatronMappingRegistry,
    tasks: Sequence[WeightConversionTask],
    claimed: Mapping[str, None],
    entries: Mapping[str, TensorEntry],
    ties: Mapping[str, str],
    buffers: Sequence[str],
) -> list[str]:
    left_over = [
        name for name in entries if name not in claimed and name not in ties and name not in buffers
    ]
    needs = {name: task.global_param_name for task in tasks for name in task.mapping.hf_names}
    missing = [name for name in claimed if name not in entries]
    problems = [
        f"tensor {name} is missing from the checkpoint, but Megatron parameter {needs[name]} needs it"
        f"{misspelling(name, left_over)}{made_by(needs[name])}{more}"
        for _, name, more in _group_alike_names(missing)
    ]
    of_mtp = {name for name in claimed if needs[name].startswith("mtp.")}
    if not of_mtp.isdisjoint(missing):
        problems.insert(0, _NO_MTP if of_mtp.issubset(missing) else _SOME_MTP)
    settings = {
        name: made_by(mapping.megatron_param)
        for name in left_over
        if (mapping := registry.hf_to_megatron_lookup(name))
    }
    problems += [
        f"tensor {name} of the checkpoint has no Megatron parameter{settings.get(name, '')}{more}"
        for _, name, more in _group_alike_names(left_over)
    ]
    prefixes = filter(None, map(wrapper_prefix, left_over))
    for prefix in dict.fromkeys(prefixes):
        problems.insert(
            0,
            f"names begin with {prefix}, which a wrapper added: set strip_prefix={prefix!r} (--strip-prefix)",
        )
    return problems


def _group_alike_names(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Group names that differ only in layer and expert; yield pattern, first name and count."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_INDEX.sub("*", name), []).append(name)
    for kind, members in kinds.items():
        yield kind, members[0], f" ({len(members)} like this: {kind})" if len(members) > 1 else ""


def _incomplete_layers(unbuilt: Sequence[str], entries: Mapping[str, TensorEntry]) -> list[str]:
    """Describe missing tensors if a checkpoint has only some of the layers that the model was built without."""
    missing = [name for name in unbuilt if name not in entries]
    if not missing or len(missing) == len(unbuilt):
        return []
    return [_SOME_MTP, *(f"tensor {name} is missing from the checkpoint" for name in missing)]
