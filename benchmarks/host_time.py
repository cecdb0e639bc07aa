# SPDX-License-Identifier: Apache-2.0
"""CPU seconds in which Python and autograd run a layer whose tensors are so small that their kernels take no time.

``python -m benchmarks host_time`` measures a layer of Llama, and layers of Qwen3 MoE with 8 to 64 experts. The
``torch`` backend runs experts in a loop; grouped kernels have none, so the time without experts is extrapolated by a
line. The tuner's constants ``HOST_OF_LAYER`` and ``HOST_OF_EXPERTS`` are from here.
"""

import sys
import time
from typing import Any

import numpy as np
import torch

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.measure import layers
from megatron.bridge.recipes.catalog import catalog

ROUNDS = 60
TOKENS = 32
EXPERTS = (8, 16, 32, 64)
DIRECTIONS = ("forward", "backward")


def main() -> None:
    torch.set_num_threads(1)
    layers._synchronized_time = time.thread_time  # CPU time: of this thread alone, on a CPU
    dense = measure_layer("llama32_1b_pretrain_config", experts=None)
    by_experts = {
        count: measure_layer("qwen3_30b_a3b_pretrain_config", experts=count) for count in EXPERTS
    }
    for direction in DIRECTIONS:
        milliseconds = [1e3 * by_experts[count][direction] for count in EXPERTS]
        each, without = np.polyfit(EXPERTS, milliseconds, 1)
        print(
            f"{direction}: {1e3 * dense[direction]:.2f} ms a dense layer, {without:.2f} ms a layer "
            f"with experts and {each:.3f} ms more for each expert of a loop"
        )


def measure_layer(recipe_name: str, experts: int | None) -> dict[str, float]:
    """Return the least CPU seconds of a layer's two passes, in bf16."""
    config = tiny_config(recipe_name, experts)
    chunk, _ = layers._short_model(config)
    chunk.to(torch.bfloat16)
    layers._fill_buffers(chunk)
    with meta_model.as_only_rank(config.model), meta_model.nothing_random():
        rounds = [layers._time_passes(chunk, 1, TOKENS) for _ in range(ROUNDS)]
    return {direction: min(seconds[direction][0] for seconds in rounds) for direction in DIRECTIONS}


def tiny_config(recipe_name: str, experts: int | None) -> Any:
    """Return the resolved config of a recipe with two layers of a small size."""
    recipe = catalog()[recipe_name]
    config = recipe().resolve(recipe.gpus).config
    model = config.model
    model.num_layers = 2
    model.hidden_size = model.ffn_hidden_size = 64
    model.num_attention_heads, model.num_query_groups, model.kv_channels = 2, 1, 32
    model.vocab_size = 128
    model.sequence_parallel = False
    model.seq_length = config.dataset.seq_length = TOKENS
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
    model.virtual_pipeline_model_parallel_size = None
    if experts is not None:
        model.num_moe_experts = experts
        model.moe_ffn_hidden_size = 32
        model.expert_model_parallel_size = 1
    return config


if __name__ == "__main__":
    sys.exit(main())
