# SPDX-License-Identifier: Apache-2.0
"""Load and save adapters in Hugging Face's ``peft`` format, whose files ``peft_files`` reads.

An adapter's factors are converted like the weight that they update. This also works for Megatron's fused layers:
``[q; k; v] = W x + B A x`` is three layers that share A, and each has its own rows of B. The mapping that splits the
rows of W therefore also splits those of B, without error.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion.adapters.adapted_layers import (
    ADAPTER,
    AdaptedModule,
    LowRankPart,
    is_whole,
)
from megatron.bridge.models.conversion.adapters.peft_config import (
    Described,
    ModuleTensors,
    adapter_config,
    last_segment,
    module_of,
)
from megatron.bridge.models.conversion.adapters.peft_files import (
    BASE_WEIGHT,
    CONFIG,
    EMBEDDING_A,
    EMBEDDING_B,
    MAGNITUDE,
    PREFIX,
    TENSORS,
    A,
    B,
    rank_and_alpha,
    read,
)
from megatron.bridge.models.conversion.adapters.stacked_experts import (
    expert_module,
    parameter_of,
    stack_factors,
    wrapped_modules,
)
from megatron.bridge.models.conversion.engine import exchange
from megatron.bridge.models.conversion.engine.plan import ConversionPlan, WeightConversionTask
from megatron.bridge.models.conversion.param_mapping import (
    MegatronParamMapping,
    ParallelKind,
    ShardSpec,
)
from megatron.bridge.utils.errors import UserError


def refuse_other_config(chunks: Sequence[nn.Module], peft_config: Any) -> None:
    """Refuse a config that differs from the one that created the adapters."""
    for chunk in chunks:
        made_with = chunk_info(chunk).peft
        if made_with != peft_config:
            raise UserError(
                f"peft_config={peft_config} is not what the model's adapters were made with, {made_with}"
            )


def merging(plan: ConversionPlan) -> ConversionPlan:
    """Return the plan of the same export with adapters merged into the weights."""
    return replace(plan, tasks=tuple(replace(task, merges=True) for task in plan.tasks))


def stream(plan: ConversionPlan) -> Iterator[ModuleTensors]:
    """Yield the adapters of a model as full tensors on every rank, in the order of the model, stacked experts last."""
    of_experts: dict[str, list[ModuleTensors]] = {}
    for module in _stream_each(plan):
        parameter = parameter_of(module.module)
        if parameter is None:
            yield module
        else:
            of_experts.setdefault(parameter, []).append(module)
    for parameter, module_name in wrapped_modules(list(of_experts)).items():
        yield _stack_experts(parameter, module_name, of_experts[parameter])


def _stack_experts(parameter: str, module: str, experts: list[ModuleTensors]) -> ModuleTensors:
    first = experts[0]
    by_index = {expert.module: expert.tensors for expert in experts}
    in_order = [by_index[expert_module(parameter, index)] for index in range(len(experts))]
    a, b = stack_factors([(tensors[A], tensors[B]) for tensors in in_order])
    return replace(first, module=module, tensors={A: a, B: b}, parameter=parameter)


def _stream_each(plan: ConversionPlan) -> Iterator[ModuleTensors]:
    """Yield the adapters of a model as ``stream``, those of stacked experts one by one."""
    for task in plan.tasks:
        local_modules = [] if task.is_copy or task.param_weight is None else _of_task(task)
        for index, (module, described, outlines) in enumerate(
            exchange.broadcast_object(task.owner, _outline_tensors(local_modules))
        ):
            held = local_modules[index].tensors if local_modules else {}
            tensors = {
                name: exchange.from_owner(held.get(name), shape, dtype, task.owner)
                for name, (shape, dtype) in outlines.items()
            }
            yield ModuleTensors(module, described, tensors, task.global_param_name)
            if described is None:
                yield from _tied_to(module, tensors, plan, task.global_param_name)


def _tied_to(
    module: str, tensors: Mapping[str, Tensor], plan: ConversionPlan, megatron_name: str
) -> Iterator[ModuleTensors]:
    """Yield the output layer with a trained embedding: ``peft`` would keep the base's, although they are tied."""
    for kind, tensor in tensors.items():
        for alias, name in plan.ties.items():
            if name == f"{module}.{kind}":
                tied_module, _, tied_kind = alias.rpartition(".")
                yield ModuleTensors(tied_module, None, {tied_kind: tensor}, megatron_name)


