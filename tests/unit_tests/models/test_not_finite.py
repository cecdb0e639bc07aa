# SPDX-License-Identifier: Apache-2.0
"""Weights that are NaN or infinite are named and counted, and are nothing that a proof can hold for."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge.cli.main import main
from megatron.bridge.models.hf_pretrained.safetensors_writer import not_finite
from tests.workers import leave

BASE = Path("tests/fixtures/v0.1/base").resolve()
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_counted(dtype):
    values = torch.ones(1000, dtype=dtype)
    assert not_finite(values) == 0
    values[[3, 500, 999]] = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
    assert not_finite(values) == 3
    assert not_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)) == 0, (
        "only the sum overflows"
    )


def test_a_model_with_nan_is_named_by_export_and_by_verify(tmp_path, capsys):
    broken = shutil.copytree(BASE, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors[NAME][0, :2] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    megatron, again = str(tmp_path / "megatron"), str(tmp_path / "again")
    assert main(["convert", "--hf-model", str(broken), "--megatron-path", megatron]) == 0
    assert (
        main(["export", "--hf-model", str(broken), "--megatron-path", megatron, "--hf-path", again])
        == 0
    )
    assert f"{NAME} (2)" in capsys.readouterr().err
    assert main(["verify", str(broken), megatron, "--skip-logits"]) == 1
    said = capsys.readouterr()
    assert NAME in said.err + said.out
    leave()
