# SPDX-License-Identifier: Apache-2.0
"""Rows of tens of thousands of tokens train in memory that grows with their length, not with its square."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.training.config import ValidationConfig
from tests.toy_run import VOCABULARY, run_toy

TOKENS = int(os.environ.get("LONG_CONTEXT_TOKENS", "65536"))


SIZES = {"num_layers": 2, "num_attention_heads": 2, "num_query_groups": 1, "seq_length": TOKENS}


def memory(field):
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def train(folder, layout):
    """The loss of a step on one packed row, and the bytes that it took at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    record = run_toy(
        {
            "model": {**SIZES, **layout},
            "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1},
            "dataset": FinetuningDatasetConfig(
                dataset_root=str(folder),
                seq_length=TOKENS,
                packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=TOKENS),
            ),
            "validation": ValidationConfig(),
        }
    )
    return record.losses, memory("VmHWM") - before


@pytest.fixture
def folder(tmp_path):
    """A sample that takes most of a row, and short ones beside it."""
    random = np.random.default_rng(0)

    def words(count):
        return " ".join(map(str, random.integers(0, VOCABULARY - 1, count)))

    lengths = [TOKENS * 7 // 8, *[TOKENS // 64] * 7]
    records = [{"prompt": f"{words(count - 100)} ", "completion": words(99)} for count in lengths]
    (tmp_path / "training.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
def test_memory_grows_with_the_length_and_not_with_its_square(processes, two_workers, folder, kind):
    processes.close()  # new processes: those of earlier tests hold memory that would be taken again
    found = two_workers.run(
        train, folder, {"context_parallel_size": 2, "cp_comm_type": kind}, timeout=540
    )
    mask = TOKENS * TOKENS // 2  # one byte for each query of a rank and each key
    for losses, taken in found:
        assert losses == pytest.approx([np.log(VOCABULARY)], abs=0.2)
        assert taken < 16_000 * TOKENS, f"{taken / TOKENS:.0f} bytes a token"
        assert taken < mask or TOKENS < 2**16
