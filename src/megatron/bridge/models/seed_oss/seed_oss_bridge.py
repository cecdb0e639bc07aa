# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS 36B: Llama with biases of queries, keys and values, and an explicit head width."""

from megatron.bridge.models.families import (
    DENSE,
    LLAMA_LIKE,
    PART_BIASES,
    DecoderBridge,
    Field,
    attention,
    ends,
    mlp,
    register_bridge,
)


@register_bridge("SeedOssForCausalLM", model_type="seed_oss")
class SeedOssBridge(DecoderBridge):
    fields = (*DENSE, *PART_BIASES, Field("residual_dropout", "hidden_dropout", default=0.0))
    fixed = {**LLAMA_LIKE, "embedding_dropout": 0.0}
    weights = (ends(), attention(), mlp())
