# SPDX-License-Identifier: Apache-2.0
"""Dtypes of the model, the optimizer and gradient reduction, from ``mixed_precision`` or from the model."""

import copy
from typing import Any

import torch

from megatron.bridge.training.config.blocks.mixed_precision import (
    MODEL_FIELDS,
    MixedPrecisionConfig,
    get_mixed_precision_config,
)
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.errors import UserError


def derive_precision(config: RunConfig, findings: Findings) -> None:
    """Give the model, the optimizer and the gradients the dtypes of one precision."""
    try:
        precision = _chosen(config)
    except UserError as error:
        findings.problems.append(str(error))
        return
    dtype = _dtype(precision)
    why = "the model's precision" if config.mixed_precision is None else "mixed_precision"
    if config.model.params_dtype not in (torch.float32, _dtype(config.model), dtype):
        findings.problems.append(
            f"model.params_dtype={config.model.params_dtype} contradicts {why}, which asks for {dtype}: remove it"
        )
    _set_on_model(config, precision, findings)
    for name, value in (
        ("bf16", precision.bf16),
        ("fp16", precision.fp16),
        ("params_dtype", dtype),
    ):
        findings.agree(config.optimizer, "optimizer", name, value, why)
    for name in ("params_dtype", "pipeline_dtype"):
        if getattr(precision, name) not in (None, dtype):
            findings.problems.append(
                f"mixed_precision.{name}={getattr(precision, name)} contradicts the precision flags, "
                f"which ask for {dtype}: remove it"
            )
    _set_grad_reduce(config, precision, findings)


def derive_backend(config: RunConfig, findings: Findings) -> None:
    """Give a base in a low-bit format layers that can use it, built where it does not need memory in full."""
    precision = config.peft and config.peft.base_precision
    if not precision:
        return
    model = config.model
    if model.backend == "transformer_engine":
        findings.problems.append(
            f"peft.base_precision={precision} needs layers of PyTorch: set model.backend=torch"
        )
    elif model.backend == "auto":
        model.backend = "torch"
        if findings.hardware.transformer_engine:
            findings.notes.append(
                f"model.backend=torch, because peft.base_precision={precision} needs layers of PyTorch"
            )
    model.use_cpu_initialization = True  # matrices go to the GPU one by one, quantized


def check_quantization(config: RunConfig, findings: Findings) -> None:
    """Require hardware for FP8 and FP4: a machine without it would silently compute in another format."""
    if not (config.model.fp8 or config.model.fp4):
        return
    scaling = config.model.fp8_recipe if config.model.fp8 else config.model.fp4_recipe
    config.optimizer.fp8_recipe = config.model.fp8_recipe if config.model.fp8 else None
    missing = findings.hardware.lacks_for(str(scaling))
    if missing is not None:
        name = config.mixed_precision if isinstance(config.mixed_precision, str) else scaling
        findings.lacking(
            f"mixed_precision={name} needs {missing}", "use bf16_mixed, or a machine that has it"
        )


def without_quantization(model: Any) -> Any:
    """A copy of a provider without FP8 and FP4, which Megatron-Core can check without Transformer Engine."""
    plain = copy.copy(model)
    plain.fp8 = plain.fp4 = None
    plain.fp8_param = plain.fp4_param = False
    return plain


def _dtype(flags: Any) -> torch.dtype:
    """The dtype that the flags of a model or of a precision ask for."""
    return torch.bfloat16 if flags.bf16 else torch.float16 if flags.fp16 else torch.float32


def _chosen(config: RunConfig) -> MixedPrecisionConfig:
    if config.mixed_precision is not None:
        return get_mixed_precision_config(config.mixed_precision)
    model = config.model
    model_values: dict[str, Any] = {name: getattr(model, name) for name in MODEL_FIELDS}
    return MixedPrecisionConfig(
        bf16=model.bf16, fp16=model.fp16, grad_reduce_in_fp32=not model.fp16, **model_values
    )


def _set_on_model(config: RunConfig, precision: MixedPrecisionConfig, findings: Findings) -> None:
    model = config.model
    for name in ("bf16", "fp16", *MODEL_FIELDS):
        before = getattr(model, name)
        after = getattr(precision, name)
        if before and not after:
            findings.notes.append(
                f"model.{name}={before} is overridden by mixed_precision, which sets {after}"
            )
        setattr(model, name, after)
    if not (precision.bf16 or precision.fp16):
        model.params_dtype = torch.float32


def _set_grad_reduce(
    config: RunConfig, precision: MixedPrecisionConfig, findings: Findings
) -> None:
    ddp = config.ddp
    if ddp.grad_reduce_in_fp32 is None:
        ddp.grad_reduce_in_fp32 = precision.grad_reduce_in_fp32
    elif (
        config.mixed_precision is not None
        and ddp.grad_reduce_in_fp32 != precision.grad_reduce_in_fp32
    ):
        # a recipe is a bundle of defaults: a value that was set in addition wins, and is shown
        findings.notes.append(
            f"ddp.grad_reduce_in_fp32={ddp.grad_reduce_in_fp32} is used instead of mixed_precision's "
            f"{precision.grad_reduce_in_fp32}"
        )
