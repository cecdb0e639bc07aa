# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and mixture of experts. Learning rates are our own.

Layouts leave room for activations of the tower, which depend on the images and are not in the memory named here.
"""

from typing import Any

from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.options import layout
from megatron.bridge.recipes.sizes import DENSE, VisionSize

_EXPERTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def _size(hub_id: str, *row: int, expert: int | None = None) -> VisionSize:
    """A size with the rows of ``config.json``; ``expert`` is the width of an expert, None for a dense model."""
    kind, model = ("qwen3_vl_moe", "Qwen3VLMoe") if expert else ("qwen3_vl", "Qwen3VL")
    sizes = dict(zip(DENSE, row, strict=True))
    text: dict[str, Any] = {
        "vocab_size": 151936,
        **sizes,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        **({**_EXPERTS, "moe_intermediate_size": expert} if expert else {}),
    }
    vision: dict[str, Any] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": sizes["hidden_size"],
        "deepstack_visual_indexes": [8, 16, 24],
    }
    numbers: dict[str, Any] = {
        "model_type": kind,
        "architectures": [f"{model}ForConditionalGeneration"],
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }
    return VisionSize(hub_id, numbers)


QWEN3_VL_8B = _size("Qwen/Qwen3-VL-8B-Instruct", 4096, 12288, 36, 32, 8)
QWEN3_VL_30B_A3B = _size("Qwen/Qwen3-VL-30B-A3B-Instruct", 2048, 6144, 48, 32, 4, expert=768)
QWEN3_VL_235B_A22B = _size("Qwen/Qwen3-VL-235B-A22B-Instruct", 4096, 12288, 94, 64, 4, expert=1536)

qwen3_vl_8b_finetune_config = finetune_recipe(QWEN3_VL_8B, layout(tp=2))
"""Qwen3-VL 8B full fine-tuning, 8 x H100 80GB: 55 GB each, TP2."""
qwen3_vl_30b_a3b_finetune_config = finetune_recipe(QWEN3_VL_30B_A3B, layout(tp=4, ep=8, etp=1))
"""Qwen3-VL 30B-A3B full fine-tuning, 16 x H100 80GB: 59 GB each, TP4 EP8."""
# two virtual stages, because the first chunk must hold the three layers that features of images are added behind
qwen3_vl_235b_a22b_finetune_config = finetune_recipe(
    QWEN3_VL_235B_A22B, layout(tp=8, pp=8, vp=2, ep=8, etp=1), embedding_and_loss_are_layers=True
)
"""Qwen3-VL 235B-A22B full fine-tuning, 128 x H100 80GB: 68 GB each, TP8 PP8 EP8."""
