# SPDX-License-Identifier: Apache-2.0
"""The vision tower of a rehearsal: that of a toy, for every recipe that has one."""

import copy

import pytest
import torch

from megatron.bridge import recipes
from megatron.bridge.cli.rehearse import toy_config
from megatron.bridge.models.vision.tower import build_tower, dummy_media, encode

NAMES = (
    *("qwen2_vl_2b_finetune_config", "qwen25_vl_7b_finetune_config", "qwen3_vl_8b_finetune_config"),
    *("gemma3_vl_4b_finetune_config", "glm_45v_finetune_config", "smolvlm2_256m_finetune_config"),
    *("qwen35_vl_35b_a3b_finetune_config", "gemma4_vl_e4b_finetune_config"),
    "gemma4_vl_12b_finetune_config",
    *("qwen2_audio_7b_finetune_config", "voxtral_mini_3b_finetune_config"),
)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_encodes_an_image(name):
    config = getattr(recipes, name)()
    toy = toy_config.Toy(
        copy.deepcopy(config), *[toy_config.ParallelDimensions(1, 1, 1, 1, 1, 1)] * 2
    )
    toy_config._shrink_widths(toy.config.model, toy.dimensions)
    toy_config._rehearse_without_images(toy)
    tower = build_tower(toy.config.model.vision, torch.float32)
    assert sum(parameter.numel() for parameter in tower.parameters()) < 500_000
    rows = encode(tower, dummy_media(tower)).rows
    assert rows.shape[-1] in (
        toy.config.model.hidden_size,
        2 * toy.config.model.hidden_size,
    )  # one deeper layer
    sections, head = toy.config.model.mrope_section, toy.config.model.kv_channels
    assert sections is None or sum(sections) == int(head * toy.config.model.rotary_percent) // 2
