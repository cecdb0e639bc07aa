# SPDX-License-Identifier: Apache-2.0
"""Positions on three axes equal transformers' ``get_rope_index``; wrong placeholders are refused."""

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel

from megatron.bridge.data.media.positions import mrope_positions
from megatron.bridge.utils.errors import UserError

IMAGES, VIDEOS = [[1, 4, 6], [1, 2, 2]], [[3, 4, 2], [2, 2, 4]]


def types_of(split):
    """Text, an image, text, a video, text, an image, text, a video; frames apart where ``split``."""
    found = [0] * 3

    def add(kind, tokens):
        found.extend([kind] * tokens + [0] * 2)

    for image, (frames, height, width) in zip(IMAGES, VIDEOS, strict=True):
        add(1, image[1] * image[2] // 4)
        for _ in range(frames if split else 1):
            add(2, height * width // 4 * (1 if split else frames))
    return found


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_they_are_those_of_transformers(family):
    split = family == "qwen3"
    types = types_of(split)
    model = (Qwen3VLModel if split else Qwen2_5_VLModel).__new__(
        Qwen3VLModel if split else Qwen2_5_VLModel
    )
    torch.nn.Module.__init__(model)
    model.config = (Qwen3VLConfig if split else Qwen2_5_VLConfig)()
    seconds = [0.7, 2.0]
    timing = {} if split else {"second_per_grid_ts": torch.tensor(seconds)}
    expected, _ = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long),
        torch.tensor([types]),
        image_grid_thw=torch.tensor(IMAGES),
        video_grid_thw=torch.tensor(VIDEOS),
        **timing,
    )
    per_second = 1 if split else model.config.vision_config.tokens_per_second
    found = mrope_positions(
        types,
        IMAGES,
        VIDEOS,
        merge=2,
        split_frames=split,
        time_steps=[per_second * step for step in seconds],
    )
    assert np.array_equal(found, expected[:, 0].numpy())


def test_neighbouring_images():
    found = mrope_positions([1, 1, 1, 1, 1, 1], [[1, 4, 4], [1, 2, 4]], merge=2)
    assert found[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert found[2].tolist() == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("types", "images", "message"),
    [
        ([0, 1, 1, 0], [], "more placeholders for images than images are given"),
        (
            [0, 1, 0],
            [[1, 2, 2], [1, 2, 2]],
            "1 more images are given than the sample has placeholders",
        ),
        ([0, 1, 0], [[1, 2, 4]], r"\[1, 2, 4\] needs 2 tokens.* expand each placeholder"),
        ([0, 1], [[1, 2, 4]], r"\[1, 2, 4\] needs 2 tokens"),
    ],
)
def test_wrong_placeholders(types, images, message):
    with pytest.raises(UserError, match=message):
        mrope_positions(types, images, merge=2)
