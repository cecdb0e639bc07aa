# SPDX-License-Identifier: Apache-2.0
"""Rehearsals really run, prove what they say, notice what fails, and leave nothing."""

import json
import tempfile

import pytest

from megatron.bridge.cli.main import main

PAIR = (
    "--recipe",
    "smollm2_135m_pretrain_config",
    "model.tensor_model_parallel_size=2",
    "--world-size",
    "2",
)
PADDED = ("model.make_query_groups_divisible_by=2", "model.sequence_parallel=true")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary folders go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def rehearsed(capfd, *arguments):
    code = main(["train", *arguments, "--rehearse", "1"])
    return code, [line for line in capfd.readouterr().err.splitlines() if not line.startswith(" ")]


def test_a_run_over_two_ranks(folder, capfd):
    code, lines = rehearsed(capfd, *PAIR, *PADDED)
    assert code == 0, lines[-1]
    proven = [
        line.partition(":")[2].partition(":")[0].strip()
        for line in lines
        if line.startswith("proven")
    ]
    assert proven == [
        "layout, data and forward step",
        "checkpoint and resume",
        "export to Hugging Face",
    ]
    assert "as 2 processes = tensor 2, at toy width over gloo" in lines
    assert list(folder.glob("megatron-bridge-*")) == [], "something was left"


def test_what_fails_is_named(folder, capfd, monkeypatch):
    (folder / "steps").mkdir()
    (folder / "steps" / "broken.py").write_text(
        "def step(data_iterator, model):\n    raise ValueError('this step is broken')\n"
    )
    monkeypatch.chdir(folder / "steps")
    code, lines = rehearsed(
        capfd,
        "--recipe",
        "llama32_1b_pretrain_config",
        "--world-size",
        "1",
        "--step-func",
        "broken.step",
    )
    assert code == 1
    assert "the rehearsal failed: training, rank 0: ValueError: this step is broken" in lines[-1]


@pytest.mark.slow
def test_a_run_with_a_vision_tower(folder, capfd):
    code, lines = rehearsed(capfd, "--recipe", "smolvlm2_256m_finetune_config", "--world-size", "1")
    assert code == 0, lines[-1]
    assert any(line.startswith("shrunk: dataset: no images") for line in lines)
    assert sum(line.startswith("proven") for line in lines) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--recipe", "qwen3_235b_a22b_pretrain_config"),
        ("--recipe", "deepseek_v3_pretrain_config"),
        ("--recipe", "llama31_8b_1m_pretrain_config"),
        ("--recipe", "llama31_405b_128k_pretrain_config"),
        ("--recipe", "qwen25_7b_128k_pretrain_config"),
        ("--recipe", "gemma3_12b_finetune_config", "checkpoint.pretrained_checkpoint=x"),
        (
            "--recipe",
            "llama3_70b_finetune_config",
            "--mode",
            "lora",
            "checkpoint.pretrained_checkpoint=x",
        ),
        (
            "--recipe",
            "gpt_oss_20b_finetune_config",
            "--mode",
            "lora",
            "checkpoint.pretrained_checkpoint=x",
        ),
        ("--recipe", "qwen2_vl_2b_finetune_config"),
        ("--recipe", "qwen25_vl_7b_finetune_config"),
        ("--recipe", "qwen3_vl_30b_a3b_finetune_config"),
        ("--recipe", "gemma3_vl_4b_finetune_config"),
        ("--recipe", "glm_45v_finetune_config"),
    ],
    ids=lambda arguments: arguments[1],
)
def test_families_and_adapters(folder, capfd, arguments):
    code, lines = rehearsed(capfd, *arguments)
    assert code == 0, lines[-1]
    assert sum(line.startswith("proven") for line in lines) == 3
    assert list(folder.glob("megatron-bridge-*")) == []


@pytest.mark.slow
def test_samples_that_ranks_share(folder, capfd):
    """A quarter of the rows has one long sample, which all ranks share."""
    records = [
        {"prompt": "1 2 3 4 " * count, "completion": "5 6 7"} for count in (2, 5, 3, 100) * 25
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    for name in ("training", "validation", "test"):
        (folder / f"{name}.jsonl").write_text(lines)
    numbers = ("tokenizer_type=NullTokenizer", "tokenizer_model=null", "vocab_size=1000")
    code, lines = rehearsed(
        capfd,
        *("--recipe", "llama3_8b_finetune_config", "--data", str(folder), "--packed-sequence"),
        *("--seq-length", "131072", "--world-size", "64"),
        *("model.hybrid_context_parallel=true", "model.max_seqlen_per_dp_cp_rank=8192"),
        *(f"tokenizer.{setting}" for setting in numbers),
    )
    assert code == 0, lines[-1]
    assert sum(line.startswith("proven") for line in lines) == 3
