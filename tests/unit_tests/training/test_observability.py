# SPDX-License-Identifier: Apache-2.0
"""What a run shows beside its losses, and what it keeps of how it was started."""

import json
import os
import subprocess

import psutil
import pytest
import torch

from megatron.bridge.backends.hardware.device_flops import BF16_TFLOPS, bf16_tflops
from megatron.bridge.backends.hardware.energy import EnergyMeter
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.callbacks.observe import first_step
from megatron.bridge.training.callbacks.observe.metrics import PREFIX
from megatron.bridge.training.callbacks.observe.outputs import _times_line, _train_line
from megatron.bridge.training.callbacks.observe.sample_generation import GenerationSamples
from megatron.bridge.training.config import (
    CheckpointConfig,
    LoggerConfig,
    OptimizerConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils import environment
from megatron.bridge.utils.config.origins import non_defaults
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

pytestmark = pytest.mark.usefixtures("one_process")


def tiny(**blocks):
    defaults = {
        "model": {"num_layers": 1},
        "train": {"train_iters": 2},
        "validation": ValidationConfig(),
    }
    return toy_config(**defaults | blocks)


def rows(folder, kind="train"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


class Gradient(Callback):
    """Numbers of the gradient, before the optimizer has it."""

    def on_grads_ready(self, context):
        whole = torch.cat([p.main_grad.flatten() for p in context.model[0].parameters()])
        self.zeros, self.norm = (whole == 0).sum().item(), whole.norm().item()


def test_numbers_of_a_step(tmp_path):
    """Speed, MFU, norms, zeros and memory; the norm of the gradient also where it is not clipped."""
    seen = Gradient()
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.0, log_num_zeros_in_grad=True)
    logger = LoggerConfig(
        log_interval=1, log_dir=str(tmp_path), peak_tflops=0.5, log_params_norm=True
    )
    run = pretrain(tiny(optimizer=optimizer, logger=logger), forward_step, [seen])
    row = rows(tmp_path)[-1]
    flops = flops_per_token([run.model[0].module], 32)
    assert row["TFLOP/s per process"] == pytest.approx(flops * row["tokens per second"] / 1e12)
    assert row["MFU"] == pytest.approx(row["TFLOP/s per process"] / 0.5)
    assert row["zeros in grad"] == seen.zeros > 0
    assert row["grad norm"] == pytest.approx(seen.norm, rel=1e-5)
    weights = torch.cat([p.detach().flatten() for p in run.model[0].parameters()])
    assert row["params norm"] == pytest.approx(weights.double().norm().item(), rel=1e-6)
    assert row["memory GB"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.2)
    assert row["peak memory GB"] >= row["memory GB"] * 0.99
    assert (row["consumed samples"], row["consumed tokens"], row["batch size"]) == (16, 512, 8)


def test_numbers_that_nobody_asked_for_cost_nothing(tmp_path):
    pretrain(tiny(logger=LoggerConfig(log_interval=1, log_dir=str(tmp_path))), forward_step)
    row = rows(tmp_path)[-1]
    assert not {"MFU", "params norm", "zeros in grad", "joules per step", "loss scale"} & set(row)
    assert not [name for name in row if name.startswith(PREFIX)]


def test_parts_of_a_step_add_up_to_it(tmp_path):
    """An evaluation runs the same schedule, and is no part of a step."""
    logger = LoggerConfig(
        log_interval=1, log_dir=str(tmp_path), timing_log_level=2, timing_log_option="all"
    )
    config = tiny(
        train={"train_iters": 3},
        logger=logger,
        validation=ValidationConfig(eval_interval=1, eval_iters=8),
        checkpoint=CheckpointConfig(
            save=str(tmp_path), save_interval=1
        ),  # timers are no part of a config
    )
    pretrain(config, forward_step)
    for row in rows(tmp_path)[1:]:
        whole, update = (
            row[f"{PREFIX}{name} rank 0"] for name in ("forward-backward", "optimizer")
        )
        parts = [row[f"{PREFIX}{name} rank 0"] for name in ("forward-compute", "backward-compute")]
        assert min(whole, update, *parts) > 0
        assert whole + update < row["step time"]
        assert sum(parts) < whole


def test_console_shows_what_matters():
    numbers = {
        "lm loss": 2.5,
        "learning rate": 1e-3,
        "tokens per second": 10.0,
        "skipped steps": 0,
        "MFU": 0.413,
    }
    numbers |= {
        "step time": 1.0,
        "data wait": 0.3,
        "memory GB": 1.0,
        "peak memory GB": 2.0,
        "mtp loss": 3.0,
    }
    line = _train_line(numbers)
    assert (
        line
        == "lm loss 2.5000  mtp loss 3.0000  lr 1.00e-03  10 tokens/s  41.3% MFU  2.00 GB  30% waiting for data"
    )
    times = {"optimizer": 0.01, "optimizer min": 0.004, "forward-backward": 0.5, "short": 1e-6}
    line = _times_line({f"{PREFIX}{name}": seconds for name, seconds in times.items()})
    assert line.strip() == "ms per step: forward-backward 500.0, optimizer 4.0 to 10.0"


@pytest.mark.parametrize(
    ("name", "peak"),
    {
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA H100 80GB HBM3": 989.0,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H100 NVL": 835.0,
        "NVIDIA GH200 480GB": 989.0,
        "NVIDIA H200": 989.0,
        "NVIDIA B200": 2250.0,
        "NVIDIA GB200": 2500.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA GeForce GTX 1080": None,
    }.items(),
)
def test_peaks_by_the_drivers_names(name, peak):
    assert bf16_tflops(name) == peak
    assert len(BF16_TFLOPS) > 15


class Nvml:
    """The driver's library, with one GPU that uses 250 J between two looks."""

    def __init__(self, code=0):
        self.code, self.millijoules, self.uuids = code, 1_000_000, []

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.uuids.append(uuid)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device, pointer):
        pointer._obj.value = self.millijoules
        self.millijoules += 250_000
        return self.code


