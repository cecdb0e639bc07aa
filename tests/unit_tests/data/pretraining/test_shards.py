# SPDX-License-Identifier: Apache-2.0
"""Corpora in shards against one process: the same bytes, from every kind of input, after kills and damage."""

import gzip
import json
import pickle
import resource
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import DatasetRequest, GPTDatasetConfig
from megatron.bridge.data.pretraining import indexed_writer, inputs, shards
from megatron.bridge.data.pretraining.gpt_builder import open_corpus
from megatron.bridge.data.pretraining.inputs import InputPart
from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from tests.refusals import refused
from tests.unit_tests.data.conftest import TEXT

RECORDS = [{"id": number, "text": f"{number}: {TEXT[number % len(TEXT)]}"} for number in range(60)]


@pytest.fixture
def settings(tmp_path, tokenizer_dir):
    """A config with the toy tokenizer; inputs and the name of the output are given."""

    def of(*files, name="many", **values):
        values = {"workers": 1, "append_eod": True, "tokenizer_model": str(tokenizer_dir)} | values
        return PreprocessConfig(
            inputs=list(files), output_prefix=tmp_path / name / "corpus", **values
        )

    return of


@pytest.fixture
def make(settings):
    return lambda *files, size=700, **values: shards.preprocess_shards(
        settings(*files, **values), "local", size, {}
    )


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def one_process(settings, *files):
    config = settings(*files, name="one", overwrite=True)
    preprocess(config)
    return tuple(
        config.output_prefix.with_suffix(ending).read_bytes() for ending in (".bin", ".idx")
    )


def joined(tmp_path, name="many"):
    """The bytes of the shards' tokens, in order, and of the index."""
    files = sorted((tmp_path / name / "corpus.shards").glob("*.bin"))
    return b"".join(path.read_bytes() for path in files), (
        tmp_path / name / "corpus.idx"
    ).read_bytes()


def write_input(folder, kind):
    """The records in a file or more; returns what ``--input`` is given."""
    lines = [json.dumps(record) + "\n" for record in RECORDS]
    content = "".join(lines).encode()
    if kind == "gz":
        (folder / "c.jsonl.gz").write_bytes(
            gzip.compress(content[:900]) + gzip.compress(content[900:])
        )
    elif kind == "zst":
        with pyarrow.CompressedOutputStream(str(folder / "c.jsonl.zst"), "zstd") as file:
            file.write(content)
    elif kind == "parquet":
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(RECORDS), folder / "c.parquet", row_group_size=7
        )
    elif kind in ("hub", "files"):
        for number in range(3):
            (folder / f"part-{number}.jsonl").write_text(
                "".join(lines[20 * number : 20 * (number + 1)])
            )
    else:
        (folder / "c.jsonl").write_bytes(content)
    names = {
        "hub": f"hub:{folder}",
        "files": f"{folder}/*.jsonl",
        "file": f"file://{folder}/c.jsonl",
    }
    return names.get(kind) or str(next(folder.iterdir()))


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "hub", "files", "file"])
def test_every_kind_of_input_gives_the_bytes_of_one_process(
    settings, make, jsonl, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 300)
    monkeypatch.setattr(indexed_writer, "BLOCK", 7)
    folder = tmp_path / "input"
    folder.mkdir()
    given = write_input(folder, kind)
    expected = one_process(settings, jsonl)
    assert one_process(settings, given) == expected
    made = make(given)
    assert joined(tmp_path) == expected
    assert (made["documents"], sum(shard["report"]["documents"] for shard in made["shards"])) == (
        60,
        60,
    )
    assert (len(made["shards"]) > 2) == (kind not in ("gz", "zst")), (
        "what is compressed cannot be divided"
    )


