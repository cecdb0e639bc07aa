# SPDX-License-Identifier: Apache-2.0
"""Tokenised corpora, read back by Megatron-Core, against a naive loop; and what can be wrong with them."""

import json
import resource
import signal
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import DatasetRequest, GPTDatasetConfig
from megatron.bridge.data.pretraining import inputs
from megatron.bridge.data.pretraining import preprocess as module
from megatron.bridge.data.pretraining.gpt_builder import open_corpus
from megatron.bridge.data.pretraining.indexed_writer import (
    DIGEST_BLOCK,
    DIGEST_BLOCKS,
    digest,
    finished_state,
)
from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from tests.refusals import refused
from tests.unit_tests.data.conftest import TEXT

DOCUMENTS = [f"{number}: {TEXT[number % len(TEXT)]}" for number in range(40)]


@pytest.fixture
def make(tmp_path, tokenizer_dir):
    """Run ``preprocess`` into ``out`` with the toy tokenizer."""

    def run(*inputs, **values):
        values = {
            "workers": 1,
            "output_prefix": tmp_path / "out",
            "tokenizer_model": str(tokenizer_dir),
        } | values
        return preprocess(PreprocessConfig(inputs=list(inputs), **values))

    return run


@pytest.fixture
def jsonl(tmp_path):
    """A corpus with two lines that hold nothing and one empty text."""
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(DOCUMENTS)]
    path.write_text("\n".join(["", *lines[:20], "   ", '{"text": ""}', *lines[20:]]) + "\n")
    return path


def naive(tokenizer_dir, documents, special=False, end=()):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    return [[*tokenizer(text, add_special_tokens=special)["input_ids"], *end] for text in documents]


def read(prefix):
    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("workers", [1, 2])
def test_jsonl_equals_the_naive_loop(make, jsonl, tokenizer_dir, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(
        inputs, "CHUNK_BYTES", 500
    )  # many pieces: their order must not depend on who is faster
    report = make(jsonl, append_eod=True, workers=workers)
    expected = naive(tokenizer_dir, DOCUMENTS, end=[1])
    assert read(tmp_path / "out") == expected
    assert (report.documents, report.tokens, report.empty) == (40, sum(map(len, expected)), 3)
    assert report.input_bytes == jsonl.stat().st_size
    assert IndexedDataset(str(tmp_path / "out")).index.dtype == np.uint16
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus.jsonl",
        "out.bin",
        "out.idx",
        "out.source.json",
    ]


def test_special_tokens_only_when_asked(make, jsonl, tokenizer_dir, tmp_path):
    make(jsonl, add_special_tokens=True)
    assert read(tmp_path / "out") == naive(tokenizer_dir, DOCUMENTS, special=True)


def test_padding_and_truncation_of_the_tokenizer_do_not_cut_documents(
    make, jsonl, tokenizer_dir, tmp_path
):
    directory = tmp_path / "cutting"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer.backend_tokenizer.save(str(tokenizer_dir / "tokenizer.json.cut"))
    tokenizer.save_pretrained(directory)
    (tokenizer_dir / "tokenizer.json.cut").rename(directory / "tokenizer.json")
    make(jsonl, tokenizer_model=str(directory))
    assert read(tmp_path / "out") == naive(tokenizer_dir, DOCUMENTS)


def test_plain_text_by_file_and_by_line(make, tokenizer_dir, tmp_path):
    texts = ["First\n\n  line two\n", "Ünïcode\nend"]
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    make(*paths)
    assert read(tmp_path / "out") == naive(tokenizer_dir, texts)
    report = make(*paths, text_document="line", overwrite=True)
    lines = [line for text in texts for line in text.splitlines() if line]
    assert read(tmp_path / "out") == naive(tokenizer_dir, lines)
    assert report.empty == 1


