# SPDX-License-Identifier: Apache-2.0
"""Samples with images and videos against transformers' composite processors; prints what differs, one line each.

Most of those processors need torchvision, which the other tests do not have: this runs in a process of its own.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.processor import MediaProcessor
from megatron.bridge.data.media.references import ImageReference, MediaReference, decode
from megatron.bridge.data.media.videos import SUPPORTED, decode_frames
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.models.vision.media import can_share, costs, select, share_out, split_kinds
from megatron.bridge.utils.errors import UserError
from tests import toy_vision
from tests.families.own_models import model_class
from tests.families.vision.rows import ROWS

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
    question = [
        *({"type": "image", "image": name} for name in images),
        {"type": "text", "text": "What color?"},
    ]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]


def prompts(name: str, folder: Path) -> Iterator[str]:
    """What differs for PaliGemma, whose processor has no template and says which tokens are the prompt."""
    toy_vision.save(name, folder)
    names = [
        toy_vision.picture(folder, f"{place}.png", *size, place) for place, size in enumerate(SIZES)
    ]
    tokenizer = HuggingFaceTokenizer(str(folder))
    encoder = RecordEncoder(
        tokenizer, EncodingRules(100_000, media=MediaRules(str(folder), str(folder)))
    )
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
    names = [
        toy_vision.picture(folder, f"{place}.png", *size, place) for place, size in enumerate(SIZES)
    ]
    tokenizer = HuggingFaceTokenizer(str(folder))
    encoder = RecordEncoder(
        tokenizer, EncodingRules(100_000, media=MediaRules(str(folder), str(folder)))
    )
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
        if (
            trained != f"{ANSWER}<|im_end|>\n{ANSWER[::-1]}<|im_end|>\n"
        ):  # the template ends turns so
            yield f"{name} with {len(images)} images: learns {trained!r}"

    yield from _other_sizes(name, encoder.media, processor)
    names = names[: 1 if name == "llava_onevision" else None]
    yield from _shares(
        name, encoder.media, encoder.media.references([("image", name) for name in names], "here")
    )


def _shares(name: str, media: MediaProcessor, images: Sequence[MediaReference]) -> Iterator[str]:
    """Ranks for which the pixels of their own images differ from those of a process that decodes all."""
    whole = media.pixels(images)
    if not all(map(can_share, split_kinds(whole))):
        yield from _undivided(name, media, images)
        return
    owners = share_out(costs(whole), 2)
    for rank in range(2):
        media.share = (rank, 2)
        share, own = (
            media.pixels(images),
            [place for place, owner in enumerate(owners) if owner == rank],
        )
        expected, found = (select(tensors, own) for tensors in (whole, share))
        if not can_share(share) or any(
            not value.equal(expected[key]) for key, value in found.items() if own
        ):
            yield f"{name}: the share of rank {rank}"
    media.share = (0, 1)


def _undivided(name: str, media: MediaProcessor, images: Sequence[MediaReference]) -> Iterator[str]:
    """Ranks that lack pixels of what every rank encodes."""
    whole = media.pixels(images)
    for rank in range(2):
        media.share = (rank, 2)
        share = media.pixels(images)
        if any(not share[key].equal(value) for key, value in whole.items()):
            yield f"{name}: rank {rank} has no pixels"
    media.share = (0, 1)


def films(name: str, folder: Path) -> Iterator[str]:
    """What differs for videos: a file, a list of images, two videos with an image between them, fewer frames."""
    from transformers import AutoProcessor

    toy_vision.save(name, folder)
    first = {
        "type": "video",
        "video": toy_vision.film(folder, "first.mp4", 44, 30, frames=14, fps=7),
    }
    second = {
        "type": "video",
        "video": toy_vision.film(folder, "second.mkv", 24, 40, frames=9, fps=3),
    }
    stills = [toy_vision.picture(folder, f"{place}.png", 40, 26, place) for place in range(6)]
    listed = {"type": "video", "video": stills, "fps": 2}
    image = {"type": "image", "image": stills[0]}
    processor = AutoProcessor.from_pretrained(folder)
    for parts, rules in (
        ([first], {}),
        ([listed], {}),
        ([first], {"fps": 3.5}),
        ([first, image, second], {}),
    ):
        if len(parts) > 1 and name in ("internvl", "smolvlm"):
            continue  # transformers cannot
        limited = rules and not name.startswith(("glm4", "internvl", "gemma4"))
        rules = {**rules, "max_frames": 4} if limited else rules  # noqa: PLW2901
        media = MediaRules(str(folder), str(folder), **rules)
        encoder = RecordEncoder(
            HuggingFaceTokenizer(str(folder)), EncodingRules(100_000, media=media)
        )
        case = f"{name} with {len(parts)} {parts[0].get('fps', '')} {rules}"
        if name.startswith("gemma4"):  # its number of frames excludes a rate
            frames = None if rules else toy_vision.TOYS[name].video_options["num_frames"]
            processor.video_processor.num_frames = frames
        try:
            yield from _film(encoder, processor, parts, rules, case)
        except UserError as error:
            yield f"{case}: {error}"


def _film(
    encoder: RecordEncoder, processor: Any, parts: list[Any], rules: Any, case: str
) -> Iterator[str]:
    question = [*parts, {"type": "text", "text": "What moves?"}]
    record = {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": ANSWER},
        ]
    }
    sample = encoder([("here", record)]).samples[0]
    expected = composite_sample(encoder, processor, record, rules)
    for what in _differing(encoder, sample, expected):
        yield f"{case}: {what}"
    if encoder.media is not None and not encoder.media.has_grids:
        yield from _shares(case, encoder.media, sample.images)
    elif encoder.media is not None:
        found = encoder.media.positions(sample.tokens, sample.images)
        theirs = _positions(encoder.media.kind, expected)
        if not np.array_equal(found, theirs):
            yield f"{case}: positions {found[:, -1]}, not {theirs[:, -1]}"


def composite_sample(encoder: RecordEncoder, processor: Any, record: Any, rules: Any) -> Any:
    """What transformers' composite processor makes of a record with one question."""
    question, answer = (message["content"] for message in record["messages"])
    bare = [part if "text" in part else {"type": part["type"]} for part in question]
    turns = [
        {"role": "user", "content": bare},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False)
    sample = encoder([("here", record)]).samples[0]
    return processor(text=[text], return_tensors="pt", **_given(encoder, sample, rules))


