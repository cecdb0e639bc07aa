# SPDX-License-Identifier: Apache-2.0
"""The example scripts as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.toy_models import make_llama

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "conversion"


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_round_trip_over_two_processes(tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3, hidden_size=45)
    script = EXAMPLES / "hf_megatron_roundtrip_multi_gpu.py"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    found = run(
        *torchrun, script, "--hf-model-id", tmp_path / "hf", "--tp", 2, "--pp", 1, "--output-dir", tmp_path / "out"
    )
    assert found.returncode == 0, found.stderr
    assert "3 query groups are padded for --tp 2" in found.stderr
    assert "21 tensors" in found.stderr
    assert "all bitwise equal" in found.stderr
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_users_mistake_is_one_line_and_exit_code_1(tmp_path):
    found = run(
        sys.executable, EXAMPLES / "convert_checkpoints.py", "--hf-model", tmp_path, "--output-dir", tmp_path
    )
    assert found.returncode == 1
    assert found.stderr == f"error: {tmp_path} is not a Hugging Face model: it has no config.json\n"