def test_energy_is_what_the_driver_counts():
    library = Nvml()
    meter = EnergyMeter(library, "GPU-1")
    assert library.uuids == [b"GPU-1"]
    assert (meter.joules(), meter.joules()) == (1250.0, 1500.0)
    with pytest.raises(
        UserError, match=r"log_energy=True, but the driver's nvmlDeviceGetTotalEnergy.* code 3"
    ):
        EnergyMeter(Nvml(code=3), "GPU-1")


@pytest.mark.gpu
def test_energy_of_this_gpu():
    from megatron.bridge.backends.hardware.energy import energy_meter

    meter = energy_meter()
    before = meter.joules()
    square = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        square @ square
    torch.cuda.synchronize()
    assert 0 < meter.joules() - before < 1e4


@pytest.mark.gpu
def test_memory_history_of_this_gpu(tmp_path):
    from megatron.bridge.training.config import ProfilingConfig

    profiling = ProfilingConfig(
        record_memory_history=True, nvtx_ranges=True, profile_step_start=0, profile_step_end=1
    )
    logger = LoggerConfig(log_interval=1, log_dir=str(tmp_path), log_energy=True)
    pretrain(tiny(logger=logger, profiling=profiling), forward_step)
    assert (tmp_path / "traces" / "memory_rank_0.pickle").stat().st_size > 0
    assert rows(tmp_path)[-1]["joules per step"] > 0


