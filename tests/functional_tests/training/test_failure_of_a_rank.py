# SPDX-License-Identifier: Apache-2.0
"""A rank that refuses something in the middle of a step ends the other ranks, which name its sentence."""

import os
import subprocess
import sys
from pathlib import Path

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.training.vlm_step import forward_step
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.processes import free_port
from tests import vision_run

SENTENCE = "the second stage cannot use this batch"


def refuse_on_the_last_stage(data_iterator, model):
    if os.environ["RANK"] == "1":
        raise UserError(SENTENCE)
    return forward_step(data_iterator, model)


def train_as_a_command(folder: Path) -> int:
    """Train under two pipeline stages and end as a command does."""

    def train() -> int:
        vision_run.run(folder, refuse_on_the_last_stage, model={"pipeline_model_parallel_size": 2})
        return 0

    return exit_code(train)


def test_refusal_on_one_pipeline_stage_of_a_vision_model_ends_all_ranks(tmp_path):
    folder = vision_run.write("qwen2_5_vl", tmp_path)
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    # no launcher, which would end the first stage when it sees that the second one has failed
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = [(rank.communicate(timeout=240)[1], rank.returncode) for rank in ranks]

    assert first[1] == second[1] == 1
    assert f"error (rank 1): {SENTENCE}" in second[0]
    assert f"rank 1: {SENTENCE}" in first[0]
    assert "Traceback" not in first[0] + second[0]


if __name__ == "__main__":
    sys.exit(train_as_a_command(Path(sys.argv[1])))
