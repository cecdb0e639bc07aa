# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with its vision tower. Learning rates are our own.

Layouts leave room for activations of the tower, which depend on the images and are not in the memory named here.
"""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import DENSE, VisionSize


def _size(hub_id: str, *row: int, **text: Any) -> VisionSize:
    """A size with the rows of ``config.json``; ``text`` overrides entries of its text model."""
    numbers: dict[str, Any] = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text",
            **dict(zip(DENSE, row, strict=True)),
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    return VisionSize(hub_id, numbers)


GEMMA3_VL_4B = _size("google/gemma-3-4b-it", 2560, 10240, 34, 8, 4)
GEMMA3_VL_12B = _size("google/gemma-3-12b-it", 3840, 15360, 48, 16, 8)
GEMMA3_VL_27B = _size("google/gemma-3-27b-it", 5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168)

gemma3_vl_4b_finetune_config = finetune_recipe(GEMMA3_VL_4B, layout(tp=4), lr=1e-5)
"""Gemma 3 VL 4B full fine-tuning, 8 x H100 80GB: 24 GB each, TP4."""
gemma3_vl_12b_finetune_config = finetune_recipe(GEMMA3_VL_12B, layout(tp=8))
"""Gemma 3 VL 12B full fine-tuning, 16 x H100 80GB: 31 GB each, TP8."""
gemma3_vl_27b_finetune_config = finetune_recipe(GEMMA3_VL_27B, layout(tp=8))
"""Gemma 3 VL 27B full fine-tuning, 16 x H100 80GB: 58 GB each, TP8."""
