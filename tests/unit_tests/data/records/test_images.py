# SPDX-License-Identifier: Apache-2.0
"""Records with images: every way to write one gives the same sample; mistakes are named with their record."""

import base64
import json
import os
import threading
from collections import Counter
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import ImageOps

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.references import decode
from megatron.bridge.data.records.encoding import NO_IMAGE, TOO_LONG, TOO_MANY_IMAGES, RecordEncoder
from megatron.bridge.data.records.preparation import prepare
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.sources import FileSource
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.utils.errors import UserError
from tests import toy_vision
from tests.refusals import refused

ANSWER = {"role": "assistant", "content": "Blue."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The toy Qwen2-VL and two pictures."""
    found = toy_vision.save("qwen2_vl", tmp_path_factory.mktemp("qwen"))
    toy_vision.picture(found, "a.png", 20, 12)
    toy_vision.picture(found, "b.png", 9, 30, 1)
    (found / "broken.png").write_bytes((found / "a.png").read_bytes()[:-60])
    (found / "text.png").write_text("no image")
    toy_vision.picture(found.parent, "outside.png", 9, 9)
    (found / "link.png").symlink_to(found.parent / "outside.png")
    os.mkfifo(found / "pipe.png")
    (found / "empty.png").touch()
    (found / "drawing.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (found / "page.jpg").write_text("<!doctype html><html>Not found</html>")
    return found


@pytest.fixture(scope="module")
def rules(folder):
    return EncodingRules(1000, media=MediaRules(str(folder), str(folder)))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HuggingFaceTokenizer(str(folder))


@pytest.fixture(scope="module")
def encode(tokenizer, rules):
    encoder = RecordEncoder(tokenizer, rules)
    return lambda record: encoder([("file:3", record)])


def refuses(call, *words):
    with refused(*words):
        call()


def chat(*parts, **keys):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **keys}


def image(value, key="image"):
    return {"type": "image", key: value}


TEXT = {"type": "text", "text": "What color?"}


def png(folder):
    return (folder / "a.png").read_bytes()


def spellings(folder):
    data = f"data:image/png;base64,{base64.b64encode(png(folder)).decode()}"
    turns = [{"from": "human", "value": "<image>What color?"}, {"from": "gpt", "value": "Blue."}]
    nulls = {"type": "text", "text": "What color?", "image": None}
    return {
        "path": chat(image("a.png"), TEXT),
        "under path": chat(image("a.png", "path"), TEXT),
        "file url": chat(image(f"file://{folder}/a.png", "url"), TEXT),
        "bytes": chat(image({"bytes": png(folder), "path": None}), TEXT),
        "openai": chat({"type": "image_url", "image_url": {"url": data}}, TEXT),
        "openai string": chat({"type": "image_url", "image_url": data}, TEXT),
        "table": chat({"type": "image", "text": None, "image": "a.png"}, nulls),
        "bare part": chat({"type": "image"}, TEXT, images=["a.png"]),
        "mark": {
            "messages": [{"role": "user", "content": "<image>What color?"}, ANSWER],
            "images": ["a.png"],
        },
        "llava": {"conversations": turns, "image": "a.png"},
        "llava list": {"conversations": turns, "images": [{"bytes": png(folder)}]},
    }


def test_every_way_to_write_an_image_gives_the_same_sample(folder, encode):
    samples = {name: encode(record).samples[0] for name, record in spellings(folder).items()}
    first = samples["path"]
    for name, sample in samples.items():
        assert sample.tokens.tolist() == first.tokens.tolist(), name
        assert sample.trained.tolist() == first.trained.tolist(), name
        assert sample.images[0][1:] == (12, 20, "file:3"), name
        assert np.array_equal(
            np.asarray(decode(sample.images[0])), np.asarray(decode(first.images[0]))
        ), name


def test_a_pil_image_is_read(folder, encode):
    from PIL import Image

    with Image.open(folder / "a.png") as opened:
        sample = encode(chat(image(opened), TEXT)).samples[0]
    assert sample.tokens.tolist() == encode(chat(image("a.png"), TEXT)).samples[0].tokens.tolist()


def test_a_turned_photograph_has_the_size_that_people_see(folder, encode):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (24, 8)).save(folder / "turned.jpg", exif=exif)
    sample = encode(chat(image("turned.jpg"), TEXT)).samples[0]
    assert sample.images[0][1:3] == (24, 8)
    assert decode(sample.images[0]).size == (8, 24)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "turned"])
def test_transparent_pixels_are_white_as_in_transformers(folder, rules, tokenizer, tmp_path, mode):
    from PIL import Image
    from transformers import AutoImageProcessor

    generator = np.random.default_rng(0)
    colors = generator.integers(0, 256, (24, 36, 4), dtype=np.uint8)
    colors[:8, :, 3] = 0  # colors that nobody sees
    picture = Image.fromarray(colors, "RGBA")
    path, options = tmp_path / "a.png", {}
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    elif mode == "P":
        picture = picture.convert("RGB").quantize(16)
        options["transparency"] = 3
    else:
        picture = picture.convert(mode)
    picture.save(path, **options)
    with Image.open(path) as given:
        turned = ImageOps.exif_transpose(given)
        expected = AutoImageProcessor.from_pretrained(folder)(turned, return_tensors="pt")
    media = RecordEncoder(tokenizer, rules).media
    (reference,) = media.references([("image", path.read_bytes())], "file:3")
    pixels = media.pixels([reference])["pixel_values"]
    assert pixels.equal(expected["pixel_values"])


def test_images_are_never_targets_and_are_counted(tokenizer, rules):
    found = RecordEncoder(tokenizer, replace(rules, train_on="everything"))(
        [("x", chat(image("a.png"), TEXT))]
    )
    sample = found.samples[0]
    token = tokenizer.hf.convert_tokens_to_ids("<|image_pad|>")
    assert not sample.trained[sample.tokens == token].any()
    assert sample.trained[sample.tokens != token][1:].all()
    assert (found.report.images, found.report.image_tokens) == (
        1,
        int((sample.tokens == token).sum()),
    )


def test_images_of_split_turns_are_those_of_earlier_messages(tokenizer, rules):
    record = {
        "messages": [
            {"role": "user", "content": [image("a.png"), TEXT]},
            ANSWER,
            {"role": "user", "content": [image("b.png")]},
            ANSWER,
        ]
    }
    found = RecordEncoder(tokenizer, replace(rules, split_turns=True))([("x", record)])
    assert [len(sample.images) for sample in found.samples] == [1, 2]


def test_samples_with_images_are_kept_on_disk(folder, tokenizer, rules, tmp_path):
    records = [chat(image("a.png"), TEXT), chat(TEXT), chat(image("b.png"), image("a.png"), TEXT)]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    in_memory = prepare(FileSource(path), RecordEncoder(tokenizer, rules))
    for _ in range(2):  # made, then loaded
        kept = prepare(FileSource(path), RecordEncoder(tokenizer, rules), tmp_path / "kept")
        assert kept.report == in_memory.report
        for ours, theirs in zip(kept.samples, in_memory.samples, strict=True):
            assert ours.images == theirs.images
            assert ours.tokens.tolist() == theirs.tokens.tolist()
    smaller = replace(rules, media=replace(rules.media, max_pixels=64))
    prepare(FileSource(path), RecordEncoder(tokenizer, smaller), tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_max_pixels_makes_images_smaller(folder, tokenizer, rules):
    small = replace(rules, media=replace(rules.media, max_pixels=64))
    lengths = [
        len(RecordEncoder(tokenizer, each)([("x", chat(image("a.png"), TEXT))]).samples[0].tokens)
        for each in (rules, small)
    ]
    assert lengths[0] - lengths[1] == 3  # 2 x 2 tokens become one


MISTAKES = {
    "missing": (chat(image("c.png"), TEXT), ("c.png", "media_root")),
    "truncated header": (chat(image("text.png"), TEXT), ("text.png", "cannot be read")),
    "outside": (chat(image("../outside.png"), TEXT), ("../outside.png", "dataset.media_root")),
    "absolute outside": (
        chat(image("/etc/hostname"), TEXT),
        ("/etc/hostname", "dataset.media_root"),
    ),
    "network": (
        chat(image("https://example.com/a.png", "url"), TEXT),
        ("https://example.com/a.png", "download"),
    ),
    "a folder": (chat(image("."), TEXT), ("media_root",)),
    "a number": (chat(image(3), TEXT), ("int",)),
    "an empty object": (chat(image({}), TEXT), ("bytes",)),
    "null byte": (chat(image("a\0.png"), TEXT), ("path",)),
    "damaged base64": (chat(image("data:image/png;base64,@@@")), ("base64",)),
    "no base64": (chat(image("data:image/svg+xml,<svg/>")), ("base64",)),
    "bytes of text": (chat(image({"bytes": b"no image"})), ("cannot be read",)),
    "more marks than images": (
        {"messages": [{"role": "user", "content": "<image><image>?"}, ANSWER], "images": ["a.png"]},
        ("<image>", "one image for each"),
    ),
    "more images than marks": (
        {
            "messages": [{"role": "user", "content": "<image>?"}, ANSWER],
            "images": ["a.png", "b.png"],
        },
        ("2 images", "<image>"),
    ),
    "images without marks": (
        {"messages": [{"role": "user", "content": "?"}, ANSWER], "images": ["a.png"]},
        ("1 images", "<image>"),
    ),
    "a bare part without images": (chat({"type": "image"}, TEXT), ("one image for each",)),
    "both keys": (chat(TEXT, image="a.png", images=["a.png"]), ("both image and images",)),
    "a video without its package": (chat({"type": "video", "video": "a.png"}), ("PyAV", "vlm")),
    "frames without their package": (
        chat({"type": "video", "video": ["a.png", "a.png"], "fps": 1}),
        ("torchvision", "vlm"),
    ),
    "a missing video": (chat({"type": "video", "video": "c.mp4"}), ("c.mp4", "media_root")),
    "a video without a place": (chat(TEXT, videos=["a.mp4"]), ("1 videos", "<video>")),
    "frames without a rate": (chat({"type": "video", "video": ["a.png", "a.png"]}), ("fps=None",)),
    "frames at a text rate": (
        chat({"type": "video", "video": ["a.png"], "fps": "2"}),
        ("fps='2'",),
    ),
    "no frames": (chat({"type": "video", "video": [], "fps": 2}), ("frames", "[]")),
    "frames of two sizes": (
        chat({"type": "video", "video": ["a.png", "b.png"], "fps": 1}),
        ("(9, 30)", "(20, 12)"),
    ),
    "a file with a rate": (
        chat({"type": "video", "video": "a.mp4", "fps": 2}),
        ("fps=2", "dataset.fps"),
    ),
    "audio key": (chat(TEXT, audios=["a.wav"]), ("1 audios", "<audio>")),
    "two images in a part": (chat(image(["a.png", "b.png"]), TEXT), ("list",)),
    "two sources": (
        chat({"type": "image", "image": "a.png", "url": "b.png"}, TEXT),
        ("several of", "keep one"),
    ),
    "no source": (chat({"type": "image_url", "image_url": {"detail": "low"}}, TEXT), ("detail",)),
    "null with a mark": (
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": [None]},
        ("NoneType",),
    ),
    "nested lists": (
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": [["a.png"]]},
        ("list",),
    ),
    "an empty path": (chat(image(""), TEXT), ("path",)),
    "a path of another system": (
        chat(image("C:\\pictures\\a.png"), TEXT),
        ("C:\\pictures\\a.png", "media_root"),
    ),
    "a home path": (chat(image("~/a.png"), TEXT), ("~/a.png", "media_root")),
    "other capitals": (chat(image("A.PNG"), TEXT), ("A.PNG", "media_root")),
    "a link outside": (chat(image("link.png"), TEXT), ("link.png", "dataset.media_root")),
    "a pipe": (chat(image("pipe.png"), TEXT), ("pipe.png", "media_root")),
    "an empty file": (chat(image("empty.png"), TEXT), ("empty.png", "cannot be read")),
    "a drawing": (chat(image("drawing.svg"), TEXT), ("drawing.svg", "cannot be read")),
    "a page instead of a photograph": (
        chat(image("page.jpg"), TEXT),
        ("page.jpg", "cannot be read"),
    ),
    "an image of a tool": (
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "tool", "content": [image("a.png")]},
                ANSWER,
            ]
        },
        ("role=tool", "user"),
    ),
    "a misspelt type": (chat({"type": "imgae", "image": "a.png"}, TEXT), ("imgae", "remove")),
    "text without text": (chat(image("a.png"), {"type": "text", "content": "What?"}), ("text",)),
    "audio": (chat({"type": "input_audio", "input_audio": {}}), ("audio", "remove")),
    "an unknown part": (chat({"type": "file", "file": {}}), ("file", "remove")),
    "a part that is a string": (chat("What?"), ("str",)),
    "an image of the assistant": (
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": [image("a.png")]},
            ]
        },
        ("role=assistant", "user"),
    ),
    "the placeholder as text": (
        chat(image("a.png"), {"type": "text", "text": "<|image_pad|>"}),
        ("2 placeholders", "1 images"),
    ),
    "the placeholder without images": (
        chat({"type": "text", "text": "<|image_pad|>"}),
        ("1 placeholders",),
    ),
    "plain text with images": (
        {"prompt": "?", "completion": "!", "images": ["a.png"]},
        ("images", "messages"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_their_record(name, encode):
    record, words = MISTAKES[name]
    refuses(lambda: encode(record), "file:3", *words)


def test_extreme_sizes_are_named(folder, encode):
    from PIL import Image

    Image.new("RGB", (2000, 2)).save(folder / "line.png")
    refuses(lambda: encode(chat(image("line.png"), TEXT)), "file:3", "line.png", "2000x2")
    Image.new("1", (20_000, 6_000)).save(folder / "huge.png")
    refuses(lambda: encode(chat(image("huge.png"), TEXT)), "file:3", "huge.png", "100,000,000")


def test_the_limits_of_one_reader_are_not_those_of_the_process(folder, encode, monkeypatch):
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    encode(chat(image("a.png"), TEXT))
    assert limit == Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    refuses(lambda: encode(chat(image("a.png"), TEXT)), "file:3", "a.png", "pixels", "smaller")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "a/" * 3000])
def test_a_path_that_no_file_has_is_named_in_a_short_sentence(encode, name):
    with pytest.raises(UserError, match=r"file:3: the image path 'a.* cannot be used") as caught:
        encode(chat(image(name), TEXT))
    assert len(str(caught.value)) < 400


def test_an_image_in_memory_is_shown_without_its_address(encode):
    raw = {"bytes": b"no image", "path": None}
    with pytest.raises(UserError) as caught:
        encode(chat({"type": "image", "image": raw}, TEXT))
    assert "cannot identify image file)" in str(caught.value)
    assert " at 0x" not in str(caught.value)


def test_formats_are_those_that_no_program_has_to_read(folder, encode):
    """PIL hands PostScript to Ghostscript."""
    from PIL import Image

    Image.init()
    assert "EPS" in Image.OPEN
    toy_vision.picture(folder, "whole.png", 16, 16)
    Image.open(folder / "whole.png").save(folder / "script.eps")
    refuses(
        lambda: encode(chat(image("script.eps"), TEXT)), "file:3", "script.eps", "cannot identify"
    )
    for name in ("photograph.jpg", "web.webp", "old.bmp", "moving.gif", "scan.tiff"):
        Image.open(folder / "whole.png").save(folder / name)
        encode(chat(image(name), TEXT))


def test_damaged_pixels_are_named_when_they_are_decoded(folder, encode):
    sample = encode(chat(image("broken.png"), TEXT)).samples[0]
    refuses(lambda: decode(sample.images[0]), "file:3", "broken.png")


def test_an_image_that_changed_since_is_named(folder, encode):
    toy_vision.picture(folder, "changing.png", 16, 16)
    sample = encode(chat(image("changing.png"), TEXT)).samples[0]
    toy_vision.picture(folder, "changing.png", 24, 16)
    refuses(lambda: decode(sample.images[0]), "file:3", "24x16", "16x16")


def test_a_sample_with_images_is_never_cut(tokenizer, rules):
    record = chat(image("a.png"), TEXT)
    cut = RecordEncoder(tokenizer, replace(rules, max_tokens=20, truncation="right"))
    refuses(lambda: cut([("file:3", record)]), "file:3", "dataset.truncation", "dataset.max_pixels")
    dropped = RecordEncoder(tokenizer, replace(rules, max_tokens=20, truncation="drop"))(
        [("x", record)]
    )
    assert dropped.report.dropped[TOO_LONG] == 1


def test_a_limit_of_image_tokens_refuses_or_drops_samples(tokenizer, rules):
    record = chat(image("a.png"), image("b.png"), TEXT)
    tokens = RecordEncoder(tokenizer, rules)([("x", record)]).report.image_tokens
    kept = RecordEncoder(
        tokenizer, replace(rules, media=replace(rules.media, max_image_tokens=tokens))
    )([("x", record)])
    assert kept.report.samples == 1
    less = replace(rules, media=replace(rules.media, max_image_tokens=tokens - 1))
    refusing = RecordEncoder(tokenizer, replace(less, truncation="right"))
    refuses(
        lambda: refusing([("file:3", record)]),
        "file:3",
        f"dataset.max_image_tokens={tokens - 1}",
        str(tokens),
    )
    dropping = RecordEncoder(tokenizer, replace(less, truncation="drop"))
    assert dropping([("file:3", record)]).report.dropped == {TOO_MANY_IMAGES: 1}


def test_a_model_without_images_refuses_them(tokenizer):
    encoder = RecordEncoder(tokenizer, EncodingRules(1000))
    refuses(
        lambda: encoder([("file:3", chat(image("a.png"), TEXT))]),
        "file:3",
        "dataset.hf_processor_path",
    )


def test_a_mark_without_images_is_counted(encode):
    assert encode(chat({"type": "text", "text": "<image> What color?"})).report.notes[NO_IMAGE] == 1


def test_limits_that_do_not_exist_are_refused(tmp_path):
    folder = toy_vision.save("llava", tmp_path)
    rules = EncodingRules(1000, media=MediaRules(str(folder), str(folder), max_pixels=64))
    refuses(
        lambda: RecordEncoder(HuggingFaceTokenizer(str(folder)), rules), "dataset.max_pixels=64"
    )


def test_folders_without_a_processor_are_refused(tmp_path, tokenizer):
    for path in (tmp_path, tmp_path / "missing"):
        rules = EncodingRules(1000, media=MediaRules(str(path), "."))
        refuses(lambda: RecordEncoder(tokenizer, rules), "dataset.hf_processor_path", str(path))  # noqa: B023


@pytest.fixture
def server(folder):
    """A web server on the loopback interface with the pictures; how often each was asked for."""
    asked = Counter()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self):
            asked[self.path] += 1
            super().do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}", asked
        found.shutdown()


def test_an_address_is_downloaded_once_where_that_is_allowed(tokenizer, rules, encode, server):
    address, asked = server
    allowed = RecordEncoder(tokenizer, replace(rules, media=replace(rules.media, fetches=True)))
    record = chat({"type": "image_url", "image_url": {"url": f"{address}/a.png"}}, TEXT)
    found = [allowed([("file:3", record)]).samples[0] for _ in range(2)]
    assert asked == {"/a.png": 1}
    assert found[0].tokens.tolist() == encode(chat(image("a.png"), TEXT)).samples[0].tokens.tolist()
    for path, words in (("/missing.png", ("404",)), ("/page.jpg", ("cannot be read",))):
        wrong = chat(image(f"{address}{path}", "url"), TEXT)
        refuses(lambda record=wrong: allowed([("file:3", record)]), "file:3", *words)
    refuses(lambda: encode(record), "file:3", "dataset.fetch_urls")
