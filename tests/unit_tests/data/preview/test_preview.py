# SPDX-License-Identifier: Apache-2.0
"""The preview tells of a data set what can be counted by hand, and shows what is learnt."""

import io
import json
import os

import numpy as np
import pytest
from rich.console import Console

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import (
    FinetuningDatasetConfig,
    GPTDatasetConfig,
    MockGPTDatasetConfig,
    PackedSequenceSpecs,
    PreferenceDatasetConfig,
)
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.pretraining.mock_dataset import MockGPTDataset
from megatron.bridge.data.preview.collect import TextSegment, preview
from megatron.bridge.data.preview.render import _sample_text, to_console, to_html
from megatron.bridge.data.records.encoding import TOO_LONG
from megatron.bridge.data.tokenizer import NullTokenizer

RECORDS = [
    {"prompt": "a <b> ", "completion": "c"},
    {"prompt": "long " * 30, "completion": "d"},
    {"prompt": "e ", "completion": "f & g"},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "training.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in RECORDS)
    )
    return tmp_path


def look(folder, tokenizer, sizes=(1, 2, 2), **values):
    config = FinetuningDatasetConfig(
        seq_length=32,
        dataset_root=str(folder),
        truncation="drop",
        do_validation=False,
        do_test=False,
        **values,
    )
    data = build_iterators(config, tokenizer, (4, 4, 4), 1, 2)
    return preview(config, data, tokenizer, sizes)


def test_counts_and_pieces(folder, tokenizer):
    found = look(folder, tokenizer)
    (train,) = found.splits
    assert (train.report.records, train.report.samples, train.rows) == (3, 2, 2)
    assert train.report.dropped == {TOO_LONG: 1}
    lengths = sorted(
        len(tokenizer.tokenize(r["prompt"])) + len(tokenizer.continue_tokens(r["completion"])) + 1
        for r in (RECORDS[0], RECORDS[2])
    )
    assert (train.longest, train.mean) == (lengths[1], sum(lengths) / 2)
    assert train.fill == pytest.approx((sum(lengths) - 2) / 64)
    assert sum(count for _, count in train.histogram) == 2
    first = train.samples[0]
    assert [(segment.text, segment.trained) for segment in first] == [
        ("<s>a <b> ", False),
        ("c</s>", True),
    ]
    assert [(batch.rank, len(batch.samples)) for batch in found.first_batches] == [(0, 1), (1, 1)]
    assert sum(batch.trained for batch in found.first_batches) == train.report.trained


@pytest.mark.parametrize("labeled", [False, True])
def test_answers_are_shown_with_what_they_are(tmp_path, tokenizer, labeled):
    pairs = [{"prompt": f"{name} ", "chosen": "Yes.", "rejected": "No."} for name in ("a", "b")]
    answers = [
        {"prompt": f"{name} ", "completion": "Yes.", "label": name == "a"} for name in ("a", "b")
    ]
    records = answers if labeled else pairs
    (tmp_path / "training.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    config = PreferenceDatasetConfig(
        seq_length=64,
        dataset_root=str(tmp_path),
        labeled=labeled,
        do_validation=False,
        do_test=False,
    )
    found = preview(
        config, build_iterators(config, tokenizer, (2, 2, 2), 1, 2), tokenizer, (1, 2, 2)
    )
    (train,) = found.splits
    trained = [segment.text for sample in train.samples for segment in sample if segment.trained]
    if labeled:
        assert train.titles == ["sample 1, desirable", "sample 2, undesirable"]
        assert trained == ["Yes.</s>"] * 2
    else:
        assert train.titles == [
            "pair 1, chosen",
            "pair 1, rejected",
            "pair 2, chosen",
            "pair 2, rejected",
        ]
        assert trained == ["Yes.</s>", "No.</s>"] * 2
    assert all(title in to_html(found) for title in train.titles)


