# SPDX-License-Identifier: Apache-2.0
"""The commands of the pages are run in their order, with a toy in the place of each real model."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests import commands
from tests.pages import blocks, pages
from tests.unit_tests.project.tree import ROOT
from tests.workers import forget_model_parallel

DEMO = "demo/SmolLM2-135M-Shakespeare"
PLACES = ("MODEL", "TEACHER", ".cache/demo/SmolLM2-135M-Instruct")
LINES = ["To be or not to be", "that is the question", "whether tis nobler in the mind to suffer"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + '<eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def make_model(path):
    """A Llama of two layers and a tokenizer of some words, in Hugging Face format."""
    words = sorted({word for line in LINES for word in line.split()} | {"user", "assistant"})
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["<eos>", *words])}, "<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    saved.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=576,  # rows divide into the groups of low-bit formats
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that looks like a clone after ``make demo``, with data of one's own; the working directory."""
    make_model(tmp_path / DEMO)
    for place in PLACES:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).symlink_to(tmp_path / DEMO)
    text = "".join(json.dumps({"text": " ".join(LINES)}) + "\n" for _ in range(40))
    (tmp_path / "demo/text").mkdir()
    (tmp_path / "demo/text/train.jsonl").write_text(text)
    (tmp_path / "corpus.jsonl").write_text(text)
    (tmp_path / "my_data").mkdir()
    (tmp_path / "my_data/training.jsonl").write_text(record(LINES[0], LINES[1]) * 20)
    for split in ("validation", "test"):
        (tmp_path / f"my_data/{split}.jsonl").write_text(record(LINES[1], LINES[2]) * 4)
    for name in ("scripts", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(question, answer):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def executed(page):
    return [block for block in blocks(page) if block.way == "run"]


def perform(block, names, folder, pool):
    """Run a block as its page shows it."""
    if block.language == "python":
        exec(compile(block.text, block.name, "exec"), names)
        return
    for words in block.commands():
        commands.run(words, folder, pool)
        forget_model_parallel()


PAGES = [page for page in pages() if executed(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, folder, two_workers, capsys):
    names = {"__name__": "a_page"}
    for block in executed(page):
        perform(block, names, folder, two_workers)
    forget_model_parallel()
    check_outcome = OUTCOMES.get(str(page.relative_to(ROOT)), lambda *_: None)
    check_outcome(folder, capsys.readouterr().out)


def readme(folder, output):
    assert same_weights(folder / DEMO, folder / "runs/hf")


def getting_started(folder, output):
    assert "2 576 9" in output.splitlines()
    assert same_weights(folder / DEMO, folder / "runs/python/hf")
    assert (folder / "runs/text/plays.bin").stat().st_size
    steps = [
        json.loads(line) for line in (folder / "runs/plays/metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1]["step"] == 5


# what a page promises beyond that its blocks run
OUTCOMES = {"README.md": readme, "docs/getting-started.md": getting_started}


def same_weights(left: Path, right: Path):
    from safetensors.torch import load_file

    ours, theirs = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
