# SPDX-License-Identifier: Apache-2.0
"""Commands and data whose paths are URLs: the bytes that paths on a disk give."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bridge.cli.main import main
from megatron.bridge.data.config import FinetuningDatasetConfig, GPTDatasetConfig, HFDatasetConfig
from megatron.bridge.data.dataset_config import DatasetRequest
from megatron.bridge.data.pretraining.gpt_builder import core_config, open_corpus
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.utils import storage
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.storage_paths import CACHE
from tests import buckets, toy_models
from tests.functional_tests.checkpoint.test_storage import server, started  # noqa: F401 - fixtures

pytestmark = pytest.mark.skipif(buckets.MISSING, reason=buckets.REASON)
HERE = f"s3://{buckets.NAME}"


@pytest.fixture
def elsewhere(server, tmp_path, monkeypatch):  # noqa: F811
    """What lets the test go on as another machine."""

    def move():
        moved.append(None)
        monkeypatch.setenv(CACHE, str(tmp_path / f"machine {len(moved)}"))

    moved = []
    return move


def test_a_model_goes_through_a_bucket_bit_for_bit(server, tmp_path, elsewhere, capsys):  # noqa: F811
    toy_models.make_llama(tmp_path / "source")
    for path in (tmp_path / "source").iterdir():
        server.files.put_file(str(path), f"{buckets.NAME}/source/{path.name}")
    assert (
        main(
            [
                "convert",
                "--hf-model",
                f"{HERE}/source",
                "--megatron-path",
                f"{HERE}/megatron",
                "--no-progress",
            ]
        )
        == 0
    )
    elsewhere()
    assert main(["checkpoint", "list", f"{HERE}/megatron"]) == 0
    assert "complete  newest" in capsys.readouterr().out
    server.fault = lambda method, path: (
        buckets.fails if path.endswith("/config.json") and method == "PUT" else None
    )
    export = [
        "export",
        "--hf-model",
        f"{HERE}/source",
        "--megatron-path",
        f"{HERE}/megatron",
        "--no-progress",
    ]
    assert main([*export, "--hf-path", f"{HERE}/exported"]) == 1
    assert f"{HERE}/exported" in capsys.readouterr().err
    assert not server.files.exists(f"{buckets.NAME}/exported/config.json")
    server.fault = lambda method, path: None
    server.requests.clear()
    assert main([*export, "--hf-path", f"{HERE}/exported"]) == 0
    sent = {path for method, path in server.requests if method == "PUT"}
    assert not [path for path in sent if path.endswith(".safetensors")], "they had arrived"
    assert main([*export, "--hf-path", f"{HERE}/exported"]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    elsewhere()
    found = storage.fetch(f"{HERE}/exported")
    assert _tensors(found) == _tensors(tmp_path / "source")
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        assert (found / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    assert (
        main(["verify", f"{HERE}/exported", f"{HERE}/megatron", "--skip-logits", "--no-progress"])
        == 0
    )
    assert main(["checkpoint", "diff", f"{HERE}/megatron", f"{HERE}/megatron", "--values"]) == 0
    assert main(["checkpoint", "verify", f"{HERE}/megatron"]) == 0
    shard = next(
        name for name in server.files.find(f"{buckets.NAME}/megatron") if name.endswith(".distcp")
    )
    server.files.pipe_file(shard, server.files.cat_file(shard)[:-1] + b"?")
    assert main(["checkpoint", "verify", f"{HERE}/megatron"]) == 1
    assert Path(shard).name in capsys.readouterr().out


def _tensors(folder):
    from safetensors.torch import load_file

    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {name: value.numpy().tobytes() for name, value in load_file(path).items()}
    return found


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["plot", f"{HERE}/run", "--output", f"{HERE}/loss.png"], ("output", "a local path")),
        (["checkpoint", "verify", "foo://bucket/run"], ("foo://", "s3://")),
        (["checkpoint", "verify", f"{HERE}/typo"], (f"{HERE}/typo", "does not exist")),
        (
            ["export", "--megatron-path", f"{HERE}/typo", "--hf-path", "x"],
            (f"{HERE}/typo", "does not exist"),
        ),
    ],
)
def test_a_url_that_cannot_be_used_is_named(server, capsys, command, words):  # noqa: F811
    assert main(command) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_records_are_those_of_the_files(server, tmp_path, elsewhere):  # noqa: F811
    lines = "".join(
        json.dumps({"prompt": f"{number}", "completion": "x"}) + "\n" for number in range(9)
    )
    for name in ("data/training.jsonl", "data/validation.jsonl", "one.jsonl"):
        server.files.pipe_file(f"{buckets.NAME}/{name}", lines.encode())
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines)
    folder = FinetuningDatasetConfig(dataset_root=f"{HERE}/data", seq_length=8, do_test=False)
    folder.check_sources()
    local = FinetuningDatasetConfig(
        dataset_root=str(tmp_path / "data"), seq_length=8, do_test=False
    )
    for split in ("train", "valid"):
        assert _records(folder, split) == _records(local, split)
    single = HFDatasetConfig(dataset_name=f"{HERE}/one.jsonl", seq_length=8)
    single.check_sources()
    assert _records(single, "train") == _records(
        HFDatasetConfig(dataset_name=str(tmp_path / "one.jsonl"), seq_length=8), "train"
    )
    server.files.pipe_file(
        f"{buckets.NAME}/one.jsonl", lines[: len(lines) // 2].rpartition("\n")[0].encode()
    )
    assert len(_records(single, "train")) < 5, "they changed in the bucket"
    with pytest.raises(UserError, match=f"dataset.dataset_name={HERE}/typo.jsonl does not exist"):
        HFDatasetConfig(dataset_name=f"{HERE}/typo.jsonl", seq_length=8).check_sources()
    with pytest.raises(UserError, match=f"dataset.dataset_root={HERE}/typo"):
        FinetuningDatasetConfig(dataset_root=f"{HERE}/typo", seq_length=8).check_sources()


def _records(config, split):
    return [record for _, record in config.source(split).records()]


def test_a_corpus_is_that_of_the_files(server, tmp_path, elsewhere):  # noqa: F811
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    for length in (5, 9, 3):
        builder.add_document(torch.arange(length), [length])
    builder.finalize(str(tmp_path / "text.idx"))
    for ending in (".bin", ".idx"):
        server.files.put_file(
            str(tmp_path / f"text{ending}"), f"{buckets.NAME}/corpus/text{ending}"
        )
    found, expected = open_corpus(f"{HERE}/corpus/text"), open_corpus(str(tmp_path / "text"))
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    config = GPTDatasetConfig(seq_length=8, blend=([f"{HERE}/corpus/text"], None), split="1")
    core = core_config(config, DatasetRequest((1, 0, 0), NullTokenizer(9)))
    assert Path(core.blend[0][0] + ".idx").is_file()
    with pytest.raises(UserError, match=f"{HERE}/corpus/typo.bin does not exist"):
        open_corpus(f"{HERE}/corpus/typo")
