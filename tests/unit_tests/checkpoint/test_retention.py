# SPDX-License-Identifier: Apache-2.0
"""What is kept: the newest published checkpoint always."""

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.checkpointing.save_load import prune


@pytest.mark.parametrize(
    ("newest", "keep", "left"),
    [
        (40, -1, [10, 20, 30, 40, 50]),
        (40, 1, [40, 50]),
        (40, 2, [30, 40, 50]),
        (40, 9, [10, 20, 30, 40, 50]),
        # A run that went back to 10 and has just saved 20: what lies ahead is not its own yet.
        (20, 1, [20, 30, 40, 50]),
    ],
)
def test_only_older_ones_are_deleted(tmp_path, newest, keep, left):
    for iteration in (10, 20, 30, 40, 50):
        paths.iteration_dir(tmp_path, iteration).mkdir()
    prune(tmp_path, newest, keep)
    assert paths.published_iterations(tmp_path) == left