def test_every_start_is_kept(tmp_path):
    folder = tmp_path / "run"
    for steps in (1, 2):
        config = tiny(
            train={"train_iters": 2, "exit_interval": steps},
            logger=LoggerConfig(log_dir=str(folder)),
            checkpoint=CheckpointConfig(save=str(folder), save_interval=1),
        )
        pretrain(config, forward_step)
    assert sorted(path.name for path in (folder / "starts").iterdir()) == ["001", "002"]
    texts = [(folder / "starts" / name / "run_config.yaml").read_text() for name in ("001", "002")]
    assert (folder / "run_config.yaml").read_text() == texts[1]
    assert [type(config).from_yaml(text).train.exit_interval for text in texts] == [1, 2]
    found = [
        json.loads((folder / "starts" / name / "environment.json").read_text())
        for name in ("001", "002")
    ]
    assert [start["step"] for start in found] == [0, 1]
    assert found[0]["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"python", "megatron-core", "transformers", "hf-megatron-bridge"} <= set(
        found[0]["versions"]
    )
    assert f"torch {found[0]['versions']['torch']}" in texts[0]
    assert "train.exit_interval" in "".join(non_defaults(config))


def git(folder, *words):
    name = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, env=os.environ | name
    )
    return done.stdout.decode()


def test_state_of_a_repository(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q", "-b", "trunk")
    assert environment.git_state(tmp_path) is None  # nothing was committed
    (tmp_path / "a.py").write_text("old\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    state = environment.git_state(tmp_path)
    assert (state["branch"], state["dirty"]) == ("trunk", False)
    assert state["commit"] == git(tmp_path, "rev-parse", "HEAD").strip()
    assert environment.git_diff({"": state}) == ""
    (tmp_path / "a.py").write_text("new\n")
    state = environment.git_state(tmp_path)
    assert state["dirty"]
    assert "-old\n+new\n" in environment.git_diff({"a": state, "b": state, "c": None})
    assert environment.git_diff({"a": state, "b": state}).count("-old") == 1
    monkeypatch.setattr(environment, "DIFF_BYTES", 10)
    assert "further characters are left out" in environment.git_diff({"": state})
    monkeypatch.setenv("PATH", "")
    assert environment.git_state(tmp_path) is None  # no git at all


def test_values_that_are_not_defaults(capfd):
    config = tiny(train={"train_iters": 1}, logger=LoggerConfig(log_non_default_values=True))
    pretrain(config, forward_step)
    lines = capfd.readouterr().err.splitlines()
    assert "model.hidden_size=32  (default 0, from script)" in lines
    assert (
        "model.activation_func=torch.nn.functional.silu  (default torch.nn.functional.gelu, from script)"
        in lines
    )
    assert not [
        line
        for line in lines
        if line.startswith(("scheduler.lr_decay_iters", "model.seq_length=None"))
    ]


def test_what_a_gpu_is_needed_for_is_asked_of_the_machine_that_runs():
    """A launch from a machine without GPUs is validated for another one."""
    from megatron.bridge.training.config import ProfilingConfig

    profiling = ProfilingConfig(use_nsys_profiler=True, nvtx_ranges=True)
    config = tiny(
        train={"train_iters": 20}, profiling=profiling, logger=LoggerConfig(log_energy=True)
    )
    config = config.resolve(world_size=1).config
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"profiling.use_nsys_profiler=True needs a GPU"):
            config.validate()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (3, "3 is neither a text nor a list of messages"),
        ("", "'' is neither"),
        ([], "at least one message"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": "hi"}], "needs a HuggingFaceTokenizer"),
        ("7", "model.seq_length=64"),
    ],
)
def test_a_wrong_sample_prompt_is_named(prompt, words):
    tokenizer = NullTokenizer(vocab_size=8)
    with pytest.raises(UserError) as error:
        GenerationSamples([prompt]).check(tokenizer, 64)
    assert words in str(error.value)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_long_first_step_is_told_before_it_ends(monkeypatch, capfd, microbatches):
    monkeypatch.setattr(first_step, "LONG_STEP_SECONDS", 0.0)
    sizes = {"micro_batch_size": 1, "global_batch_size": microbatches, "train_iters": 2}
    pretrain(tiny(train=sizes), forward_step)
    notes = [line for line in capfd.readouterr().err.splitlines() if "a microbatch took" in line]
    # a step of one microbatch ends when its length is known
    assert len(notes) == (microbatches > 1)
    for note in notes:
        assert "3 microbatches" in note
        assert "2 steps" in note
        assert "train.global_batch_size" in note
