# SPDX-License-Identifier: Apache-2.0
"""Name the adapted modules in ``adapter_config.json``, as ``peft`` finds them again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Any

from torch import Tensor

from megatron.bridge.models.conversion.adapters.peft_files import PREFIX
from megatron.bridge.models.conversion.engine.plan import ConversionPlan
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class Described:
    """The settings in ``adapter_config.json`` for one Hugging Face module."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    dropout: float


TASK_TYPES = {
    None: "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
"""The task name of each head in ``peft``."""


@dataclass(frozen=True)
class ModuleTensors:
    """The adapter of one Hugging Face module, or the tensors of a module that is saved as a whole."""

    module: str  # name of the module in the base checkpoint
    described: (
        Described | None
    )  # settings of an adapter; None for a module that is saved as a whole
    tensors: dict[str, Tensor]  # by the part of their names after the module's name
    megatron_param: str = (
        ""  # the parameter that the adapter updates, or the tensor's own parameter
    )
    parameter: str | None = None  # the adapted parameter with all experts of ``module``

    def named(self, prefix: str = PREFIX) -> dict[str, Tensor]:
        """Return the tensors by their full names; ``adapter_model.safetensors`` uses a prefix."""
        return {f"{prefix}{self.module}.{name}": tensor for name, tensor in self.tensors.items()}


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def adapter_config(
    modules: Sequence[ModuleTensors], plan: ConversionPlan, base: str | None
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for the adapters of ``stream``, with the shortest exact names."""
    adapters = {
        module.parameter or module.module: module.described
        for module in modules
        if module.described is not None
    }
    parameters = {module.parameter for module in modules if module.parameter is not None}
    first = mode(adapters.values())
    for key in ("use_rslora", "use_dora", "dropout"):
        if len({getattr(module, key) for module in adapters.values()}) > 1:
            raise UserError(
                f"the adapters differ in {key}, which the peft format has once for all: merge them"
            )
    head = getattr(plan.tasks[0].shard.config, "head", None)
    return {
        **config_of(first, base),
        "task_type": TASK_TYPES[head],
        "target_modules": _brief_names(adapters.keys() - parameters, plan) or [],
        **(
            {"target_parameters": _brief_parameters(parameters, plan), "lora_dropout": 0.0}
            if parameters
            else {}
        ),
        "modules_to_save": _brief_saved(
            {module.module for module in modules if module.described is None}, plan
        ),
        "rank_pattern": {
            name: module.rank for name, module in adapters.items() if module.rank != first.rank
        },
        "alpha_pattern": {
            name: module.alpha for name, module in adapters.items() if module.alpha != first.alpha
        },
    }


def config_of(described: Described, base: str | None) -> dict[str, Any]:
    """Return the part of ``adapter_config.json`` that is the same for all modules."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "r": described.rank,
        "lora_alpha": described.alpha,
        "lora_dropout": described.dropout,
        "use_rslora": described.use_rslora,
        "use_dora": described.use_dora,
    }


def last_segment(module: str) -> str:
    return module.rpartition(".")[2]


def _brief_names(modules: Iterable[str], plan: ConversionPlan) -> list[str] | None:
    """Return names for ``modules``: the last segment if it matches only these, otherwise the full names."""
    adapted = set(modules)
    names: dict[str, None] = {}
    everywhere = _modules_of_transformers(plan)
    for module in sorted(adapted):
        same = {
            candidate for candidate in everywhere if last_segment(candidate) == last_segment(module)
        }
        # a numeric segment also matches the layer with this number
        names[
            last_segment(module)
            if same <= adapted and not last_segment(module).isdigit()
            else module
        ] = None
    return list(names) or None


def _brief_parameters(parameters: set[str], plan: ConversionPlan) -> list[str]:
    """Return names for adapted parameters: the last two segments if these match only adapted ones."""
    everywhere = {
        name for task in plan.tasks if task.mapping.is_stacked for name in task.mapping.hf_names
    }
    names: set[str] = set()
    for parameter in parameters:
        end = ".".join(parameter.split(".")[-2:])
        alike = {name for name in everywhere if name.endswith(f".{end}")}
        names.add(end if alike <= parameters else parameter)
    return sorted(names)


def _modules_of_transformers(plan: ConversionPlan) -> set[str]:
    """Return the modules of transformers' model with tensors, also of parts that are copied, and their parents.

    Gemma 4's towers have a module ``q_proj`` without tensors of its own, and ``peft`` cannot adapt it.
    """
    loaded = set(plan.buffers) - set(plan.unread)
    modules = {module_of(name) for name in (*plan.hf_names, *loaded)}
    parents = {name.rpartition(".")[0] for name in modules}
    return modules | parents


def _brief_saved(modules: set[str], plan: ConversionPlan) -> list[str] | None:
    """Return names for modules that are saved as a whole, which ``peft`` compares with the ends of all names.

    ``norm`` would also be ``input_layernorm``, so the full name is needed there.
    """
    everywhere = {module_of(name) for name in plan.hf_names}
    names: dict[str, None] = {}
    for module in sorted(modules):
        alike = {candidate for candidate in everywhere if candidate.endswith(last_segment(module))}
        names[last_segment(module) if alike <= modules else module] = None
    return list(names) or None
