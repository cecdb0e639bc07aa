# SPDX-License-Identifier: Apache-2.0
"""What is read right into memory is what torch's own reader reads."""

import io

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from megatron.bridge.checkpoint import inplace_reader


class _Into:
    """Answers with one tensor, as a planner does."""

    def __init__(self, target):
        self.target, self.committed = target, 0

    def resolve_tensor(self, item):
        return self.target

    def commit_tensor(self, item, tensor):
        assert tensor.data_ptr() == self.target.data_ptr()
        self.committed += 1


def _read(kind, directory, target, offsets=None):
    """Read what lies at ``offsets`` of the tensor ``a`` into ``target``."""
    found = kind(directory)
    found.set_up_storage_reader(found.read_metadata(), is_coordinator=True)
    begin, into = torch.Size(offsets or [0] * target.dim()), _Into(target)
    where = next(index for index in found.storage_data if index.fqn == "a")
    index = MetadataIndex("a", torch.Size([0] * target.dim()))
    item = ReadItem(LoadItemType.TENSOR, index, begin, where, begin, target.shape)
    found.read_data(LoadPlan([item]), into).wait()
    assert into.committed == 1
    return target


@pytest.fixture
def copies(monkeypatch):
    """Names the calls that read a whole tensor into memory of its own."""
    calls, load = [], torch.load

    def counted(file, map_location=None, **options):
        calls.extend(["copy"] if map_location == "cpu" else [])
        return load(file, map_location=map_location, **options)

    monkeypatch.setattr(inplace_reader, "LARGE", 1)
    monkeypatch.setattr(torch, "load", counted)
    return calls


def _save(directory, tensor):
    torch_checkpoint.save({"a": tensor}, storage_writer=FileSystemWriter(directory), no_dist=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize(
    ("shape", "wanted", "offsets"),
    [
        ((5, 4, 3), (5, 4, 3), (0, 0, 0)),
        ((5, 4, 3), (2, 4, 3), (3, 0, 0)),
        ((40,), (7,), (31,)),
        ((1, 6), (1, 6), (0, 0)),
    ],
)
def test_whole_rows_are_not_copied(tmp_path, copies, dtype, shape, wanted, offsets):
    tensor = torch.randint(0, 200, shape).to(dtype)
    _save(tmp_path, tensor)
    target = _read(
        inplace_reader.InplaceReader, tmp_path, torch.zeros(wanted, dtype=dtype), offsets
    )
    assert not copies
    expected = tensor[
        tuple(slice(begin, begin + size) for begin, size in zip(offsets, wanted, strict=True))
    ]
    assert torch.equal(target.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("stored", "target", "offsets"),
    [
        (torch.randn(6, 4), torch.zeros(6, 2), (0, 1)),  # columns
        (torch.randn(4, 6).t(), torch.zeros(6, 4), (0, 0)),  # stored by columns
        (torch.randn(6, 4), torch.zeros(4, 6).t(), (0, 0)),  # wanted by columns
        (torch.randn(6, 4), torch.zeros(6, 4, dtype=torch.bfloat16), (0, 0)),  # another dtype
        (torch.randn(6, 4), torch.zeros(12, 4)[::2], (0, 0)),  # rows of another tensor
    ],
)
def test_what_lies_otherwise_is_read_as_by_torch(tmp_path, copies, stored, target, offsets):
    _save(tmp_path, stored)
    expected = _read(FileSystemReader, tmp_path, target.clone(), offsets)
    copies.clear()
    _read(inplace_reader.InplaceReader, tmp_path, target, offsets)
    assert copies == ["copy"]
    assert torch.equal(target, expected)
    assert target.any()


def test_rows_of_a_view_that_was_stored_with_its_storage(tmp_path, copies):
    _save(tmp_path, torch.arange(30.0).view(10, 3)[4:])
    found = _read(inplace_reader.InplaceReader, tmp_path, torch.zeros(2, 3), (1, 0))
    assert torch.equal(found, torch.arange(15.0, 21).view(2, 3))
    assert not copies


def test_a_gpu_is_filled_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(inplace_reader, "STAGING", 100)
    values, sizes, read = torch.arange(252, dtype=torch.uint8), [], inplace_reader._read_into
    monkeypatch.setattr(
        inplace_reader, "_read_into", lambda flat, part: (sizes.append(len(flat)), read(flat, part))
    )
    found = torch.zeros_like(values)
    inplace_reader._read_in_blocks(found, io.BytesIO(values.numpy().tobytes()))
    assert torch.equal(found, values)
    assert sizes == [100, 100, 52]


def test_a_file_that_ends_early(tmp_path, copies, monkeypatch):
    _save(tmp_path, torch.randn(100, 100))
    (shard,) = tmp_path.glob("*.distcp")
    monkeypatch.setattr(
        inplace_reader, "_contiguous_offset", lambda *args: shard.stat().st_size - 8
    )
    with pytest.raises(EOFError, match="39992 bytes of a tensor are missing"):
        _read(inplace_reader.InplaceReader, tmp_path, torch.zeros(100, 100))


def test_small_tensors_and_objects_are_read_as_by_torch(tmp_path):
    state = {"a": torch.randn(3), "b": [1, 2]}
    torch_checkpoint.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    found = {"a": torch.zeros(3), "b": None}
    torch_checkpoint.load(
        found, storage_reader=inplace_reader.InplaceReader(tmp_path), no_dist=True
    )
    assert torch.equal(found["a"], state["a"])
    assert found["b"] == [1, 2]
