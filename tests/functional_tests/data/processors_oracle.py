# SPDX-License-Identifier: Apache-2.0
"""Samples with images against transformers' composite processors; prints what differs, one line each.

Most of those processors need torchvision, which the other tests do not have: this runs in a process of its own.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.references import ImageReference, decode
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests import toy_vision

SIZES = [(20, 12), (41, 24), (9, 30)]  # width, height
ANSWER = "Blue, and a <b> of red."


def messages(images: list[str], mark: bool) -> list[dict[str, Any]]:
    """A conversation of two turns; the images are in the first one, the second one after some text."""
    first = [{"type": "image", "image": name} if mark else {"type": "image"} for name in images[:1]]
    rest = [{"type": "image", "image": name} if mark else {"type": "image"} for name in images[1:]]
    return [
        {"role": "user", "content": [*first, {"type": "text", "text": "What color?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        {"role": "user", "content": [{"type": "text", "text": "And this: "}, *rest]},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER[::-1]}]},
    ]


def one_question(images: list[str]) -> list[dict[str, Any]]:
    """A conversation of one turn, all that PaliGemma takes."""
    question = [*({"type": "image", "image": name} for name in images), {"type": "text", "text": "What color?"}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]


def prompts(name: str, folder: Path) -> Iterator[str]:
    """What differs for PaliGemma, whose processor has no template and says which tokens are the prompt."""
    toy_vision.save(name, folder)
    names = [toy_vision.picture(folder, f"{place}.png", *size, place) for place, size in enumerate(SIZES)]
    tokenizer = HuggingFaceTokenizer(str(folder))
    encoder = RecordEncoder(tokenizer, EncodingRules(100_000, media=MediaRules(str(folder), str(folder))))
    processor = toy_vision.composite(name, folder)
    for images in (names[:1], names[1:]):
        sample = encoder([("here", {"messages": one_question(images)})]).samples[0]
        text = "<image>" * len(images) + "What color?"
        pictures = [decode(image) for image in sample.images]
        expected = processor(text=[text], images=[pictures], suffix=[ANSWER], return_tensors="pt")
        for what in _differing(encoder, sample, expected):
            yield f"{name} with {len(images)} images: {what}"
        if sample.trained.tolist() != expected["token_type_ids"][0].bool().tolist():
            yield f"{name} with {len(images)} images: the prompt has {sample.trained.argmax()} tokens"


def differences(name: str, folder: Path) -> Iterator[str]:
    """What differs for the family ``name``, for one image, two and none."""
    toy_vision.save(name, folder)
    names = [toy_vision.picture(folder, f"{place}.png", *size, place) for place, size in enumerate(SIZES)]
    tokenizer = HuggingFaceTokenizer(str(folder))
    encoder = RecordEncoder(tokenizer, EncodingRules(100_000, media=MediaRules(str(folder), str(folder))))
    processor = toy_vision.composite(name, folder)
    for images in ([names[0]], [names[1], names[2]], []):
        if len(images) > 1 and name == "llava_onevision":
            continue
        sample = encoder([("here", {"messages": messages(images, True)})]).samples[0]
        text = processor.tokenizer.apply_chat_template(messages(images, False), tokenize=False)
        pictures = [decode(image) for image in sample.images]
        given = {"images": [pictures]} if pictures else {}
        expected = processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
        for what in _differing(encoder, sample, expected):
            yield f"{name} with {len(images)} images: {what}"
        trained = tokenizer.hf.decode(sample.tokens[sample.trained])
        if trained != f"{ANSWER}<|im_end|>\n{ANSWER[::-1]}<|im_end|>\n":  # the template ends turns so
            yield f"{name} with {len(images)} images: learns {trained!r}"

    yield from _other_sizes(name, encoder.media, processor)


def _other_sizes(name: str, media: Any, processor: Any) -> Iterator[str]:
    """Sizes whose text differs; no file is needed for it."""
    from PIL import Image

    rng = np.random.default_rng(7)
    for width, height in rng.integers(9, 70, (25, 2)).tolist():
        reference = ImageReference("", height, width, "here")
        given = {"images": [[Image.new("RGB", (width, height))]], "text": [media.placeholder]}
        expected = processor(add_special_tokens=False, **given)["input_ids"][0]
        if processor.tokenizer(media.text(reference), add_special_tokens=False)["input_ids"] != list(expected):
            yield f"{name}: {width}x{height} has other tokens"


def _differing(encoder: RecordEncoder, sample: Any, expected: Any) -> Iterator[str]:
    media = encoder.media
    assert media is not None
    if sample.tokens.tolist() != expected["input_ids"][0].tolist():
        yield f"ids {encoder.tokenizer.detokenize(sample.tokens)!r}, not {_text(encoder, expected)!r}"
    pixels = media.pixels(sample.images)
    for key, value in pixels.items():
        theirs = expected[key]
        if media.kind in ("idefics3", "smolvlm"):
            theirs = theirs[0]
        if value.shape != theirs.shape or not torch.equal(value, torch.as_tensor(theirs)):
            yield f"{key} {list(value.shape)}, not {list(theirs.shape)}"
    if media.has_grids and sample.images:
        found = [list(media.grid(image) or ()) for image in sample.images]
        if found != expected["image_grid_thw"].tolist():
            yield f"grids {found}"


def _text(encoder: RecordEncoder, expected: Any) -> str:
    return encoder.tokenizer.detokenize(expected["input_ids"][0].tolist())


def main() -> None:
    for name in sys.argv[1:] or toy_vision.TOYS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for line in (prompts if name.startswith("paligemma") else differences)(name, Path(folder)):
                    print(line)  # noqa: T201
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")  # noqa: T201
                if len(sys.argv) > 1:
                    raise
        print(f"{name} done")  # noqa: T201


if __name__ == "__main__":
    main()
