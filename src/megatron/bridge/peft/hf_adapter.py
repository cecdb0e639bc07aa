# SPDX-License-Identifier: Apache-2.0
"""From a directory that the ``peft`` library wrote to the method whose adapters can hold it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.adapters.stacked_experts import parameter_of
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.peft import layers
from megatron.bridge.peft.base import bare_chunks
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.fused_parts import GATED, QKV
from megatron.bridge.peft.lora import LoRA, LowRankPEFT
from megatron.bridge.utils.errors import UserError

_PARTS = {**QKV, **GATED}
_EMBEDDING, _OUTPUT = "embedding.word_embeddings", "output_layer"
_WHOLE_LAYERS = (_EMBEDDING, _OUTPUT, "decoder.final_layernorm")


@dataclass(frozen=True)
class _Placed:
    """One adapted Hugging Face module: its layer, and its role there if the layer is fused."""

    module: str
    layer: str
    role: str | None
    roles: frozenset[str]


def base_name(directory: Path) -> str | None:
    """The base model that the adapter names."""
    return peft_format.read(directory)[0].get("base_model_name_or_path")


def adapted_model(
    directory: Path, base: str, trust_remote_code: bool, check: bool
) -> tuple[AutoBridge, list[Any]]:
    """The base model with the adapters of a directory, in one process.

    Args:
        directory: In the format of ``peft``, which does not say what the base's weights are.
        base: Hugging Face directory or hub id.
        trust_remote_code: Run the base's own code.
        check: Without use here.
    """
    del check
    adapter = "none" if hub.leaves_out_adapter(base, directory) else None
    bridge = AutoBridge.from_hf_pretrained(
        base, trust_remote_code=trust_remote_code, adapter=adapter
    )
    method = peft_for(bridge, directory)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    method(model, training=False)
    for chunk in bare_chunks(model):
        for module in layers.adapted(chunk):
            module.adapter.float()  # as stored: a bf16 base would round them
    bridge.load_hf_adapter(model, directory)
    return bridge, model


def peft_for(bridge: AutoBridge, directory: str | Path) -> LowRankPEFT:
    """The method to adapt a model with before ``AutoBridge.load_hf_adapter`` loads ``directory``.

    Projections that Megatron fuses get separate factors (``CanonicalLoRA``), unless all of them share A (``LoRA``,
    ``DoRA``), as in what ``AutoBridge.save_hf_adapter`` wrote.

    Args:
        bridge: ``AutoBridge`` of the base model.
        directory: With ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        UserError: an adapter that Megatron's layers cannot hold.
    """
    config, tensors = peft_format.read(Path(directory))
    adapted_modules, whole_modules = _sort_modules(tensors)
    registry = bridge.adapter_registry
    placed = [_place_module(registry, module) for module in adapted_modules]
    saved = [_place_module(registry, module) for module in whole_modules]
    _check_whole_modules(saved, config, Path(directory))
    if bridge.to_megatron_provider(load_weights=False).share_embeddings_and_output_weights:
        saved = _check_tied_modules(placed, saved, tensors, Path(directory))
    fused = _can_be_fused(placed, config, tensors)
    if config.get("use_dora") and not fused:
        raise UserError(
            f"the adapter {directory} is DoRA with separate factors for projections that are one layer in "
            "Megatron: merge it into its base with peft's merge_and_unload"
        )
    kind = DoRA if config.get("use_dora") else LoRA if fused else CanonicalLoRA
    return _make_method(kind, placed, saved, config, fused)


def _sort_modules(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Return the modules with factors, and those that get other weights.

    An embedding gets other weights: the product of its factors is added to its rows.
    """
    factors = (peft_format.A, peft_format.B, peft_format.MAGNITUDE)
    embedding_factors = (peft_format.EMBEDDING_A, peft_format.EMBEDDING_B)
    adapted: dict[str, None] = {}
    replaced: dict[str, None] = {}
    base_weights: list[str] = []
    for name in tensors:
        module, kind = _split_name(
            name, (*factors, *embedding_factors, peft_format.BASE_WEIGHT, "weight")
        )
        if kind in factors:
            adapted[module] = None
        elif kind == peft_format.BASE_WEIGHT:
            base_weights.append(module)
        else:
            replaced[module] = None
    if half := [module for module in adapted if module in replaced]:
        raise UserError(
            f"the adapter changes {half[0]} in two ways (such as DoRA on an embedding), which cannot be read: merge it "
            "into its base with peft's merge_and_unload"
        )
    for module in base_weights:
        if module not in adapted and module not in replaced:
            raise UserError(
                f"the adapter holds {module}.{peft_format.BASE_WEIGHT} without factors for {module}: save it again"
            )
    return list(adapted), list(replaced)


