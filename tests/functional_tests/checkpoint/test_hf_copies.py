# SPDX-License-Identifier: Apache-2.0
"""Hugging Face copies beside the checkpoints of a run."""

import filecmp
import os

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.training.checkpointing import hf_copy
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.utils.errors import UserError
from tests.toy_run import save_llama, toy_config
from tests.workers import forget_model_parallel

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
}


def train(root, model):
    saved = CheckpointConfig(
        save=str(root / "run"),
        pretrained_checkpoint=str(root / "hf"),
        also_save_hf_checkpoint=True,
        async_save=True,
    )
    values = {"model": model, "checkpoint": saved, "validation": ValidationConfig(eval_iters=0)}
    try:
        finetune(toy_config(train={"train_iters": 2}, **values), forward_step)
    finally:
        forget_model_parallel()


@pytest.fixture(scope="module", params=["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def run_folder(request, two_workers, tmp_path_factory):
    """A run of two steps on two processes, beside the model that it began with."""
    root = tmp_path_factory.mktemp("copies")
    save_llama(root / "hf", num_hidden_layers=4, rope_theta=10000.0, rms_norm_eps=1e-5)
    two_workers.run(train, root, LAYOUTS[request.param])
    return root


def test_a_checkpoint_has_its_copy(run_folder, tmp_path):
    assert sorted(path.name for path in (run_folder / "run").glob("hf_*")) == ["hf_0000002"]
    bridge = AutoBridge.from_hf_pretrained(run_folder / "hf")
    bridge.export_ckpt(run_folder / "run" / "iter_0000002", tmp_path / "out", show_progress=False)
    copied = run_folder / "run" / "hf_0000002"
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(copied / name, tmp_path / "out" / name, shallow=False), name
    assert not filecmp.cmp(
        copied / "model.safetensors", run_folder / "hf" / "model.safetensors", shallow=False
    )


@pytest.mark.slow
def test_a_copy_ends_with_the_process_that_started_it(run_folder):
    root = run_folder / "run"
    hf_copy.copy_dir(root, 2).rename(root / "set_aside")
    process = hf_copy.CopyProcess(root, 2, str(run_folder / "hf"), trust_checkpoint=False)
    process.let_go()
    assert process.wait(0) != 0
    assert hf_copy.missing(root) == [2]
    (root / "set_aside").rename(hf_copy.copy_dir(root, 2))


def test_a_model_without_a_copy_is_refused_before_the_first_step(tmp_path):
    save_llama(tmp_path / "hf", num_hidden_layers=4, rope_theta=10000.0, rms_norm_eps=1e-5)
    settings = {"attention_output_gate": True}  # which no config of Llama can express
    with pytest.raises(
        UserError, match=r"checkpoint\.also_save_hf_checkpoint=True .* attention_output_gate=True"
    ):
        train(tmp_path, settings)
    assert not list((tmp_path / "run").glob("iter_*"))


def test_a_checkpoint_that_was_saved_again_lacks_its_copy(tmp_path):
    for name in ("iter_0000004", "hf_0000004"):
        (tmp_path / name).mkdir()
    written = tmp_path / "iter_0000004" / "manifest.json"
    written.touch()
    os.utime(tmp_path / "hf_0000004", ns=(10, 10))
    os.utime(written, ns=(9, 9))
    assert hf_copy.missing(tmp_path) == []
    os.utime(written, ns=(11, 11))
    assert hf_copy.missing(tmp_path) == [4]


def test_what_is_left_over_is_removed(tmp_path):
    for name in (
        "iter_0000004",
        "hf_0000004",
        "hf_0000004.incomplete",
        "hf_0000004.replaced",
        "hf_0000002",
        "hf_notes",
    ):
        (tmp_path / name).mkdir()
    hf_copy.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hf_0000004",
        "hf_notes",
        "iter_0000004",
    ]
