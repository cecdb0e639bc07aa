# SPDX-License-Identifier: Apache-2.0
"""GPT datasets against the format's rules written out naively: order, split, blend, epochs, and bad corpora."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bridge.data.config import DatasetRequest, GPTDatasetConfig
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer
from tests.refusals import refused

SEQ = 16
VOCAB = 10_000
EOD = VOCAB - 1


def write_corpus(prefix, documents, first_token=0):
    """``documents`` of random lengths; every token occurs once, so that a sample says where it comes from."""
    rng = np.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    texts, token = [], first_token
    for length in rng.integers(1, 40, documents):
        text = np.append(np.arange(token, token + length), EOD)
        token += length
        builder.add_document(text, [len(text)])
        texts.append(text)
    builder.finalize(f"{prefix}.idx")
    return texts


@pytest.fixture
def corpus(tmp_path):
    """Prefix and documents of a corpus."""
    prefix = str(tmp_path / "corpus")
    return prefix, write_corpus(prefix, 50)


def config(prefix, **values):
    values = {"blend": ([prefix], None), "split": "80,10,10", "random_seed": 3} | values
    return GPTDatasetConfig(seq_length=SEQ, **values)


def request(*sizes):
    return DatasetRequest(sizes, NullTokenizer(VOCAB))


def naive_epoch(texts, seed):
    """One epoch: documents shuffled and joined, cut into overlapping windows, windows shuffled."""
    random = np.random.RandomState(seed)
    order = np.arange(len(texts), dtype=np.int32)
    random.shuffle(order)
    stream = np.concatenate([texts[i] for i in order])
    windows = [stream[i * SEQ : i * SEQ + SEQ + 1] for i in range((len(stream) - 1) // SEQ)]
    places = np.arange(len(windows), dtype=np.uint32)
    random.shuffle(places)
    return [windows[place] for place in places]


def text_of(sample):
    return np.append(sample["tokens"].numpy(), sample["labels"][-1].numpy())


def test_one_epoch_is_the_naive_order(corpus):
    prefix, texts = corpus
    splits = config(prefix).build(request(4, 2, 2))
    for dataset, part in zip(splits, (slice(0, 40), slice(40, 45), slice(45, 50)), strict=True):
        expected = naive_epoch(texts[part], 3)
        assert len(dataset) == len(expected)
        for sample, window in zip(dataset, expected, strict=False):
            np.testing.assert_array_equal(text_of(sample), window)
            np.testing.assert_array_equal(sample["labels"], window[1:])
            np.testing.assert_array_equal(sample["position_ids"], np.arange(SEQ))
            assert sample["loss_mask"].sum() == SEQ


def test_more_samples_than_one_epoch_repeat_the_split_and_nothing_else(corpus):
    prefix, texts = corpus
    size = 3 * len(naive_epoch(texts[:40], 3)) + 5
    train = config(prefix).build(request(size, 0, 0)).train
    assert len(train) >= size
    seen = np.unique(np.concatenate([text_of(train[i]) for i in range(size)]))
    assert set(seen) <= set(np.concatenate(texts[:40]))


def test_splits_of_which_nothing_is_needed_are_not_built(corpus):
    splits = config(corpus[0], split="1").build(request(4, 0, 0))
    assert splits.train is not None
    assert splits.valid is None
    assert splits.test is None


def test_a_second_build_reads_the_cache_and_agrees(corpus, tmp_path):
    cached = config(corpus[0], path_to_cache=str(tmp_path / "cache"))
    first = cached.build(request(30, 0, 0)).train
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    second = cached.build(request(30, 0, 0)).train
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert all(torch.equal(first[i]["tokens"], second[i]["tokens"]) for i in range(30))


def source_of(sample):
    """Which corpus a sample of the blend test comes from."""
    return int(sample["tokens"][sample["tokens"] != EOD][0]) // 3000


def test_a_corpus_that_is_written_anew_does_not_get_the_old_indices(corpus, tmp_path):
    """Megatron-Core names cached indices by path and settings alone."""
    prefix, _ = corpus
    values = {"split": "100,0,0", "path_to_cache": str(tmp_path / "cache")}
    config(prefix, **values).build(request(4, 0, 0))
    texts = write_corpus(prefix, 30)
    (dataset, *_) = config(prefix, **values).build(request(4, 0, 0))
    expected = naive_epoch(texts, 3)
    assert len(dataset) == len(expected)
    for sample, window in zip(dataset, expected, strict=True):
        np.testing.assert_array_equal(text_of(sample), window)


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [7, 1, 2]])
def test_a_blend_always_draws_from_the_corpus_that_lags_most(tmp_path, weights):
    prefixes = [str(tmp_path / name) for name in "abc"]
    for number, prefix in enumerate(prefixes):
        write_corpus(prefix, 30, 3000 * number)
    train = config("", blend=(prefixes, weights), split="1").build(request(200, 0, 0)).train
    shares = np.array(weights) / sum(weights)
    counts = np.zeros(3)
    for index in range(200):
        lag = shares * max(index, 1) - counts
        source = source_of(train[index])
        assert lag[source] == pytest.approx(lag.max())
        counts[source] += 1
    assert np.abs(counts - shares * 200).max() <= 1.0


def test_blends_for_each_purpose(tmp_path):
    prefixes = [str(tmp_path / name) for name in "abc"]
    for number, prefix in enumerate(prefixes):
        write_corpus(prefix, 30, 3000 * number)
    per_split = tuple(([prefix], None) for prefix in prefixes)
    splits = config("", blend=None, split=None, blend_per_split=per_split).build(request(8, 8, 8))
    for number, dataset in enumerate(splits):
        assert {source_of(dataset[i]) for i in range(8)} == {number}
    without_test = (*per_split[:2], None)
    with refused("8 samples for test", "dataset.blend_per_split"):
        config("", blend=None, split=None, blend_per_split=without_test).build(request(8, 8, 8))


@pytest.mark.parametrize("order", ["single", "batch"])
def test_a_blend_without_weights_that_is_too_short_is_refused(tmp_path, order):
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        write_corpus(prefix, 20)
    short = config("", blend=(prefixes, None), split="1", dataloader_type=order)
    with refused("1000 samples for train", "dataset.dataloader_type=cyclic", "weights"):
        build_iterators(short, NullTokenizer(VOCAB), (1000, 0, 0), 1, 8)


def test_document_ends_reset_positions_masks_and_loss(corpus):
    values = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    iterators = build_iterators(config(corpus[0], **values), NullTokenizer(VOCAB), (8, 0, 0), 2, 4)
    batch = next(iterators.train)
    for row in range(2):
        tokens = batch["tokens"][row].tolist()
        document, position, documents, positions = 0, 0, [], []
        for token in tokens:
            documents.append(document)
            positions.append(position)
            document, position = (document + 1, 0) if token == EOD else (document, position + 1)
        assert batch["position_ids"][row].tolist() == positions
        assert batch["loss_mask"][row].tolist() == [float(token != EOD) for token in tokens]
        forbidden = [
            [documents[j] != documents[i] or j > i for j in range(SEQ)] for i in range(SEQ)
        ]
        assert batch["attention_mask"][row, 0].tolist() == forbidden


def test_a_split_without_text_is_refused_instead_of_counting_epochs_for_ever(corpus):
    with refused("dataset.split=1000,1,0", "valid", "50 documents", "dataset.blend_per_split"):
        config(corpus[0], split="1000,1,0").build(request(4, 4, 0))


def test_bad_corpora_are_named(corpus, tmp_path):
    prefix = corpus[0]
    with refused("none.bin", "dataset.blend"):
        config(str(tmp_path / "none")).build(request(4, 0, 0))
    with refused("corpus.bin.bin", "without the ending .bin"):
        config(prefix + ".bin").build(request(4, 0, 0))
    with Path(prefix + ".bin").open("r+b") as file:
        file.truncate(100)
    with refused("corpus.bin", "100 bytes", "write it again"):
        config(prefix).build(request(4, 0, 0))
    with Path(prefix + ".idx").open("r+b") as file:
        file.write(b"something else")
    with refused("corpus.idx", "damaged", "write it again"):
        config(prefix).build(request(4, 0, 0))


def test_a_cache_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with refused(str(tmp_path / "file" / "cache"), "dataset.path_to_cache"):
        config(corpus[0], path_to_cache=str(tmp_path / "file" / "cache")).build(request(4, 0, 0))


def test_a_wrong_path_is_told_before_anything_is_built(corpus, tmp_path):
    prefix, _ = corpus
    config(prefix).check_sources()
    with refused("absent.bin", "dataset.blend"):
        config(str(tmp_path / "absent")).check_sources()
    per_split = GPTDatasetConfig(
        seq_length=SEQ, blend_per_split=(([prefix], None), ([f"{prefix}2"], None), None)
    )
    with refused("corpus2.bin", "dataset.blend"):
        per_split.check_sources()
