# SPDX-License-Identifier: Apache-2.0
"""A tiny model on disk, and a process that is as it was after a run in it."""

import pytest

from tests.toy_run import save_llama


@pytest.fixture
def run_in_process():
    """Whatever a run initialises in this process is gone after the test."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def hf_directory(tmp_path, run_in_process):
    """A tiny Hugging Face model for a run in this process."""
    return save_llama(tmp_path / "hf")
