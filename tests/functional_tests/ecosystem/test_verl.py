# SPDX-License-Identifier: Apache-2.0
"""verl's own Megatron engine against a loop over transformers' model: training, checkpoints, adapters, weights."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.functional_tests.ecosystem.verl_engine import RATE, STEPS, rows_of
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/verl"  # where scripts/extra.sh installs it
VOCABULARY = 96
LAYOUTS = {"one": [], "tp2": ["tp=2"], "pp2": ["pp=2"], "lora": ["lora"]}

pytestmark = pytest.mark.skipif(
    not (BESIDE / "verl").is_dir(), reason="verl is not installed: run scripts/extra.sh verl"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w1", pad_token="w0"
    ).save_pretrained(folder / "model")
    return folder


def start(root, name, options):
    processes = 2 if "=2" in "".join(options) else 1
    result = root / f"{name}.json"
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    run += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m"]
    run += ["tests.functional_tests.ecosystem.verl_engine", str(root), str(result), *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{BESIDE}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        run, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(result.read_text()), torch.load(f"{result}.pt")


@pytest.fixture(scope="module")
def results(root):
    return {name: start(root, name, options) for name, options in LAYOUTS.items()}


def loss_of(model, rows):
    """The mean over the tokens from the third on, as ``sft_loss`` has it."""
    total, count = 0.0, 0
    for row in rows:
        logits = model(row[None]).logits[0, 1:-1].float()
        total = total + F.cross_entropy(logits, row[2:], reduction="sum")
        count += len(row) - 2
    return total / count


@pytest.fixture(scope="module")
def expected(root):
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), RATE, (0.9, 0.999), 1e-8)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, rows_of(0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_a_loop_over_transformers(results, expected):
    """In bfloat16 here, in float32 there."""
    values, _ = results["one"]
    assert values["losses"] == pytest.approx(expected, abs=0.02)
    assert values["losses"][-1] < values["losses"][0] - 0.3


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_two_processes_compute_the_same(results, name):
    values, _ = results[name]
    alone, _ = results["one"]
    assert values["losses"] == pytest.approx(alone["losses"], abs=2e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loaded_checkpoint_continues_as_the_run_did(results, name):
    values, _ = results[name]
    assert values["repeated"] == values["losses"][2:]


@pytest.mark.parametrize("name", ["one", "tp2", "pp2"])
def test_weights_for_the_rollout_are_the_trained_model(root, results, name):
    values, saved = results[name]
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    model.load_state_dict(saved["weights"])
    found = torch.tensor(values["log_probs"]).split([len(row) for row in rows_of(0)])
    for row, log_probs in zip(rows_of(0), found, strict=True):
        expected = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        expected = expected.gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(log_probs[:-1], expected, atol=0.06, rtol=0.02)


def test_the_adapter_for_the_rollout_is_the_trained_one(root, results):
    """Its base is as published, and peft computes with it what verl's engine does."""
    values, saved = results["lora"]
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    assert values["losses"][-1] < values["losses"][0]
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in saved["adapter"]}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=sorted(names))
    model = get_peft_model(base, config)
    adapter = {f"base_model.model.{name}": value for name, value in saved["adapter"].items()}
    report = set_peft_model_state_dict(model, adapter)
    assert not report.unexpected_keys
    found = torch.tensor(values["log_probs"]).split([len(row) for row in rows_of(0)])
    with torch.no_grad():
        for row, log_probs in zip(rows_of(0), found, strict=True):
            expected = model(row[None]).logits[0, :-1].float().log_softmax(-1)
            expected = expected.gather(1, row[1:, None])[:, 0]
            torch.testing.assert_close(log_probs[:-1], expected, atol=0.06, rtol=0.02)
