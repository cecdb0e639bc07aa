# SPDX-License-Identifier: Apache-2.0
"""Named precision recipes: which number formats weights, matrix products and gradient reductions use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.bridge.utils.errors import UserError, did_you_mean


@dataclass
class MixedPrecisionConfig:
    """The precision of a run; the one owner of the model's and the optimizer's dtype fields.

    The fields from ``fp8`` on are Megatron-Core's own, for matrix products that Transformer Engine quantises. The
    weights themselves stay in the half precision of ``bf16``, so a checkpoint does not depend on them.

    Attributes:
        bf16: Compute in bfloat16 over fp32 master weights.
        fp16: Compute in float16 over fp32 master weights, with loss scaling.
        params_dtype: dtype of the model's weights; follows the flags above, and must agree with them when given.
        pipeline_dtype: dtype of activations between pipeline stages; likewise.
        grad_reduce_in_fp32: Accumulate and reduce gradients in fp32, unless ``ddp`` says otherwise.
        fp8: Format of matrix products: ``e4m3``, or ``hybrid`` with e5m2 for gradients; None leaves them.
        fp8_recipe: What shares a scale: a tensor, by its past (``delayed``) or its present values
            (``tensorwise``), a block of 128 x 128 (``blockwise``), or 32 numbers in a row (``mxfp8``).
        fp8_amax_history_len: Steps that ``delayed`` looks back.
        fp8_amax_compute_algo: What ``delayed`` takes of them.
        first_last_layers_bf16: Keep layers at both ends out of FP8.
        num_layers_at_start_in_bf16: How many at the start, with ``first_last_layers_bf16``.
        num_layers_at_end_in_bf16: How many at the end.
        fp4: ``e2m1`` for matrix products in 4 bits; None leaves them.
        fp4_recipe: How those are scaled.
    """

    bf16: bool = False
    fp16: bool = False
    params_dtype: torch.dtype | None = None
    pipeline_dtype: torch.dtype | None = None
    grad_reduce_in_fp32: bool = True
    fp8: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "delayed"
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    fp4: Literal["e2m1"] | None = None
    fp4_recipe: Literal["nvfp4"] = "nvfp4"

    @property
    def scaling(self) -> str | None:
        """How quantised matrix products are scaled; None where none are quantised."""
        return self.fp8_recipe if self.fp8 else self.fp4_recipe if self.fp4 else None


MODEL_FIELDS = (
    "fp8",
    "fp8_recipe",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "fp4",
    "fp4_recipe",
)
"""What the model takes over under the same name."""

# scaling -> compute capability from which Transformer Engine multiplies in it
NEEDS: dict[str, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}


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


def bf16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    """FP8 with a scale for each tensor, from its own values; the first and the last layer, sensitive, without."""
    return MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True)


def bf16_with_fp8_delayed_scaling_mixed() -> MixedPrecisionConfig:
    """FP8 with a scale for each tensor, from the largest value of the last 1024 steps."""
    return MixedPrecisionConfig(
        bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=1024, fp8_amax_compute_algo="max"
    )


def bf16_with_fp8_subchannel_scaling_mixed() -> MixedPrecisionConfig:
    """FP8 with a scale for each 128 x 128 weights and for each 128 activations, as DeepSeek-V3 was trained."""
    return MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="blockwise")


def bf16_with_mxfp8_mixed() -> MixedPrecisionConfig:
    """FP8 with a scale for each 32 numbers, which the hardware applies; fine enough for e4m3 everywhere."""
    return MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")


def bf16_with_nvfp4_mixed() -> MixedPrecisionConfig:
    """4 bits with a scale for each 16 numbers and one for the tensor."""
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
    """The recipe called ``name``; a config is returned as it is.

    Raises:
        UserError: no such recipe.
    """
    if isinstance(name, MixedPrecisionConfig):
        return name
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f"; choose one of {', '.join(RECIPES)}"
        raise UserError(f"mixed_precision={name} is not a known recipe{hint}")
    return RECIPES[name]()


def lack(scaling: str | None) -> str | None:
    """What this machine has not got and quantised matrix products need; None if it has it all."""
    from megatron.bridge.backends.device import has_cuda
    from megatron.bridge.backends.layer_specs import has_transformer_engine

    if scaling is None:
        return None
    if not has_transformer_engine():
        return "Transformer Engine, which is not installed"
    capability = torch.cuda.get_device_capability() if has_cuda() else (0, 0)
    if capability >= NEEDS[scaling]:
        return None
    needed, found = (".".join(map(str, pair)) for pair in (NEEDS[scaling], capability))
    return f"a GPU of compute capability {needed}, and here is {found if has_cuda() else 'none'}"
