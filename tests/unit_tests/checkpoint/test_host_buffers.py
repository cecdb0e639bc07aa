# SPDX-License-Identifier: Apache-2.0
"""Copies that a save in the background writes from, and tensors that torch writes without copying them."""

import io
import threading

import pytest
import torch

from megatron.bridge.checkpoint import host_buffers, manifest
from megatron.bridge.checkpoint.host_buffers import HostBuffer, copy_size, with_own_storage

BUFFER = torch.arange(24, dtype=torch.float32)
TENSORS = [
    BUFFER[3:15].view(3, 4),
    BUFFER.view(4, 6).t(),
    torch.tensor(7.0, dtype=torch.float64),
    torch.arange(5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.tensor([True, False]),
]


@pytest.mark.parametrize("reserved", [0, 1, 4096])
def test_copies_are_equal_and_apart(reserved):
    memory = HostBuffer()
    memory.reserve(reserved)
    before = [tensor.clone() for tensor in TENSORS]
    sources = [tensor.clone() for tensor in TENSORS]
    copies = memory.copy_tensors(sources)
    for source in sources:
        source.zero_()
    for copy, tensor in zip(copies, before, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().nbytes() == tensor.nbytes


def test_memory_is_used_again():
    memory = HostBuffer()
    memory.reserve(sum(map(copy_size, TENSORS)))
    first = memory.copy_tensors(TENSORS)[0].data_ptr()
    assert memory.copy_tensors(TENSORS[:3])[0].data_ptr() == first


class Runtime:
    """Registers memory as CUDA's runtime does: what is registered must not be freed."""

    def __init__(self):
        self.held = {}

    def cudaHostRegister(self, address, size, flags):
        assert address not in self.held
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.held[address]


def test_a_gpu_gets_as_much_pinned_memory_as_is_needed(monkeypatch):
    runtime, memory = Runtime(), HostBuffer()
    monkeypatch.setattr(host_buffers, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor = torch.arange(1250.0)
    for count, held in ((1, 1), (4, 4), (1, 4)):
        copies = memory.copy_tensors([tensor] * count)
        assert list(runtime.held.values()) == [held * copy_size(tensor)]
        (address,) = runtime.held
        assert copies[0].data_ptr() == address


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_views_are_written_without_a_copy(tensor):
    found = with_own_storage(tensor)
    assert torch.equal(found, tensor)
    assert found.data_ptr() == tensor.data_ptr()
    if tensor.is_contiguous():
        assert found.untyped_storage().nbytes() == tensor.nbytes


def test_a_save_that_was_given_up_writes_no_more():
    cancelled = threading.Event()
    stream = manifest.HashingStream(io.BytesIO(), cancelled)
    stream.write(b"before")
    cancelled.set()
    with pytest.raises(OSError, match=r"[Cc]anceled"):
        stream.write(b"after")
    assert stream.tell() == len(b"before")
