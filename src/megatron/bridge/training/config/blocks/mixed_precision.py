# SPDX-License-Identifier: Apache-2.0
"""Named precision recipes: number formats of weights, matrix products and gradient reduction."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch

from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass
class MixedPrecisionConfig:
    """The precision of a run, which owns the dtype fields of the model and of the optimizer.

    The fields from ``fp8`` on are Megatron-Core's. Transformer Engine quantizes the inputs of matrix products,
    while the weights stay in bf16, so a checkpoint does not depend on these fields.
    """

    bf16: bool = False
    """Compute in bfloat16 over fp32 master weights."""
    fp16: bool = False
    """Compute in float16 over fp32 master weights, with loss scaling."""
    params_dtype: torch.dtype | None = None
    """Dtype of the model's weights. It follows the flags above, and must agree with them if it is set."""
    pipeline_dtype: torch.dtype | None = None
    """Dtype of activations between pipeline stages. It follows the flags, and must agree with them if it is set.
    """
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32, unless ``ddp.grad_reduce_in_fp32`` is set."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """FP8 format of matrix products: ``e4m3``, or ``hybrid`` for e4m3 with e5m2 gradients. None turns FP8 off."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "delayed"
    """Granularity of the scales: per tensor, from past values (``delayed``) or from current values
    (``tensorwise``), per block of 128 x 128 (``blockwise``), or per 32 consecutive values (``mxfp8``).
    """
    fp8_amax_history_len: int = 1
    """Number of past steps that ``delayed`` scaling considers."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """How ``delayed`` scaling reduces the past maxima."""
    first_last_layers_bf16: bool = False
    """Keep the first and the last layers in bf16."""
    num_layers_at_start_in_bf16: int = 1
    """Number of first layers in bf16, with ``first_last_layers_bf16``."""
    num_layers_at_end_in_bf16: int = 1
    """Number of last layers in bf16, with ``first_last_layers_bf16``."""
    fp4: Literal["e2m1"] | None = None
    """FP4 format of matrix products: ``e2m1``. None turns FP4 off."""
    fp4_recipe: Literal["nvfp4"] = "nvfp4"
    """Granularity of the FP4 scales."""

    @property
    def scaling(self) -> str | None:
        """The scaling recipe of quantized matrix products, or None."""
        return self.fp8_recipe if self.fp8 else self.fp4_recipe if self.fp4 else None


MODEL_FIELDS = tuple(entry.name for entry in fields(MixedPrecisionConfig))[5:]
"""Fields that the model has under the same name: those from ``fp8`` on."""


def fp32() -> MixedPrecisionConfig:
    return MixedPrecisionConfig()


def bf16_mixed() -> MixedPrecisionConfig:
    """bfloat16 compute, fp32 master weights and gradient reduction."""
    return MixedPrecisionConfig(bf16=True)


def fp16_mixed() -> MixedPrecisionConfig:
    """float16 compute with dynamic loss scaling, fp32 master weights.

    Gradients are reduced in float16, as Megatron does: the loss scale keeps them in range.
    """
    return MixedPrecisionConfig(fp16=True, grad_reduce_in_fp32=False)


def bf16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    """FP8 with one scale per tensor, from current values. The first and the last layer stay in bf16."""
    return MixedPrecisionConfig(
        bf16=True, fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True
    )


def bf16_with_fp8_delayed_scaling_mixed() -> MixedPrecisionConfig:
    """FP8 with one scale per tensor, from the largest value of the last 1024 steps."""
    return MixedPrecisionConfig(
        bf16=True,
        fp8="hybrid",
        fp8_recipe="delayed",
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
    )


def bf16_with_fp8_subchannel_scaling_mixed() -> MixedPrecisionConfig:
    """FP8 with one scale per 128 x 128 weights and per 128 activations, as DeepSeek-V3 was trained."""
    return MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="blockwise")


def bf16_with_mxfp8_mixed() -> MixedPrecisionConfig:
    """FP8 with one scale per 32 values, applied by the hardware, and e4m3 everywhere."""
    return MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")


def bf16_with_nvfp4_mixed() -> MixedPrecisionConfig:
    """FP4 with one scale per 16 values and one per tensor."""
    return MixedPrecisionConfig(bf16=True, fp4="e2m1", fp4_recipe="nvfp4")


RECIPES: dict[str, Callable[[], MixedPrecisionConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        fp32,
        bf16_mixed,
        fp16_mixed,
        bf16_with_fp8_current_scaling_mixed,
        bf16_with_fp8_delayed_scaling_mixed,
        bf16_with_fp8_subchannel_scaling_mixed,
        bf16_with_mxfp8_mixed,
        bf16_with_nvfp4_mixed,
    )
}


def get_mixed_precision_config(name: str | MixedPrecisionConfig) -> MixedPrecisionConfig:
    """The recipe called ``name``. A config is returned unchanged.

    Raises:
        UserError: there is no recipe of that name.
    """
    if isinstance(name, MixedPrecisionConfig):
        return name
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f"; choose one of {', '.join(RECIPES)}"
        raise UserError(f"mixed_precision={name} is not a known recipe{hint}")
    return RECIPES[name]()
