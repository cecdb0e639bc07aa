# SPDX-License-Identifier: Apache-2.0
"""SmolLM3."""

from tests.families.row import Row

SIZE = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 70.0},
}

ROWS = [
    Row("smollm3", "SmolLM3ForCausalLM", {**SIZE, "no_rope_layer_interval": 2}),
    Row(
        # no bias of keys: without a rotary embedding it has no gradient but rounding
        "smollm3_untied_windows_biases",
        "SmolLM3ForCausalLM",
        {
            **SIZE,
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
]
