# SPDX-License-Identifier: Apache-2.0
"""Learned positions: GPT-2 and OPT."""

from tests.families.row import Row

GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 4, "n_head": 3, "n_positions": 70}
GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
OPT = {
    "vocab_size": 101,
    # narrow: biases of keys have no gradient but rounding, which grows with the width
    "hidden_size": 24,
    "ffn_dim": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 70,
    "pad_token_id": 8,
    "dropout": 0.0,
}

ROWS = [
    Row("gpt2", "GPT2LMHeadModel", GPT2, ("tp2",), slow=("sp2", "pp2", "vp2"), brief=True),
    Row(
        "gpt2_untied",
        "GPT2LMHeadModel",
        {
            **GPT2,
            "n_inner": 40,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "n_head": 6,
        },
        (),
        slow=("tp2", "pp2"),
        brief=True,
    ),
    Row(
        "gpt2_scores_by_layer",
        "GPT2LMHeadModel",
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        ("pp2",),
        slow=("tp2", "vp2"),
        brief=True,
    ),
    Row("opt", "OPTForCausalLM", OPT, ("pp2",), slow=("tp2", "sp2", "vp2"), brief=True, seed=1),
    Row(
        "opt_no_biases",
        "OPTForCausalLM",
        {**OPT, "enable_bias": False, "tie_word_embeddings": False, "num_attention_heads": 6},
        (),
        slow=("tp2", "pp2"),
        brief=True,
    ),
]