def _outline_tensors(modules: list[ModuleTensors]) -> list[Any]:
    return [
        (
            module.module,
            module.described,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in module.tensors.items()},
        )
        for module in modules
    ]


@torch.no_grad()
def _of_task(task: WeightConversionTask) -> list[ModuleTensors]:
    """Return the adapter tensors of one parameter on this rank; a collective over the ranks of its shards."""
    module = task.megatron_module
    weight = cast(Tensor, task.param_weight)
    if is_whole(weight):
        full_tensors = task.mapping.megatron_to_hf(sharded_rows.whole(weight), module)
        return [ModuleTensors(*_split_name(name, tensor)) for name, tensor in full_tensors.items()]
    if not isinstance(module, AdaptedModule):
        return []
    with sharded_rows.gathered(cast(nn.Module, getattr(module, ADAPTER))):
        return [
            tensors for part in module.low_rank_parts(weight) for tensors in _of_part(task, part)
        ]


def _split_name(name: str, tensor: Tensor) -> tuple[str, None, dict[str, Tensor]]:
    module, _, kind = name.rpartition(".")
    return module, None, {kind: tensor}


def _of_part(task: WeightConversionTask, part: LowRankPart) -> Iterator[ModuleTensors]:
    described = Described(
        part.a.shape[0], part.alpha, part.use_rslora, part.magnitude is not None, part.dropout
    )
    tensors = {
        A: _join_factor(task, part, part.a, "row"),
        B: _join_factor(task, part, part.b, "column"),
    }
    if part.magnitude is not None:
        tensors[MAGNITUDE] = _join_factor(task, part, part.magnitude, "column")
    for name in _updated_names(task.mapping, part):
        factors = {kind: by_name[name].detach().contiguous() for kind, by_name in tensors.items()}
        yield ModuleTensors(module_of(name), described, factors)


def _join_factor(
    task: WeightConversionTask, part: LowRankPart, factor: Tensor, side: ParallelKind
) -> dict[str, Tensor]:
    """Join a factor of each Hugging Face tensor from all ranks; the outputs lie along ``column``."""
    names = _updated_names(task.mapping, part)
    shard = task.shard
    if not _is_split(shard, side):  # every rank has the full factor, which all tensors share
        return dict.fromkeys(names, factor)
    group = exchange.shard_group(task.global_param_name)
    shards = exchange.all_gather(factor, group, shard.parts) if shard.parts > 1 else [factor]
    if part.role is None:
        joined = task.mapping.join(replace(shard, shape=tuple(factor.shape)), shards)
        return {
            _updated_name(task.mapping, name): _as_stored(task.mapping, tensor)
            for name, tensor in joined.items()
        }
    (name,) = names
    return {name: torch.cat(shards)[: task.mapping.hf_shapes(shard)[name][0]]}


def _is_split(shard: ShardSpec, side: ParallelKind) -> bool:
    """Return whether a factor is sharded, or divided among the outputs of several tensors."""
    return side == shard.kind or (side, shard.kind) == ("column", "replicated")


def _updated_names(mapping: MegatronParamMapping, part: LowRankPart) -> list[str]:
    """Return the Hugging Face tensors that a part updates."""
    if not mapping.copies:
        raise UserError(
            f"the adapter of {mapping.megatron_param} has no form in the peft format, as {mapping.hf_names[0]} "
            "is computed from it: merge it into the model instead"
        )
    if mapping.is_stacked and part.magnitude is not None:
        raise UserError(
            f"the adapter of {mapping.megatron_param} has no form in the peft format, which has no DoRA for experts "
            "in one tensor: merge it into the model instead"
        )
    if part.role is None:
        return [_updated_name(mapping, name) for name in mapping.hf_names]
    if isinstance(mapping.hf_param, str):
        raise UserError(
            f"the adapter of {mapping.megatron_param} has factors for {part.role} alone, but Hugging Face's "
            f"{mapping.hf_param} is one tensor, too: use LoRA instead of CanonicalLoRA"
        )
    return [mapping.hf_param[part.role]]


def _updated_name(mapping: MegatronParamMapping, hf_name: str) -> str:
    """Return the name of a Hugging Face tensor, or of an expert's part of it."""
    if not mapping.is_stacked:
        return hf_name
    assert mapping.expert is not None, "a parameter with all experts is not adapted as a whole"
    return expert_module(hf_name, mapping.expert)


def _as_stored(mapping: MegatronParamMapping, factor: Tensor) -> Tensor:
    """Turn a factor of an [in, out] weight, which was joined like it, or back: ``peft`` stores factors in one way."""
    return factor.mT if mapping.is_stacked and mapping.transposed else factor


