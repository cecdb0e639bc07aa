# SPDX-License-Identifier: Apache-2.0
"""Heartbeats for the launcher of nvidia-resiliency-ext, which restarts ranks that stop sending them.

This is the only module that imports ``nvidia_resiliency_ext.fault_tolerance``. A rank is always in one of three
sections, for which ``ft_launcher`` has timeouts: ``setup`` until the first step, ``step`` during steps of training
and evaluation, and ``checkpointing`` between steps, while the run is logged and saved. At the end of each step the
rank also sends a heartbeat.
"""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer, FaultToleranceConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import atomic, distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import import_optional

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
TIMEOUTS_FILE = "ft_timeouts.json"
FAULT_FILE = "simulated_fault.json"
SETUP, STEP, BETWEEN = "setup", "step", "checkpointing"


def connect(config: ConfigContainer) -> "FaultTolerance | None":
    """Connect to the launcher; None if ``ft`` is not enabled."""
    if config.ft is None or not config.ft.enable_ft_package:
        return None
    module = import_optional("nvidia_resiliency_ext.fault_tolerance", "ft", "resiliency")
    if not os.environ.get(SOCKET):
        raise UserError(
            "ft is set, but ft_launcher did not start this process: start it with ft_launcher, or unset ft"
        )
    return FaultTolerance(config.ft, module.RankMonitorClient(), config.checkpoint.save)


class FaultTolerance(Callback):
    """Reports sections and heartbeats to the launcher; the first callback, so that a step ends before others."""

    def __init__(self, config: FaultToleranceConfig, client: Any, save: str | None) -> None:
        self._config = config
        self._client = client
        self._save = None if save is None else Path(save)
        self._section = ""
        earlier = (
            self._save / TIMEOUTS_FILE
            if config.calc_ft_timeouts and self._save is not None
            else None
        )
        if earlier is not None and earlier.is_file():  # an earlier start of this run computed them
            client.load_state_dict(json.loads(earlier.read_text()))
        client.init_workload_monitoring()
        self._enter(SETUP)

    def on_train_start(self, context: Run) -> None:
        if self._config.simulate_fault:
            simulate_fault(self._config, self._save)

    def on_train_step_start(self, context: Run) -> None:
        self._enter(STEP)

    def on_train_step_end(self, context: Run) -> None:
        self._client.send_heartbeat()
        self._enter(BETWEEN)

    on_eval_step_start = on_test_step_start = on_train_step_start
    on_eval_step_end = on_test_step_end = on_train_step_end

    def on_train_end(self, context: Run) -> None:
        """Compute timeouts from the durations of this run, which had no fault."""
        if self._config.calc_ft_timeouts:
            self._leave()
            self._client.calculate_and_set_section_timeouts(
                calc_out_of_section=False, skip_if_not_ready=True
            )
            state = self._client.state_dict()
            if self._save is not None:
                root = self._save
                on_first_rank(
                    lambda: atomic.write_text(root / TIMEOUTS_FILE, json.dumps(state) + "\n")
                )
            self._enter(BETWEEN)

    def close(self, context: Run) -> None:
        if self._section:
            self._leave()
            self._client.shutdown_workload_monitoring()

    def _enter(self, section: str) -> None:
        self._leave()
        self._client.start_section(section)
        self._section = section

    def _leave(self) -> None:
        if self._section:
            self._client.end_section(self._section)
        self._section = ""


def simulate_fault(config: FaultToleranceConfig, save: Path | None) -> None:
    """Kill or stop one rank after a delay, once per run: a restarted run is not affected."""
    drawn = on_first_rank(lambda: _draw_fault(config, save))
    if drawn is None:
        return
    kind, rank, delay = drawn
    print_rank_0(f"simulated fault: rank {rank} will be {kind} in {delay:.0f} s")
    if distributed.rank() == rank:
        signum = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
        threading.Thread(
            target=_fail, args=(signum, delay, save), name="simulated fault", daemon=True
        ).start()


def _draw_fault(config: FaultToleranceConfig, save: Path | None) -> tuple[str, int, float] | None:
    if save is not None and (save / FAULT_FILE).is_file():
        return None
    draw = random.Random()  # must not change the random state of the run
    kinds = {"rank_killed": ["killed"], "rank_hung": ["stopped"]}
    kind = draw.choice(kinds.get(config.simulated_fault_type, ["killed", "stopped"]))
    rank = config.simulated_fault_rank
    failing = draw.randrange(distributed.world_size()) if rank is None else rank
    return kind, failing, config.simulated_fault_base_delay * draw.uniform(1.0, 1.2)


def _fail(signum: signal.Signals, delay: float, save: Path | None) -> None:
    time.sleep(delay)
    if save is not None:
        content = {"signal": signum.name, "rank": distributed.rank(), "time": time.time()}
        atomic.write_text(save / FAULT_FILE, json.dumps(content) + "\n")
    cast(Any, os).kill(os.getpid(), signum)