def test_the_output_feeds_a_gpt_dataset(make, jsonl, tokenizer, tmp_path):
    make(jsonl, append_eod=True)
    config = GPTDatasetConfig(seq_length=16, blend=([str(tmp_path / "out")], None), split="80,20")
    splits = config.build(DatasetRequest((10, 5, 0), tokenizer))
    stream = [token for document in read(tmp_path / "out") for token in document]
    windows = {tuple(stream[i : i + 4]) for i in range(len(stream))}
    inside = [tuple(splits.train[0]["tokens"][i : i + 4].tolist()) for i in range(13)]
    assert (
        sum(window in windows for window in inside) >= 5
    )  # all but those across a shuffled document's end


@pytest.mark.parametrize(("ending", "place"), [(".bin", 40), (".bin", -1), (".idx", -16)])
def test_a_corpus_that_has_changed_is_refused(make, jsonl, tmp_path, ending, place):
    make(jsonl)
    open_corpus(str(tmp_path / "out"))
    path = tmp_path / f"out{ending}"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with refused(f"{path} has changed", "out.source.json"):
        open_corpus(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "size", [0, 1, DIGEST_BLOCK, DIGEST_BLOCK + 1, DIGEST_BLOCK * DIGEST_BLOCKS]
)
def test_small_files_are_read_whole_for_their_digest(tmp_path, size):
    path = tmp_path / "file"
    content = np.random.default_rng(0).bytes(size)
    path.write_bytes(content)
    found = digest(path)
    for place in range(0, size, max(size // 50, 1)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert digest(path) != found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"text": "a"', ("corpus.jsonl:44: ", "JSON", "column")),
        ('["a"]', ("corpus.jsonl:44: ", "object", "list")),
        (
            '{"txt": "a", "id": 3}',
            (":44: ", "'text'", "txt, id", "--json-key", "did you mean txt?"),
        ),
        ('{"text": 3}', (":44: ", "'text'", "int")),
        (b'{"text": "\xff"}', (":44: ", "UTF-8")),
    ],
)
def test_wrong_lines_are_named_and_leave_nothing_behind(
    make, jsonl, tmp_path, workers, line, parts
):
    with jsonl.open("ab") as file:
        file.write(line if isinstance(line, bytes) else line.encode())
    with refused(*parts):
        make(jsonl, workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_inputs_and_outputs_that_cannot_be_used_are_named(make, jsonl, tmp_path):
    for arguments, values, *parts in [
        ([tmp_path / "none.jsonl"], {}, "--input=", "none.jsonl"),
        ([tmp_path], {}, "--input="),
        ([jsonl], {"workers": 0}, "--workers=0"),
        ([jsonl], {"tokenizer_model": str(tmp_path)}, "tokenizer", str(tmp_path)),
        ([jsonl], {"output_prefix": jsonl / "below" / "out"}, "out.bin", "Not a directory"),
    ]:
        with refused(*parts):
            make(*arguments, **values)
    (tmp_path / "corpus.csv").write_text("x")
    with refused("corpus.csv", "--format"):
        make(tmp_path / "corpus.csv")
    (tmp_path / "empty.txt").write_text(" \n")
    with refused("empty.txt"):
        make(tmp_path / "empty.txt")


def test_an_existing_output_is_kept_unless_told_otherwise(make, jsonl, tmp_path):
    make(jsonl)
    before = (tmp_path / "out.bin").read_bytes()
    with refused("out.bin", "exists", "--overwrite"):
        make(jsonl, append_eod=True)
    assert (tmp_path / "out.bin").read_bytes() == before
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    with refused("broken.jsonl:1: ", "JSON"):
        make(broken, overwrite=True)
    assert (tmp_path / "out.bin").read_bytes() == before
    make(jsonl, append_eod=True, overwrite=True)
    assert (tmp_path / "out.bin").read_bytes() != before


def test_what_was_made_of_the_same_content_is_found(make, jsonl, tmp_path):
    made = make(jsonl)
    before = (tmp_path / "out.bin").stat().st_mtime_ns
    moved = jsonl.rename(tmp_path / "moved.jsonl")
    found = make(moved)
    assert (found.documents, found.tokens, found.found) == (made.documents, made.tokens, True)
    assert "same content" in found.summary()
    assert (tmp_path / "out.bin").stat().st_mtime_ns == before
    assert not make(moved, overwrite=True).found
    with moved.open("a") as file:
        file.write('{"text": "more"}\n')
    with refused("out.bin", "exists", "--overwrite"):
        make(moved)


class _Interrupts:
    """A tokenizer process that is interrupted at its third piece."""

    def __init__(self, encoder):
        self.encoder, self.calls = encoder, 0

    def __call__(self, piece):
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt
        return self.encoder(piece)


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_an_interrupted_run_goes_on(make, jsonl, tokenizer_dir, tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 500)
    monkeypatch.setattr("megatron.bridge.data.pretraining.indexed_writer.SAVE_SECONDS", seconds)
    second = tmp_path / "second.jsonl"
    second.write_text(jsonl.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(
            module,
            "ordered_map",
            lambda encoder, _: nullcontext(partial(map, _Interrupts(encoder))),
        )
        with pytest.raises(KeyboardInterrupt):
            make(jsonl, second, append_eod=True)
    progress = json.loads((tmp_path / "out.progress.json").read_text())
    done = progress["report"]["documents"]
    assert 0 < done < 40
    with (tmp_path / "out.bin.incomplete").open("ab") as file:
        file.write(b"what a killed writer had not counted yet")
    read_lines = []
    monkeypatch.setattr(
        module, "parse_record", lambda line, where: read_lines.append(where) or json.loads(line)
    )
    report = make(jsonl, second, append_eod=True)
    assert read(tmp_path / "out") == naive(tokenizer_dir, DOCUMENTS * 2, end=[1])
    assert (report.documents, report.input_bytes) == (80, 2 * jsonl.stat().st_size)
    assert len(read_lines) == 82 - done - (1 if done >= 20 else 0), "nothing is read twice"
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert names == ["out.bin", "out.idx", "out.source.json"]


def test_what_version_0_1_wrote_about_a_dataset_is_read(tmp_path):
    report = {
        "documents": 9,
        "tokens": 99,
        "empty": 1,
        "input_bytes": 500,
        "seconds": 0.5,
        "found": False,
    }
    saved = {"key": "abc", "place": [1, 0, 1], "report": report}
    for ending, text in ((".bin", "x"), (".idx", "x"), (".source.json", json.dumps(saved))):
        (tmp_path / f"out{ending}").write_text(text)
    state = finished_state(tmp_path / "out")
    assert (state.key, state.place.file, vars(state.report)) == ("abc", 1, report)


def test_another_input_does_not_go_on(make, jsonl, tokenizer_dir, tmp_path):
    (tmp_path / "out.bin.incomplete").write_bytes(b"1234")
    (tmp_path / "out.progress.json").write_text(
        json.dumps({"key": "other", "place": [0, 4, 2], "report": {"documents": 1, "tokens": 2}})
    )
    make(jsonl)
    assert read(tmp_path / "out") == naive(tokenizer_dir, DOCUMENTS)


def test_conversations_become_the_text_of_their_template(make, tokenizer_dir, tmp_path):
    """transformers' own rendering, and for other forms what fine-tuning makes of them."""
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    messages = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "The gentle rain."},
    ]
    turns = [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "The gentle rain."}]
    records = [
        {"messages": messages},
        {"conversations": turns},
        {"prompt": "a ", "completion": "b"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    make(path, format="chat", chat_template=template, append_eod=True)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    chat = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    ids = [*tokenizer(chat, add_special_tokens=False)["input_ids"], 1]
    pair = [
        *tokenizer("a ")["input_ids"],
        *tokenizer("b", add_special_tokens=False)["input_ids"],
        1,
    ]
    assert read(tmp_path / "out") == [ids, ids, pair]
    path.write_text(json.dumps({"messages": [{"role": "asistant", "content": "x"}]}) + "\n")
    with refused("chats.jsonl:1: message 1: ", "role='asistant'", "assistant"):
        make(path, format="chat", chat_template=template, overwrite=True)
    with refused("--chat-template=", "--format chat"):
        make(path, chat_template=template)


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(make, jsonl, tmp_path):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, limits[1])
    )  # the kernel refuses to write more, as a full disk
    try:
        with refused("out.bin", "File too large", "space"):
            make(jsonl)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_command_line(jsonl, tokenizer_dir, tmp_path, capsys):
    words = [
        "data",
        "preprocess",
        "--input",
        jsonl,
        "--tokenizer-model",
        tokenizer_dir,
        "--workers",
        "1",
    ]
    assert main([*map(str, words), "--output-prefix", f"{tmp_path}/o"]) == 0
    assert read(tmp_path / "o") == naive(tokenizer_dir, DOCUMENTS)
    assert "40 documents" in capsys.readouterr().err


