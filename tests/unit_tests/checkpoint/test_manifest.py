# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to one file of a checkpoint is noticed, and the file is named."""

import os
import random
import shutil

import pytest
import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.bridge.checkpoint import manifest, paths, saving, verification
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from tests.workers import leave

ROUNDS = 40


def _save(directory, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: ShardedTensor.from_rank_offsets(name, torch.randn(size, generator=generator))
        for name, size in (("a", (40, 30)), ("b", (7,)))
    }
    saving.save(
        state,
        directory,
        lambda staging: (staging / "run_config.yaml").write_text("model: x\n...\n"),
    )
    return directory


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """Megatron-Core's planner asks for the rank, even of a process alone."""
    own = not distributed.is_initialized()
    distributed.initialize("gloo")
    yield
    if own:
        leave()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of one rank; a second shard is there so that two can change places."""
    directory = _save(tmp_path_factory.mktemp("run") / "iter_0000004")
    record = manifest.read(directory)
    shutil.copyfile(directory / "__0_0.distcp", directory / "__1_0.distcp")
    with (directory / "__1_0.distcp").open("r+b") as stream:
        stream.write(b"another")
    (directory / manifest.NAME).unlink()
    files = {name: entry for name, entry in record.files.items() if name != "__1_0.distcp"}
    manifest.write(directory, 4, record.save_id, files)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / saved.name)


def test_hashes_are_of_the_bytes_on_the_disk(saved):
    record = manifest.read(saved)
    assert list(record.files) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "metadata.json",
        "run_config.yaml",
    ]
    for name, entry in record.files.items():
        content = (saved / name).read_bytes()
        assert entry == manifest.FileRecord(len(content), xxhash.xxh3_128_hexdigest(content))
    verification.verify(saved, "fast")
    verification.verify(saved, "full")


def _flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _truncate(path, draw):
    os.truncate(path, draw.randrange(path.stat().st_size))


def _delete(path, draw):
    path.unlink()


def _grow(path, draw):
    with path.open("ab") as stream:
        stream.write(draw.randbytes(draw.randrange(1, 9)))


@pytest.mark.parametrize("damage", [_flip, _truncate, _delete, _grow])
@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "metadata.json",
        "run_config.yaml",
        manifest.NAME,
    ],
)
def test_one_damaged_file_is_named(copy, name, damage):
    draw = random.Random(f"{name} {damage.__name__}")
    whole = (copy / name).read_bytes()
    for _ in range(1 if damage is _delete else ROUNDS):
        damage(copy / name, draw)
        with pytest.raises(DamagedError) as caught:
            verification.verify(copy, "full")
        assert str(caught.value).startswith(f"checkpoint {copy} is damaged: ")
        assert name in str(caught.value).removeprefix(f"checkpoint {copy}")
        (copy / name).write_bytes(whole)
    verification.verify(copy, "full")


def test_two_shards_that_changed_places_are_both_named(copy):
    first, second, aside = copy / "__0_0.distcp", copy / "__1_0.distcp", copy.parent / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with pytest.raises(DamagedError, match=r"content of __0_0.distcp .* content of __1_0.distcp"):
        verification.verify(copy, "full")


def test_the_fast_mode_reads_small_files_only(copy, monkeypatch):
    monkeypatch.setattr(manifest, "SMALL", 2000)
    _flip(copy / "__0_0.distcp", random.Random(0))
    verification.verify(copy, "fast")
    with pytest.raises(DamagedError, match=r"content of __0_0.distcp"):
        verification.verify(copy, "full")
    (copy / "run_config.yaml").write_text("model: y\n...\n")
    with pytest.raises(DamagedError, match=r"content of run_config.yaml"):
        verification.verify(copy, "fast")


def test_a_directory_that_was_renamed(copy):
    renamed = copy.rename(paths.iteration_dir(copy.parent, 6))
    with pytest.raises(DamagedError, match="is of iteration 4"):
        verification.verify(renamed)


def test_a_manifest_of_another_save_does_not_fit(copy, tmp_path):
    other = _save(tmp_path / "other" / copy.name, seed=1)
    shutil.copyfile(other / manifest.NAME, copy / manifest.NAME)
    with pytest.raises(DamagedError):
        verification.verify(copy)


def test_a_later_format_is_not_called_damage(copy, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with pytest.raises(UserError, match="has the format 1") as caught:
        verification.verify(copy)
    assert not isinstance(caught.value, DamagedError)


def test_a_failed_save_leaves_nothing(tmp_path):
    def fail(staging):
        raise OSError(28, "No space left on device")

    state = {"a": ShardedTensor.from_rank_offsets("a", torch.ones(3))}
    with pytest.raises(UserError, match="No space left on device; free some space"):
        saving.save(state, tmp_path / "iter_0000001", fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("worth_a_thread", [1, 1 << 20])
def test_what_is_written_in_pieces_is_hashed_as_one(tmp_path, monkeypatch, worth_a_thread):
    monkeypatch.setattr(manifest, "CHUNK", 7)
    monkeypatch.setattr(manifest, "WORTH_A_THREAD", worth_a_thread)
    records = {}
    with manifest.hashing(tmp_path / "file", records, "file") as stream:
        stream.write(b"0123456789abcdef")
        stream.write(memoryview(bytearray(b"xyz")))
        assert stream.tell() == 19
    assert records == {"file": manifest.hash_file(tmp_path / "file")}
    assert (tmp_path / "file").read_bytes() == b"0123456789abcdefxyz"
