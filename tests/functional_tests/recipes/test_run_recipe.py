# SPDX-License-Identifier: Apache-2.0
"""Recipes really train, at toy sizes, in one process and under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.recipes.catalog import catalog
from megatron.bridge.training.config import ConfigContainer

ROOT = Path(__file__).parents[3]
TOY = [
    *("--seq-length", "32"),
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=8",
    "model.ffn_hidden_size=64",
    "model.vocab_size=128",
    "tokenizer.vocab_size=128",
    "train.train_iters=2",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "validation.eval_iters=1",
    "logger.log_interval=1",
]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["lm loss"] for line in lines if "lm loss" in line]


@pytest.mark.parametrize("name", ["llama31_405b_pretrain_config", "smollm2_135m_finetune_config"])
def test_recipes_train_at_toy_size(name, tmp_path, resolutions, capfd):
    """Recipes for many GPUs fit themselves to one process, and say so."""
    toy = [*TOY, f"logger.log_dir={tmp_path}"]
    assert main(["train", "--recipe", name, "--mode", "pretrain", *toy]) == 0
    assert len(losses(tmp_path)) >= 2
    assert len(resolutions) == 1
    has_ranks = catalog()[name].layout != "no model parallelism"
    assert (f"the layout of {name} (" in " ".join(capfd.readouterr().err.split())) == has_ranks


REFUSED = ("fp", "_distill_")
REHEARSED = [name for name in catalog() if not any(part in name for part in REFUSED)]


@pytest.mark.slow
@pytest.mark.parametrize("name", REHEARSED[:: int(os.environ.get("REHEARSE_EVERY", "1"))])
def test_every_recipe_is_rehearsed(name):
    """Under its own layout, but for FP8, FP4 and teachers."""
    assert main(["train", "--recipe", name, "--rehearse", "1"]) == 0


def test_fine_tuning_starts_from_a_checkpoint(tmp_path):
    toy = [item for item in TOY if not item.startswith(("train.train_iters", "train.global"))]
    toy += ["train.global_batch_size=8"]
    first, second = tmp_path / "pretrained", tmp_path / "tuned"
    learn = [
        "train.train_iters=30",
        "optimizer.lr=1e-2",
        f"checkpoint.save={first}",
        "mixed_precision=fp32",
    ]
    assert main(["train", "--recipe", "llama3_8b_pretrain_config", *toy, *learn]) == 0
    tune = [
        "train",
        "--recipe",
        "llama3_8b_finetune_config",
        *toy,
        "train.train_iters=2",
        f"checkpoint.save={second}",
    ]
    assert main(tune) == 1
    assert main([*tune, f"checkpoint.pretrained_checkpoint={first}"]) == 0
    assert losses(first)[0] > 4.5, "a random model knows nothing of 128 tokens (ln 128 = 4.85)"
    assert losses(second)[0] < losses(first)[0] - 1, "the tuning goes on where the training ended"


def test_script_runs_under_torchrun(tmp_path):
    script = ROOT / "scripts" / "training" / "run_recipe.py"
    overrides = ["model.tensor_model_parallel_size=2", f"checkpoint.save={tmp_path}", "rng.seed=7"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    command += ["--recipe", "llama32_1b_pretrain_config", *TOY, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "layout: 2 processes = tensor 2 x pipeline 1 x context 1 x data 1" in done.stderr
    text = (tmp_path / "run_config.yaml").read_text()
    assert "  seed: 7  # command line\n" in text
    assert ConfigContainer.from_yaml(text).model.tensor_model_parallel_size == 2
