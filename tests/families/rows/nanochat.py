# SPDX-License-Identifier: Apache-2.0
"""NanoChat: caps that bend the logits, biases on and off."""

from tests.families.row import Row
from tests.toy_models import LLAMA

# heads as wide as hidden size / number of heads: its config has no other width
NANOCHAT = {**{key: value for key, value in LLAMA.items() if key != "head_dim"}, "hidden_size": 60}
NANOCHAT |= {
    "final_logit_softcapping": 1.5,
    "pad_token_id": 8,
    "rope_parameters": {"rope_theta": 50.0},
}

ROWS = [
    Row(
        "nanochat", "NanoChatForCausalLM", NANOCHAT, ("tp2", "sp2"), slow=("pp2", "vp2"), brief=True
    ),
    Row(
        "nanochat_biases",
        "NanoChatForCausalLM",
        {
            **NANOCHAT,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
        },
        slow=("tp2",),
        brief=True,
    ),
]
