# SPDX-License-Identifier: Apache-2.0
"""Iterators over mock data: same samples in every layout, at every resume, with or without worker processes."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.data.config import DatasetRequest, MockGPTDatasetConfig
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.utils.errors import UserError

BATCH = 12
TOKENIZER = NullTokenizer(1000)


def iterators(config, micro=1, rank=0, ranks=1, consumed=0, sizes=(60, 24, 12)):
    return build_iterators(config, TOKENIZER, sizes, micro, BATCH, rank, ranks, consumed, consumed_valid=0)


def step(config, micro, ranks, number):
    """Tokens and sample numbers of global batch ``number``, put together from all ranks."""
    each = [iterators(config, micro, rank, ranks, number * BATCH).train for rank in range(ranks)]
    tokens, ids = [], []
    for _ in range(BATCH // (micro * ranks)):
        for iterator in each:
            tokens.append(next(iterator)["tokens"])
            ids += iterator.sample_ids
    return torch.cat(tokens), ids


@given(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (1, 4), (12, 1)]),
    st.integers(0, 4),
    st.sampled_from(["single", "batch", "cyclic"]),
)
def test_a_global_batch_is_the_same_in_every_layout(layout, number, order):
    config = MockGPTDatasetConfig(seq_length=4, dataloader_type=order)
    tokens, ids = step(config, *layout, number)
    expected, expected_ids = step(config, 1, 1, number)
    if order == "batch":  # dealt out one by one: the same samples, but other neighbours
        places = [expected_ids.index(sample) for sample in ids]
        expected, expected_ids = expected[places], [expected_ids[place] for place in places]
    assert ids == expected_ids
    assert torch.equal(tokens, expected)
    if order != "cyclic":
        assert sorted(ids) == list(range(number * BATCH, (number + 1) * BATCH))


def test_splits_share_no_sample_and_batches_have_the_promised_form():
    config = MockGPTDatasetConfig(seq_length=16)
    splits = config.build(DatasetRequest((60, 60, 60), TOKENIZER))
    texts = {tuple(split[i]["tokens"].tolist()) for split in splits for i in range(60)}
    assert len(texts) == 180
    batch = next(iterators(config, 3).valid)
    assert {key: (value.dtype, value.shape) for key, value in batch.items() if value is not None} == {
        "tokens": (torch.int64, (3, 16)),
        "labels": (torch.int64, (3, 16)),
        "loss_mask": (torch.float32, (3, 16)),
        "position_ids": (torch.int64, (3, 16)),
    }
    assert batch["attention_mask"] is None
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["tokens"].max() < TOKENIZER.vocab_size


def test_an_iterator_ends_with_its_data_and_nothing_is_built_for_size_zero():
    found = iterators(MockGPTDatasetConfig(seq_length=4), 6, sizes=(24, 0, 0))
    assert len(list(found.train)) == 4
    assert found.valid is None
    assert found.test is None


def test_replicas_start_from_the_same_place():
    train = iterators(MockGPTDatasetConfig(seq_length=4), 6, consumed=12).train
    next(train)
    replica = train.replicate()
    next(replica)
    assert replica.sample_ids == train.sample_ids == [12, 13, 14, 15, 16, 17]


def test_worker_processes_change_neither_order_nor_random_state():
    config = MockGPTDatasetConfig(seq_length=4, num_workers=2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train = iterators(config, 6).train
    ids = [(next(train), list(train.sample_ids))[1] for _ in range(10)]
    assert ids == [list(range(6 * i, 6 * i + 6)) for i in range(10)]
    assert torch.equal(before, torch.get_rng_state())


def test_data_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match=r"train data has 8 samples, less than train\.global_batch_size=12"):
        iterators(MockGPTDatasetConfig(seq_length=4), sizes=(8, 0, 0))


def test_importing_the_config_costs_no_torch():
    code = (
        "import sys, megatron.bridge.data.config, megatron.bridge.data.tokenizer; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
