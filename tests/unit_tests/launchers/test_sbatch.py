# SPDX-License-Identifier: Apache-2.0
"""The script for plain Slurm, started outside of a job, explains itself."""

import os
import subprocess

import pytest

from tests.unit_tests.project.tree import ROOT

SCRIPT = "scripts/training/launch_with_sbatch.sh"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--help"], 0, ""),
        ([], 2, "no recipe is given"),
        (["--recipe", "llama3_8b_pretrain_config"], 2, "this is no Slurm job"),
    ],
)
def test_by_hand_it_says_how_to_submit_it(words, code, error):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        ["bash", SCRIPT, *words], check=False, cwd=ROOT, env=outside, capture_output=True, text=True
    )
    assert done.returncode == code
    assert "sbatch --nodes=4" in done.stdout
    assert "MAX_REQUEUES" in done.stdout
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == bool(error)
