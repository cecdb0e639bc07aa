# SPDX-License-Identifier: Apache-2.0
"""Llama: biases on and off, tied and untied, with scaled and plain rotary embeddings."""

from tests.families.row import Row
from tests.toy_models import LLAMA, LLAMA_VARIANTS

ROWS = [
    Row(
        f"llama_{name}",
        "LlamaForCausalLM",
        {**LLAMA, **changes},
        layouts=("tp2", "sp2", "pp2", "vp2"),
        four=("tp2pp2",) if name == "tied" else (),
    )
    for name, changes in LLAMA_VARIANTS.items()
]
