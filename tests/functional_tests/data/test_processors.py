# SPDX-License-Identifier: Apache-2.0
"""Samples with images equal those of transformers' composite processors: ids, pixels, grids and loss masks."""

import os
import subprocess
import sys

import pytest

from tests.toy_vision import TOYS
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/vlm"  # where scripts/extra.sh installs torchvision


pytestmark = pytest.mark.skipif(
    not BESIDE.is_dir(), reason="no torchvision: run scripts/extra.sh vlm"
)


def ran_beside(*words):
    """Output of a process of its own, which has torchvision and PyAV."""
    env = {**os.environ, "PYTHONPATH": str(BESIDE)}
    return subprocess.run(
        [sys.executable, "-m", *words],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_samples_equal_those_of_composite_processors():
    ran = ran_beside("tests.functional_tests.data.processors_oracle")
    assert ran.stdout.splitlines() == [f"{name} done" for name in TOYS], ran.stderr[-2000:]


@pytest.mark.parametrize(
    "names",
    [
        ("qwen2_5_vl",),
        pytest.param(
            ("qwen3_vl", "qwen3_5_vl", "glm4v", "internvl", "smolvlm"), marks=pytest.mark.slow
        ),
    ],
    ids="+".join,
)
def test_the_loss_on_videos_is_that_of_transformers(names):
    ran = ran_beside("tests.functional_tests.data.video_training", *names)
    found = [line for line in ran.stdout.splitlines() if line.endswith("done") or ", not " in line]
    assert found == [f"{name} done" for name in names], ran.stderr[-2000:]


def test_mistakes_in_videos_are_named():
    ran = ran_beside(
        "pytest", "-q", "-p", "no:cacheprovider", "tests/functional_tests/data/video_mistakes.py"
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
