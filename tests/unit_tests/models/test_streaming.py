# SPDX-License-Identifier: Apache-2.0
"""Conversion without the model in memory writes what conversion of a model writes, in bounded memory."""

import errno
import hashlib
import multiprocessing
import shutil
import threading
from pathlib import Path

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import loading, manifest
from megatron.bridge.checkpoint.manifest import DamagedError, HashingStream
from megatron.bridge.models.conversion.engine import streaming
from megatron.bridge.models.hf_pretrained.model_folder import RECORD
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.toy_models import make_llama

NAMED_AFTER_THE_SAVE = {"iter_0000000/.metadata", "iter_0000000/manifest.json"}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    make_llama(directory, num_hidden_layers=2, tie_word_embeddings=True, dtype=torch.bfloat16)
    return directory


@pytest.fixture(scope="module")
def megatron(hf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("megatron")
    AutoBridge.import_ckpt(hf, directory, show_progress=False)
    return directory


def files(directory):
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name != RECORD
    }


def assert_written_the_same(checkpoint, folder):
    """Import both ways, and export what was imported."""
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    bridge.save_megatron_model(bridge.to_megatron_model(wrap_with_ddp=False), folder / "whole")
    AutoBridge.import_ckpt(checkpoint, folder / "streamed", show_progress=False)
    whole, streamed = files(folder / "whole"), files(folder / "streamed")
    assert whole.keys() == streamed.keys()
    assert {name for name in whole if whole[name] != streamed[name]} == NAMED_AFTER_THE_SAVE
    bridge.export_ckpt(folder / "streamed", folder / "out", show_progress=False)


def test_half_precision_tied(hf, tmp_path):
    assert_written_the_same(hf, tmp_path)
    assert files(tmp_path / "out") == files(hf)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "deepseek_v3_fp8", "qwen3_moe_sequential", "gemma2"]
)
def test_every_kind_of_parameter(family_case, tmp_path, name):
    case = family_case(name)
    assert_written_the_same(case.checkpoint, tmp_path)
    assert harness.different_files(case, tmp_path / "out") == []


@pytest.mark.parametrize("limit", [1, 20_000])
def test_the_limit_changes_nothing(hf, megatron, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(streaming, "AHEAD", limit)
    AutoBridge.import_ckpt(hf, tmp_path / "megatron", show_progress=False)
    found, expected = files(tmp_path / "megatron"), files(megatron)
    assert {name for name in expected if found[name] != expected[name]} == NAMED_AFTER_THE_SAVE
    bridge = AutoBridge.from_hf_pretrained(hf)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    assert files(tmp_path / "out") == files(hf)


class Peak:
    """The most anonymous memory of this process while it is entered, above what it had, in bytes."""

    def __enter__(self):
        self._start, self.above, self._stop = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.wait(0.002):
            self.above = max(self.above, self._now() - self._start)

    def _now(self):
        (line,) = (
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )
        return int(line.split()[1]) * 1024


def peaks(folder, answer):
    """Memory of an import, of an export, and of a model as a whole, in a process that has done nothing else."""
    import megatron.bridge.training.config  # noqa: F401  # what is imported on the way is not counted

    streaming.AHEAD = 16 << 20
    AutoBridge.import_ckpt(folder / "small", folder / "warm", show_progress=False)
    with Peak() as importing:
        AutoBridge.import_ckpt(folder / "hf", folder / "megatron", show_progress=False)
    bridge = AutoBridge.from_hf_pretrained(folder / "hf")
    with Peak() as exporting:
        bridge.export_ckpt(folder / "megatron", folder / "out", show_progress=False)
    with Peak() as whole:
        bridge.load_megatron_model(folder / "megatron", wrap_with_ddp=False)
    answer.put((importing.above, exporting.above, whole.above))


@pytest.mark.sampled
def test_memory_is_what_was_allowed_and_not_the_models(tmp_path):
    make_llama(
        tmp_path / "hf",
        hidden_size=576,
        intermediate_size=2304,
        num_hidden_layers=9,
        shard_size="1GB",
    )
    make_llama(tmp_path / "small")
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert size > 120 << 20
    # what a process has freed before decides what its allocator keeps
    fresh = multiprocessing.get_context("spawn")
    answer = fresh.Queue()
    process = fresh.Process(target=peaks, args=(tmp_path, answer))
    process.start()
    importing, exporting, whole = answer.get(timeout=120)
    process.join()
    assert importing < size / 2.5
    assert exporting < size / 2.5
    assert whole > size  # what is compared with is seen


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "hf")
    shard = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="is truncated"):
        AutoBridge.import_ckpt(tmp_path / "hf", tmp_path / "megatron", show_progress=False)
    assert not (tmp_path / "megatron").exists()