@pytest.mark.parametrize("size", [1, 2, 99, 100, 101, 350, 10**6])
def test_each_line_is_in_one_shard_wherever_the_edges_are(tmp_path, settings, size):
    path = tmp_path / "lines.jsonl"
    texts = ["", "a", "", "bc" * 40, "x" * 99, "é" * 7, "", "end"]
    path.write_text("\n".join(texts) + "\n\n")
    found = inputs.divided(settings(path), inputs.find_parts(settings(path)), size)
    start = indexed_writer.InputPosition()
    read = [chunk for parts in found for chunk in inputs.read_chunks(settings(path), parts, start)]
    assert b"".join(line for chunk in read for line in chunk.lines) == path.read_bytes()
    assert len(found) == -(-path.stat().st_size // size)


def test_small_inputs_share_a_shard_and_a_shard_without_a_document_is_one(make, settings, tmp_path):
    files = []
    for number in range(9):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(json.dumps(RECORDS[number]) + "\n" if number else "\n" * 400)
    made = make(*files)
    assert made["shards"][0]["report"]["documents"] < 8
    assert 1 < len(made["shards"]) < 9
    assert joined(tmp_path) == one_process(settings, *files)
    made = make(files[0], files[1], size=1, name="tiny")
    assert 0 in [shard["report"]["documents"] for shard in made["shards"]]
    assert len(open_corpus(str(tmp_path / "tiny/corpus"))) == 1


def test_the_manifest_has_statistics_and_says_where_each_shard_is_from(make, jsonl, tmp_path):
    made = make(jsonl)
    for number, shard in enumerate(made["shards"]):
        part, facts = InputPart(*shard["parts"][0]), shard["facts"]
        assert (part.url, part.start) == (str(jsonl), 700 * number)
        assert facts["node"] == socket.gethostname()
        assert 1 < facts["shortest"] <= facts["median"] <= facts["longest"]
        assert len(facts["sha256"]) == 64
    assert made == json.loads((tmp_path / "many/corpus.manifest.json").read_text())
    assert len(made["tokenizer"]) == 64
    assert not (tmp_path / "many/corpus.shards/incomplete").exists()


def test_training_reads_the_samples_of_one_process(settings, make, jsonl, tokenizer, tmp_path):
    one_process(settings, jsonl)
    make(jsonl)

    def samples(name, **values):
        prefix, cache = str(tmp_path / name / "corpus"), str(tmp_path / f"cache-{name}")
        config = GPTDatasetConfig(
            seq_length=16, blend=([prefix], None), split="80,20", path_to_cache=cache, **values
        )
        splits = config.build(DatasetRequest((30, 5, 0), tokenizer))
        return np.stack(
            [split[at]["tokens"].numpy() for split in splits[:2] for at in range(len(split))]
        )

    expected = samples("one")
    assert (samples("many") == expected).all()
    assert (samples("many", mmap_bin_files=False) == expected).all()
    corpus = pickle.loads(pickle.dumps(open_corpus(str(tmp_path / "many/corpus"))))
    one = open_corpus(str(tmp_path / "one/corpus"))
    assert (corpus.get(50, 3, 4) == one[50][3:7]).all()


class Killed(BaseException):
    """Ends a process in the middle, as far as one can see."""


def test_a_kill_anywhere_costs_one_shard(make, settings, jsonl, tmp_path, monkeypatch):
    expected = one_process(settings, jsonl)
    real, writes = shards.DocumentEncoder.__call__, []

    def encode(self, chunk):
        writes.append(chunk.source)
        if len(writes) in (3, 5):
            raise Killed
        return real(self, chunk)

    monkeypatch.setattr(shards.DocumentEncoder, "__call__", encode)
    for _ in range(2):
        with pytest.raises(Killed):
            make(jsonl)
        assert shards.finished_manifest(tmp_path / "many/corpus") is None
    made = make(jsonl)
    assert len(writes) == len(made["shards"]) + 2
    assert joined(tmp_path) == expected
    make(jsonl)
    assert len(writes) == len(made["shards"]) + 2, "what is made is found"


@pytest.mark.parametrize("damage", ["lost", "shorter", "other", "another's"])
def test_a_lost_or_damaged_shard_is_named_and_made_again(make, settings, jsonl, tmp_path, damage):
    make(jsonl)
    expected = one_process(settings, jsonl)
    path = tmp_path / "many/corpus.shards/000002.bin"
    content = path.read_bytes()
    if damage == "lost":
        path.unlink()
    elif damage == "another's":
        shutil.copy(path.with_name("000001.bin"), path)
    else:
        path.write_bytes(
            content[:-2] if damage == "shorter" else content[:-1] + bytes([content[-1] ^ 1])
        )
    with refused(str(path), "lost" if damage == "lost" else "changed", "write it again"):
        open_corpus(str(tmp_path / "many/corpus"))
    make(jsonl)
    assert joined(tmp_path) == expected
    open_corpus(str(tmp_path / "many/corpus"))


def test_repeated_shards_are_named(make, jsonl, tmp_path, capsys):
    twice = tmp_path / "twice.jsonl"
    shutil.copy(jsonl, twice)
    made = make(jsonl, twice, size=10**6)
    assert len(made["shards"]) == 1
    made = make(jsonl, twice, size=jsonl.stat().st_size, name="two")
    said = " ".join(capsys.readouterr().err.split())
    assert all(
        part in said
        for part in (
            "shard 1 of 2",
            "twice.jsonl",
            "repeats shard 0 of 2",
            "corpus.jsonl",
            "--input",
        )
    )


def test_one_wrong_line_is_named_with_the_node_and_the_rest_is_kept(
    make, settings, jsonl, tmp_path
):
    with jsonl.open("a") as file:
        file.write('{"text": 3}\n')
    with refused(f"{jsonl} from ", "'text'", "int", f"node {socket.gethostname()}"):
        make(jsonl)
    done = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "many/corpus.shards").glob("*.bin")
    }
    assert done
    assert not list((tmp_path / "many/corpus.shards").rglob("*.incomplete"))
    assert not (tmp_path / "many/corpus.idx").exists()
    with refused(str(jsonl), "int"):
        make(jsonl)
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())


