# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge doctor`` says what a machine has, what a run would use there, and how fast it is."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron.bridge.backends.cpu import device
from megatron.bridge.backends.hardware import bf16, compiler, speed
from megatron.bridge.cli import doctor
from megatron.bridge.cli.main import main


def lines_of(capsys, *arguments):
    assert main(["doctor", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_recipe_on_a_machine_without_a_gpu(capsys):
    lines = lines_of(capsys, "--recipe", "qwen3_30b_a3b_pretrain_config", "--no-measure")
    text = "\n".join(lines)
    assert "without a GPU" in lines
    assert "layer spec of backend=auto: torch (there is no GPU)" in lines
    assert "layer spec of this run: torch (model.backend=auto)" in lines
    assert re.search(r"model\.bias_activation_fusion=True becomes False: .*CPUs", text)
    assert "experts of the torch spec: one product per expert" in text
    assert "measured" not in text


@pytest.mark.parametrize(("choice", "how"), [("widen", "computed in fp32"), ("native", "native")])
def test_products_in_bf16(monkeypatch, choice, how):
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    monkeypatch.setenv(bf16.VARIABLE, choice)
    bf16.choose_products.cache_clear()
    try:
        (line,) = [line for line in doctor._kernels() if line.startswith("products in bf16")]
    finally:
        bf16.choose_products.cache_clear()
    assert how in line
    assert f"({bf16.VARIABLE}={choice})" in line


def test_settings_change_the_run(capsys):
    lines = lines_of(
        capsys, "--recipe", "llama32_1b_pretrain_config", "--no-measure", "model.backend=torch"
    )
    assert "layer spec of this run: torch (model.backend=torch)" in lines


def test_a_gpu_without_headers(monkeypatch):
    """What a machine lacks is given as the reason."""
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(compiler, "why_not_compiled", lambda: "Python.h is missing")
    lines = list(doctor._kernels())
    assert "norms, rotary embeddings, cross entropy: eager (Python.h is missing)" in lines
    assert any(line.startswith("delayed scaling: needs Transformer Engine") for line in lines)
    model = SimpleNamespace(num_moe_experts=8, attn_logit_softcapping=50.0)
    experts, capped = doctor._parts(model)
    assert "one product per expert (one grouped kernel needs compute capability 9.0" in experts
    assert "soft-capping" in capped


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train.train_iters=3"],
            "train.train_iters=3 changes a run: give the run with --recipe or --config",
        ),
        (["--recipe", "llama32_1b_pretrian_config"], "did you mean llama32_1b_pretrain_config"),
    ],
)
def test_mistakes(capsys, arguments, said):
    assert main(["doctor", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_speeds_are_measured():
    assert speed.matmul_flops(torch.float32, 64) > 0
    assert speed.copy_bandwidth(1 << 16) > 0
    assert speed.host_bandwidth(1 << 16) > 0
    assert speed.all_reduce_bandwidth(1 << 16) is None
