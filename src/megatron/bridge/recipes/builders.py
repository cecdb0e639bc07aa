# SPDX-License-Identifier: Apache-2.0
"""Make recipes, and build configs without one.

``pretrain``, ``distill``, ``sft``, ``dpo`` and ``grpo`` build a config from a model and options. ``pretrain_recipe``,
``distill_recipe``, ``finetune_recipe``, ``dpo_recipe`` and ``grpo_recipe`` make recipes of them. The caller's options
override recommended values, which override the defaults in ``options.py``. Torch is imported when a config is built.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from megatron.bridge.recipes.options import (
    ADAPTER_DEFAULTS,
    DPO_ADAPTER_DEFAULTS,
    DPO_DEFAULTS,
    FINETUNE_DEFAULTS,
    GRPO_ADAPTER_DEFAULTS,
    GRPO_DEFAULTS,
    PRETRAIN_DEFAULTS,
    FinetuneOptions,
    LayoutOptions,
    PretrainOptions,
    merge_options,
)
from megatron.bridge.recipes.recipe import FinetuneRecipe, LowPrecisionRecipe, PretrainRecipe
from megatron.bridge.recipes.sizes import Size, sized
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

H100 = "H100 80GB"


def pretrain(
    size: Size | str,
    options: PretrainOptions,
    *shared: LayoutOptions | PretrainOptions,
    **recommended: Unpack[PretrainOptions],
) -> "ConfigContainer":
    """Return the config that trains ``size`` from random weights.

    Args:
        size: The model, or its hub id if its published config is in the package.
        options: The caller's options.
        *shared: Recommended values that several recipes share; later ones override earlier ones.
        **recommended: Recommended values of this recipe; they override the shared ones.

    Raises:
        UserError: ``options`` has a key that is not in ``PretrainOptions``, or nothing sets the sequence length or
            the learning rate.
    """
    from megatron.bridge.recipes import assembly

    chosen = merge_options(PretrainOptions, PRETRAIN_DEFAULTS, *shared, recommended, options)
    missing = [option for option in ("seq_length", "lr") if option not in chosen]
    if missing:
        raise UserError(
            f"pretraining has no default of {' and '.join(missing)}: recommend a value in the recipe, or pass one"
        )
    return assembly.pretrain_config(sized(size), chosen)


def distill(
    size: Size | str,
    options: PretrainOptions,
    teacher: Size | str,
    *shared: LayoutOptions | PretrainOptions,
    **recommended: Unpack[PretrainOptions],
) -> "ConfigContainer":
    """Return the config that trains ``size`` from random weights on the data and on the logits of ``teacher``.

    The other arguments are the same as for ``pretrain``.

    Raises:
        UserError: ``options`` has a key that is not in ``PretrainOptions``.
    """
    from megatron.bridge.training.config import DistillConfig

    config = pretrain(size, options, *shared, **recommended)
    config.distill = DistillConfig(teacher=sized(teacher).hub_id)
    return config


def sft(
    size: Size | str,
    options: FinetuneOptions,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> "ConfigContainer":
    """Return the config that fine-tunes ``size``, or adapters on it, on prompts and completions.

    The arguments are the same as for ``pretrain``.

    Raises:
        UserError: ``options`` has a key that is not in ``FinetuneOptions``, or asks for an unknown adapter.
    """
    from megatron.bridge.recipes import assembly

    adapters: FinetuneOptions = {} if options.get("peft") is None else ADAPTER_DEFAULTS
    chosen = merge_options(
        FinetuneOptions, FINETUNE_DEFAULTS, *shared, recommended, adapters, options
    )
    return assembly.finetune_config(sized(size), chosen)


def dpo(
    size: Size | str,
    options: FinetuneOptions,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> "ConfigContainer":
    """Return the config that trains ``size``, or adapters on it, to prefer one of two answers.

    ``dataset_root`` is a folder of pairs, by default ``preferences`` in the current directory. The arguments are
    the same as for ``pretrain``.

    Raises:
        UserError: ``options`` has a key that is not in ``FinetuneOptions``, or asks for an unknown adapter.
    """
    adapters: FinetuneOptions = {} if options.get("peft") is None else DPO_ADAPTER_DEFAULTS
    defaults = (FINETUNE_DEFAULTS, DPO_DEFAULTS)
    chosen: Any = merge_options(FinetuneOptions, *defaults, *shared, recommended, adapters, options)
    if chosen["dataset_root"] is None:
        chosen["dataset_root"] = "preferences"
    config = sft(size, chosen)
    train_on_preferences(config, chosen["dataset_root"], chosen["seed"])
    return config


def train_on_preferences(config: "ConfigContainer", dataset_root: str, seed: int) -> None:
    """Turn a config of fine-tuning into one of preference tuning, in place.

    Args:
        config: Of any recipe for fine-tuning.
        dataset_root: Folder of pairs.
        seed: Of the order of the pairs.
    """
    from megatron.bridge.data.config import PreferenceDatasetConfig
    from megatron.bridge.training.config import DPOConfig

    config.dpo = DPOConfig()
    config.model.calculate_per_token_loss = True
    config.dataset = PreferenceDatasetConfig(
        seq_length=config.model.seq_length, dataset_root=dataset_root, seed=seed
    )


def grpo(
    size: Size | str,
    options: FinetuneOptions,
    *shared: LayoutOptions | FinetuneOptions,
    **recommended: Unpack[FinetuneOptions],
) -> "ConfigContainer":
    """Return the config that trains ``size``, or adapters on it, on rewards of its own completions.

    ``dataset_root`` has prompts, by default in the folder ``prompts`` of the current directory. The arguments are
    the same as for ``pretrain``.

    Raises:
        UserError: ``options`` has a key that is not in ``FinetuneOptions``, or asks for an unknown adapter.
    """
    adapters: FinetuneOptions = {} if options.get("peft") is None else GRPO_ADAPTER_DEFAULTS
    defaults = (FINETUNE_DEFAULTS, GRPO_DEFAULTS)
    chosen: Any = merge_options(FinetuneOptions, *defaults, *shared, recommended, adapters, options)
    if chosen["dataset_root"] is None:
        chosen["dataset_root"] = "prompts"
    config = sft(size, chosen)
    train_on_rewards(config, chosen["dataset_root"], chosen["seed"])
    return config


def train_on_rewards(config: "ConfigContainer", dataset_root: str, seed: int) -> None:
    """Turn a config of fine-tuning into one of reinforcement learning, in place.

    Args:
        config: Of any recipe for fine-tuning.
        dataset_root: Folder or file of prompts, or a dataset on the hub.
        seed: Of the order of the prompts.
    """
    from megatron.bridge.data.config import PromptDatasetConfig
    from megatron.bridge.training.config import GRPOConfig

    config.grpo = GRPOConfig()
    config.model.calculate_per_token_loss = True
    config.dataset = PromptDatasetConfig(
        seq_length=config.model.seq_length, dataset_root=dataset_root, seed=seed
    )


def pretrain_recipe(
    size: Size | str,
    *shared: LayoutOptions | PretrainOptions,
    what: str = "pretraining",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[PretrainOptions],
) -> PretrainRecipe:
    """Make a recipe that trains a model from random weights.

    Args:
        size: The model, or its hub id if its published config is in the package.
        *shared: Recommended values that several recipes share; later ones override earlier ones.
        what: What it trains, for lists and help.
        gpus: Number of GPUs for which its layout was chosen.
        gpu_kind: Kind of these GPUs, a name that ``autotune.gpus`` knows.
        memory_gb: GB that the fullest GPU uses; ``make recipes`` writes it.
        **recommended: Recommended values of this recipe; they override the shared ones.

    Raises:
        UserError: a recommended value is of no option.
    """
    return PretrainRecipe(
        size=size,
        what=what,
        stage="pretrain",
        builder=pretrain,
        recommended=_complete(PretrainOptions, PRETRAIN_DEFAULTS, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def low_precision_recipe(
    size: Size | str,
    *shared: LayoutOptions | PretrainOptions,
    what: str = "pretraining in a low precision",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[PretrainOptions],
) -> LowPrecisionRecipe:
    """Make a recipe like ``pretrain_recipe``, whose precision can also be the first argument of a call."""
    return LowPrecisionRecipe(
        size=size,
        what=what,
        stage="pretrain",
        builder=pretrain,
        recommended=_complete(PretrainOptions, PRETRAIN_DEFAULTS, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def distill_recipe(
    size: Size | str,
    teacher: Size | str,
    *shared: LayoutOptions | PretrainOptions,
    what: str = "distillation",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[PretrainOptions],
) -> PretrainRecipe:
    """Make a recipe that trains a model from random weights on the data and on the logits of ``teacher``.

    The other arguments are the same as for ``pretrain_recipe``.
    """

    def build(
        size: Size | str, options: PretrainOptions, recommended: PretrainOptions
    ) -> "ConfigContainer":
        return distill(size, options, teacher, recommended)

    return PretrainRecipe(
        size=size,
        what=what,
        stage="distill",
        builder=build,
        recommended=_complete(PretrainOptions, PRETRAIN_DEFAULTS, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def finetune_recipe(
    size: Size | str,
    *shared: LayoutOptions | FinetuneOptions,
    what: str = "full fine-tuning",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[FinetuneOptions],
) -> FinetuneRecipe:
    """Make a recipe that fine-tunes a model, or adapters on it, on prompts and completions.

    The arguments are the same as for ``pretrain_recipe``.
    """
    return FinetuneRecipe(
        size=size,
        what=what,
        stage="sft",
        builder=sft,
        recommended=_complete(FinetuneOptions, FINETUNE_DEFAULTS, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def qlora_recipe(
    size: Size | str,
    *shared: LayoutOptions | FinetuneOptions,
    what: str = "QLoRA",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[FinetuneOptions],
) -> FinetuneRecipe:
    """Make a recipe that trains adapters on a base in 4 bits, or in the format that the model is published in.

    It starts from the published weights, unless a call gives others. The arguments are the same as for
    ``pretrain_recipe``.
    """

    def build(
        size: Size | str, options: FinetuneOptions, recommended: FinetuneOptions
    ) -> "ConfigContainer":
        chosen: FinetuneOptions = {**options}
        if not (chosen.get("pretrained_checkpoint") or chosen.get("hf_model")):
            chosen["pretrained_checkpoint"] = sized(size).hub_id
        return sft(size, chosen, recommended)

    adapters: FinetuneOptions = {**ADAPTER_DEFAULTS, "peft": "qlora"}
    return FinetuneRecipe(
        size=size,
        what=what,
        stage="sft",
        builder=build,
        recommended=_complete(FinetuneOptions, FINETUNE_DEFAULTS, adapters, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def dpo_recipe(
    size: Size | str,
    *shared: LayoutOptions | FinetuneOptions,
    what: str = "DPO",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[FinetuneOptions],
) -> FinetuneRecipe:
    """Make a recipe that trains a model, or adapters on it, to prefer one of two answers.

    The arguments are the same as for ``pretrain_recipe``.
    """
    defaults = (FINETUNE_DEFAULTS, DPO_DEFAULTS)
    return FinetuneRecipe(
        size=size,
        what=what,
        stage="dpo",
        builder=dpo,
        recommended=_complete(FinetuneOptions, *defaults, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def grpo_recipe(
    size: Size | str,
    *shared: LayoutOptions | FinetuneOptions,
    what: str = "GRPO",
    gpus: int = 1,
    gpu_kind: str = H100,
    memory_gb: int | None = None,
    **recommended: Unpack[FinetuneOptions],
) -> FinetuneRecipe:
    """Make a recipe that trains a model, or adapters on it, on rewards of its own completions.

    The arguments are the same as for ``pretrain_recipe``.
    """
    defaults = (FINETUNE_DEFAULTS, GRPO_DEFAULTS)
    return FinetuneRecipe(
        size=size,
        what=what,
        stage="grpo",
        builder=grpo,
        recommended=_complete(FinetuneOptions, *defaults, *shared, recommended),
        gpus=gpus,
        gpu_kind=gpu_kind,
        memory_gb=memory_gb,
        module=_calling_module(),
    )


def _complete(options: type, *layers: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(merge_options(options, *layers))


def _calling_module() -> str:
    """Return the name of the module that makes a recipe, as ``collections.namedtuple`` finds it."""
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    return caller.f_globals["__name__"]
