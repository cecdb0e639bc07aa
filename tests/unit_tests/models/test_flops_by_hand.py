# SPDX-License-Identifier: Apache-2.0
"""Operations of published models, counted by hand from their Hugging Face configs: one row for each architecture.

Widths are the published ones; layers and experts are fewer, so that the models are built in no time.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron.bridge import AutoBridge
from megatron.bridge.models.flops import flops_per_token
from tests.families import published

LENGTH = 2048
FEWER = {
    "num_hidden_layers": 8,
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_nextn_predict_layers": 0,
}


def config_of(name):
    values = json.loads((Path(published.__path__[0]) / f"{name}.json").read_text())
    values |= {key: count for key, count in FEWER.items() if key in values}
    return {
        key: value
        for key, value in values.items()
        if key not in ("auto_map", "quantization_config")
    }


def seen(window=None):
    """Keys that a token attends to, on average: token by token."""
    return sum(min(place + 1, window or LENGTH) for place in range(LENGTH)) / LENGTH


def attention(c, window=None):
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    return 2 * c["hidden_size"] * (queries + keys + keys + queries) + 2 * (
        queries + queries
    ) * seen(window)


def latent_attention(c):
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    width, heads, kv, q = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["kv_lora_rank"],
        c["q_lora_rank"],
    )
    queries = width * q + q * heads * (nope + rope)
    keys_and_values = width * (kv + rope) + kv * heads * (nope + value)
    return (
        2 * (queries + keys_and_values + heads * value * width)
        + 2 * heads * (nope + rope + value) * seen()
    )


def gated(width, inner):
    return 2 * 3 * width * inner


def dense(c):
    return c["num_hidden_layers"] * (attention(c) + gated(c["hidden_size"], c["intermediate_size"]))


def experts(c):
    width = c["hidden_size"]
    chosen = c["num_experts_per_tok"] * gated(width, c["moe_intermediate_size"])
    return c["num_hidden_layers"] * (attention(c) + 2 * width * c["num_experts"] + chosen)


def latent_experts(c):
    width, inner = c["hidden_size"], c["moe_intermediate_size"]
    first = c["first_k_dense_replace"]
    chosen = (c["num_experts_per_tok"] + c["n_shared_experts"]) * gated(width, inner)
    mixed = 2 * width * c["n_routed_experts"] + chosen
    layers = c["num_hidden_layers"]
    return (
        layers * latent_attention(c)
        + first * gated(width, c["intermediate_size"])
        + (layers - first) * mixed
    )


def windows(c):
    layers, every = c["num_hidden_layers"], c["sliding_window_pattern"]
    wide = layers // every
    local = (layers - wide) * attention(c, c["sliding_window"])
    return local + wide * attention(c) + layers * gated(c["hidden_size"], c["intermediate_size"])


ROWS = {
    "dense": ("meta-llama--Llama-2-7b-hf", dense),
    "GQA": ("meta-llama--Llama-3.1-8B", dense),
    "MoE": ("Qwen--Qwen3-30B-A3B", experts),
    "MLA": ("deepseek-ai--DeepSeek-V3", latent_experts),
    "sliding windows": ("google--gemma-3-1b-pt", windows),
}  # a hybrid is in test_flops.py


@pytest.mark.parametrize("architecture", ROWS)
def test_published_models_by_hand(architecture):
    name, by_hand = ROWS[architecture]
    values = config_of(name)
    expected = 3 * (by_hand(values) + 2 * values["hidden_size"] * values["vocab_size"])
    config = AutoConfig.for_model(**values)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    assert flops_per_token(provider.meta_model(), LENGTH) == pytest.approx(expected, rel=1e-12)
