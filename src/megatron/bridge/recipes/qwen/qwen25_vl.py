# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL. Learning rates are our own.

Layouts leave room for activations of the tower, which depend on the images and are not in the memory named here.
"""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import DENSE, VisionSize


def _size(hub_id: str, *row: int, tower: int = 3420, vocabulary: int = 152064, tied: bool = False) -> VisionSize:
    """A size with the rows of ``config.json``; ``tower`` is the width of the tower's feed-forward layers."""
    sizes = dict(zip(DENSE, row, strict=True))
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        **sizes,
        "max_position_embeddings": 128000,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "max_window_layers": sizes["num_hidden_layers"],
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    vision: dict[str, Any] = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": tower,
        "num_heads": 16,
        "out_hidden_size": sizes["hidden_size"],
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }
    numbers: dict[str, Any] = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": vision,
    }
    return VisionSize(hub_id, numbers)


QWEN25_VL_3B = _size(*("Qwen/Qwen2.5-VL-3B-Instruct", 2048, 11008, 36, 16, 2), vocabulary=151936, tied=True)
QWEN25_VL_7B = _size("Qwen/Qwen2.5-VL-7B-Instruct", 3584, 18944, 28, 28, 4)
QWEN25_VL_32B = _size("Qwen/Qwen2.5-VL-32B-Instruct", 5120, 27648, 64, 40, 8, tower=3456)
QWEN25_VL_72B = _size("Qwen/Qwen2.5-VL-72B-Instruct", 8192, 29568, 80, 64, 8, tower=3456)

qwen25_vl_3b_finetune_config = finetune_recipe(QWEN25_VL_3B, layout(tp=2), lr=1e-5)
"""Qwen2.5-VL 3B full fine-tuning, 8 x H100 80GB: 29 GB each, TP2."""
qwen25_vl_7b_finetune_config = finetune_recipe(QWEN25_VL_7B, layout(tp=2))
"""Qwen2.5-VL 7B full fine-tuning, 8 x H100 80GB: 52 GB each, TP2."""
qwen25_vl_32b_finetune_config = finetune_recipe(QWEN25_VL_32B, layout(tp=8))
"""Qwen2.5-VL 32B full fine-tuning, 32 x H100 80GB: 52 GB each, TP8."""
qwen25_vl_72b_finetune_config = finetune_recipe(QWEN25_VL_72B, layout(tp=8, pp=4))
"""Qwen2.5-VL 72B full fine-tuning, 64 x H100 80GB: 50 GB each, TP8 PP4."""
