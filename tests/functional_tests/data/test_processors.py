# SPDX-License-Identifier: Apache-2.0
"""Samples with images equal those of transformers' composite processors: ids, pixels, grids and loss masks."""

import os
import subprocess
import sys

import pytest

from tests.toy_vision import TOYS
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/vlm"  # where scripts/extra.sh installs torchvision


@pytest.mark.skipif(not BESIDE.is_dir(), reason="no torchvision: run scripts/extra.sh vlm")
def test_samples_equal_those_of_composite_processors():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.functional_tests.data.processors_oracle"],
        env={**os.environ, "PYTHONPATH": str(BESIDE)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.splitlines() == [f"{name} done" for name in TOYS], ran.stderr[-2000:]
