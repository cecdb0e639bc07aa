# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face side of a conversion: config, tokenizer, files and lazy weights."""

from typing import TYPE_CHECKING

from megatron.bridge.utils.optional_imports import lazy_names

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM

__all__ = ["PreTrainedCausalLM"]

# imported on use: finding the files of a model needs no torch
__getattr__ = lazy_names(
    __name__, {"PreTrainedCausalLM": f"{__name__}.causal_lm:PreTrainedCausalLM"}
)
