# SPDX-License-Identifier: Apache-2.0
"""Tokenizers against transformers itself, and what is refused."""

import json

import pytest
from transformers import AutoTokenizer

from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import TokenizerConfig, build_tokenizer, encode_many
from megatron.bridge.inference.prompts import PromptReader
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


def sentencepiece_like(directory):
    """A tokenizer that puts a space before each text, as that of Llama 2 does, and BOS and EOS around it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehnrst", "▁t", "▁th", "▁the", "▁c", "▁ca", "▁cat", "▁a", "ca", "cat"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    merges += [("▁", "a"), ("c", "a"), ("ca", "t")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(directory)
    return build_tokenizer(TokenizerConfig(tokenizer_model=str(directory)))


def test_beginnings_and_continuations(tmp_path):
    tokenizer = sentencepiece_like(tmp_path)
    pieces = tokenizer.hf.convert_ids_to_tokens
    assert pieces(tokenizer.hf.encode("the cat")) == ["<s>", "▁the", "▁cat", "</s>"]
    assert pieces(tokenizer.tokenize("the cat")) == ["<s>", "▁the", "▁cat"]
    assert pieces(tokenizer.tokenize("<s>the")).count("<s>") == 1
    texts = {"a": ["a"], " a": ["▁a"], "cat": ["cat"], "\na": ["<0x0A>", "a"], "": []}
    for text, expected in texts.items():
        assert pieces(tokenizer.continue_tokens(text)) == expected, text
    assert encode_many(tokenizer, list(texts), "continuation") == [
        tokenizer.continue_tokens(text) for text in texts
    ]
    assert pieces(tokenizer.plain_tokens("the cat")) == ["▁the", "▁cat"]
    assert encode_many(tokenizer, ["the cat", "a"], "document") == [
        tokenizer.plain_tokens("the cat"),
        tokenizer.plain_tokens("a"),
    ]
    beginnings = ["the cat", "<s>the", ""]
    assert encode_many(tokenizer, beginnings, "beginning") == [
        tokenizer.tokenize(text) for text in beginnings
    ]


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("the cat", "a"),
        ("the cat", " a"),
        ("<s>the cat", " a</s>"),
        ("the ", "cat"),
        ("", "the cat"),
    ],
)
def test_completions_continue_their_prompts(tmp_path, prompt, completion):
    """The text is that of the record, with one BOS and one EOS, and its prompt has the tokens of inference."""
    tokenizer = sentencepiece_like(tmp_path)
    encoder = RecordEncoder(tokenizer, EncodingRules(64))
    record = {"prompt": prompt, "completion": completion}
    (sample,) = encoder([("file:1", record)]).samples
    tokens = sample.tokens.tolist()
    begin = int(sample.trained.argmax())
    reader = PromptReader(tokenizer.hf)
    assert tokens[:begin] == reader.tokens(prompt, "prompt") == tokenizer.tokenize(prompt)
    assert (tokens[0], tokens.count(1), tokens[-1], tokens.count(2)) == (1, 1, 2, 1)
    text = (prompt + completion).removeprefix("<s>").removesuffix("</s>")
    if prompt:
        assert tokenizer.hf.decode(tokens[1:-1]) == text
