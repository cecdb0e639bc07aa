# SPDX-License-Identifier: Apache-2.0
"""Tiles of Nemotron Nano VL v2 against another way to make them, and the tokens of an image."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.references import decode
from megatron.bridge.data.media.tile_processor import TileProcessor
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests import toy_vision
from tests.refusals import refused

NORM = {"norm_mean": [0.48, 0.46, 0.41], "norm_std": [0.27, 0.26, 0.28]}
PUBLISHED = TileProcessor(NORM, "here")
SIZES = [(20, 12), (41, 24), (9, 30), (16, 16), (200, 7), (1, 1)]


def grid(width, height, most, side):
    """Columns and rows of the shape that is nearest to the image's; among equals, the larger grid for an image that
    fills more than half of it."""
    shapes = sorted(
        {(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if c * r <= most},
        key=np.prod,
    )
    away = {shape: abs(width / height - shape[0] / shape[1]) for shape in shapes}
    nearest = [shape for shape in shapes if away[shape] == min(away.values())]
    return [
        nearest[0],
        *(shape for shape in nearest[1:] if width * height > side**2 * np.prod(shape) / 2),
    ][-1]


def resized(image, width, height):
    """PIL's own filter, channel by channel in floats."""
    bands = [Image.fromarray(np.asarray(band, dtype=np.float32) / 255) for band in image.split()]
    return np.stack(
        [np.asarray(band.resize((width, height), Image.Resampling.BICUBIC)) for band in bands]
    )


def expected(image, most, side):
    columns, rows = grid(*image.size, most, side)
    whole = resized(image, columns * side, rows * side)
    tiles = [
        whole[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(rows)
        for column in range(columns)
    ]
    tiles += [resized(image, side, side)] if len(tiles) > 1 else []
    mean, deviation = (np.array(NORM[key]).reshape(3, 1, 1) for key in ("norm_mean", "norm_std"))
    return (np.stack(tiles) - mean) / deviation


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [1, 4, 12])
def test_pixels(size, most):
    rng = np.random.default_rng(size)
    image = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    processor = TileProcessor({**NORM, "image_size": 16, "max_num_tiles": most}, "here")
    found = processor(image)["pixel_values"]
    assert found.dtype == torch.float32
    assert found.shape[0] == processor.count(*size[::-1])
    np.testing.assert_allclose(found.numpy(), expected(image, most, 16), atol=1e-4)


def test_the_published_grid():
    """Every shape of up to 12 tiles of 512 pixels, and many sizes at which two are equally near."""
    for width in range(32, 4000, 61):
        for height in (*range(32, 3000, 167), 512, 1024, width):
            tiles = int(np.prod(grid(width, height, 12, 512)))
            assert PUBLISHED.count(height, width) == tiles + (tiles > 1), (width, height)
    assert PUBLISHED.tokens == 256
    # as measured with the remote processor: a line of 481x202 pixels in 11 tiles, a page of 1178x1779 in 7
    assert [PUBLISHED.count(202, 481), PUBLISHED.count(1779, 1178)] == [11, 7]


def test_no_thumbnail():
    without = TileProcessor({**NORM, "use_thumbnail": False}, "here")
    assert (without.count(512, 1024), PUBLISHED.count(512, 1024)) == (2, 3)


def test_numbers_of_the_checkpoint_are_not_made_up():
    with refused("somewhere: preprocessor_config.json has no norm_mean: download it again"):
        TileProcessor({"norm_std": [1.0] * 3}, "somewhere")


@pytest.mark.parametrize("key", ["image_token_id", "img_context_token_id"])
def test_a_record(tmp_path, key):
    folder = toy_vision.save("nemotron_nano_vl", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config[key] = config.pop("image_token_id")
    (folder / "config.json").write_text(json.dumps(config))
    names = [
        toy_vision.picture(folder, f"{place}.png", *size, place)
        for place, size in enumerate(SIZES[:2])
    ]
    tokenizer = HuggingFaceTokenizer(str(folder))
    rules = EncodingRules(1000, media=MediaRules(str(folder), str(folder)))
    encoder = RecordEncoder(tokenizer, rules)
    parts = [
        *({"type": "image", "image": name} for name in names),
        {"type": "text", "text": "What color?"},
    ]
    record = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Blue."}]
    }
    sample = encoder([("here", record)]).samples[0]
    tiles = [int(np.prod(grid(*size, 4, 16))) + 1 for size in SIZES[:2]]
    text = tokenizer.detokenize(sample.tokens.tolist())
    assert (
        f"<img>{'<image>' * 4 * tiles[0]}</img><img>{'<image>' * 4 * tiles[1]}</img>What color?"
        in text
    )
    pixels = encoder.media.pixels(sample.images)["pixel_values"]
    both = [expected(decode(image), 4, 16) for image in sample.images]
    np.testing.assert_allclose(pixels.numpy(), np.concatenate(both), atol=1e-4)
    with refused(
        "dataset.max_pixels=99: TileProcessor has no such limit, its images have fixed sizes: leave it unset"
    ):
        RecordEncoder(
            tokenizer, replace(rules, media=MediaRules(str(folder), str(folder), max_pixels=99))
        )
