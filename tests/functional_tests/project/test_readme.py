# SPDX-License-Identifier: Apache-2.0
"""What README.md shows is run, in its order, with a toy model where the demo's model would lie."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.unit_tests.project.tree import ROOT

MODEL = "demo/SmolLM2-135M-Shakespeare"
LINES = ["To be or not to be", "that is the question", "whether tis nobler in the mind to suffer"]

# One interpreter runs a list of megatron-bridge commands: each would take seconds to start.
RUNNER = """
import json, sys
from megatron.bridge.cli.main import main
for command in json.loads(sys.stdin.read()):
    print("$", *command)
    if code := main(command):
        sys.exit(f"exit code {code}")
"""


def blocks(language):
    """Fenced blocks of the README, in order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )


def commands(program):
    """The arguments of every command line of the README that starts ``program``."""
    lines = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] == program]


def run(*words, folder, text=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that looks like a clone after ``make demo``."""
    path = tmp_path_factory.mktemp("clone")
    words = sorted({word for line in LINES for word in line.split()})
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["<eos>", *words])}, "<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path / MODEL)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path / MODEL)
    (path / "demo/text").mkdir()
    rows = "".join(json.dumps({"text": " ".join(LINES)}) + "\n" for _ in range(40))
    (path / "demo/text/train.jsonl").write_text(rows)
    (path / "scripts").symlink_to(ROOT / "scripts")
    return path


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target, *_ in commands("make"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_python_blocks(folder):
    (block,) = blocks("python")
    output = run("-c", block, folder=folder)
    assert output.splitlines()[0] == "2 32 4"
    assert same_weights(folder / MODEL, folder / "runs/python/hf")


def test_commands(folder):
    output = run("-c", RUNNER, folder=folder, text=json.dumps(commands("megatron-bridge")))
    assert "llama32_1b_pretrain_config" in output
    assert same_weights(folder / MODEL, folder / "runs/hf")
    assert (folder / "runs/text/plays.bin").stat().st_size


def test_training_command(folder):
    """As shown, but for the size of the model: 135M parameters are too many for a test."""
    (words,) = commands("torchrun")
    small = ["num_layers=2", "hidden_size=36", "ffn_hidden_size=64", "vocab_size=64", "kv_channels=4"]
    run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        *words,
        *(f"model.{entry}" for entry in small),
        folder=folder,
    )
    steps = [json.loads(line) for line in (folder / "runs/plays/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 5


def same_weights(left: Path, right: Path):
    from safetensors.torch import load_file

    ours, theirs = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
