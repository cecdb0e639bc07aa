# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face side of a conversion: config, tokenizer, files and lazy weights."""

from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM

__all__ = ["PreTrainedCausalLM"]