def test_arguments_of_megatron_lm(tokenizer_dir, tmp_path):
    """One dataset for each key, named as by Megatron-LM's own tool."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text, "title": text[:9]}) + "\n" for text in DOCUMENTS)
    )
    words = [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tokenizer_dir,
        "--partitions",
        "1",
    ]
    words += ["--keep-sequential-samples"]
    words += ["--json-keys", "text", "title", "--workers", "1", "--output-prefix", tmp_path / "o"]
    assert main(["data", "preprocess", "--input", str(corpus), *map(str, words)]) == 0
    assert read(tmp_path / "o_text_document") == naive(tokenizer_dir, DOCUMENTS)
    assert read(tmp_path / "o_title_document") == naive(
        tokenizer_dir, [text[:9] for text in DOCUMENTS]
    )


def test_tokenizer_of_gpt2(tmp_path, capsys):
    """GPT-2's files become a tokenizer in Hugging Face's format, which gives the same ids."""
    from tokenizers import ByteLevelBPETokenizer, pre_tokenizers

    merges = [("t", "h"), ("th", "e"), ("e", "r")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(
        json.dumps({token: index for index, token in enumerate(tokens)})
    )
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{first} {second}\n" for first, second in merges)
    )
    expected = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    command = ["data", "preprocess", "--input", str(corpus), "--workers", "1", "--output-prefix"]
    command += [f"{tmp_path}/o", "--tokenizer-type", "GPT2BPETokenizer"]
    assert main(command) == 1
    assert "needs --vocab-file and --merge-file" in capsys.readouterr().err
    command += ["--vocab-file", f"{tmp_path}/vocab.json", "--merge-file", f"{tmp_path}/merges.txt"]
    assert main(command) == 0
    assert read(tmp_path / "o") == naive(tmp_path / "o_tokenizer", DOCUMENTS)
    dataset = IndexedDataset(str(tmp_path / "o"))  # its items are views of its file
    assert dataset[0].tolist() == expected.encode(DOCUMENTS[0]).ids


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("--tokenizer-type SentencePieceTokenizer", "--tokenizer-model"),
        ("--vocab-file vocab.json", "GPT2BPETokenizer"),
        ("--merge-file merges.txt", "GPT2BPETokenizer"),
        ("--tiktoken-pattern v1", "TikTokenizer"),
        ("--tokenizer-type TikTokenizer --tokenizer-model absent.json", "absent.json"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model absent.model", "absent.model"),
    ],
)
def test_other_tokenizers_are_refused(words, way_out, capsys):
    command = ["data", "preprocess", "--input", "c", "--output-prefix", "o"]
    assert main([*command, *words.split()]) == 1
    assert way_out in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("--split-sentences", "remove"),
        ("--keep-newlines", "remove"),
        ("--lang english", "remove"),
        ("--find-optimal-num-workers", "--workers"),
        ("--workers-to-check 16 32", "--workers"),
        ("--max-documents 9", "--workers"),
        ("--performance-dir x", "--workers"),
        ("--log-interval 100", "remove"),
    ],
)
def test_arguments_of_megatron_lm_without_a_counterpart_are_refused(words, way_out, capsys):
    command = [
        "data",
        "preprocess",
        "--input",
        "c",
        "--tokenizer-model",
        "t",
        "--output-prefix",
        "o",
    ]
    with pytest.raises(SystemExit):
        main([*command, *words.split()])
    reason = capsys.readouterr().err.split("error: ")[-1]
    assert reason.startswith(words.split()[0])
    assert way_out in reason
