# SPDX-License-Identifier: Apache-2.0
"""The whole demo, with fewer steps."""

import subprocess

import pytest

from tests.unit_tests.project.tree import ROOT


@pytest.mark.slow
@pytest.mark.network
def test_demo(tmp_path):
    arguments = f"--steps 6 --out {tmp_path / 'demo'}"
    subprocess.run(["make", "demo", f"ARGS={arguments}"], cwd=ROOT, check=True)
    model = tmp_path / "demo" / "SmolLM2-135M-Shakespeare"
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "loss.png",
        "run_config.yaml",
    ):
        assert (model / name).stat().st_size
    robot = tmp_path / "demo" / "SmolLM2-135M-Robot"
    assert (robot / "model.safetensors").stat().st_size == (
        model / "model.safetensors"
    ).stat().st_size
