# SPDX-License-Identifier: Apache-2.0
"""WebDatasets through Megatron Energon: every record once, packed rows, broken records, and exact resume."""

import gc
import io
import json
import multiprocessing
import pathlib
import pickle
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.data.dataset_config import DatasetRequest
from megatron.bridge.data.energon import EnergonProvider
from megatron.bridge.data.finetuning.builder import build_finetuning_datasets
from megatron.bridge.data.loaders import build_iterators, collate
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.records.encoding import TOO_LONG
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from megatron.bridge.models.vision import media
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from tests import toy_vision
from tests.pages import blocks
from tests.refusals import refused
from tests.toy_run import SEQUENCE, VOCABULARY, run_toy
from tests.unit_tests.project.tree import ROOT

TOKENIZER = NullTokenizer(VOCABULARY)
SAMPLES = 40


BESIDE = ROOT / ".cache/energon"  # where scripts/extra.sh installs it
if find_spec("megatron.energon") is None and BESIDE.is_dir():
    sys.path.append(str(BESIDE))  # in the workers, too: they import this module

needs_energon = pytest.mark.skipif(
    find_spec("megatron.energon") is None,
    reason="megatron-energon is not installed: run scripts/extra.sh energon",
)


class Parts(dict):
    """The parts of a sample."""


def write(folder, records, shards=2, part="json"):
    """A WebDataset of ``records`` with its index: the shards for training, the last one for validation, too.

    A record is an object, bytes, or the parts of a sample by name.
    """
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    folder.mkdir()
    names = [f"shard_{number}.tar" for number in range(shards)]
    for name, place in zip(names, np.array_split(np.arange(len(records)), shards), strict=True):
        with tarfile.open(folder / name, "w") as file:
            for number in place.tolist():
                found = records[number]
                parts = found if isinstance(found, Parts) else {part: found}
                for ending, content in parts.items():
                    data = content if isinstance(content, bytes) else json.dumps(content).encode()
                    info = tarfile.TarInfo(f"{number:04}.{ending}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))
    splits = [("train", "shard_.*"), ("val", names[-1])]
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_patterns=splits, workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    return folder


def record(number):
    """A pair whose number can be read off its first token."""
    return {"prompt": f"{number} 1 ", "completion": " ".join("2" for _ in range(1 + number % 7))}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "wds", [record(number) for number in range(SAMPLES)])


def provider(folder, **values):
    return EnergonProvider(
        **{
            "path": str(folder),
            "seq_length": SEQUENCE,
            "shuffle_buffer_size": 4,
            "max_samples_per_sequence": 5,
        }
        | values
    )


def batches(config, rank=0, ranks=1, micro=2, whole=8, split="train"):
    return getattr(build_iterators(config, TOKENIZER, (80, 8, 0), micro, whole, rank, ranks), split)


def numbers(batch):
    return batch["tokens"][:, 0].tolist()


