# SPDX-License-Identifier: Apache-2.0
"""Datasets with images under their public names, and the preview of images."""

import json

import numpy as np
import pytest

from megatron.bridge.data.config import (
    FinetuningDatasetConfig,
    HFDatasetConversationProvider,
    MockVLMConversationProvider,
    PackedSequenceSpecs,
    PreloadedVLMConversationProvider,
)
from megatron.bridge.data.dataset_config import DatasetRequest
from megatron.bridge.data.finetuning.builder import build_finetuning_datasets
from megatron.bridge.data.loaders import build_iterators, collate
from megatron.bridge.data.media import processing, references
from megatron.bridge.data.media.positions import mrope_positions
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.preview.render import summary, to_html
from megatron.bridge.data.records.formats import parse
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.data.vlm_datasets.providers import MAKERS
from megatron.bridge.models.vision import media
from tests import vision_run
from tests.refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_run.write("qwen2_vl", tmp_path_factory.mktemp("qwen"), weights=False)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HuggingFaceTokenizer(str(folder))


def batch(dataset, tokenizer, size=2, **request):
    """The first rows of the training data as a batch."""
    rows = build_finetuning_datasets(
        dataset, DatasetRequest((size, 0, 0), tokenizer, **request)
    ).train
    return collate([(index, rows[index]) for index in range(size)])[1]


def finetuning(folder, **changes):
    values = {
        "dataset_root": str(folder / "data"),
        "seq_length": 128,
        "hf_processor_path": str(folder),
    }
    return FinetuningDatasetConfig(**values | changes)


def test_batches_have_pixels_and_positions_of_three_axes(folder, tokenizer):
    found = batch(finetuning(folder), tokenizer, size=8)
    assert found["position_ids"].shape == (3, 8, 128)
    grids = found["media"]["image_grid_thw"]
    assert len(found["media"]["pixel_values"]) == grids.prod(-1).sum()
    token = tokenizer.hf.convert_tokens_to_ids("<|image_pad|>")
    assert (found["tokens"] == token).sum() == grids.prod(-1).sum() // 4
    starts = iter(grids.tolist())
    for row, tokens in enumerate(found["tokens"].numpy()):
        types = (tokens == token).astype(int)
        images = np.flatnonzero(
            np.diff(types, prepend=0) == 1
        )  # an end token lies between two images
        expected = mrope_positions(types, [next(starts) for _ in images], merge=2)
        assert found["position_ids"][:, row].numpy().tolist() == expected.tolist()


def test_packed_rows_restart_positions_at_each_sample(folder, tokenizer):
    specs = PackedSequenceSpecs(packed_sequence_size=128)
    found = batch(finetuning(folder, packed_sequence_specs=specs), tokenizer)
    assert found["position_ids"].shape == (3, 1, 256)
    for start in found["cu_seqlens"][:-1].tolist():
        assert found["position_ids"][:, 0, start].tolist() == [0, 0, 0]


def test_packed_rows_have_no_more_images_than_fit(folder, tokenizer):
    specs = PackedSequenceSpecs(packed_sequence_size=128)
    token = tokenizer.hf.convert_tokens_to_ids("<|image_pad|>")

    def most(limit):
        dataset = finetuning(folder, packed_sequence_specs=specs, max_image_tokens=limit)
        rows = build_finetuning_datasets(dataset, DatasetRequest((4, 0, 0), tokenizer)).train.rows
        return len(rows), max(
            int((rows[index]["tokens"] == token).sum()) for index in range(len(rows))
        )

    (few, free), (many, limited) = most(None), most(16)
    assert limited <= 16 < free
    assert many > few


def test_later_stages_get_no_pixels(folder, tokenizer):
    found = batch(finetuning(folder), tokenizer, image_share=None)
    assert "media" not in found
    assert found["position_ids"].dim() == 3


