# SPDX-License-Identifier: Apache-2.0
"""Videos that cannot be used are named with their record. Needs torchvision and PyAV, so it runs in its own process."""

import json
import shutil

import pytest

from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.videos import decode_frames
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.preview.render import to_html
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests import toy_vision
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path):
    found = toy_vision.save("qwen2_5_vl", tmp_path / "model")
    toy_vision.film(found, "a.mp4", 44, 30, frames=8, fps=4)
    return found


def encode(folder, *parts, **rules):
    media = MediaRules(str(folder), str(folder), **rules)
    encoder = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1000, media=media))
    question = [*parts, {"type": "text", "text": "What moves?"}]
    record = {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "Red."},
        ]
    }
    return encoder([("file:3", record)])


def film(name):
    return {"type": "video", "video": name}


@pytest.mark.parametrize("name", ["text.mp4", "half.mp4", "a.wav"])
def test_a_file_that_is_no_video_is_named(folder, name):
    import wave

    (folder / "text.mp4").write_text("no video")
    (folder / "half.mp4").write_bytes((folder / "a.mp4").read_bytes()[:300])
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes(bytes(1600))
    with refused("file:3", name):
        encode(folder, film(name))


def test_a_video_that_became_shorter_is_named(folder):
    video = encode(folder, film("a.mp4")).samples[0].images[0]
    toy_vision.film(folder, "a.mp4", 44, 30, frames=4, fps=4)
    with refused("file:3", "a.mp4", "frame 4"):
        decode_frames(video, range(8))


def test_bytes_of_a_video_are_read(folder):
    raw = {"bytes": (folder / "a.mp4").read_bytes(), "path": None}
    found, expected = encode(folder, film(raw)), encode(folder, film("a.mp4"))
    assert found.samples[0].tokens.tolist() == expected.samples[0].tokens.tolist()
    assert found.report.videos == 1
    ours, theirs = (decode_frames(each.samples[0].images[0], [0, 5]) for each in (found, expected))
    assert ours.equal(theirs)


def test_a_mark_in_text_takes_a_listed_video(folder):
    media = MediaRules(str(folder), str(folder))
    encoder = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1000, media=media))
    turns = [{"from": "human", "value": "<video>What moves?"}, {"from": "gpt", "value": "Red."}]
    found = encoder([("file:3", {"conversations": turns, "videos": ["a.mp4"]})]).samples[0]
    assert found.tokens.tolist() == encode(folder, film("a.mp4")).samples[0].tokens.tolist()


def test_fewer_frames_make_fewer_tokens(folder):
    tokens = [
        encode(folder, film("a.mp4"), **rules).report.image_tokens for rules in ({}, {"fps": 2.0})
    ]
    assert tokens[0] == 2 * tokens[1]
    capped = encode(folder, film("a.mp4"), fps=4.0, max_frames=6).report.image_tokens
    assert capped == tokens[0] * 6 // 8


def test_a_limit_that_does_nothing_is_refused(folder):
    with refused("file:3", "dataset.max_frames=4", "dataset.fps"):
        encode(folder, film("a.mp4"), max_frames=4)


@pytest.mark.parametrize("name", ["llava_onevision", "gemma3_vl"])
def test_a_family_without_videos_is_named(tmp_path, folder, name):
    other = toy_vision.save(name, tmp_path / "other")
    shutil.copy(folder / "a.mp4", other)
    with refused("file:3", "qwen2_5_vl"):
        encode(other, film("a.mp4"))


def test_the_preview_shows_videos(folder):
    dataset = FinetuningDatasetConfig(
        dataset_root=str(folder),
        seq_length=512,
        hf_processor_path=str(folder),
        media_root=str(folder),
    )
    record = {
        "messages": [
            {"role": "user", "content": [film("a.mp4")]},
            {"role": "assistant", "content": "Red."},
        ]
    }
    (folder / "training.jsonl").write_text(json.dumps(record) + "\n")
    tokenizer = HuggingFaceTokenizer(str(folder))
    data = build_iterators(dataset, tokenizer, (1, 0, 0), 1, 1)
    found = preview(dataset, data, tokenizer, (1, 1, 1))
    assert found.splits[0].media.endswith("pixels; videos by Qwen2VLVideoProcessor, all frames")
    shown = [part.text for part in found.splits[0].samples[0] if part.image]
    assert shown == [f"[video 44x30, 8 frames -> {found.splits[0].report.image_tokens} tokens]"]
    assert to_html(found).count("data:image/png;base64,") == 4  # frames of it
