# SPDX-License-Identifier: Apache-2.0
"""Freed tensors are reused without page faults, in a process that asked for it."""

import os
import subprocess
import sys

import pytest
import torch

STEPS = """
import resource
import torch
from megatron.bridge.backends.cpu.allocator import keep_freed_memory

def step():
    tensors = [torch.zeros(1 << 20) for _ in range(20)]

def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="does nothing beside a GPU")
def test_freed_memory_is_kept():
    # where glibc may move this limit, it comes to keep such tensors by itself, on some starts
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], check=True, capture_output=True, text=True, env=environment
    )
    without, kept = map(int, done.stdout.split())
    assert kept * 4 < without  # 80 MB: up to 20,480 pages, fewer where the kernel joins them
