# SPDX-License-Identifier: Apache-2.0
"""Videos that cannot be used are named with their record. Needs torchvision and PyAV, so it runs in its own process."""

import json
import shutil

import numpy as np
import pytest

from megatron.bridge.data.config import FinetuningDatasetConfig
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.processing import load_media_processor
from megatron.bridge.data.media.videos import decode_frames, refer_video
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.preview.render import to_html
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.utils.errors import UserError
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


REDIRECTS = {
    "hls.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{film}\n#EXT-X-ENDLIST\n",
    "hls.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{film}\n#EXT-X-ENDLIST\n",
    "relative.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n../outside/b.mp4\n#EXT-X-ENDLIST\n",
    "network.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nhttp://127.0.0.1:9/b.mp4\n",
    "concat.mp4": "ffconcat version 1.0\nfile '{film}'\n",
    "session.sdp": (
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    ),
    "rtsp.mp4": "[Reference]\nRef1=rtsp://127.0.0.1:9/film\n",
    "dash.mpd": (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'mediaPresentationDuration="PT2S"><Period><AdaptationSet mimeType="video/mp4">'
        '<Representation id="0" bandwidth="1"><BaseURL>{film}</BaseURL></Representation>'
        "</AdaptationSet></Period></MPD>"
    ),
    "metadata.mp4": ";FFMETADATA1\ntitle={film}\n",
    "composition.xml": '<?xml version="1.0"?><CompositionPlaylist xmlns="http://www.smpte-ra.org/schemas/2067-3/2016">',
    "frames.webpage": "{film}",
}
"""Files in the formats of FFmpeg's that name further files and addresses."""


@pytest.mark.parametrize("name", REDIRECTS)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_video_never_reaches_outside_its_file(tmp_path, name, in_memory):
    import base64

    root = tmp_path / "media"
    for folder in (root, tmp_path / "outside"):
        folder.mkdir()
    toy_vision.film(tmp_path / "outside", "b.mp4", 44, 30, frames=8, fps=4)
    content = REDIRECTS[name].replace("{film}", str(tmp_path / "outside/b.mp4")).encode()
    (root / name).write_bytes(content)
    source = f"data:video/mp4;base64,{base64.b64encode(content).decode()}" if in_memory else name
    with refused("file:3", "mp4, mov, mkv, webm, avi or gif"):
        refer_video(source, root, "file:3")


def test_ffmpeg_alone_follows_a_playlist(folder):
    """What the test above would miss, if FFmpeg never opened a second file."""
    import av

    text = REDIRECTS["concat.mp4"].replace("{film}", "a.mp4")
    (folder / "list.txt").write_text(text)
    with av.open(str(folder / "list.txt")) as container:
        assert len(list(container.decode(video=0))) == 8


def test_a_name_with_a_pattern_is_one_file(folder):
    """FFmpeg's image2 takes ``%03d`` for numbered images, and ``concat:`` for a protocol."""
    toy_vision.picture(folder, "001.png", 44, 30)
    for name in ("%03d.png", "concat:a.mp4|a.mp4", "rtsp://127.0.0.1:9/film", "pipe:0"):
        with refused("file:3", name, "not a file"):
            encode(folder, film(name))


@pytest.mark.parametrize("name", ["a.mov", "a.mkv", "a.webm", "a.avi", "a.gif"])
def test_the_containers_that_are_meant_are_read(folder, name):
    import av

    codec = {"a.webm": "libvpx-vp9", "a.gif": "gif"}.get(name, "mpeg4")
    pixel_format = "rgb8" if name == "a.gif" else "yuv420p"
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 44, 30, pixel_format
        for shade in range(8):
            picture = np.full((30, 44, 3), shade * 20, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame.reformat(format=pixel_format)))
        container.mux(stream.encode())
    video = encode(folder, film(name)).samples[0].images[0]
    assert (video.frames, video.fps, video.width, video.height) == (8, 4, 44, 30)
    shades = decode_frames(video, [0, 7]).float().mean(dim=(1, 2, 3)).tolist()
    assert shades == pytest.approx([0, 140], abs=20)


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_video_is_named_or_read(folder, seed):
    """Cut anywhere, or with other bytes in its index: a sentence without an address of memory."""
    content = (folder / "a.mp4").read_bytes()
    random = np.random.default_rng(seed)
    for number in range(60):
        damaged = bytearray(content)
        if number % 3:
            for place in random.integers(len(content), size=4):
                damaged[place] = random.integers(256)
        else:
            damaged = damaged[: random.integers(len(content))]
        sentence = problem_of(bytes(damaged), folder)
        assert not sentence or sentence.startswith("file:3: the video in the record")
        assert " at 0x" not in sentence
        assert "[Errno" not in sentence


def problem_of(content, folder):
    """What a video is refused with; empty if it is read."""
    try:
        video = refer_video({"bytes": content}, folder, "file:3")
        decode_frames(video, range(min(video.frames, 8)))
    except UserError as error:
        return str(error)
    return ""


def test_a_video_whose_frames_change_their_size_is_named(folder):
    """The header says the size before a frame is decoded; here another file takes the place of the first."""
    video = encode(folder, film("a.mp4")).samples[0].images[0]
    toy_vision.film(folder, "a.mp4", 60, 30, frames=8, fps=4)
    with refused("file:3", "a.mp4", "60x30", "44x30"):
        decode_frames(video, range(8))


def test_a_processor_without_videos_is_named(folder):
    (folder / "processor_config.json").write_text('{"processor_class": "NoProcessor"}')
    with refused("file:3", "dataset.hf_processor_path", "processor_class"):
        encode(folder, film("a.mp4"))


@pytest.mark.parametrize(
    "values", [{"size": []}, {"image_processor_type": 0}, {"resample": -1}, {"patch_size": "a"}]
)
def test_a_damaged_processor_is_named(folder, values):
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    toy_vision.picture(folder, "a.png", 44, 30)
    with refused("image processor"):
        samples = encode(folder, {"type": "image", "image": "a.png"}).samples
        processor = load_media_processor(
            MediaRules(str(folder), str(folder)), HuggingFaceTokenizer(str(folder)).hf
        )
        processor.pixels(samples[0].images)


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
