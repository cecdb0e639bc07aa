# SPDX-License-Identifier: Apache-2.0
"""The content of ``adapter_config.json`` for programs that write adapters themselves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.bridge.models.conversion.adapters import peft_format
from megatron.bridge.models.conversion.adapters.peft_config import Described, config_of

_ENDS = tuple(f".{kind}" for kind in (peft_format.A, peft_format.B, peft_format.MAGNITUDE))


def infer_target_modules_from_adapter_weights(adapter_weight_names: Iterable[str]) -> list[str]:
    """Return the last segments of the adapted modules' names, sorted.

    Example:
        >>> infer_target_modules_from_adapter_weights(["model.layers.0.self_attn.q_proj.lora_A.weight"])
        ['q_proj']
    """
    modules = (
        name.removesuffix(end)
        for name in adapter_weight_names
        for end in _ENDS
        if name.endswith(end)
    )
    return sorted({module.rpartition(".")[2] for module in modules})


def build_adapter_config_dict(
    peft_config: Any,
    target_modules: Sequence[str],
    base_model_name_or_path: str | None = None,
    rank_pattern: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the ``adapter_config.json`` that ``peft.PeftModel.from_pretrained`` needs for adapters."""
    is_dora = type(peft_config).__name__ == "DoRA"
    described = Described(
        peft_config.dim, peft_config.alpha, peft_config.use_rslora, is_dora, peft_config.dropout
    )
    return {
        **config_of(described, base_model_name_or_path),
        "target_modules": list(target_modules),
        "modules_to_save": None,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": {},
    }
