# SPDX-License-Identifier: Apache-2.0
"""What lies between a run and nvidia-resiliency-ext: refusals, and the words for what its GPU detector finds."""

import contextlib
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron.bridge.training.callbacks.guard.straggler_detection import NVRxStragglerDetection
from megatron.bridge.training.config import (
    CheckpointConfig,
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
)
from megatron.bridge.training.resiliency import fault_tolerance
from megatron.bridge.training.resiliency.inprocess_restart import run_with_restarts
from megatron.bridge.utils.errors import UserError

PACKAGE = "nvidia_resiliency_ext"


def _config(**blocks):
    return SimpleNamespace(
        **{
            "ft": None,
            "inprocess_restart": None,
            "checkpoint": CheckpointConfig(),
            "dist": None,
            **blocks,
        }
    )


@pytest.mark.parametrize(
    ("use", "key"),
    [
        (
            lambda: fault_tolerance.connect(_config(ft=FaultToleranceConfig())),
            "ft needs the package",
        ),
        (
            lambda: run_with_restarts(_config(inprocess_restart=InProcessRestartConfig()), None),
            "inprocess_restart needs the package",
        ),
        (
            lambda: NVRxStragglerDetection(NVRxStragglerDetectionConfig()),
            "nvrx_straggler needs the package",
        ),
    ],
)
def test_without_the_package_it_is_refused_by_name(monkeypatch, use, key):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(UserError, match=key) as caught:
        use()
    assert "hf-megatron-bridge[resiliency]" in " ".join(str(caught.value).split())


def _stub(monkeypatch, name, **content):
    """A package at the edge, with the names that an adapter imports."""
    parts = f"{PACKAGE}.{name}".split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[f"{PACKAGE}.{name}"]).update(content)


def test_signs_of_life_need_their_launcher(monkeypatch):
    _stub(monkeypatch, "fault_tolerance", RankMonitorClient=object)
    monkeypatch.delenv(fault_tolerance.SOCKET, raising=False)
    with pytest.raises(UserError, match="ft_launcher did not start this process"):
        fault_tolerance.connect(_config(ft=FaultToleranceConfig()))
    assert (
        fault_tolerance.connect(_config(ft=FaultToleranceConfig(enable_ft_package=False))) is None
    )


def test_simulated_faults_leave_the_runs_random_numbers_alone(tmp_path):
    before = random.getstate()
    config = FaultToleranceConfig(simulated_fault_type="rank_killed", simulated_fault_base_delay=10)
    kind, rank, delay = fault_tolerance._draw_fault(config, tmp_path)
    assert (kind, rank) == ("killed", 0)
    assert 10 <= delay <= 12
    assert random.getstate() == before
    (tmp_path / fault_tolerance.FAULT_FILE).touch()
    assert fault_tolerance._draw_fault(config, tmp_path) is None, "once in a run"


class Detector:
    """The detector's names, finding rank 3 slow at each second step."""

    initialized = False
    options: dict
    sections = steps = 0

    @classmethod
    def initialize(
        cls, scores_to_compute, gather_on_rank0, profiling_interval, report_time_interval
    ):
        cls.initialized, cls.options = (
            True,
            {"scores": scores_to_compute, "seconds": report_time_interval},
        )

    @classmethod
    def shutdown(cls):
        cls.initialized = False

    @classmethod
    @contextlib.contextmanager
    def detection_section(cls, name, profile_cuda):
        yield
        cls.sections += 1

    @classmethod
    def generate_report_if_interval_elapsed(cls):
        cls.steps += 1
        return cls if cls.is_interval_elapsed() else None

    @classmethod
    def is_interval_elapsed(cls):
        return cls.steps % 2 == 0

    @staticmethod
    def identify_stragglers(gpu_rel_threshold, gpu_indiv_threshold):
        slow = SimpleNamespace(rank=3, node="b")
        return {"straggler_gpus_relative": [slow], "straggler_gpus_individual": []}


def test_slow_gpus_are_named_and_can_end_the_run(monkeypatch, capsys):
    _stub(monkeypatch, "attribution.straggler", Detector=Detector)
    callback = NVRxStragglerDetection(
        NVRxStragglerDetectionConfig(stop_if_detected=True, calc_individual_gpu_perf=False)
    )
    run = SimpleNamespace(progress=SimpleNamespace(step=0), stop_reason=None, requeue=False)
    callback.on_train_start(run)
    for step in (1, 2):
        callback.on_train_step_start(run)
        run.progress.step = step
        assert run.stop_reason is None
        callback.on_train_step_end(run)
    callback.close(run)
    assert Detector.options == {"scores": ["relative_perf_scores"], "seconds": 300.0}
    assert (Detector.sections, Detector.initialized) == (2, False)
    assert (
        run.stop_reason == "a slow GPU: the GPU of rank 3 on b is slow compared with the other GPUs"
    )
    assert run.requeue