@needs_energon
def test_an_epoch_has_every_record_once_with_its_mask(folder):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = []
    train = batches(provider(folder, shuffle_buffer_size=1))
    for _ in range(SAMPLES // 2):
        batch = next(train)
        for row, mask in zip(batch["labels"], batch["loss_mask"], strict=True):
            count = int(mask.sum())
            assert row[mask.bool()].tolist() == [2] * (count - 1) + [VOCABULARY - 1]
        drawn += numbers(batch)
    assert sorted(drawn) == list(range(SAMPLES))
    assert drawn != sorted(drawn), "shards are read in an order of their own"
    assert torch.equal(before, torch.get_rng_state()), "the run's random numbers are its own"
    assert (train.report.records, train.report.samples) == (SAMPLES, SAMPLES)
    held_out = batches(provider(folder), split="valid")
    assert [numbers(next(held_out)) for _ in range(2)] == [[20, 21], [22, 23]]
    assert numbers(next(held_out.replicate())) == [20, 21]


@needs_energon
@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_is_exact_under_another_number_of_ranks(folder, workers):
    config = provider(folder, readers=2, num_workers=workers)
    each = [batches(config, rank, 2) for rank in range(2)]
    for _ in range(3):
        for mine in each:
            next(mine)
            next(mine)
    states = [mine.state_dict() for mine in each]
    merged = states[0] | {"readers": states[0]["readers"] | states[1]["readers"]}
    expected = {}
    for _ in range(2):
        for mine in each:
            batch = next(mine)
            expected |= dict(zip(mine.sample_ids, numbers(batch), strict=True))
    alone = batches(config)
    alone.load_state_dict(merged)
    found = {}
    for _ in range(4):
        batch = next(alone)
        found |= dict(zip(alone.sample_ids, numbers(batch), strict=True))
    assert found == expected


@needs_energon
@pytest.mark.parametrize("collected", [False, True])
def test_workers_end_by_themselves_when_their_reader_is_let_go_of(folder, collected):
    """Not killed after the 5 s that torch waits for them."""
    others = multiprocessing.active_children()
    train = batches(provider(folder, num_workers=1))
    next(train)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    if collected:
        train.itself = train  # like a run whose parts know each other
    del train
    gc.collect()
    worker.join(30)
    assert worker.exitcode == 0


@needs_energon
def test_packed_rows_hold_every_token_once_and_resume(folder):
    specs = PackedSequenceSpecs(packed_sequence_size=SEQUENCE)
    config = provider(folder, packed_sequence_specs=specs, packing_buffer_size=10)
    train = batches(config, micro=1)
    found = []
    while len(found) < 10:  # the first buffer
        row = next(train)
        bounds = row["cu_seqlens"].tolist()
        assert bounds[-1] == SEQUENCE
        assert row["position_ids"][0, bounds[:-1]].tolist() == [0] * (len(bounds) - 1)
        for start, stop in pairwise(bounds):
            if trained := int(row["loss_mask"][0, start:stop].sum()):
                number = int(row["tokens"][0, start])
                assert trained == 2 + number % 7, "the completion and its end"
                found.append(number)
    assert len(set(found)) == 10
    state = train.state_dict()
    expected = [next(train)["tokens"] for _ in range(8)]
    again = batches(config, micro=1)
    again.load_state_dict(state)
    assert all(torch.equal(next(again)["tokens"], tokens) for tokens in expected)


@needs_energon
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_is_one_sentence(tmp_path, workers):
    records = [record(number) for number in range(8)]
    records[3] = {"promt": "1", "completion": "2"}
    config = provider(write(tmp_path / "wds", records), num_workers=workers)
    train = batches(config)
    with refused("shard_0.tar: 0003: ", "messages", "completion, promt"):
        list(islice(train, 8))
    with refused("dataset.path=", "valid"):
        next(batches(provider(tmp_path / "wds", validation_split="valid"), split="valid"))


@needs_energon
def test_a_reader_without_a_sample_is_named(tmp_path):
    config = provider(write(tmp_path / "wds", [record(number) for number in range(8)]), readers=8)
    with refused(str(tmp_path), "dataset.readers", "more data"):
        next(batches(config, split="valid", whole=8, micro=8))


@needs_energon
def test_text_and_samples_that_are_dropped(tmp_path):
    texts = [b"1 2 3", b"4 " * 100, b"5 6"]
    config = provider(write(tmp_path / "wds", texts, shards=1, part="txt"), truncation="drop")
    train = batches(config, whole=2)
    drawn = [row for _ in range(3) for row in numbers(next(train))]
    assert set(drawn) == {1, 5}
    assert train.report.dropped[TOO_LONG] >= 1


@needs_energon
def test_lines_of_json_are_read_without_parts(tmp_path):
    from megatron.energon import CrudeJsonlDatasetFactory

    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record(number)) + "\n" for number in range(12)))
    CrudeJsonlDatasetFactory.prepare_dataset(path)
    train = batches(provider(path, validation_split=None, shuffle_buffer_size=1))
    assert sorted(number for _ in range(6) for number in numbers(next(train))) == list(range(12))
    with refused("dataset.validation_split='val'", "records.jsonl", "metadataset"):
        batches(provider(path))


@needs_energon
def test_the_blend_of_the_documentation_keeps_its_weights(tmp_path):
    for name, first in (("web", 0), ("chats", 50)):
        write(tmp_path / name, [record(first + number) for number in range(SAMPLES)])
    (shown,) = (block for block in blocks(ROOT / "docs" / "data.md") if "__module__" in block.text)
    blend = tmp_path / "blend.yaml"
    blend.write_text(shown.text)
    train = batches(provider(blend, shuffle_buffer_size=1))
    drawn = [number for _ in range(100) for number in numbers(next(train))]
    assert 0.65 < np.mean(np.array(drawn) < 50) < 0.85
    assert numbers(next(batches(provider(blend), split="valid"))) == [70, 71]


def train(folder, save, iterations, layout=None, exit_interval=None):
    """Losses of a run on the WebDataset."""
    return run_toy(
        {
            "model": layout or {},
            "train": {
                "train_iters": iterations,
                "micro_batch_size": 1,
                "exit_interval": exit_interval,
            },
            "dataset": provider(folder, readers=4),
            "checkpoint": CheckpointConfig(save=str(save), save_interval=2),
            "validation": ValidationConfig(eval_interval=3, eval_iters=1),
        }
    ).losses


@needs_energon
def test_a_run_resumes_exactly_and_under_other_layouts(four_workers, two_workers, folder, tmp_path):
    whole = two_workers.run(train, folder, tmp_path / "whole", 6)[0]
    assert two_workers.run(train, folder, tmp_path / "cut", 6, None, 4)[0] == whole[:4]
    for name in ("same", "tensor"):
        shutil.copytree(tmp_path / "cut", tmp_path / name)
    assert two_workers.run(train, folder, tmp_path / "same", 6)[0] == whole[4:], "bitwise"
    tensor = {"tensor_model_parallel_size": 2}
    assert two_workers.run(train, folder, tmp_path / "tensor", 6, tensor)[0] == pytest.approx(
        whole[4:], abs=1e-5
    )
    assert four_workers.run(train, folder, tmp_path / "cut", 6)[0] == pytest.approx(
        whole[4:], abs=1e-5
    )


