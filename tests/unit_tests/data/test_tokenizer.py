# SPDX-License-Identifier: Apache-2.0
"""Tokenizers against transformers itself, and what is refused."""

import json

import pytest
from transformers import AutoTokenizer

from megatron.bridge.data.tokenizer import TokenizerConfig, build_tokenizer
from megatron.bridge.training.tokenizers.config import TokenizerConfig as PublicTokenizerConfig
from tests.refusals import refused
from tests.unit_tests.data.conftest import TEXT


def test_a_hugging_face_tokenizer_keeps_its_own_ids(tokenizer_dir):
    ours = build_tokenizer(PublicTokenizerConfig(tokenizer_model=str(tokenizer_dir)))
    theirs = AutoTokenizer.from_pretrained(tokenizer_dir)
    assert ours.vocab_size == len(theirs)
    assert ours.eod == theirs.eos_token_id
    assert ours.pad == -1
    for text in TEXT:
        assert ours.tokenize(text) == theirs(text)["input_ids"]
        assert ours.continue_tokens(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.detokenize(ours.continue_tokens(text)) == text
    json.dumps(ours.unique_identifiers)


def test_null_tokenizer():
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, -1)
    assert tokenizer.tokenize("3 99") == tokenizer.continue_tokens("3 99") == [3, 99]
    assert tokenizer.detokenize([3, 99]) == "3 99"
    for text in ("hello", "100", "-1"):
        with refused("tokenizer.vocab_size=100", repr(text), "HuggingFaceTokenizer"):
            tokenizer.tokenize(text)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, ("tokenizer.tokenizer_model", "directory or hub id")),
        ({"tokenizer_type": "NullTokenizer"}, ("tokenizer.vocab_size=None", "positive number")),
        (
            {"tokenizer_type": "SentencePiece"},
            ("tokenizer.tokenizer_type='SentencePiece'", "HuggingFaceTokenizer", "NullTokenizer"),
        ),
        (
            {"tokenizer_model": "x", "vocab_size": 3},
            ("tokenizer.vocab_size=3", "NullTokenizer", "remove it"),
        ),
    ],
)
def test_wrong_configs_are_named(values, parts):
    with refused(*parts):
        build_tokenizer(TokenizerConfig(**values))


@pytest.mark.parametrize(
    ("files", "path", "part"),
    [
        ({}, "", "missing or damaged"),
        (
            {"tokenizer.json": "[]", "tokenizer_config.json": "{}"},
            "",
            "tokenizer.json is not a JSON object",
        ),
        (
            {"tokenizer.json": "{}", "tokenizer_config.json": "[]"},
            "",
            "tokenizer_config.json is not a JSON object",
        ),
        ({"tokenizer.json": "{}"}, "tokenizer.json", "give its directory"),
        ({}, "none", "not a directory"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path, files, path, part):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with refused(str(tmp_path / path), part):
        build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path / path)))


def test_a_tokenizer_without_end_of_sequence_is_named(tokenizer_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with refused(str(tmp_path), "eos_token", "set one"):
        _ = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path))).eod
