# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: microbatches are those of the packer, and layouts that do not fit are left out."""

import json

import numpy as np
import pytest

from megatron.bridge.autotune.rl import drawn_lengths, read_lengths, rows, shares
from megatron.bridge.cli.main import main
from megatron.bridge.data.finetuning.packing import pack
from megatron.bridge.utils.errors import UserError

DISTRIBUTIONS = {
    "equal": np.full(60, 100),
    "one long": np.array([1000] + [10] * 59),
    "log-normal": drawn_lengths(60, 100, 900),
    "rising": np.arange(1, 61) * 16,
    "two kinds": np.array([30, 900] * 30),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("balance", [True, False])
def test_microbatches_are_those_of_the_packer(name, balance):
    lengths = DISTRIBUTIONS[name]
    parts = shares(lengths, 4, balance)
    assert sorted(np.concatenate(parts)) == sorted(lengths)
    assert rows(lengths, 4, 1000, balance) == [len(pack(part, 1000)) for part in parts]
    for part in parts:
        assert all(part[members].sum() <= 1000 for members in pack(part, 1000))


def test_balanced_ranks_have_about_as_many_tokens():
    lengths = DISTRIBUTIONS["log-normal"]
    totals = [part.sum() for part in shares(lengths, 4, balance=True)]
    assert max(totals) <= 1.01 * np.mean(totals)


def test_drawn_lengths_keep_their_limits():
    lengths = drawn_lengths(1000, 100, 300)
    assert lengths.max() <= 400
    assert lengths.min() >= 2
    assert len(set(lengths.tolist())) > 100


def test_lengths_are_read(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n700\n")
    assert read_lengths(path).tolist() == [3, 700]
    for text in ("", "3 -1", "3 x", "0"):
        path.write_text(text)
        with pytest.raises(UserError, match="--lengths"):
            read_lengths(path)


RECIPE = [
    "tune",
    "--recipe",
    "llama32_1b_pretrain_config",
    "--gpus",
    "8",
    "--gpu",
    "h100",
    "--mode",
    "rl",
]


def test_layouts_with_the_keys_of_both_trainers(capsys):
    few = [
        "--fixed",
        "pipeline=1",
        "context=1",
        "--samples",
        "64",
        "--max-token-len",
        "8192",
        "--top",
        "2",
    ]
    assert main([*RECIPE, *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for layout in found["layouts"]:
        parts = layout["log_prob_seconds"] + layout["update_seconds"]
        assert layout["step_seconds"] == pytest.approx(parts)
        assert layout["rows"][0] <= layout["rows"][1]
    assert found["verl"]["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 8192
    assert found["NeMo-RL"]["policy.sequence_packing.train_mb_tokens"] == 8192


def test_token_budgets_are_compared(capsys):
    def tuned(*budgets):
        few = [
            "--fixed",
            "pipeline=1",
            "context=1",
            "tensor=1",
            "--samples",
            "64",
            "--top",
            "3",
            "--json",
        ]
        assert main([*RECIPE, *few, "--max-token-len", *budgets]) == 0
        return json.loads(capsys.readouterr().out)

    alone = [tuned(budget)["layouts"][0] for budget in ("4096", "8192")]
    both = tuned("4096", "8192")
    best = min(alone, key=lambda layout: layout["step_seconds"])
    assert both["layouts"][0] == best
    assert both["NeMo-RL"]["policy.sequence_packing.train_mb_tokens"] == best["max_token_len"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-token-len", "2048"], ["2048", "--max-token-len"]),
        (["--engine-memory", "1.5"], ["--engine-memory 1.5"]),
        (
            ["--engine-memory", "0.99", "--fixed", "pipeline=1", "context=1"],
            ["--engine-memory 0.99", "--offload"],
        ),
    ],
)
def test_what_cannot_be_is_named(capsys, arguments, words):
    assert main([*RECIPE, *arguments]) == 1
    found = capsys.readouterr().err
    assert all(word in found for word in words), found
