# SPDX-License-Identifier: Apache-2.0
"""The logits that ``verify`` and examples/conversion/compare_models.py compare."""

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.bridge.models.conversion.check.compare_logits import LogitComparison, ModelOutputs

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
RANDOM_TOKENS = 32
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Largest allowed difference of two logits over their standard deviation; half precision keeps about 3 digits."""


def tokens(bridge: Any, prompt: str | None) -> "tuple[Tensor, Any]":
    """(token ids [1, sequence], tokenizer or None)."""
    import torch

    try:
        tokenizer = bridge.hf_pretrained.tokenizer
        ids = tokenizer(prompt or PROMPT, return_tensors="pt").input_ids
    except (OSError, ValueError, KeyError, ImportError):
        tokenizer = None
        ids = torch.empty(1, 0)
    if ids.numel():  # without tokenizer files, transformers may make an empty tokenizer
        return ids, tokenizer
    if prompt is not None:
        raise UserError(
            f"--prompt needs a tokenizer and {bridge.hf_pretrained.directory} has none: leave --prompt out"
        )
    console().print(f"no tokenizer: running {RANDOM_TOKENS} random tokens")
    generator = torch.Generator().manual_seed(0)
    words = bridge.hf_config.get_text_config().vocab_size
    ids = torch.randint(0, words, (1, RANDOM_TOKENS), generator=generator)
    for name in ("image_token_id", "video_token_id"):  # there is no image for a placeholder
        ids[ids == getattr(bridge.hf_config, name, None)] = 0
    return ids, None


def judged(
    bridge: Any,
    ids: "Tensor",
    outputs: "ModelOutputs",
    given: float | None = None,
    extra: dict[str, Any] | None = None,
    in_float32: "Callable[[], ModelOutputs] | None" = None,
) -> "tuple[ModelOutputs, LogitComparison, float]":
    """Return the outputs of transformers for the tokens, their difference from ``outputs``, and the tolerance.

    In half precision, the logits of some models are inexact by more than the tolerance, even in transformers. Such
    a model is compared with transformers in float32; its tolerance is twice the error of transformers in half
    precision. A tolerance ``given`` by the user stays unchanged. ``extra`` has further inputs of the model. A model
    that differs more runs again ``in_float32``: rounding can change which expert a router chooses.
    """
    import torch

    from megatron.bridge.models.conversion.check.compare_logits import compare

    reference = reference_activations(bridge, ids, extra=extra)
    report = compare(reference, outputs)
    dtype = bridge.hf_config.dtype or torch.float32  # the default of transformers
    usual = TOLERANCES[str(dtype).removeprefix("torch.")]
    if given is not None or report.relative <= usual or usual == TOLERANCES["float32"]:
        return reference, report, usual if given is None else given
    exact = reference_activations(bridge, ids, torch.float32, extra)
    rounding = compare(exact, reference).relative
    console().print(
        f"logits differ by {report.relative:.3g} of their standard deviation; {bridge.hf_config.dtype} changes "
        f"the logits of transformers by {rounding:.3g}: comparing with float32"
    )
    report = compare(exact, outputs)
    if report.relative <= 2 * rounding or in_float32 is None:
        return exact, report, 2 * rounding
    return exact, compare(exact, in_float32()), TOLERANCES["float32"]


@contextmanager
def _readable_folder(pretrained: Any) -> Iterator[Path]:
    """Yield a folder that transformers reads as the model alone.

    It would apply an adapter that is there, too. Of quantized weights, it reads few without a GPU or another library,
    and none in float32, so they are written in full.
    """
    from megatron.bridge.models.hf_pretrained.quantized_checkpoint import (
        QuantizedCheckpoint,
        write_in_full,
    )

    directory: Path = pretrained.state.directory
    has_adapter = (directory / "adapter_config.json").exists()
    is_quantized = isinstance(pretrained.state, QuantizedCheckpoint)
    if not has_adapter and not is_quantized:
        yield directory
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if is_quantized:
            pretrained.save_artifacts(folder)
            write_in_full(pretrained.state, folder)
        else:
            for path in directory.iterdir():
                (folder / path.name).symlink_to(path.resolve())
        for path in folder.glob("adapter_*"):
            path.unlink()
        yield folder


def _class_of(config: Any) -> Any:
    """The class of transformers that computes the logits of a model."""
    import transformers

    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    if hasattr(config, "audio_config"):  # no Auto class has all models with audio
        return getattr(transformers, config.architectures[0])
    return transformers.AutoModelForCausalLM


def reference_activations(
    bridge: Any, ids: "Tensor", dtype: Any = None, extra: dict[str, Any] | None = None
) -> "ModelOutputs":
    """Return the outputs of transformers for the tokens in ``dtype``, or in the model's dtype."""
    import torch
    from transformers.utils import logging

    from megatron.bridge.models.conversion.check import compare_logits

    if not console().is_terminal:
        cast(Any, logging).disable_progress_bar()  # it would write a line per update to a log
    pretrained = bridge.hf_pretrained
    kind = _class_of(pretrained.config)
    with _readable_folder(pretrained) as directory:
        hf = kind.from_pretrained(
            directory,
            dtype=dtype or pretrained.config.dtype or torch.float32,
            trust_remote_code=pretrained.trust_remote_code,
        )
    device = torch.cuda.current_device()
    model: Any = hf.eval()
    known = inspect.signature(model.forward).parameters
    inputs = {name: value.to(device) for name, value in (extra or {}).items() if name in known}
    return compare_logits.run_hf(model.to(device), ids.to(device), **inputs)
