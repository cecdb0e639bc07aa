# SPDX-License-Identifier: Apache-2.0
"""The six lines (tune.py) of README.md and docs/index.md run on two processes: with a toy model, and fewer steps."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import hub_cache
from tests.pages import blocks
from tests.unit_tests.project.tree import ROOT

MODEL = "Qwen/Qwen3-0.6B"
DATA = ROOT / "tutorials" / "data"


def snippet(page):
    (found,) = [block.text for block in blocks(ROOT / page) if block.title == "tune.py"]
    return found


@pytest.fixture
def folder(tmp_path):
    """A working directory with conversations, and a cache of the hub with a toy in the place of the model."""
    toy = json.loads((ROOT / "examples/models/qwen/qwen3.json").read_text())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**toy | {"vocab_size": 512, "num_hidden_layers": 2})
    )
    cached = hub_cache.snapshot_folder(tmp_path / "hub", MODEL)
    model.to(torch.bfloat16).save_pretrained(cached)
    AutoTokenizer.from_pretrained(DATA / "tokenizer").save_pretrained(cached)
    shutil.copytree(DATA / "chats", tmp_path / "chats")
    shutil.copy(tmp_path / "chats/validation.jsonl", tmp_path / "chats/test.jsonl")
    return tmp_path


def execute(source, folder):
    """On every rank of a pool."""
    with contextlib.chdir(folder), hub_cache.only(folder / "hub"):
        names = {"__name__": "tune"}
        exec(compile(source, "tune.py", "exec"), names)
    return names["config"].model.tensor_model_parallel_size


def shortened(source):
    """Four steps of two samples."""
    for written, small in (
        ("train_iters=20", "train_iters=4"),
        ("global_batch_size=8", "global_batch_size=2"),
    ):
        assert written in source
        source = source.replace(written, small)
    return source


def measured(page):
    """The table of what has been measured on which hardware."""
    text = (ROOT / page).read_text()
    return re.search(r"^\| what \| hardware .*\n(\|.*\n)+", text, flags=re.MULTILINE)[0]


def test_both_pages_show_the_same():
    assert snippet("README.md") == snippet("docs/index.md")
    assert measured("README.md").replace("](docs/", "](") == measured("docs/index.md")


def test_nobody_can_believe_that_more_ran_on_a_gpu():
    """One card was there; what needs more, or was not reached on it, says so."""
    rows = [
        [cell.strip() for cell in row.split("|")[1:4]]
        for row in measured("README.md").splitlines()[2:]
    ]
    elsewhere = [row for row in rows if "CPU" not in row[1]]
    assert [result == "not run yet" for _, _, result in elsewhere] == [False] * 3 + [True] * 4
    assert all(
        (hardware == "one H100") == (result != "not run yet") for _, hardware, result in elsewhere
    )


def test_six_lines(two_workers, folder):
    assert two_workers.run(execute, shortened(snippet("README.md")), folder) == [2, 2]
    with hub_cache.only(folder / "hub"):
        before, tokenizer = (
            AutoModelForCausalLM.from_pretrained(MODEL),
            Path(snapshot_download(MODEL)),
        )
    after = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    assert before.config.to_dict().keys() == after.config.to_dict().keys()
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    # the gain of a norm, 1 in bf16, may round to itself after so few steps
    assert not any(torch.equal(old, new) for old, new in pairs if old.dim() > 1)
    assert (
        Path(folder / "tuned/tokenizer.json").read_bytes()
        == (tokenizer / "tokenizer.json").read_bytes()
    )