@pytest.fixture
def corpora(tmp_path):
    """Two corpora of 30 documents of 21 tokens and of 10 documents of 11 tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    for prefix, documents, length in zip(prefixes, (30, 10), (21, 11), strict=True):
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
        for number in range(documents):
            builder.add_document(np.full(length, number, np.uint16), [length])
        builder.finalize(prefix + ".idx")
    return prefixes


def test_a_look_starts_no_processes(tokenizer):
    """Of 16 ranks it would be 16 times as many as a rank of the run has."""
    drawn_by = []

    class Watched(MockGPTDataset):
        def __getitem__(self, index):
            drawn_by.append(os.getpid())
            return super().__getitem__(index)

    config = MockGPTDatasetConfig(seq_length=8, num_workers=2)
    data = build_iterators(config, tokenizer, (4, 0, 0), 1, 2)
    data.train.dataset = Watched(4, 8, tokenizer.vocab_size, 1234)
    preview(config, data, tokenizer, (1, 2, 2))
    assert drawn_by == [os.getpid()] * 2


def test_corpora_are_counted_with_what_is_drawn_from_each(corpora, tmp_path):
    tokenizer = NullTokenizer(1000)
    config = GPTDatasetConfig(
        seq_length=16,
        blend=(corpora, [3.0, 1.0]),
        split="90,10",
        path_to_cache=str(tmp_path / "cache"),
    )
    data = build_iterators(config, tokenizer, (80, 8, 0), 2, 8)
    found = preview(config, data, tokenizer, (2, 8, 2), samples=1)
    train, valid = found.corpora
    assert [(share.documents, share.tokens, share.samples) for share in train.shares] == [
        (27, 27 * 21, 60),
        (9, 9 * 11, 20),
    ]
    assert next(train.lines()) == "80 samples x 16 = 1,280 tokens"
    assert f"75.0% from {corpora[0]}: 1.69 epochs of its 27 documents, 567 tokens" in list(
        train.lines()
    )
    assert [share.documents for share in valid.shares] == [3, 1]
    assert [(batch.rank, batch.samples, batch.trained) for batch in found.first_batches] == [
        (0, [0, 1], 32),
        (1, [2, 3], 32),
    ]
    (text,) = found.texts
    first = next(data.train)
    assert text[1].text == tokenizer.detokenize(first["labels"][0].tolist())
    page = to_html(found)
    assert "1.69 epochs" in page
    assert json.loads(json.dumps(found.to_dict()))["corpora"][0]["shares"][1]["samples"] == 20


def test_data_without_corpora_is_counted(corpora, tmp_path, tokenizer):
    config = MockGPTDatasetConfig(seq_length=16)
    data = build_iterators(config, tokenizer, (1000, 8, 0), 1, 8)
    found = preview(config, data, tokenizer, (1, 8, 64))
    assert [(part.name, part.samples, part.shares) for part in found.corpora] == [
        ("train", 1000, []),
        ("valid", 8, []),
    ]
    assert len(found.first_batches) == 16, "a few ranks show what there is to see"
    terminal = Console(width=200, record=True, file=io.StringIO())
    to_console(terminal, found)
    assert "1,000 samples x 16 = 16,000 tokens" in terminal.export_text()


def test_packed_rows_are_counted_in_sequences(folder, tokenizer):
    specs = PackedSequenceSpecs(packed_sequence_size=32)
    found = look(folder, tokenizer, sizes=(1, 2, 2), packed_sequence_specs=specs)
    assert found.splits[0].rows == 1
    assert [batch.sequences for batch in found.first_batches] == [2, 2]
    assert json.loads(json.dumps(found.to_dict()))["splits"][0]["report"]["samples"] == 2


@pytest.mark.parametrize(("length", "shown"), [(None, "abcdefgh"), (8, "abcdefgh"), (4, "ab")])
def test_long_parts_are_shown_without_their_middle(length, shown):
    text = _sample_text([TextSegment("abcdefgh", 8, True)], length).plain
    assert text.startswith(f"\u27e6{shown}")
    assert ("[... 4 characters ...] gh\u27e7" in text) == (length == 4)
    assert "(8 of 8 tokens" in text


def test_outputs_mark_what_is_learnt(folder, tokenizer):
    found = look(folder, tokenizer)
    terminal = Console(width=200, record=True, force_terminal=True, quiet=False, file=io.StringIO())
    to_console(terminal, found)
    text = terminal.export_text()
    assert "a <b> \u27e6c</s>\u27e7" in text
    assert f"1 dropped {TOO_LONG}" in text
    page = to_html(found)
    assert "\u27e6c&lt;/s&gt;\u27e7</span>" in page
    assert "a &lt;b&gt;" in page


def test_the_command_shows_a_recipe_with_data(folder, tokenizer_dir, capsys):
    for name in ("validation", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")
    page = folder / "page.html"
    status = main(
        [
            *(
                "data",
                "preview",
                "smollm2_135m_finetune_config",
                "--data",
                str(folder),
                "--html",
                str(page),
            ),
            f"tokenizer.tokenizer_model={tokenizer_dir}",
            *(
                "dataset.truncation=drop",
                "dataset.seq_length=64",
                "train.global_batch_size=2",
                "train.micro_batch_size=1",
            ),
            *("--world-size", "2", "--samples", "1"),
        ]
    )
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "a <b> \u27e6c</s>\u27e7" in shown.out
    assert "data rank" in shown.out
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_takes_what_train_takes_under_any_layout(folder, tokenizer_dir, capsys):
    """The layout of a recipe for one GPU is changed to four ranks, of which the data needs none."""
    status = main(
        [
            *("data", "preview", "--recipe", "smollm2_135m_finetune_config", "--mode", "sft"),
            *("--seq_length", "64", "--data", str(folder)),
            f"tokenizer.tokenizer_model={tokenizer_dir}",
            *("dataset.truncation=drop", "validation.eval_iters=0", "dataset.do_test=false"),
            *("model.tensor_model_parallel_size=1", "model.pipeline_model_parallel_size=2"),
            *("model.context_parallel_size=2", "train.micro_batch_size=1"),
        ]
    )
    assert status == 0
    out = capsys.readouterr().out
    assert "a <b>" in out
    [batch] = [line.split() for line in out.splitlines() if line.split()[:1] == ["0"]]
    assert batch[3] == "64"  # tokens of a row


def test_the_command_prepares_what_a_run_finds(folder, tokenizer_dir, capsys):
    command = [
        *("data", "prepare", "smollm2_135m_finetune_config", "--data", str(folder)),
        f"tokenizer.tokenizer_model={tokenizer_dir}",
        *("dataset.truncation=drop", "validation.eval_iters=0"),
    ]
    assert main(command) == 1
    assert "dataset.prepared_dir is not set" in capsys.readouterr().err
    status = main([*command, f"dataset.prepared_dir={folder / 'prepared'}"])
    assert status == 0, capsys.readouterr().err
    (made,) = (folder / "prepared").iterdir()
    assert (made / "tokens.npy").is_file()