def test_without_the_package_the_config_is_there_and_says_what_is_missing(tmp_path):
    code = (
        "import sys, importlib.abc\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('megatron.energon'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from megatron.bridge.data.energon import EnergonProvider\n"
        "assert 'torch' not in sys.modules\n"
        "EnergonProvider(path='x', seq_length=8).check_sources()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "dataset=EnergonProvider" in done.stderr
    assert "'hf-megatron-bridge[energon]'" in done.stderr


@needs_energon
def test_the_preview_shows_what_a_stream_begins_with(folder):
    config = provider(folder, readers=2)
    data = build_iterators(config, TOKENIZER, (80, 8, 0), 2, 8)
    found = preview(config, data, TOKENIZER, (2, 8, 2), samples=1)
    assert [(part.name, part.samples) for part in found.corpora] == [
        ("train", None),
        ("valid", None),
    ]
    first = [next(batches(config, rank, 2)) for rank in range(2)]
    assert [batch.trained for batch in found.first_batches] == [
        int(batch["loss_mask"].sum()) for batch in first
    ]
    assert found.texts[0][0].text.split()[0] == str(numbers(first[0])[0])
    assert numbers(next(data.train)) == numbers(next(data.train.replicate())), (
        "nothing was drawn from the run's own"
    )


def question(count):
    """A conversation with ``count`` images whose places are marked."""
    return {
        "messages": [
            {"role": "user", "content": "<image>" * count + "What color?"},
            {"role": "assistant", "content": f"{count}."},
        ]
    }


@needs_energon
@pytest.mark.parametrize("packed", [False, True])
def test_images_are_parts_of_samples(tmp_path, packed):
    """Parts of a sample are its images, in their order or as the record names them; pixels are those of files."""
    toy = toy_vision.save("qwen2_5_vl", tmp_path / "toy")
    names = [
        toy_vision.picture(toy, f"{place}.png", 16 + 8 * place, 16, place) for place in range(3)
    ]
    first, second, third = ((toy / name).read_bytes() for name in names)
    named = question(2) | {"images": ["b.png", "a.jpg"]}
    parts = [
        Parts({"json": question(2), "10.png": second, "9.png": first}),
        Parts({"json": named, "a.jpg": second, "b.png": first}),
        Parts({"json": question(1), "0.PNG": third}),
        Parts({"json": question(0)}),
    ]
    write(tmp_path / "wds", parts, shards=1)
    files = [names[:2], names[:2], names[2:], []]
    lines = [
        json.dumps(question(len(each)) | ({"images": each} if each else {})) + "\n"
        for each in files
    ]
    (toy / "training.jsonl").write_text("".join(lines))
    specs = PackedSequenceSpecs(packed_sequence_size=128, pad_seq_to_mult=1) if packed else None
    common = {"seq_length": 128, "hf_processor_path": str(toy), "packed_sequence_specs": specs}
    energon = EnergonProvider(
        path=str(tmp_path / "wds"),
        shuffle_buffer_size=1,
        packing_buffer_size=4 if packed else None,
        **common,
    )
    tokenizer = HuggingFaceTokenizer(str(toy))
    rows = build_finetuning_datasets(
        FinetuningDatasetConfig(dataset_root=str(toy), **common),
        DatasetRequest((4, 0, 0), tokenizer),
    ).train.rows
    count = len(rows)
    _, expected = collate([(place, rows[place]) for place in range(count)])
    found = next(build_iterators(energon, tokenizer, (count, 0, 0), count, count).train)
    for key in ("tokens", "labels", "loss_mask"):
        assert found[key].reshape(-1).sort().values.equal(expected[key].reshape(-1).sort().values)
    assert found["position_ids"].dim() == 3
    patches = [
        batch["media"]["pixel_values"].flatten().sort().values for batch in (found, expected)
    ]
    assert patches[0].equal(patches[1])
    later = build_iterators(energon, tokenizer, (count, 0, 0), count, count, image_share=None).train
    assert "media" not in next(later)

    def drawn(micro, **share):
        return next(
            build_iterators(energon, tokenizer, (count, 0, 0), micro, count, **share).train
        )["media"]

    whole = drawn(1)
    owners = media.share_out(media.costs(whole), 2)
    for rank in range(2):
        own = [place for place, owner in enumerate(owners) if owner == rank]
        assert 0 < len(own) < len(owners)
        mine = media.select(whole, own)["pixel_values"]
        assert drawn(1, image_share=(rank, 2))["pixel_values"].equal(mine)
        if count > 1:  # several readers decode the images of a microbatch
            together = drawn(count, image_share=(rank, 2))["pixel_values"]
            assert together.equal(found["media"]["pixel_values"])


@needs_energon
def test_a_pickled_part_is_not_executed(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (pathlib.Path.touch, (tmp_path / "executed",))

    hostile = Parts({"json": record(1), "pyd": pickle.dumps(Hostile())})
    folder = write(tmp_path / "wds", [hostile] * 8)
    assert len(next(batches(provider(folder)))["tokens"]) == 2
    assert not (tmp_path / "executed").exists()