def test_ranks_decode_the_patches_of_their_own_images(folder, tokenizer):
    whole = batch(finetuning(folder), tokenizer, size=8)["media"]
    shares = [
        batch(finetuning(folder), tokenizer, size=8, image_share=(rank, 3))["media"]
        for rank in range(3)
    ]
    assert all(share["image_grid_thw"].equal(whole["image_grid_thw"]) for share in shares)
    costs = media.costs(whole)
    owners = media.share_out(costs, 3)
    for rank, share in enumerate(shares):
        own = [place for place, owner in enumerate(owners) if owner == rank]
        assert 0 < len(own) < len(costs)
        for found in (media.select(share, own), media.select(whole, own)):
            assert found["pixel_values"].equal(share["pixel_values"])
            assert found["image_grid_thw"].equal(whole["image_grid_thw"][own])


@pytest.mark.parametrize("name", ["mistral3", "llava_next", "internvl", "smolvlm"])
def test_ranks_decode_their_own_images_and_tiles(name, tmp_path, monkeypatch):
    folder, decoded = vision_run.write(name, tmp_path, weights=False), []
    monkeypatch.setattr(
        processing, "decode", lambda image: decoded.append(image) or references.decode(image)
    )
    tokenizer = HuggingFaceTokenizer(str(folder))
    dataset = finetuning(folder, seq_length=512)
    whole = batch(dataset, tokenizer, size=8)["media"]
    costs, total = media.costs(whole), len(decoded)
    owners = media.share_out(costs, 4)
    for rank in range(4):
        decoded.clear()
        share = batch(dataset, tokenizer, size=8, image_share=(rank, 4))["media"]
        assert 0 < len(decoded) < total
        assert media.costs(share) == costs
        assert media.can_share(share)
        own = [place for place, owner in enumerate(owners) if owner == rank]
        expected = media.select(whole, own)
        assert share.keys() == whole.keys()
        assert all(value.equal(expected[key]) for key, value in media.select(share, own).items())


def test_workers_decode_the_same_pixels(folder, tokenizer):
    def first(workers):
        dataset = finetuning(folder, num_workers=workers)
        return next(build_iterators(dataset, tokenizer, (4, 0, 0), 2, 2).train)

    alone, helped = first(0), first(1)
    assert alone["tokens"].equal(helped["tokens"])
    assert alone["media"]["pixel_values"].equal(helped["media"]["pixel_values"])


def test_mock_pictures_show_the_color_that_their_answers_name(folder, tokenizer):
    dataset = MockVLMConversationProvider(
        seq_length=128,
        hf_processor_path=str(folder),
        image_size=(24, 16),
        num_images=2,
        num_samples=3,
    )
    records = [record for _, record in dataset.source("train").records()]
    assert records == [record for _, record in dataset.source("train").records()]
    assert records != [record for _, record in dataset.source("valid").records()]
    found = batch(dataset, tokenizer, size=3)
    assert len(found["media"]["image_grid_thw"]) == 6
    text = records[0]["messages"][1]["content"]
    rows = found["media"]["pixel_values"].view(6, -1, 3, 2 * 16).mean((1, 3))  # patches of 3 colors
    order = build_finetuning_datasets(dataset, DatasetRequest((3, 0, 0), tokenizer)).train
    place = [order._row(0, index) for index in range(3)].index(0)
    assert text == ", ".join(
        ("red", "green", "blue")[row.argmax()] for row in rows[2 * place : 2 * place + 2]
    )


def test_llava_json_is_read_from_a_list(folder, tokenizer, tmp_path):
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A picture."}]
    path = tmp_path / "llava.json"
    path.write_text(
        json.dumps([{"id": "1", "image": "0.png", "conversations": turns}] * 2, indent=1)
    )
    dataset = PreloadedVLMConversationProvider(
        seq_length=128,
        train_data_path=str(path),
        image_folder=str(folder / "data"),
        hf_processor_path=str(folder),
    )
    assert len(batch(dataset, tokenizer)["media"]["image_grid_thw"]) == 2
    with refused("dataset.valid_data_path", "do_validation"):
        dataset.source("valid")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", ("record 1", "int")),
        ('[{"a": 1]', ("not valid JSON",)),
        ('[{"a": 1}', ("not valid JSON",)),
    ],
)
def test_damaged_lists_are_named(tmp_path, content, words):
    path = tmp_path / "list.json"
    path.write_text(content)
    dataset = PreloadedVLMConversationProvider(seq_length=8, train_data_path=str(path))
    with refused(str(path), *words):
        list(dataset.source("train").records())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_data_path": "missing.json"}, ("dataset.train_data_path=missing.json",)),
        ({"image_folder": "missing"}, ("dataset.image_folder=missing",)),
    ],
)
def test_missing_files_are_named_before_a_run(tmp_path, changes, words):
    path = tmp_path / "list.json"
    path.write_text("[]")
    dataset = PreloadedVLMConversationProvider(
        **{"seq_length": 8, "train_data_path": str(path)} | changes
    )
    with refused(*words):
        dataset.check_sources()


