# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Signs of life for nvidia-resiliency-ext's launcher, which ends and restarts ranks that give none.

The one place that imports its ``fault_tolerance``. A rank is always in one of three sections, for which
``ft_launcher`` takes timeouts: ``setup`` until the first step, ``step`` in steps of training and evaluation, and
``checkpointing`` between them, where a run is logged and saved. At the end of each step it also sends a heartbeat.
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
from megatron.bridge.utils import atomic, dist
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
TIMEOUTS = "ft_timeouts.json"
FAULT = "simulated_fault.json"
SETUP, STEP, BETWEEN = "setup", "step", "checkpointing"


def connect(config: ConfigContainer) -> "FaultTolerance | None":
    """Tell the launcher that this rank is being set up; None where the config does not ask for it.

    Raises:
        UserError: nvidia-resiliency-ext is missing, or ``ft_launcher`` did not start this process.
    """
    if config.ft is None or not config.ft.enable_ft_package:
        return None
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"ft is set, but nvidia-resiliency-ext cannot be imported ({error}): install the extra `resiliency`, "
            "or unset ft"
        ) from error
    if not os.environ.get(SOCKET):
        raise UserError("ft is set, but ft_launcher did not start this process: start it so, or unset ft")
    return FaultTolerance(config.ft, RankMonitorClient(), config.checkpoint.save)


class FaultTolerance(Callback):
    """Keeps the launcher informed; comes first of all callbacks, so that a step ends before others look at it."""

    def __init__(self, config: FaultToleranceConfig, client: Any, save: str | None) -> None:
        self._config = config
        self._client = client
        self._save = None if save is None else Path(save)
        self._section = ""
        self._load_timeouts()
        client.init_workload_monitoring()
        self._enter(SETUP)

    def on_train_start(self, context: Run) -> None:
        """Let something go wrong later, if that is asked for."""
        if self._config.simulate_fault:
            simulate(self._config, self._save)

    def on_train_step_start(self, context: Run) -> None:
        """A step begins."""
        self._enter(STEP)

    def on_train_step_end(self, context: Run) -> None:
        """A step ends; what comes now is logging and saving."""
        self._client.send_heartbeat()
        self._enter(BETWEEN)

    def on_eval_step_start(self, context: Run) -> None:
        """A step begins."""
        self._enter(STEP)

    def on_eval_step_end(self, context: Run) -> None:
        """A step ends."""
        self._client.send_heartbeat()
        self._enter(BETWEEN)

    on_test_step_start, on_test_step_end = on_eval_step_start, on_eval_step_end

    def on_train_end(self, context: Run) -> None:
        """Nothing went wrong: what was seen can tell what is too long."""
        if self._config.calc_ft_timeouts:
            self._leave()
            self._client.calculate_and_set_section_timeouts(calc_out_of_section=False, skip_if_not_ready=True)
            state = self._client.state_dict()
            if self._save is not None:
                root = self._save
                on_first_rank(lambda: atomic.write_text(root / TIMEOUTS, json.dumps(state) + "\n"))
            self._enter(BETWEEN)

    def close(self, context: Run) -> None:
        """The launcher has nothing to watch any more."""
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

    def _load_timeouts(self) -> None:
        """Those that an earlier start of this run has calculated."""
        if self._config.calc_ft_timeouts and self._save is not None and (self._save / TIMEOUTS).is_file():
            self._client.load_state_dict(json.loads((self._save / TIMEOUTS).read_text()))


def simulate(config: FaultToleranceConfig, save: Path | None) -> None:
    """Have one rank killed or stopped after a while, once in a run: the start after it is left alone."""
    drawn = on_first_rank(lambda: _draw(config, save))
    if drawn is None:
        return
    kind, rank, delay = drawn
    console().print(f"a simulated fault: rank {rank} will be {kind} in {delay:.0f} s", markup=False)
    if dist.rank() == rank:
        signum = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
        threading.Thread(target=_fail, args=(signum, delay, save), name="simulated fault", daemon=True).start()


def _draw(config: FaultToleranceConfig, save: Path | None) -> tuple[str, int, float] | None:
    if save is not None and (save / FAULT).is_file():
        return None
    draw = random.Random()  # that of the run must not notice
    kinds = {"rank_killed": ["killed"], "rank_hung": ["stopped"]}
    kind = draw.choice(kinds.get(config.simulated_fault_type, ["killed", "stopped"]))
    rank = config.simulated_fault_rank
    return (
        kind,
        draw.randrange(dist.world_size()) if rank is None else rank,
        config.simulated_fault_base_delay * draw.uniform(1.0, 1.2),
    )


def _fail(signum: signal.Signals, delay: float, save: Path | None) -> None:
    time.sleep(delay)
    if save is not None:
        content = {"signal": signum.name, "rank": dist.rank(), "time": time.time()}
        atomic.write_text(save / FAULT, json.dumps(content) + "\n")
    cast(Any, os).kill(os.getpid(), signum)