def _given(encoder: RecordEncoder, sample: Any, rules: Any) -> dict[str, Any]:
    """Images and all frames of videos, among which transformers' processor chooses."""
    from transformers.video_utils import VideoMetadata

    images = [decode(item) for item in sample.images if isinstance(item, ImageReference)]
    videos = [item for item in sample.images if not isinstance(item, ImageReference)]
    metadata = [
        VideoMetadata(
            item.frames,
            item.fps,
            item.width,
            item.height,
            item.frames / item.fps,
            None,
            list(range(item.frames)),
        )
        for item in videos
    ]
    options = {**rules, "do_sample_frames": True} if rules else {}
    if encoder.media is not None and encoder.media.kind == "smolvlm" and rules:
        options["num_frames"] = options.pop("max_frames")
    if videos and isinstance(videos[0].source, list):
        options["do_sample_frames"] = False
    found = {
        "videos": [decode_frames(item, range(item.frames)) for item in videos],
        "video_metadata": metadata,
    }
    if not videos:
        found, options = {}, {}
    return found | ({"images": images} if images else {}) | options


def _positions(kind: str, expected: Any) -> Any:
    """Transformers' positions."""
    row = next(row for name, row in ROWS.items() if name in toy_vision.TOYS and _kind(name) == kind)
    import transformers

    model = getattr(transformers, row.model)
    with torch.device("meta"):
        whole = model(model.config_class(**row.config)).model
    names = (
        "input_ids",
        "mm_token_type_ids",
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
    )
    given = {name: torch.as_tensor(expected[name]) for name in names if name in expected}
    return whole.get_rope_index(**given)[0][:, 0].numpy()


def _other_sizes(name: str, media: Any, processor: Any) -> Iterator[str]:
    """Sizes whose text differs; no file is needed for it."""
    from PIL import Image

    rng = np.random.default_rng(7)
    for width, height in rng.integers(9, 70, (25, 2)).tolist():
        reference = ImageReference("", height, width, "here")
        given = {"images": [[Image.new("RGB", (width, height))]], "text": [media.placeholder()]}
        expected = processor(add_special_tokens=False, **given)["input_ids"][0]
        if processor.tokenizer(media.text(reference), add_special_tokens=False)[
            "input_ids"
        ] != list(expected):
            yield f"{name}: {width}x{height} has other tokens"


def _differing(encoder: RecordEncoder, sample: Any, expected: Any) -> Iterator[str]:
    media = encoder.media
    assert media is not None
    if sample.tokens.tolist() != expected["input_ids"][0].tolist():
        yield f"ids {encoder.tokenizer.detokenize(sample.tokens)!r}, not {_text(encoder, expected)!r}"
    pixels = media.pixels(sample.images)
    for key, value in pixels.items():
        theirs = _theirs(media.kind, key, expected)
        if media.kind in ("idefics3", "smolvlm"):
            theirs = theirs[0]
        if value.shape != theirs.shape or not torch.equal(value, torch.as_tensor(theirs)):
            yield f"{key} {list(value.shape)}, not {list(theirs.shape)}"
    if media.has_grids and sample.images and "video_grid_thw" not in expected:
        found = [list(media.grid(image) or ()) for image in sample.images]
        if found != expected["image_grid_thw"].tolist():
            yield f"grids {found}"


def _theirs(kind: str, key: str, expected: Any) -> Any:
    """What transformers calls ``key``; frames of a video that are images are under another name there."""
    if not kind.startswith("glm4") or "video_grid_thw" not in expected:
        return expected[key] if key in expected else expected["pixel_values_videos"][0]
    grids = expected["video_grid_thw"].tolist()
    split = {
        "image_grid_thw": [torch.tensor([[1, *grid[1:]]] * grid[0]) for grid in grids],
        "pixel_values": list(
            expected["pixel_values_videos"].split([int(np.prod(grid)) for grid in grids])
        ),
    }[key]
    if len(grids) > 1:  # an image is between them
        split.insert(1, expected[key])
    return torch.cat(split)


def _text(encoder: RecordEncoder, expected: Any) -> str:
    return encoder.tokenizer.detokenize(expected["input_ids"][0].tolist())


def _kind(name: str) -> str:
    """``model_type`` of a toy."""
    return model_class(ROWS[name].model).config_class.model_type


def main() -> None:
    for name in sys.argv[1:] or toy_vision.TOYS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for line in (prompts if name.startswith("paligemma") else differences)(
                    name, Path(folder)
                ):
                    print(line)  # noqa: T201
                for line in films(name, Path(folder)) if _kind(name) in SUPPORTED else ():
                    print(line)  # noqa: T201
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")  # noqa: T201
                if len(sys.argv) > 1:
                    raise
        print(f"{name} done")  # noqa: T201


if __name__ == "__main__":
    main()
