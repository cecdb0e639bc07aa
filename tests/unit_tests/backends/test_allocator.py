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
from megatron.bridge.backends.allocator import keep_freed_memory

def step():
    tensors = [torch.zeros(1 << 20) for _ in range(20)]

if {keep}:
    keep_freed_memory()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="does nothing beside a GPU")
def test_freed_memory_is_kept():
    # where glibc may move this limit, it comes to keep such tensors by itself, on some starts
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    faults = {}
    for keep in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", STEPS.format(keep=keep)],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        faults[keep] = int(done.stdout)
    assert faults[True] * 4 < faults[False]  # 80 MB: up to 20,480 pages, fewer where the kernel joins them
