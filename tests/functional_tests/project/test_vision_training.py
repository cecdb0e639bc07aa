# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks vision_training`` at toy size: both candidates compute the same, and the command prints it."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from benchmarks import vision_training
from benchmarks.vision_training import Stamp, rows, step_medians

ROOT = Path(__file__).parents[3]
ARGS = Namespace(size="toy", batch=2, seq_length=256, steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision_training")
    vision_training.write(path, ARGS)
    return path


@pytest.mark.parametrize("layout", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
def test_both_train_on_the_same(folder, layout):
    torch.set_num_threads(1)
    theirs = vision_training.Trainer(folder, ARGS, layout, "fp32")
    ours = vision_training.Ours(folder, ARGS, layout, "fp32")
    try:
        assert sum(map(len, ours.plan)) == sum(map(len, theirs.plan)) == 4
        expected = theirs.loss(ours.plan[0])
        assert len(ours.epoch()) == len(ours.plan)
    finally:
        parallel_state.destroy_model_parallel()
    assert ours.first_loss == pytest.approx(expected, rel=vision_training.TOLERANCES["fp32"])
    collated = theirs.collator([theirs.records[place] for place in range(4)])
    assert (collated["attention_mask"].sum(-1) - 1).tolist() == ours.lengths
    assert len(theirs.epoch()) == 2


def test_steps_are_compared_over_rounds():
    epochs = [[Stamp(0, 0), Stamp(1, 2), Stamp(4, 8)], [Stamp(5, 9), Stamp(8, 13), Stamp(9, 21)]]
    assert step_medians(epochs) == [Stamp(2, 3), Stamp(2, 7)]


def test_speed_is_in_tokens():
    found = {"HF Trainer": [Stamp(2, 4), Stamp(2, 4)], "Megatron Bridge": [Stamp(2, 3)]}
    lines = rows(found, {"HF Trainer": 400, "Megatron Bridge": 300})
    assert lines[0] == ["HF Trainer", "2", "2000", "4.00", "100", "1.00", "1.00"]
    assert lines[1] == ["Megatron Bridge", "1", "2000", "3.00", "150", "1.50", "2.00"]


@pytest.mark.slow
def test_the_command():
    words = "--size toy --seq-length 256 --rounds 1 --steps 1 --wait 1 --threads 1 --layout packed --precision bf16"
    command = [sys.executable, "-m", "benchmarks", "vision_training", *words.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "first loss" in done.stdout
    for name in ("| Megatron Bridge | ", "| HF Trainer | ", "| packed, bf16 | "):
        assert name in done.stdout
