# SPDX-License-Identifier: Apache-2.0
"""What a recipe is. The functions of ``builders.py`` make recipes.

A family's module assigns each of its recipes to a name::

    llama2_13b_pretrain_config = pretrain_recipe(
        "meta-llama/Llama-2-13b-hf",
        layout(tp=2),
        what="Llama 2 13B pretraining",
        gpus=16,
        memory_gb=65,
        seq_length=4096,
        lr=3e-4,
    )

Calling the recipe builds its config: ``llama2_13b_pretrain_config(train_iters=100)``. Only the call imports torch.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from megatron.bridge.recipes.options import FinetuneOptions, LowPrecision, PretrainOptions
from megatron.bridge.recipes.sizes import Size

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

Mode = Literal["pretrain", "sft"]
Stage = Literal["pretrain", "sft", "distill", "dpo", "grpo"]

_LAYOUT_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}


@dataclass(frozen=True, eq=False, repr=False)
class Recipe(ABC):
    """A model, the options to train it with, and the GPUs for which they were chosen.

    Call it to build its config; options of the call override the recommended ones. Like a function, a recipe is
    pickled by its name, so it must be assigned at the top level of its module.
    """

    size: Size | str
    """The model, or its hub id if its published config is in the package."""
    what: str
    """What it trains, such as ``Llama 2 13B pretraining``."""
    stage: Stage
    """The stage of training."""
    recommended: Mapping[str, Any]
    """The recommended value of each option, defaults included."""
    gpus: int
    """Number of GPUs for which its layout was chosen."""
    gpu_kind: str
    """Kind of these GPUs, such as ``H100 80GB``."""
    memory_gb: int | None
    """GB (10^9 bytes) that the fullest GPU uses, rounded up, as ``autotune.memory`` counts; None if not counted."""
    module: str
    """The module that defines it."""
    builder: Callable[..., "ConfigContainer"]
    """Builds the config from ``size``, the caller's options and ``recommended``."""

    mode: ClassVar[Mode]
    """The stage whose options it takes: distillation takes those of pretraining, DPO and GRPO those of fine-tuning."""
    options_type: ClassVar[type]
    """The ``TypedDict`` of these options."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__module__", self.module)
        object.__setattr__(self, "__doc__", self.summary)

    @abstractmethod
    def __call__(self, **options: Any) -> "ConfigContainer":
        """Build the config."""

    @property
    def name(self) -> str:
        """The name to which its module assigns it; ``<recipe>`` if it does not, as for a lambda."""
        members = getattr(sys.modules.get(self.module), "__dict__", {})
        for name, value in members.items():
            if value is self:
                return name
        return "<recipe>"

    @property
    def layout(self) -> str:
        """Sizes of model parallelism, such as ``TP8 PP2``."""
        sizes = {short: self.recommended[option] for short, option in _LAYOUT_SIZES.items()}
        parts = [f"{short}{size}" for short, size in sizes.items() if size > 1]
        return " ".join(parts) or "no model parallelism"

    @property
    def summary(self) -> str:
        """Its description, GPUs, memory and layout in one sentence."""
        if self.memory_gb is None:
            return f"{self.what}, {self.layout}."
        per_gpu = " each" if self.gpus > 1 else ""
        memory = f"{self.memory_gb} GB{per_gpu}"
        return f"{self.what}, {self.gpus} x {self.gpu_kind}: {memory}, {self.layout}."

    def signature(self) -> inspect.Signature:
        """Return the options as keywords, with their recommended values."""
        keywords = [
            inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=self.recommended.get(option),
                annotation=annotation,
            )
            for option, annotation in self.options_type.__annotations__.items()
        ]
        return inspect.Signature(keywords)

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}: {self.summary}>"

    def __reduce__(self) -> str:
        """Pickle it by its name."""
        return self.name

    if not TYPE_CHECKING:  # a type checker must report attributes that do not exist

        def __getattr__(self, attribute: str) -> Any:
            """Return what Python expects of a function; a class cannot define these for its instances."""
            if attribute in ("__name__", "__qualname__"):
                return self.name
            if attribute == "__signature__":
                return self.signature()
            raise AttributeError(f"{type(self).__name__} has no attribute {attribute!r}")


class PretrainRecipe(Recipe):
    """A recipe with the options of pretraining."""

    mode = "pretrain"
    options_type = PretrainOptions

    def __call__(self, **options: Unpack[PretrainOptions]) -> "ConfigContainer":
        """Build the config that trains the model from random weights.

        Raises:
            UserError: ``options`` has a key that is not in ``PretrainOptions``.
        """
        return self.builder(self.size, options, self.recommended)


class LowPrecisionRecipe(PretrainRecipe):
    """A recipe of pretraining whose precision can also be its first argument, as in Megatron Bridge."""

    def __call__(
        self,
        mixed_precision_recipe: LowPrecision | None = None,
        **options: Unpack[PretrainOptions],
    ) -> "ConfigContainer":
        """Build the config; the option ``precision`` overrides ``mixed_precision_recipe``."""
        if mixed_precision_recipe is not None:
            options = {"precision": mixed_precision_recipe, **options}
        return super().__call__(**options)

    def signature(self) -> inspect.Signature:
        """Return the parameters, the precision first."""
        precision = inspect.Parameter(
            "mixed_precision_recipe",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=self.recommended["precision"],
            annotation=LowPrecision,
        )
        keywords = super().signature().parameters.values()
        return inspect.Signature([precision, *keywords])


class FinetuneRecipe(Recipe):
    """A recipe with the options of fine-tuning."""

    mode = "sft"
    options_type = FinetuneOptions

    def __call__(self, **options: Unpack[FinetuneOptions]) -> "ConfigContainer":
        """Build the config that fine-tunes the model, or adapters on it.

        Raises:
            UserError: ``options`` has a key that is not in ``FinetuneOptions``, or asks for an unknown adapter.
        """
        return self.builder(self.size, options, self.recommended)
