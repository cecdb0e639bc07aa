# SPDX-License-Identifier: Apache-2.0
"""Iterators over mock data: same samples in every layout, at every resume, with or without worker processes."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from megatron.bridge.data.config import DatasetConfig, DatasetRequest, MockGPTDatasetConfig, Splits
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused
from tests.unit_tests.project.tree import ROOT

BATCH = 12
TOKENIZER = NullTokenizer(1000)


def iterators(config, micro=1, rank=0, ranks=1, consumed=0, sizes=(60, 24, 12)):
    return build_iterators(
        config, TOKENIZER, sizes, micro, BATCH, rank, ranks, consumed, consumed_valid=0
    )


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
    assert {
        key: (value.dtype, value.shape) for key, value in batch.items() if value is not None
    } == {
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


class Spied(Dataset):
    """Samples that tell which thread made them; one of them is broken."""

    def __init__(self, broken=None, draws=False):
        self.threads, self.made = set(), []
        self._broken, self._draws = broken, draws

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == self._broken:
            raise UserError(f"sample {index} is damaged: repair it")
        self.threads.add(threading.current_thread())
        self.made.append(index)
        row = torch.full((4,), index)
        noise = torch.rand(4) if self._draws else torch.zeros(4)
        return {"tokens": row, "labels": row, "loss_mask": noise, "position_ids": torch.arange(4)}


@dataclass(kw_only=True)
class Own(DatasetConfig):
    """A data set of a user."""

    data: Spied
    shuffle_seed = 0

    def build(self, request):
        return Splits(self.data, self.data, None)


@dataclass(kw_only=True)
class OwnAhead(Own):
    """One whose samples depend on their number alone."""

    read_ahead = True


def test_the_next_batch_is_made_during_a_step_and_a_run_goes_on_behind_what_it_used():
    data = Spied()
    config = OwnAhead(seq_length=4, data=data)
    train, ids = iterators(config, 6).train, []
    for _ in range(4):
        next(train)
        ids += train.sample_ids
        deadline = time.monotonic() + 120
        while len(data.made) < len(ids) + 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert data.made == list(range(len(ids) + 6)), "one batch ahead, and no further"
    assert ids == list(range(24))
    assert threading.current_thread() not in data.threads
    again = iterators(config, 6, consumed=24).train
    assert (
        next(again)["tokens"][:, 0].tolist()
        == next(train)["tokens"][:, 0].tolist()
        == list(range(24, 30))
    )


def test_samples_that_draw_random_numbers_are_made_where_they_always_were():
    def run():
        torch.manual_seed(0)
        data, found = Spied(draws=True), []
        train = iterators(Own(seq_length=4, data=data), 6).train
        for _ in range(5):
            found.append(next(train)["loss_mask"])
            time.sleep(0.002)
            found.append(torch.rand(6, 4))  # dropout
        assert data.threads == {threading.current_thread()}
        return torch.stack(found)

    assert torch.equal(run(), run())


def test_the_sentence_about_a_broken_sample_comes_at_its_step():
    train = iterators(OwnAhead(seq_length=4, data=Spied(broken=13)), 6).train
    assert [next(train)["tokens"][0, 0].item() for _ in range(2)] == [0, 6]
    with pytest.raises(UserError, match=r"^sample 13 is damaged: repair it$"):
        next(train)


def test_reading_ahead_leaves_the_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train = iterators(MockGPTDatasetConfig(seq_length=4), 6).train
    assert [(next(train), train.sample_ids[0])[1] for _ in range(5)] == [0, 6, 12, 18, 24]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_and_processes_end_with_their_iterator(workers):
    before = set(threading.enumerate())
    found = iterators(MockGPTDatasetConfig(seq_length=4, num_workers=workers), 6)
    next(found.train)
    next(found.valid.replicate())
    assert not workers or set(threading.enumerate()) - before
    del found
    deadline = time.monotonic() + 120
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_data_smaller_than_a_batch_is_refused():
    with refused("train", "8 samples", "train.global_batch_size=12"):
        iterators(MockGPTDatasetConfig(seq_length=4), sizes=(8, 0, 0))


def test_importing_configs_costs_no_torch():
    data = ROOT / "src" / "megatron" / "bridge" / "data"
    paths = [*data.glob("**/*_config.py"), data / "config.py", data / "tokenizer.py"]
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in paths]
    assert len(names) >= 9
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_beyond_the_vocabulary_are_refused():
    config = MockGPTDatasetConfig(seq_length=4)
    sizes, batch = (12, 0, 0), (1, 12)
    whole = build_iterators(config, TOKENIZER, sizes, *batch, vocab_size=1000).train
    largest = max(int(part[name].max()) for part in whole for name in ("tokens", "labels"))
    assert (
        len(list(build_iterators(config, TOKENIZER, sizes, *batch, vocab_size=largest + 1).train))
        == 12
    )
    with refused(f"id {largest}", f"model.vocab_size={largest}", "tokenizer"):
        list(
            build_iterators(config, TOKENIZER, sizes, *batch, vocab_size=largest).train.replicate()
        )