def save(plan: ConversionPlan, directory: Path, base: str | None, write: bool) -> None:
    """Write the adapters of a model into ``directory``; all ranks call this, and the ranks with ``write`` write."""
    modules = [
        replace(module, tensors={name: factor.cpu() for name, factor in module.tensors.items()})
        for module in stream(plan)
    ]
    if not any(module.described for module in modules):
        raise UserError("this model has no adapters to write: save the model itself")
    described = [module for module in modules if module.described is not None]
    _refuse_what_is_dropped(
        plan, {module.module for module in described if module.parameter is None}
    )
    config = adapter_config(modules, plan, base)
    if write:
        tensors = {
            name: tensor.clone() for module in modules for name, tensor in module.named().items()
        }
        content = safetensors.torch.save(tensors, metadata={"format": "pt"})
        (directory / TENSORS).write_bytes(
            content
        )  # save_file would create a file that only its owner can read
        (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _refuse_what_is_dropped(plan: ConversionPlan, modules: set[str]) -> None:
    """Refuse adapters that ``peft`` would silently drop."""
    experts = {
        task.global_param_name: {module_of(name) for name in task.mapping.hf_names}
        for task in plan.tasks
        if ".experts." in task.global_param_name and not task.mapping.is_stacked
    }
    _refuse_namesakes(
        {module for expert_modules in experts.values() for module in expert_modules}, modules
    )
    _refuse_half_of_experts(
        {name for name, expert_modules in experts.items() if expert_modules & modules}
    )


def _refuse_namesakes(experts: set[str], modules: set[str]) -> None:
    """Refuse shared experts or dense layers that ``peft`` would confuse with experts of the same name."""
    leaves = {last_segment(module) for module in experts}
    namesake = next(
        (module for module in sorted(modules - experts) if last_segment(module) in leaves), None
    )
    if namesake is not None:
        raise UserError(
            f"{namesake} has an adapter that peft cannot load, because layers of experts are also "
            f"called {last_segment(namesake)}: "
            "leave it out with peft.exclude_modules, or merge the adapters into the model"
        )


def _refuse_half_of_experts(adapted: set[str]) -> None:
    """Refuse an adapter on only one of an expert's two layers: ``peft`` takes it for the first layer's adapter."""
    first = (name for name in adapted if ".linear_fc1." in name)
    alone = next(
        (name for name in first if name.replace(".linear_fc1.", ".linear_fc2.") not in adapted),
        None,
    )
    if alone is not None:
        raise UserError(
            f"{alone} has an adapter and the second layer of its expert has none, which peft cannot load: also target "
            "linear_fc2, or merge the adapters into the model"
        )


def load(plan: ConversionPlan, directory: Path) -> None:
    """Load the adapters of a model from a ``peft`` directory; no value changes if anything differs."""
    config, stored = read(directory)
    tensors = _drop_tied_copies(plan, stored, directory)
    base_weights = {name for name in tensors if name.endswith(f".{BASE_WEIGHT}")}
    jobs: list[tuple[WeightConversionTask, LowRankPart]] = []
    trained_whole: list[WeightConversionTask] = []
    claimed: set[str] = set()
    for task in plan.tasks:
        parts = [] if task.param_weight is None else _adapter_parts(task)
        names = [name for part in parts for name in _claimed_keys(task, part)]
        jobs += [(task, part) for part in parts]
        if task.param_weight is not None and is_whole(task.param_weight):
            trained_whole.append(task)
            names += _claims_of_whole(task, tensors)
        claimed |= set(exchange.broadcast_object(task.owner, names))
    claimed |= {name for name in base_weights if _has_factors(name, claimed)}
    if wrong := sorted(claimed ^ tensors.keys()):
        missing = wrong[0] in claimed
        raise UserError(
            f"the adapter {directory} {'lacks' if missing else 'also holds'} {wrong[0]} and differs in "
            f"{len(wrong)} tensors from the model's adapters: adapt the model with the result of peft_for"
        )
    for task, part in jobs:
        _check_part(task, part, config, tensors, directory)
    for task in trained_whole:
        _check_whole(task, tensors, directory)
    _check_base_weights(plan, tensors, directory)
    with torch.no_grad():
        for task, part in jobs:
            _fill_factors(task, part, tensors)
        for task in trained_whole:
            _fill_whole(task, config, tensors)


def _drop_tied_copies(
    plan: ConversionPlan, tensors: Mapping[str, Tensor], directory: Path
) -> dict[str, Tensor]:
    """Return the tensors without the second half of a tie; refuse halves that differ."""
    remaining = dict(tensors)
    for alias, name in plan.ties.items():
        alias_key = f"{PREFIX}{alias}"
        key = f"{PREFIX}{name}"
        if alias_key not in tensors and key not in tensors:
            continue
        if not _are_equal(tensors.get(alias_key), tensors.get(key)):
            raise UserError(
                f"the adapter {directory} has different weights for {alias} and {name}, which are one weight in this "
                "model (tie_word_embeddings): save the base model with tie_word_embeddings=false and use that one"
            )
        del remaining[alias_key]
    return remaining


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def _has_factors(base_weight: str, names: Iterable[str]) -> bool:
    module = base_weight.removesuffix(f".{BASE_WEIGHT}")
    return f"{module}.{A}" in names or f"{module}.{EMBEDDING_A}" in names


def _claims_of_whole(task: WeightConversionTask, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors that a module which is trained whole is loaded from."""
    names: list[str] = []
    for hf_name in task.mapping.hf_names:
        if _tensor_key(hf_name, EMBEDDING_A) in tensors:
            names += [_tensor_key(hf_name, EMBEDDING_A), _tensor_key(hf_name, EMBEDDING_B)]
        else:
            names.append(f"{PREFIX}{hf_name}")
    return names


def _check_whole(
    task: WeightConversionTask, tensors: Mapping[str, Tensor], directory: Path
) -> None:
    """Refuse tensors of modules that are trained whole if their shapes are others than the model's."""
    for hf_name, shape in task.mapping.hf_shapes(task.shard).items():
        if _tensor_key(hf_name, EMBEDDING_A) in tensors:
            inputs = tensors[_tensor_key(hf_name, EMBEDDING_A)].shape[1]
            stored_shape = (inputs, tensors[_tensor_key(hf_name, EMBEDDING_B)].shape[0])
        else:
            stored_shape = tuple(tensors[f"{PREFIX}{hf_name}"].shape)
        if stored_shape != tuple(shape):
            raise UserError(
                f"the adapter {directory} has {hf_name} of shape {list(stored_shape)} where this model needs "
                f"{list(shape)}: give the base model that it was trained for"
            )
    if getattr(task.param_weight, "holds_adapter", False):
        raise UserError(
            f"{task.global_param_name} holds an adapter already: load {directory} into a new model"
        )


def _check_base_weights(
    plan: ConversionPlan, tensors: Mapping[str, Tensor], directory: Path
) -> None:
    """Refuse weights that ``peft`` stored again if they are not those of the base model."""
    for task in plan.tasks:
        if task.param_weight is None or not task.mapping.copies:
            continue
        stored = {
            name: tensors.get(_tensor_key(name, BASE_WEIGHT)) for name in task.mapping.hf_names
        }
        if all(weight is None for weight in stored.values()):
            continue
        shapes = task.mapping.hf_shapes(task.shard)
        for piece in task.mapping.copy_ranges(task.shard):
            weight = stored[piece.hf]
            if weight is None:
                continue
            base = piece.of_shard(task.param_weight)
            if tuple(weight.shape) != tuple(shapes[piece.hf]) or not torch.equal(
                piece.of_hf(weight).to(base.device, base.dtype), base
            ):
                raise UserError(
                    f"the adapter {directory} was trained with another {piece.hf} than this base model has: give the "
                    "base model that it was trained for"
                )


def _fill_whole(
    task: WeightConversionTask, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Load a module that is trained whole; factors of an embedding are added to its rows."""
    parameter = cast(Tensor, task.param_weight)
    updates: dict[str, Tensor] = {}
    for hf_name in task.mapping.hf_names:
        if _tensor_key(hf_name, EMBEDDING_A) in tensors:
            a = tensors[_tensor_key(hf_name, EMBEDDING_A)]
            b = tensors[_tensor_key(hf_name, EMBEDDING_B)]
            rank, alpha = rank_and_alpha(config, module_of(hf_name))
            scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            updates[hf_name] = (b.float() @ a.float()).T * scaling
    for piece in task.mapping.copy_ranges(task.shard):
        rows = piece.of_shard(parameter)
        if piece.hf in updates:
            rows.copy_(rows.float() + piece.of_hf(updates[piece.hf]).to(rows.device))
            cast(Any, parameter).holds_adapter = True
        else:
            rows.copy_(piece.of_hf(tensors[f"{PREFIX}{piece.hf}"]))


def _adapter_parts(task: WeightConversionTask) -> list[LowRankPart]:
    module = task.megatron_module
    return (
        module.low_rank_parts(cast(Tensor, task.param_weight))
        if isinstance(module, AdaptedModule)
        else []
    )


def _claimed_keys(task: WeightConversionTask, part: LowRankPart) -> list[str]:
    kinds = [A, B, *([MAGNITUDE] if part.magnitude is not None else [])]
    return [
        _tensor_key(name, kind) for name in _updated_names(task.mapping, part) for kind in kinds
    ]


def _tensor_key(name: str, kind: str) -> str:
    return f"{PREFIX}{module_of(name)}.{kind}"


def _check_part(
    task: WeightConversionTask,
    part: LowRankPart,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    directory: Path,
) -> None:
    if not part.is_view:
        raise UserError(
            f"{directory} cannot be loaded into adapters that start as parts of the weights "
            "(peft.init_lora_weights): adapt the model with the result of peft_for"
        )
    names = _updated_names(task.mapping, part)
    for name in names:
        rank, alpha = rank_and_alpha(config, module_of(name))
        of_model = (part.a.shape[0], part.alpha, part.use_rslora)
        of_files = (rank, alpha, bool(config.get("use_rslora")))
        if of_model != of_files:
            raise UserError(
                f"the adapter {directory} has rank, alpha and use_rslora {of_files} for {name}, the model's adapter "
                f"has {of_model}: adapt the model with the result of peft_for"
            )
        _check_shapes(task, part, name, tensors, directory)
    shared = task.shard.kind != "row" and part.role is None
    if shared and any(
        not torch.equal(tensors[_tensor_key(names[0], A)], tensors[_tensor_key(name, A)])
        for name in names[1:]
    ):
        raise UserError(
            f"the adapter {directory} has different factors A for {', '.join(names)}, which an adapter of "
            "Megatron's fused layer shares: use CanonicalLoRA"
        )


def _check_shapes(
    task: WeightConversionTask,
    part: LowRankPart,
    name: str,
    tensors: Mapping[str, Tensor],
    directory: Path,
) -> None:
    """Refuse factors whose matrix has a different shape: a slice of a wider factor would fit."""
    shapes = {
        _updated_name(task.mapping, hf_name): shape
        for hf_name, shape in task.mapping.hf_slice_shapes(task.shard).items()
    }
    outputs, inputs = shapes[name]
    if task.mapping.is_stacked and task.mapping.transposed:
        outputs, inputs = inputs, outputs
    rank = part.a.shape[0]
    expected_shapes: dict[str, tuple[int, ...]] = {A: (rank, inputs), B: (outputs, rank)}
    if part.magnitude is not None:
        expected_shapes[MAGNITUDE] = (outputs,)
    for kind, expected_shape in expected_shapes.items():
        stored_shape = tuple(tensors[_tensor_key(name, kind)].shape)
        if stored_shape != expected_shape:
            raise UserError(
                f"the adapter {directory} has {_tensor_key(name, kind)} of shape "
                f"{list(stored_shape)} where this model needs "
                f"{list(expected_shape)}: give the base model that it was trained for"
            )


def _fill_factors(
    task: WeightConversionTask, part: LowRankPart, tensors: Mapping[str, Tensor]
) -> None:
    sides: list[tuple[Tensor, str, ParallelKind]] = [(part.a, A, "row"), (part.b, B, "column")]
    if part.magnitude is not None:
        sides.append((part.magnitude, MAGNITUDE, "column"))
    names = _updated_names(task.mapping, part)
    for factor, kind, side in sides:
        stored = {name: tensors[_tensor_key(name, kind)] for name in names}
        if not _is_split(task.shard, side):
            factor.copy_(stored[names[0]])
        elif part.role is not None:
            _copy_rows(factor, stored[names[0]], task.shard)
        else:
            factor.zero_()
            for piece in task.mapping.copy_ranges(replace(task.shard, shape=tuple(factor.shape))):
                source = stored[_updated_name(task.mapping, piece.hf)]
                piece.of_shard(factor).copy_(piece.of_slice(_as_stored(task.mapping, source)))


def _copy_rows(factor: Tensor, full_factor: Tensor, shard: ShardSpec) -> None:
    """Copy this rank's rows; rows that pad the heads become zero."""
    rows = factor.shape[0]
    local_rows = full_factor[shard.part * rows : (shard.part + 1) * rows]
    factor.zero_()
    factor[: local_rows.shape[0]].copy_(local_rows)
