# SPDX-License-Identifier: Apache-2.0
"""Runs with adapters under layouts: the losses and the adapter of one process, also across a resume."""

from pathlib import Path

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.vera import VeRA
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from tests.toy_adapters import exported, make
from tests.toy_run import Record
from tests.unit_tests.peft.test_runs import STEPS, config_of
from tests.workers import forget_model_parallel

OVERLAP = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
FSDP2 = "FSDP2"
PISSA = LoRA(dim=4, init_lora_weights="pissa")
VERA = VeRA(dim=8)
CASES = {
    "dora dp2, gathered while it computes": (DoRA(dim=4), {}, OVERLAP),
    "canonical dp2, gathered while it computes": (CanonicalLoRA(dim=4), {}, OVERLAP),
    "lora cp2": (LoRA(dim=4), {"context_parallel_size": 2}, {}),
    "lora pp2, stages without adapters": (
        LoRA(target_modules=["*.layers.1.*"], dim=4),
        {"pipeline_model_parallel_size": 2},
        {"use_distributed_optimizer": True},
    ),
    "dora dp2, FSDP2": (DoRA(dim=4), {}, FSDP2),
    "lora tp2, FSDP2": (LoRA(dim=4), {"tensor_model_parallel_size": 2}, FSDP2),
    "lora pp2, FSDP2": (LoRA(dim=4), {"pipeline_model_parallel_size": 2}, FSDP2),
    "dora pp2, Megatron-FSDP": (
        DoRA(dim=4),
        {"pipeline_model_parallel_size": 2},
        {"use_megatron_fsdp": True},
    ),
    "dora dp2, Megatron-FSDP": (DoRA(dim=4), {}, {"use_megatron_fsdp": True}),
    "pissa tp2, FSDP2": (PISSA, {"tensor_model_parallel_size": 2}, FSDP2),
    "pissa dp2, Megatron-FSDP": (PISSA, {}, {"use_megatron_fsdp": True}),
    "pissa dp2, gathered while it computes": (PISSA, {}, OVERLAP),
    "vera dp2, FSDP2": (VERA, {}, FSDP2),
    "vera dp2, Megatron-FSDP": (VERA, {}, {"use_megatron_fsdp": True}),
    "vera dp2, gathered while it computes": (VERA, {}, OVERLAP),
}
TOLERANCE = 1e-5


def run(base, method, layout, ddp, save=None, stop=None):
    record = Record()
    config = config_of(Path(base), save, method, stop, layout, {} if ddp == FSDP2 else ddp)
    config.dist.use_torch_fsdp2 = ddp == FSDP2
    run = finetune(config, forward_step, [record])
    bridge = AutoBridge.from_hf_pretrained(base)
    merged = dict(bridge.export_hf_weights(run.model, show_progress=False))
    tensors = {
        name: tensor.numpy() for name, tensor in (exported(bridge, run.model) | merged).items()
    }
    forget_model_parallel()
    return record.losses, tensors


def run_all(base):
    return {name: run(base, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make("llama", directory)
    return directory


def assert_same(found, expected, name):
    losses, tensors = expected
    for rank_losses, rank_tensors in found:
        assert rank_losses == pytest.approx(losses, abs=TOLERANCE), name
        for key, tensor in tensors.items():
            torch.testing.assert_close(
                torch.from_numpy(rank_tensors[key]),
                torch.from_numpy(tensor),
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda text, where=f"{name} {key}": f"{where}: {text}",
            )


def test_runs_are_those_of_one_process(llama, two_workers):
    ranks = two_workers.run(run_all, str(llama))
    for name, (method, _, _) in CASES.items():
        assert_same([rank[name] for rank in ranks], run(llama, method, {}, {}), name)


HALVES = {
    "stages": (
        ({"tensor_model_parallel_size": 2}, {}),
        ({"pipeline_model_parallel_size": 2}, OVERLAP),
    ),
    "FSDP2": (({}, {"use_megatron_fsdp": True}), ({}, FSDP2)),
    "Megatron-FSDP": (({"tensor_model_parallel_size": 2}, {}), ({}, {"use_megatron_fsdp": True})),
}


def halves(base, save, name):
    """Two steps under one layout, the others under another."""
    method, (before, after) = LoRA(dim=4), HALVES[name]
    first, _ = run(base, method, *before, save, STEPS // 2)
    second, tensors = run(base, method, *after, save)
    return first + second, tensors


@pytest.mark.parametrize("name", HALVES)
def test_resume_under_another_layout(name, llama, tmp_path, two_workers):
    """Gates and values, and the base's fingerprint, do not depend on how they are cut."""
    found = two_workers.run(halves, str(llama), str(tmp_path / "run"), name)
    assert_same(found, run(llama, LoRA(dim=4), {}, {}), name)