ROWS = {
    "rdr": {"image": "0.png", "text": "A chair."},
    "medpix": {"image_id": "0.png", "question": "What?", "answer": "A bone."},
    "cord_v2": {
        "image": "0.png",
        "ground_truth": json.dumps({"gt_parse": {"total": [{"price": 3}]}}),
    },
    "raven": {"images": ["0.png", "1.png"], "texts": [{"user": "Next?", "assistant": "B"}]},
    "llava_video_178k": {
        "video": "NextQA/1.mp4",
        "conversations": [
            {"from": "human", "value": "<image>\nWho runs?"},
            {"from": "gpt", "value": "A dog."},
        ],
    },
}
ANSWERS = {
    "rdr": "A chair.",
    "medpix": "A bone.",
    "cord_v2": "<s_total><s_price>3</s_price></s_total>",
    "raven": "B",
    "llava_video_178k": "A dog.",
}


def test_every_maker_has_a_row_here():
    assert ROWS.keys() == MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_makers_read_rows_of_their_dataset(name):
    parsed = parse(MAKERS[name].record(ROWS[name]), "here")
    assert [message["role"] for message in parsed.messages] == ["user", "assistant"]
    videos = [("video", ROWS[name]["video"])] if "video" in ROWS[name] else []
    images = [("image", image) for image in ROWS[name].get("images", ["0.png"])]
    assert [(item.kind, item.raw) for item in parsed.images] == (videos or images)
    assert "<" not in parsed.messages[0]["content"][-1]["text"]
    assert parsed.messages[1]["content"] == [{"type": "text", "text": ANSWERS[name]}]


def test_a_maker_reads_a_local_copy(folder, tokenizer, tmp_path):
    import datasets

    picture = {"bytes": (folder / "data/0.png").read_bytes(), "path": None}
    table = datasets.Dataset.from_list(
        [{"image": picture, "text": "A chair."}] * 2,
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )
    table.save_to_disk(tmp_path / "rdr")
    dataset = HFDatasetConversationProvider(
        seq_length=128,
        maker_name="make_rdr_dataset",
        dataset_name=str(tmp_path / "rdr"),
        hf_processor_path=str(folder),
    )
    assert len(batch(dataset, tokenizer)["media"]["image_grid_thw"]) == 2


def test_unknown_makers_are_named():
    dataset = HFDatasetConversationProvider(seq_length=8, maker_name="rdrr")
    with refused("dataset.maker_name=rdrr", "rdr"):
        dataset.check_sources()


def test_the_preview_shows_images(folder, tokenizer):
    dataset = finetuning(folder)
    data = build_iterators(dataset, tokenizer, (8, 0, 0), 2, 4)
    found = preview(dataset, data, tokenizer, (2, 4, 2))
    assert "images by Qwen2VLImageProcessorPil, 64 to 768 pixels" in list(summary(found.splits[0]))
    assert [batch.images for batch in found.first_batches] == [8, 10]
    shown = [part for sample in found.splits[0].samples for part in sample if part.image]
    assert [part.text for part in shown] == [
        "[image 20x12 -> 4 tokens]",
        "[image 16x24 -> 6 tokens]",
        "[image 9x30 -> 4 tokens]",
    ]
    assert found.splits[0].report.images == 8
    page = to_html(found)
    assert page.count("<img") == 3
    assert "[image 20x12 -&gt; 4 tokens]" in page
