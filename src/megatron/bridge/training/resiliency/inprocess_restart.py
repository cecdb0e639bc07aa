# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
"""Restart a run within the same processes when a rank fails, with nvidia-resiliency-ext.

This is the only module that imports ``nvidia_resiliency_ext.inprocess``. When a rank raises an error, all ranks
abort communication, release what they built, and set the run up again from the newest checkpoint. Processes,
imports and memory stay, so a restart takes seconds instead of minutes. A rank whose process has died cannot be
replaced: the other ranks exit, and the launcher restarts the job.
"""

import gc
import os
import socket
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as torch_dist
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.distributed import DistributedDataParallel

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.training.config import ConfigContainer, InProcessRestartConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.optional_imports import import_optional

STORE_PORT, RESTARTS_PORT = 1, 2
"""Offsets from the launcher's port to those of the run's store and of the store for restarts."""


class _Unrecoverable(BaseException):
    """Carries an error that would occur again past the restarts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class GlooConnections:
    """The connections of Gloo's process groups, which can be shut down while the main thread is blocked in one.

    Gloo cannot abort (``abort`` does nothing, and the timeout takes minutes), so the sockets are shut down. One
    of the two ranks of each connection accepted it, on a separate port.
    """

    def __init__(self) -> None:
        self._others: set[int] = set()

    def start_tracking(self) -> None:
        """Exclude ports that other code already listens on."""
        self._others = set(_listening())

    def shut_down(self) -> None:
        """Shut down the connections made since ``start_tracking``."""
        ports = set(_listening()) - self._others
        for connection in _connections():
            if connection.status == "ESTABLISHED" and connection.laddr.port in ports:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as same:
                    same.shutdown(socket.SHUT_RDWR)


def _listening() -> list[int]:
    return [connection.laddr.port for connection in _connections() if connection.status == "LISTEN"]


def _connections() -> Any:
    import psutil  # nvidia-resiliency-ext brings it

    return psutil.Process().net_connections("tcp")


def run_with_restarts(config: ConfigContainer, attempt: Callable[[], Run]) -> Run:
    """Call ``attempt``, which sets up and trains in the existing process group, again after each failure."""
    assert config.inprocess_restart is not None, "inprocess_restart is not set"
    inprocess = import_optional(
        "nvidia_resiliency_ext.inprocess", "inprocess_restart", "resiliency"
    )
    store = _create_store(config)
    gloo = GlooConnections()

    def one(call: inprocess.CallWrapper = None) -> Run:  # pyright: ignore - nvidia-resiliency-ext fills it in
        if call.iteration:
            print_rank_0(f"restart {call.iteration} within the processes")
        gloo.start_tracking()
        attempted = torch_dist.PrefixStore(f"attempt{call.iteration}", store)
        distributed.initialize(
            config.dist.distributed_backend, config.dist.distributed_timeout_minutes, attempted
        )
        try:
            return attempt()
        except (UserError, FloatingPointError) as error:
            raise _Unrecoverable(error) from error

    try:
        return _wrapper(inprocess, config.inprocess_restart, gloo)(one)()
    except _Unrecoverable as final:
        raise final.error from None


def _create_store(config: ConfigContainer) -> Any:
    """The store in which the ranks of all attempts meet: a launcher's store works for one attempt only."""
    if distributed.is_initialized() or "MASTER_PORT" not in os.environ:
        raise UserError(
            "inprocess_restart joins the process group itself: start the ranks with torchrun or another launcher, "
            "and do not initialize torch.distributed before"
        )
    return torch_dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + STORE_PORT,
        distributed.world_size(),
        is_master=distributed.rank() == 0,
        timeout=timedelta(minutes=config.dist.distributed_timeout_minutes),
    )


def _wrapper(inprocess: Any, settings: InProcessRestartConfig, gloo: GlooConnections) -> Any:
    world = distributed.world_size()
    timeouts = {
        name: timedelta(seconds=getattr(settings, name))
        for name in vars(settings)
        if name.endswith(("_timeout", "_interval", "_wait", "_time"))
    }

    class Release(inprocess.finalize.Finalize):
        def __call__(self, state: Any) -> Any:
            release()
            return state

    class Abort(inprocess.abort.AbortTorchDistributed):
        def __call__(self, state: Any) -> Any:
            gloo.shut_down()
            return super().__call__(state)

    with _without_gpu_checks():
        return inprocess.Wrapper(
            abort=Abort(),
            store_kwargs={"port": int(os.environ["MASTER_PORT"]) + RESTARTS_PORT},
            initialize=inprocess.initialize.RetryController(settings.max_iterations, world, world),
            finalize=Release(),
            **timeouts,
        )


@contextmanager
def _without_gpu_checks() -> Any:
    """Without a GPU, hide LOCAL_RANK, which would enable a check of the GPU's health."""
    before = None if has_cuda() else os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def release() -> None:
    """Release what a failed attempt built: process groups, models and Megatron-Core's global state.

    Gradient hooks keep a wrapped model alive outside of the garbage collector's view. Without removing them by
    hand, each restart would leak the memory of a model.
    """
    objects: list[Any] = gc.get_objects()
    for wrapper in [
        candidate
        for candidate in objects
        if type(candidate) is DistributedDataParallel and vars(candidate)
    ]:
        for parameter in wrapper.parameters():
            vars(parameter).clear()
            parameter.grad = None
        vars(wrapper).clear()
    cast(Any, rerun_state_machine).destroy_rerun_state_machine()
    cast(Any, parallel_state).destroy_model_parallel()
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    gc.collect()
