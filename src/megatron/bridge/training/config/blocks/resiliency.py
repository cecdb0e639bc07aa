# SPDX-License-Identifier: Apache-2.0
"""What a run does about faults: wrong numbers, slow ranks, restarts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.bridge.utils.config.ranges import AT_LEAST_ONE


@dataclass
class RerunStateMachineConfig:
    """What to do about a step with wrong numbers. It costs no time unless there is one."""

    check_for_nan_in_loss: bool = True
    """Rerun a step whose loss is not finite."""
    check_for_nan_in_grad: bool = True
    """Rerun a step whose gradient is not finite. With fp16, loss scaling skips such steps anyway."""
    check_for_spiky_loss: bool = False
    """Rerun a step whose loss spikes."""
    spiky_loss_factor: float = 10.0
    """A loss spikes if it is this many times the largest of the first ``spiky_loss_samples`` steps."""
    spiky_loss_samples: int = 100
    """Steps whose largest loss is the reference for spikes."""
    when_persistent: Literal["stop", "skip"] = "stop"
    """If the rerun is wrong too: ``stop``, or ``skip``, which records the batch in the run folder and ends with
    exit code 75; the restarted run skips that batch.
    """


@dataclass
class StragglerDetectionConfig:
    """Detect slow ranks, on any hardware."""

    interval: Annotated[int, AT_LEAST_ONE] = 20
    """Steps between comparisons."""
    factor: float = 1.5
    """A rank is slow if it takes this many times the median."""


@dataclass
class NVRxStragglerDetectionConfig:
    """Detect slow GPUs with nvidia-resiliency-ext."""

    enabled: bool = True
    report_time_interval: float = 300.0
    """Seconds between comparisons."""
    calc_relative_gpu_perf: bool = True
    """Compare GPUs with each other."""
    calc_individual_gpu_perf: bool = True
    """Compare each GPU with its own past."""
    gpu_relative_perf_threshold: float = 0.7
    """A GPU whose relative score is lower is slow; the best score is 1."""
    gpu_individual_perf_threshold: float = 0.7
    """A GPU whose individual score is lower is slow; the best score is 1."""
    profiling_interval: int = 1
    """Steps between timings of kernels."""
    stop_if_detected: bool = False
    """Save and end with exit code 75, so that the scheduler restarts the job elsewhere."""


@dataclass
class FaultToleranceConfig:
    """Heartbeats for ``ft_launcher`` of nvidia-resiliency-ext."""

    enable_ft_package: bool = True
    """Send heartbeats."""
    calc_ft_timeouts: bool = False
    """At the end of a run, compute timeouts from the observed times. They are saved in ``checkpoint.save`` and
    replace the launcher's from the next start on.
    """
    simulate_fault: bool = False
    """Make one rank fail, once per run."""
    simulated_fault_type: Literal["rank_killed", "rank_hung", "random"] = "random"
    """Kill the rank, stop it, or choose at random."""
    simulated_fault_rank: int | None = None
    """The rank that fails. None chooses at random."""
    simulated_fault_base_delay: float = 0.0
    """Minimum delay after the first step, in seconds; up to a fifth is added at random."""


@dataclass
class InProcessRestartConfig:
    """Restart a failed run in the same processes. All times are in seconds."""

    enabled: bool = True
    max_iterations: int | None = 10
    """Maximum number of attempts, including the first. None sets no limit."""
    soft_timeout: float = 60.0
    """A rank whose Python code makes no progress for this long is interrupted, and all ranks restart. Set it
    longer than the longest call into native code, such as a collective that waits for a slow rank.
    """
    hard_timeout: float = 90.0
    """A rank that still makes no progress after this long is killed."""
    heartbeat_interval: float = 1.0
    """Time between heartbeats of a rank."""
    heartbeat_timeout: float = 30.0
    """A rank without a heartbeat for this long is considered dead."""
    barrier_timeout: float = 120.0
    """Maximum time that ranks wait for each other between attempts."""
    completion_timeout: float = 120.0
    """Maximum time that finished ranks wait for the others."""
    last_call_wait: float = 1.0
    """Time to wait for further failures before the restart."""
    termination_grace_time: float = 5.0
    """Time between SIGTERM and SIGKILL."""
    monitor_thread_interval: float = 1.0
    """Time between checks of the monitor thread."""
    monitor_process_interval: float = 1.0
    """Time between checks of the monitor process."""
    progress_watchdog_interval: float = 1.0
    """Time between checks of the progress watchdog."""
