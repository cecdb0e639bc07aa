# SPDX-License-Identifier: Apache-2.0
"""The logits that ``verify`` and examples/conversion/compare_models.py compare."""

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.bridge.models.conversion.check.compare_logits import ModelOutputs

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
RANDOM_TOKENS = 32
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Largest allowed difference of two logits over their standard deviation; half precision keeps about 3 digits."""


def tolerance_of(dtype: Any) -> float:
    """The tolerance for a dtype or its name. None is float32, in which such a model is built."""
    return TOLERANCES[str(dtype or "float32").removeprefix("torch.")]


def tokens(bridge: Any, prompt: str | None) -> "tuple[Tensor, Any]":
    """(token ids [1, sequence], tokenizer or None)."""
    import torch

    from megatron.bridge.utils.console import console
    from megatron.bridge.utils.errors import UserError

    try:
        tokenizer = bridge.hf_pretrained.tokenizer
        ids = tokenizer(prompt or PROMPT, return_tensors="pt").input_ids
    except (OSError, ValueError, KeyError, ImportError):
        tokenizer, ids = None, torch.empty(1, 0)
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


def reference_activations(bridge: Any, ids: "Tensor") -> "ModelOutputs":
    """What transformers computes for the tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    from megatron.bridge.models.conversion.check import compare_logits
    from megatron.bridge.utils.console import console

    if not console().is_terminal:
        cast(Any, logging).disable_progress_bar()  # it would write a line per update to a log
    pretrained = bridge.hf_pretrained
    kind = AutoModelForImageTextToText if hasattr(pretrained.config, "vision_config") else AutoModelForCausalLM
    hf = kind.from_pretrained(
        pretrained.state.directory,
        dtype=pretrained.config.dtype or torch.float32,
        trust_remote_code=pretrained.trust_remote_code,
    )
    device = torch.cuda.current_device()
    model: Any = hf.eval()
    return compare_logits.run_hf(model.to(device), ids.to(device))
