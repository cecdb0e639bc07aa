# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of other formats give the ids of their own libraries, after a way through Hugging Face's format."""

import json
import re
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer

from megatron.bridge.cli.main import main
from megatron.bridge.data.pretraining.foreign_tokenizers import (
    write_sentencepiece_tokenizer,
    write_tiktoken_tokenizer,
)
from megatron.bridge.utils.errors import UserError

FOLDER = Path(__file__).with_name("foreign_tokenizers")
RECORDED = json.loads((FOLDER / "ids.json").read_text())


def assert_same_ids(folder, name):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(RECORDED["texts"], RECORDED["ids"][name], strict=True):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, repr(text)
    return tokenizer


@pytest.mark.parametrize("name", ["bpe", "bpe_llama", "unigram"])
def test_sentencepiece(name, tmp_path):
    folder = write_sentencepiece_tokenizer(FOLDER / f"{name}.model", tmp_path / "tokenizer")
    tokenizer = assert_same_ids(folder, name)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )
    assert tokenizer.decode(tokenizer("Hello world")["input_ids"]) == "Hello world"


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken(pattern, tmp_path):
    folder = write_tiktoken_tokenizer(
        FOLDER / "tiktoken.json", tmp_path / "tokenizer", pattern, special_count=20, vocab_size=480
    )
    tokenizer = assert_same_ids(folder, f"tiktoken {pattern}")
    assert len(tokenizer) == 480
    assert tokenizer.convert_tokens_to_ids(["<unk>", "</s>", "<SPECIAL_19>"]) == [0, 2, 19]
    for text in RECORDED["texts"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_preprocess_reads_a_sentencepiece_model(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in RECORDED["texts"][:7]))
    command = ["data", "preprocess", "--input", str(corpus), "--output-prefix", f"{tmp_path}/o"]
    command += ["--workers", "1", "--tokenizer-type", "GPTSentencePieceTokenizer"]
    assert main([*command, "--tokenizer-model", str(FOLDER / "bpe.model")]) == 0
    dataset = IndexedDataset(str(tmp_path / "o"))  # its items are views of its file
    assert [row.tolist() for row in dataset] == RECORDED["ids"]["bpe"][:7]
    assert AutoTokenizer.from_pretrained(tmp_path / "o_tokenizer").vocab_size == 700


@pytest.mark.parametrize(
    "content", ["", "not a model", "[]", '[{"rank": 1, "token_bytes": "AA=="}]']
)
def test_other_files_are_refused_by_name(content, tmp_path):
    path = tmp_path / "some.file"
    path.write_text(content)
    for write in (write_sentencepiece_tokenizer, write_tiktoken_tokenizer):
        with pytest.raises(UserError, match=re.escape(str(path))):
            write(path, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
