# SPDX-License-Identifier: Apache-2.0
"""``launch --dry-run`` where NeMo-Run is not installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.bridge.cli import launch
from tests.unit_tests.cli.test_main import run

LAUNCH = ("launch", "--recipe", "llama32_1b_pretrain_config", "--nodes", "2", "--devices", "8")


@pytest.fixture(autouse=True)
def without_nemo_run(monkeypatch):
    found = importlib.util.find_spec

    def find_spec(name, *rest):
        return None if name == "nemo_run" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_a_dry_run_shows_what_would_run(capsys):
    code, out, _ = run(capsys, *LAUNCH, "--dry-run", "train.train_iters=7")
    assert code == 0
    assert "2 x 8 processes, started by torchrun" in out
    assert "run_recipe.py --recipe llama32_1b_pretrain_config train.train_iters=7" in out
    assert "hf-megatron-bridge[launch]" in out


def test_scripts_get_the_names_of_the_api(capsys, tmp_path):
    """A script of the Megatron Bridge API has underscores, however the option was typed."""
    script = tmp_path / "own.py"
    script.write_text("")
    words = ("--script", str(script), "--seq-length", "64", "--packed_sequence", "--hf_model", "a")
    code, out, _ = run(capsys, *LAUNCH, "--dry-run", *words)
    assert code == 0
    recipe = "--recipe llama32_1b_pretrain_config"
    assert f"own.py {recipe} --hf-model a --seq_length 64 --packed_sequence\n" in out


def test_a_dry_run_checks_the_config(capsys):
    code, _, error = run(capsys, *LAUNCH, "--dry-run", "model.tensor_model_parallel_size=3")
    assert code == 1
    assert "model.tensor_model_parallel_size=3" in error


def test_a_launch_is_refused(capsys):
    code, _, error = run(capsys, *LAUNCH)
    assert code == 1
    assert "hf-megatron-bridge[launch]" in error


def test_no_module_beside_the_script_hides_one_of_python():
    """Python looks for modules in the folder of a script first."""
    script = Path(launch.__file__).parent / "entry" / launch.RUN_RECIPE
    names = {path.stem for path in script.parent.glob("*.py")}
    assert names == {"__init__", "run_recipe"}
    done = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--recipe" in done.stdout