def _split_name(name: str, kinds: Sequence[str]) -> tuple[str, str]:
    """Return module and kind of a tensor."""
    kind = next((kind for kind in kinds if name.endswith(f".{kind}")), None)
    if kind is None or not name.startswith(peft_format.PREFIX):
        raise UserError(
            f"the adapter holds {name}, which is no factor of LoRA or DoRA: merge it instead"
        )
    return name[len(peft_format.PREFIX) : -len(kind) - 1], kind


def _check_whole_modules(
    saved: Sequence[_Placed], config: Mapping[str, Any], directory: Path
) -> None:
    """Refuse modules that have other weights in the adapter and that a model cannot exchange as a whole."""
    if config.get("modules_to_save") and not saved:
        raise UserError(
            f"the adapter {directory} has modules_to_save={config['modules_to_save']!r} but no weights of them: save "
            "it again"
        )
    for placed_module in saved:
        if placed_module.layer not in _WHOLE_LAYERS:
            raise UserError(
                f"the adapter {directory} has other weights for {placed_module.module}, which is "
                "a part of a larger layer here: "
                "merge it into its base with peft's merge_and_unload"
            )


def _check_tied_modules(
    placed: Sequence[_Placed],
    saved: Sequence[_Placed],
    tensors: Mapping[str, Tensor],
    directory: Path,
) -> list[_Placed]:
    """Return ``saved`` without the second half of a tie; refuse to change one half, as ``peft`` does."""
    halves = {
        placed_module.layer: placed_module
        for placed_module in (*placed, *saved)
        if placed_module.layer in (_EMBEDDING, _OUTPUT)
    }
    with_factors = [
        placed_module
        for placed_module in halves.values()
        if placed_module in placed
        or f"{peft_format.PREFIX}{placed_module.module}.{peft_format.EMBEDDING_A}" in tensors
    ]
    if len(halves) == 1 or with_factors:
        changed = next(iter(with_factors or halves.values()))
        raise UserError(
            f"the adapter {directory} changes {changed.module} alone, but it is one weight with the "
            f"{'embedding' if changed.layer == _OUTPUT else 'output layer'} in this model: save the base model with "
            "tie_word_embeddings=false and lm_head.weight, and use that one"
        )
    return [placed_module for placed_module in saved if placed_module.layer != _OUTPUT]


def _place_module(registry: MegatronMappingRegistry, module: str) -> _Placed:
    parameter = parameter_of(module)
    mapping = registry.hf_to_megatron_lookup(parameter or f"{module}.weight")
    if mapping is None:
        raise UserError(f"the adapter is for {module}, which the base model does not have")
    layer = mapping.megatron_param.rpartition(".")[0]
    if isinstance(mapping.hf_param, str):
        return _Placed(module, layer, None, frozenset())
    role = next(role for role, name in mapping.hf_param.items() if name == f"{module}.weight")
    return _Placed(module, layer, role, frozenset(mapping.hf_param))


def _can_be_fused(
    placed: list[_Placed], config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> bool:
    """Whether all roles of each layer have adapters of the same shape that share A."""
    parts: dict[str, list[_Placed]] = {}
    for placed_module in placed:
        # experts are apart in Megatron, too: each is a weight of its layer
        parts.setdefault(
            placed_module.module.rpartition(".")[0] + placed_module.layer
            if placed_module.role
            else placed_module.module,
            [],
        ).append(placed_module)
    for group in parts.values():
        first = group[0]
        if first.role is None:
            continue
        values = {
            peft_format.rank_and_alpha(config, placed_module.module) for placed_module in group
        }
        factors = [
            tensors[f"{peft_format.PREFIX}{placed_module.module}.{peft_format.A}"]
            for placed_module in group
        ]
        has_all_roles = {placed_module.role for placed_module in group} == first.roles
        if (
            not has_all_roles
            or len(values) > 1
            or any(not torch.equal(factors[0], factor) for factor in factors[1:])
        ):
            return False
    return True


def _make_method(
    kind: type[LowRankPEFT],
    placed: list[_Placed],
    saved: list[_Placed],
    config: Mapping[str, Any],
    fused: bool,
) -> LowRankPEFT:
    values = {
        _target_name(placed_module, fused): peft_format.rank_and_alpha(config, placed_module.module)
        for placed_module in placed
    }
    rank = config["r"]
    alpha = config["lora_alpha"]
    return kind(
        target_modules=list(values),
        modules_to_save=list(dict.fromkeys(placed_module.layer for placed_module in saved)),
        dim=rank,
        alpha=alpha,
        use_rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        dim_by_module={
            name: rank_and_alpha_of[0]
            for name, rank_and_alpha_of in values.items()
            if rank_and_alpha_of[0] != rank
        },
        alpha_by_module={
            name: rank_and_alpha_of[1]
            for name, rank_and_alpha_of in values.items()
            if rank_and_alpha_of[1] != alpha
        },
    )


def _target_name(placed_module: _Placed, fused: bool) -> str:
    if fused or placed_module.role is None:
        return placed_module.layer
    return f"{placed_module.layer.rpartition('.')[0]}.{_PARTS[placed_module.role]}"
