# SPDX-License-Identifier: Apache-2.0
"""Named precision recipes: which dtype weights, pipeline messages and gradient reductions use."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass
class MixedPrecisionConfig:
    """The precision of a run; the one owner of the model's and the optimizer's dtype fields.

    Attributes:
        bf16: Compute in bfloat16 over fp32 master weights.
        fp16: Compute in float16 over fp32 master weights, with loss scaling.
        params_dtype: dtype of the model's weights; follows the flags above, and must agree with them when given.
        pipeline_dtype: dtype of activations between pipeline stages; likewise.
        grad_reduce_in_fp32: Accumulate and reduce gradients in fp32, unless ``ddp`` says otherwise.
    """

    bf16: bool = False
    fp16: bool = False
    params_dtype: torch.dtype | None = None
    pipeline_dtype: torch.dtype | None = None
    grad_reduce_in_fp32: bool = True


def fp32() -> MixedPrecisionConfig:
    """Everything in float32."""
    return MixedPrecisionConfig()


def bf16_mixed() -> MixedPrecisionConfig:
    """bfloat16 compute, fp32 master weights and gradient reduction."""
    return MixedPrecisionConfig(bf16=True)


def fp16_mixed() -> MixedPrecisionConfig:
    """float16 compute with dynamic loss scaling, fp32 master weights.

    Gradients are reduced in float16, as Megatron does: the loss scale keeps them in range.
    """
    return MixedPrecisionConfig(fp16=True, grad_reduce_in_fp32=False)


RECIPES: dict[str, Callable[[], MixedPrecisionConfig]] = {
    "fp32": fp32,
    "bf16_mixed": bf16_mixed,
    "fp16_mixed": fp16_mixed,
}

# Known by name so that asking for one gets the reason, not "unknown recipe".
NEED_TRANSFORMER_ENGINE = (
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
)


def get_mixed_precision_config(name: str | MixedPrecisionConfig) -> MixedPrecisionConfig:
    """The recipe called ``name``; a config is returned as it is.

    Raises:
        UserError: no such recipe, or one that Transformer Engine must run.
    """
    if isinstance(name, MixedPrecisionConfig):
        return name
    if name in NEED_TRANSFORMER_ENGINE:
        raise UserError(
            f"mixed_precision={name} needs Transformer Engine and is not available in this version: "
            "use bf16_mixed, fp16_mixed or fp32"
        )
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f"; choose one of {', '.join(RECIPES)}"
        raise UserError(f"mixed_precision={name} is not a known recipe{hint}")
    return RECIPES[name]()