def test_another_corpus_is_kept_unless_told_otherwise(make, jsonl, tmp_path):
    make(jsonl)
    before = joined(tmp_path)
    with refused("corpus.manifest.json", "--overwrite"):
        make(jsonl, size=800)
    assert joined(tmp_path) == before
    make(jsonl, size=800, overwrite=True)
    assert joined(tmp_path) == before


def test_a_full_disk_is_named_with_its_node_and_leaves_no_part(make, jsonl, tmp_path):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = 4 * jsonl.stat().st_size
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2_000, limits[1])
    )  # the kernel refuses to write more, as a full disk
    try:
        with refused("File too large", "space", f"node {socket.gethostname()}", "shard 0"):
            make(jsonl, size=size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    left = [path for path in tmp_path.rglob("many/**/*") if path.is_file()]
    assert [path.name for path in left] == ["corpus.manifest.json"]
    assert make(jsonl, size=size)["documents"] == 60


def test_workers_that_are_killed_each_time_are_named(make, jsonl, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 300)
    real, chunks = shards.DocumentEncoder.__call__, []

    def dies(self, chunk):
        chunks.append(chunk)
        if len(chunks) == 3:
            signal.raise_signal(signal.SIGKILL)
        return real(self, chunk)

    monkeypatch.setattr(shards.DocumentEncoder, "__call__", dies)
    with refused("shard 0 of 1", f"on node {socket.gethostname()}: ", "memory", "--workers"):
        make(jsonl, workers=2, size=10**6)


def test_a_task_of_another_machine_notes_what_is_wrong(settings, jsonl, tmp_path, tokenizer_dir):
    """What an executor starts there: it knows the plan alone."""
    config = settings(jsonl)
    encoder = shards.DocumentEncoder(config)
    plan = shards.ShardPlan.of(config, encoder, 700)
    shards._claim_folder(plan)
    path = shards.manifest_path(config.output_prefix)
    shards.make_shards(path, [1, 3])
    assert plan.missing(range(5)) == [0, 2, 4]
    shutil.copytree(tokenizer_dir, tmp_path / "other")
    text = (tmp_path / "other/tokenizer.json").read_text()
    (tmp_path / "other/tokenizer.json").write_text(text.replace('"</s>"', '"</t>"'))
    saved = json.loads(path.read_text())
    saved["config"]["tokenizer_model"] = str(tmp_path / "other")
    path.write_text(json.dumps(saved))
    shards.make_shards(path, [2])
    said = plan.aside(2, "failed").read_text()
    assert all(
        part in said
        for part in (socket.gethostname(), "--tokenizer-model", str(tmp_path / "other"))
    )


BAD = {
    "foo://bucket/x.jsonl": ("foo", "scheme"),
    "hub:some/name": ("hub:some/name", "revision=COMMIT"),
    "hub:some/name?revison=a": ("revison", "revision=COMMIT"),
    "{folder}": ("directory", "/*.jsonl"),
    "{folder}/none-*.jsonl": ("none-*.jsonl", "pattern"),
    "{folder}/none.jsonl": ("none.jsonl", "No such file", "path"),
    "{folder}/short.jsonl.gz": ("short.jsonl.gz", "complete"),
    "{folder}/short.jsonl.zst": ("short.jsonl.zst", "complete"),
    "{folder}/bad.parquet": ("bad.parquet", "complete"),
    "{folder}/x.csv": ("x.csv", "--format"),
}


@pytest.mark.parametrize("given", BAD)
@pytest.mark.parametrize("sharded", [False, True])
def test_inputs_that_cannot_be_read_are_named_and_nothing_is_left(
    make, settings, tmp_path, given, sharded
):
    folder = tmp_path / "input"
    folder.mkdir()
    for kind in ("gz", "zst"):
        path = tmp_path / kind
        path.mkdir()
        written = Path(write_input(path, kind)).read_bytes()
        (folder / f"short.jsonl.{kind}").write_bytes(written[:-9])
    (folder / "bad.parquet").write_text("no table")
    (folder / "x.csv").write_text("a,b")
    given_path = given.format(folder=folder)
    with refused("--input=" if "csv" not in given else "csv", *BAD[given]):
        make(given_path) if sharded else preprocess(settings(given_path, name="many"))
    left = [path.name for path in tmp_path.rglob("many/**/*") if path.is_file()]
    assert left in ([], ["corpus.manifest.json"])


def test_what_is_in_a_store_is_read_through_its_file_system(make, settings, jsonl, tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("a", "b"):
        store.pipe(f"/bucket/{name}.jsonl", jsonl.read_bytes())
    made = make("memory://bucket/*.jsonl")
    assert made["documents"] == 120
    content, _ = one_process(settings, jsonl)
    assert joined(tmp_path)[0] == content * 2


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--executor slurm", ("--executor slurm", "--sbatch partition=NAME time=")),
        ("--executor local --sbatch time=1", ("--executor local", "time")),
        ("--shard-mb 3", ("--shard-mb", "--executor")),
        ("--sbatch a=b", ("--sbatch", "--executor")),
    ],
)
def test_the_command_refuses_what_has_no_meaning(
    jsonl, tokenizer_dir, tmp_path, capsys, words, parts
):
    output = ["--output-prefix", f"{tmp_path}/out", "--tokenizer-model", str(tokenizer_dir)]
    assert main(["data", "preprocess", "--input", str(jsonl), *output, *words.split()]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert all(part in said for part in parts)


def test_the_command_makes_one_corpus_for_each_key(jsonl, tokenizer_dir, tmp_path, capsys):
    output = [
        "--output-prefix",
        f"{tmp_path}/out",
        "--tokenizer-model",
        str(tokenizer_dir),
        "--workers",
        "1",
    ]
    words = ["--executor", "local", "--json-keys", "text"]
    assert main(["data", "preprocess", "--input", str(jsonl), *output, *words]) == 0
    assert "60 documents" in " ".join(capsys.readouterr().err.split())
    assert len(open_corpus(f"{tmp_path}/out_text_document")) == 60
