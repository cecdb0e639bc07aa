# SPDX-License-Identifier: Apache-2.0
"""The example scripts, started as a user starts them, but in processes that are there."""

from pathlib import Path

from tests.commands import as_script
from tests.toy_models import make_llama

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "conversion"


def test_round_trip_over_two_processes(two_workers, tmp_path):
    make_llama(
        tmp_path / "hf",
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=45,
    )
    script = EXAMPLES / "hf_megatron_roundtrip_multi_gpu.py"
    words = [
        script,
        "--hf-model-id",
        tmp_path / "hf",
        "--tp",
        2,
        "--pp",
        1,
        "--output-dir",
        tmp_path / "out",
    ]
    (code, said), other = two_workers.run(as_script, ROOT, words)
    assert code == other[0] == 0, said
    assert "3 query groups are padded for --tp 2" in said
    assert "21 tensors" in said
    assert "all bitwise equal" in said
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_users_mistake_is_one_line_and_exit_code_1(tmp_path):
    words = [EXAMPLES / "convert_checkpoints.py", "--hf-model", tmp_path, "--output-dir", tmp_path]
    assert as_script(ROOT, words) == (
        1,
        f"error: {tmp_path} is not a Hugging Face model: it has no config.json\n",
    )
