# SPDX-License-Identifier: Apache-2.0
"""Microbatches of planned steps: all tokens of a global batch once, from any step on, with and without workers."""

from collections import Counter

import pytest
import torch

from megatron.bridge.data.finetuning.context_plan import ContextSharing
from megatron.bridge.data.finetuning.rows import packed_batch
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer
from tests.toy_run import SEQUENCE, VOCABULARY
from tests.toy_samples import dataset, write_samples

RANKS = 4
ROWS = 4  # of a global batch
SHARING = ContextSharing(SEQUENCE // RANKS, linear_work=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


def step(batches):
    """The microbatches of the next step."""
    first = next(batches)
    return [first, *(next(batches) for _ in range(first["microbatches"] - 1))]


def iterator(folder, rank, consumed=0, workers=0, read_ahead=True):
    config = dataset(folder, "packed")
    config.num_workers = workers
    train = build_iterators(
        config,
        NullTokenizer(VOCABULARY),
        (3 * ROWS, 0, 0),
        micro_batch_size=1,
        global_batch_size=ROWS,
        dp_rank=rank,
        dp_size=RANKS,
        consumed_train=consumed,
        sharing=SHARING,
    ).train
    train.read_ahead = read_ahead
    return train


def trained_tokens(batch):
    return batch["labels"][batch["loss_mask"] > 0].tolist()


def test_all_ranks_together_have_the_tokens_of_the_rows_once(folder):
    steps = [step(iterator(folder, rank)) for rank in range(RANKS)]
    assert len({len(batches) for batches in steps}) == 1
    found = Counter()
    for place in zip(*steps, strict=True):
        rank = 0
        while rank < RANKS:
            size = place[rank]["cp_size"]
            shared = [place[member]["tokens"].tolist() for member in range(rank, rank + size)]
            assert all(tokens == shared[0] for tokens in shared), "ranks that share a microbatch"
            assert place[rank]["tokens"].shape[1] % (2 * size if size > 1 else 1) == 0
            found += Counter(trained_tokens(place[rank]))
            rank += size
    rows = dataset(folder, "packed")
    whole = build_iterators(rows, NullTokenizer(VOCABULARY), (ROWS, 0, 0), 1, ROWS).train
    assert found == sum((Counter(trained_tokens(next(whole))) for _ in range(ROWS)), Counter())
    assert {batch["cp_size"] for batches in steps for batch in batches} == {1, 2, 4}


@pytest.mark.parametrize(("workers", "read_ahead"), [(0, False), (1, True)])
def test_workers_and_threads_change_nothing(folder, workers, read_ahead):
    plain = iterator(folder, 1)
    other = iterator(folder, 1, workers=workers, read_ahead=read_ahead)
    for _ in range(3):
        for expected, found in zip(step(plain), step(other), strict=True):
            assert torch.equal(expected["tokens"], found["tokens"])
        assert plain.sample_ids == other.sample_ids


def test_a_resumed_iterator_begins_with_the_next_step(folder):
    whole = iterator(folder, 2)
    step(whole)
    resumed = iterator(folder, 2, consumed=ROWS)
    for expected, found in zip(step(whole), step(resumed), strict=True):
        assert torch.equal(expected["tokens"], found["tokens"])


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_microbatch_without_samples_is_padding(multiple):
    batch = packed_batch([], padding=7, multiple=multiple)
    assert batch["tokens"].tolist() == [[7] * max(multiple, 2)]
    assert not batch["loss_mask"].any()
    assert batch["padding_mask"].all()
