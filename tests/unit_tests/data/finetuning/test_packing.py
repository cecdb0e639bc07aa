# SPDX-License-Identifier: Apache-2.0
"""Packing: every sample in one row, rows nearly full, and context-parallel cuts that tile them."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.data.finetuning.packing import cut_for_rank, pack
from megatron.bridge.data.finetuning.rows import PackedRows, SampleRows
from megatron.bridge.data.loaders import collate
from tests.unit_tests.data.finetuning.test_rows import make_samples


def naive(lengths, capacity):
    """Best fit, longest first, over a plain list of rows: only the number of rows is compared."""
    space = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, left in enumerate(space) if left >= length]
        if fitting:
            space[min(fitting, key=space.__getitem__)] -= length
        else:
            space.append(capacity - length)
    return len(space)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 90))
def test_every_sample_is_in_one_row_that_holds_it(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(sample for row in rows for sample in row.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[sample] for sample in row) <= capacity for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert all(row.tolist() == sorted(row.tolist()) for row in rows)
    assert len(rows) == naive(lengths, capacity)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), max_size=60), st.integers(20, 40)
)
def test_no_row_has_more_images_than_fit(samples, limit):
    lengths, images = [length for length, _ in samples], [tokens for _, tokens in samples]
    rows = pack(lengths, 90, images, limit)
    assert sorted(sample for row in rows for sample in row.tolist()) == list(range(len(samples)))
    assert all(sum(lengths[sample] for sample in row) <= 90 for row in rows)
    assert all(sum(images[sample] for sample in row) <= limit for row in rows)


def test_a_limit_that_no_row_reaches_changes_nothing():
    random = np.random.default_rng(0)
    lengths, images = random.integers(1, 50, 500), random.integers(0, 20, 500)
    free, limited = pack(lengths, 90), pack(lengths, 90, images, 10_000)
    assert [row.tolist() for row in free] == [row.tolist() for row in limited]


@pytest.mark.parametrize("capacity", [4096, 131072])
def test_realistic_lengths_fill_the_rows(capacity):
    random = np.random.default_rng(0)
    lengths = np.clip(
        random.lognormal(6.0, 0.9, 100_000).astype(int), 8, 4096
    )  # chats: median 400 tokens
    start = time.process_time()
    rows = pack(lengths, capacity)
    assert time.process_time() - start < 2.0  # 0.15 s on an idle core
    assert lengths.sum() / (len(rows) * capacity) >= 0.995


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 4))
def test_the_cuts_of_all_ranks_are_the_row(lengths, size):
    bounds = np.concatenate(([0], np.cumsum(lengths))) * 2 * size
    cuts = [cut_for_rank(bounds, rank, size).tolist() for rank in range(size)]
    assert sorted(place for cut in cuts for place in cut) == list(range(bounds[-1]))
    assert len({len(cut) for cut in cuts}) == 1
    for start, stop in pairwise(bounds.tolist()):
        work = [sum(place - start for place in cut if start <= place < stop) for cut in cuts]
        assert len(set(work)) == 1, "causal work is equal"


def test_the_samples_of_a_microbatch_become_one_row():
    samples = make_samples([4, 7, 3])
    rows = SampleRows(samples, None, padding=0, multiple=2)
    numbers, batch = collate([(place, rows[place]) for place in (2, 0, 1)])
    assert numbers == [2, 0, 1]
    assert batch["cu_seqlens"].tolist() == [0, 2, 6, 12]
    assert batch["max_seqlen"] == 6
    assert batch["attention_mask"] is None
    tokens = [[*samples[place].tokens.tolist()][:-1] for place in (2, 0, 1)]
    assert batch["tokens"].tolist() == [[*tokens[0], *tokens[1], 0, *tokens[2]]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]


def test_the_longest_sample_of_a_packed_row_is_told_as_it_is():
    """With the length of the row in its place, Megatron-Core would count positions on through all samples."""
    rows = PackedRows(make_samples([5, 4, 3]), seq_length=16, padding=0)
    _, batch = collate([(0, rows[0])])
    assert batch["cu_seqlens"].tolist() == [0, 4, 7, 9, 16]
    assert batch["max_seqlen"] == 7
    assert rows.fill == 9 / 16
