# SPDX-License-Identifier: Apache-2.0
"""The order of streamed samples under any layout and resume, with readers that count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bridge.data.config import GPTDatasetConfig
from megatron.bridge.data.energon import EnergonProvider
from megatron.bridge.data.loaders import BatchShard
from megatron.bridge.data.records.samples import EncodingReport
from megatron.bridge.data.streams import StreamingBatchIterator
from megatron.bridge.training.config.rules.model import energon_readers_fit_batch
from tests.refusals import refused, says
from tests.toy_run import toy_config


class Counter:
    """Reader n gives n * 1000, n * 1000 + 1, and so on."""

    def __init__(self, number):
        self.number, self.place, self.report = number, 0, EncodingReport()

    def __next__(self):
        value = torch.tensor([self.number * 1000 + self.place])
        self.place += 1
        return {"tokens": value, "labels": value, "loss_mask": value.float(), "position_ids": value}

    def state(self):
        return str(self.place).encode()

    def restore(self, state):
        self.place = int(state)


def streams(readers, micro, ranks, whole, consumed=0, fingerprint=None):
    return [
        StreamingBatchIterator(
            "data",
            Counter,
            readers,
            BatchShard(micro, whole, rank, ranks),
            fingerprint or {},
            consumed,
        )
        for rank in range(ranks)
    ]


def step(batches, micro, whole):
    """Samples of a global batch by their place in the order."""
    found = {}
    for _ in range(whole // (micro * len(batches))):
        for each in batches:
            tokens = next(each)["tokens"][:, 0].tolist()
            found |= dict(zip(each.sample_ids, tokens, strict=True))
    return found


@st.composite
def layouts(draw):
    """(micro batch, ranks, readers, global batch): readers are a multiple of the ranks and divide the batch."""
    micro, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    readers = ranks * draw(st.integers(1, 3))
    return micro, ranks, readers, micro * readers * draw(st.integers(1, 2))


@given(layouts(), st.integers(1, 3))
def test_sample_p_is_the_next_of_reader_p_modulo_readers(layout, steps):
    micro, ranks, readers, whole = layout
    batches = streams(readers, micro, ranks, whole)
    for number in range(steps):
        expected = {
            p: (p % readers) * 1000 + p // readers
            for p in range(number * whole, (number + 1) * whole)
        }
        assert step(batches, micro, whole) == expected


@given(layouts(), st.integers(1, 3))
def test_a_run_goes_on_under_another_number_of_ranks(layout, steps):
    micro, ranks, readers, whole = layout
    batches = streams(readers, micro, ranks, whole)
    for _ in range(steps):
        step(batches, micro, whole)
    states = [each.state_dict() for each in batches]
    merged = states[0] | {
        "readers": {n: state for each in states for n, state in each["readers"].items()}
    }
    alone = streams(readers, 1, 1, whole, consumed=steps * whole)
    alone[0].load_state_dict(merged)
    assert step(alone, 1, whole) == step(batches, micro, whole)


def test_a_position_of_other_data_and_none_at_all_are_refused():
    (batches,) = streams(2, 1, 1, 4, fingerprint={"dataset.seed": 1})
    with refused("dataset.seed=2 instead of 1", "checkpoint.finetune"):
        streams(2, 1, 1, 4, fingerprint={"dataset.seed": 2})[0].load_state_dict(
            batches.state_dict()
        )
    (lost,) = streams(2, 1, 1, 4, consumed=8)
    with refused("8 samples", "data", "checkpoint.finetune"):
        next(lost)
    assert next(lost.replicate())["tokens"].tolist() == [[0]], "held-out data begins anew"


def energon(**values):
    return EnergonProvider(**{"path": "data", "seq_length": 32} | values)


def test_readers_come_out_even():
    def problem(readers, ranks):
        return "; ".join(
            energon_readers_fit_batch(toy_config(dataset=energon(readers=readers)), ranks)
        )

    assert not problem(4, 2)
    assert not problem(8, 8)
    assert says(
        problem(3, 2), "dataset.readers=3", "data parallel size 2", "train.global_batch_size"
    )
    assert problem(16, 2), "more readers than samples in a batch of 8"
    assert not [*energon_readers_fit_batch(toy_config(dataset=GPTDatasetConfig(seq_length=32)), 2)]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"readers": 0}, ("dataset.readers=0", "at least 1")),
        (
            {"dataloader_type": "cyclic"},
            ("dataset.dataloader_type='cyclic'", "dataset.shuffle_buffer_size"),
        ),
        (
            {"packing_buffer_size": 5},
            ("dataset.packing_buffer_size=5", "dataset.packed_sequence_specs"),
        ),
        ({"truncation": "cut"}, ("dataset.truncation='cut'", "keep_answer")),
        ({"path": "a.jsonl"}, ("dataset.validation_split='val'", "a.jsonl", "null")),
    ],
)
def test_wrong_values_are_named(values, parts):
    (problem,) = energon(**values).problems()
    assert says(problem, *parts)