class SmallDisk:
    """A file that takes so many writes."""

    def __init__(self, stream, writes):
        self._stream, self._left = stream, writes

    def write(self, data):
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._stream.write(data)

    def __getattr__(self, name):
        return getattr(self._stream, name)


@pytest.mark.parametrize(
    "writes", [3, 20, 40, 100]
)  # in the numbers, and in what torch writes around them
def test_a_full_disk_leaves_nothing_and_the_import_can_be_run_again(
    hf, tmp_path, monkeypatch, writes
):
    with monkeypatch.context() as patched:
        patched.setattr(
            manifest, "HashingStream", lambda stream, _: HashingStream(SmallDisk(stream, writes))
        )
        with pytest.raises(UserError, match="No space left on device; free some space"):
            AutoBridge.import_ckpt(hf, tmp_path / "megatron", show_progress=False)
    assert list(tmp_path.iterdir()) == []
    AutoBridge.import_ckpt(hf, tmp_path / "megatron", show_progress=False)
    AutoBridge.from_hf_pretrained(hf).export_ckpt(
        tmp_path / "megatron", tmp_path / "out", show_progress=False
    )
    assert files(tmp_path / "out") == files(hf)


def test_a_damaged_checkpoint_is_named_and_not_exported(hf, megatron, tmp_path):
    shutil.copytree(megatron, tmp_path / "megatron")
    (shard,) = (tmp_path / "megatron").rglob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{shard.name} is not what was written"):
        AutoBridge.from_hf_pretrained(hf).export_ckpt(
            tmp_path / "megatron", tmp_path / "out", show_progress=False
        )
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_read_ends_the_export(hf, megatron, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "AHEAD", 1)  # many reads
    read, reads = loading.read, []

    def breaks(state, directory):
        reads.append(1)
        if len(reads) == 5:
            raise DamagedError.of(directory, "the disk is gone")
        return read(state, directory)

    monkeypatch.setattr(loading, "read", breaks)
    with pytest.raises(DamagedError, match="the disk is gone"):
        AutoBridge.from_hf_pretrained(hf).export_ckpt(
            megatron, tmp_path / "out", show_progress=False
        )
    assert list(tmp_path.iterdir()) == []
    assert len(reads) < 8


def test_a_state_that_is_computed_from_parameters_is_refused(hf, tmp_path, monkeypatch):
    bridge = AutoBridge.from_hf_pretrained(hf)
    monkeypatch.setattr(streaming, "storage_id", lambda tensor: -1)
    with pytest.raises(UserError, match="is no view of a parameter"):
        bridge.save_megatron_checkpoint(
            bridge.to_megatron_provider(load_weights=False),
            tmp_path / "megatron",
            show_progress=False,
        )


def test_a_model_larger_than_the_checkpoint_says_is_refused(hf, megatron, tmp_path):
    make_llama(
        tmp_path / "other", num_hidden_layers=3, tie_word_embeddings=True, dtype=torch.bfloat16
    )
    with pytest.raises(UserError, match=r"the conversion plan is inconsistent"):
        AutoBridge.from_hf_pretrained(tmp_path / "other").export_ckpt(
            megatron, tmp_path / "out", False
        )
    assert not (tmp_path / "out").exists()
