# SPDX-License-Identifier: Apache-2.0
"""From a directory that the ``peft`` library wrote to the method whose adapters can hold it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.peft import layers
from megatron.bridge.peft.base import bare_chunks
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.fused_parts import GATED, QKV
from megatron.bridge.peft.lora import LoRA, LowRankPEFT
from megatron.bridge.utils.errors import UserError

_PARTS = {**QKV, **GATED}


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
    bridge = AutoBridge.from_hf_pretrained(base, trust_remote_code=trust_remote_code)
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
    placed = [_place(bridge.adapter_registry, name) for name in _modules(tensors)]
    fused = _can_be_fused(placed, config, tensors)
    if config.get("use_dora") and not fused:
        raise UserError(
            f"the adapter {directory} is DoRA with factors of their own for projections that are one layer in "
            "Megatron: merge it into its base with peft's merge_and_unload"
        )
    kind = DoRA if config.get("use_dora") else LoRA if fused else CanonicalLoRA
    return _method(kind, placed, config, fused)


def _modules(tensors: Mapping[str, Tensor]) -> list[str]:
    ends = tuple(f".{kind}" for kind in (peft_format.A, peft_format.B, peft_format.MAGNITUDE))
    found: dict[str, None] = {}
    for name in tensors:
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None or not name.startswith(peft_format.PREFIX):
            raise UserError(
                f"the adapter holds {name}, which is no factor of LoRA or DoRA: merge it instead"
            )
        found[name[len(peft_format.PREFIX) : -len(end)]] = None
    return list(found)


def _place(registry: MegatronMappingRegistry, module: str) -> _Placed:
    mapping = registry.hf_to_megatron_lookup(f"{module}.weight")
    if mapping is None:
        raise UserError(f"the adapter is beside {module}, which the base model does not have")
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
    for one in placed:
        # experts are apart in Megatron, too: each is a weight of its layer
        parts.setdefault(
            one.module.rpartition(".")[0] + one.layer if one.role else one.module, []
        ).append(one)
    for group in parts.values():
        first = group[0]
        if first.role is None:
            continue
        values = {peft_format.rank_and_alpha(config, one.module) for one in group}
        factors = [tensors[f"{peft_format.PREFIX}{one.module}.{peft_format.A}"] for one in group]
        whole = {one.role for one in group} == first.roles
        if (
            not whole
            or len(values) > 1
            or any(not torch.equal(factors[0], other) for other in factors[1:])
        ):
            return False
    return True


def _method(
    kind: type[LowRankPEFT], placed: list[_Placed], config: Mapping[str, Any], fused: bool
) -> LowRankPEFT:
    values = {_target(one, fused): peft_format.rank_and_alpha(config, one.module) for one in placed}
    rank, alpha = config["r"], config["lora_alpha"]
    return kind(
        target_modules=list(values),
        dim=rank,
        alpha=alpha,
        use_rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        dim_by_module={name: found[0] for name, found in values.items() if found[0] != rank},
        alpha_by_module={name: found[1] for name, found in values.items() if found[1] != alpha},
    )


def _target(one: _Placed, fused: bool) -> str:
    if fused or one.role is None:
        return one.layer
    return f"{one.layer.rpartition('.')[0]}.{_PARTS[one.role]}"
