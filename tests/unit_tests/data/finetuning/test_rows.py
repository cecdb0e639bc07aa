# SPDX-License-Identifier: Apache-2.0
"""Rows of tokenised samples, their order over epochs, and how samples are cut."""

import numpy as np
import pytest

from megatron.bridge.data.finetuning.rows import EpochRows, PaddedRows
from megatron.bridge.data.records.samples import Sample, Samples
from megatron.bridge.data.records.truncation import shorten


def make_samples(lengths):
    """Samples of distinct tokens, of which the second half is learnt."""
    random = np.random.default_rng(0)
    return Samples.of(
        Sample(
            random.integers(5, 90, length).astype(np.int32),
            np.arange(length) >= max(length // 2, 1),
        )
        for length in lengths
    )


def test_a_row_is_a_sample_and_padding():
    samples = make_samples([4, 6])
    row = PaddedRows(samples, seq_length=7, padding=1)[1]
    tokens, trained, _ = samples[1]
    assert row["tokens"].tolist() == [*tokens[:-1], 1, 1]
    assert row["labels"].tolist() == [*tokens[1:], 1, 1]
    assert row["loss_mask"].tolist() == [*trained[1:].astype(float), 0, 0]
    assert row["position_ids"].tolist() == list(range(7))
    assert row["padding_mask"].tolist() == [False] * (len(tokens) - 1) + [True] * 2
    assert set(row) == {"tokens", "labels", "loss_mask", "position_ids", "padding_mask"}


def test_epochs_present_every_row_once_in_an_order_of_the_seed():
    rows = PaddedRows(make_samples([3] * 10), seq_length=4, padding=0)
    first = [row["tokens"].tolist() for row in EpochRows(rows, 25, seed=3)]
    assert (
        sorted(first[:10]) == sorted(first[10:20]) == sorted(row["tokens"].tolist() for row in rows)
    )
    assert first[:10] != first[10:20]
    assert [row["tokens"].tolist() for row in EpochRows(rows, 90, seed=3)][:25] == first
    assert [row["tokens"].tolist() for row in EpochRows(rows, 10, seed=None)] == [
        r["tokens"].tolist() for r in rows
    ]
    with pytest.raises(IndexError):
        EpochRows(rows, 25, seed=3)[25]


@pytest.mark.parametrize(
    ("policy", "limit", "opening", "tokens", "learnt"),
    [
        ("right", 6, 0, [0, 1, 2, 3, 4, 5], [4, 5]),
        (
            "left",
            6,
            None,
            [4, 5, 6, 7, 8, 9],
            [5, 7, 8],
        ),  # 4 was learnt, but nothing predicts it now
        ("left", 6, 0, [0, 5, 6, 7, 8, 9], [7, 8]),
        ("keep_answer", 6, None, [3, 4, 5, 6, 7, 8], [4, 5, 7, 8]),
        ("keep_answer", 4, 0, [0, 6, 7, 8], [7, 8]),
        ("keep_answer", 2, None, [6, 7], [7]),  # the answer loses its end
    ],
)
def test_policies_on_a_sample_of_two_answers(policy, limit, opening, tokens, learnt):
    trained = np.isin(np.arange(10), [4, 5, 7, 8])
    cut = shorten(Sample(np.arange(10, dtype=np.int32), trained), limit, policy, opening)
    assert cut.tokens.tolist() == tokens
    assert cut.tokens[cut.trained].tolist() == learnt
