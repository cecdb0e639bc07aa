# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron: layers of different sizes, and of each kind of a missing part."""

from tests.families.row import Row
from tests.toy_models import LLAMA3

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": LLAMA3,
}


def part(key, size):
    """A part as the hub writes it: its size, ``linear``, or nothing."""
    kind = size if isinstance(size, str) else None
    return {
        key: None if kind else size,
        "no_op": kind == "nothing",
        "replace_with_linear": kind == "linear",
        "sparsify": None,
    }


def block(heads, mult):
    attention = {**part("n_heads_in_group", heads), "window_length": None, "unshifted_sink": False}
    return {"attention": attention, "ffn": part("ffn_mult", mult)}


ROWS = [
    Row(
        "deci",
        "DeciLMForCausalLM",
        {
            **SIZES,
            "block_configs": [
                block(1, 5.25),
                block("nothing", 1.3125),
                block(3, 10.5),
                block(3, "nothing"),
            ],
        },
        ("sp2", "vp2"),
        slow=("tp2", "pp2"),
    ),
    Row(
        "deci_linear",
        "DeciLMForCausalLM",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "block_configs": [
                block("linear", 2.0),
                block(3, "linear"),
                block("nothing", "nothing"),
                block(1, 2.0),
            ],
        },
        ("tp2", "sp2", "pp2", "vp2"),
    ),
]
