# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
"""A run that starts again in the same processes when a rank fails, through nvidia-resiliency-ext.

The one place that imports its ``inprocess``. When a rank raises an error, communication is ended on all ranks,
what was built is let go, and all of them set the run up again, from the newest checkpoint. Processes, imports and
memory stay, so that this takes seconds where a launcher takes minutes. A rank whose process has died cannot be
replaced here: the others end, and the launcher starts all again.
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

from megatron.bridge.backends.device import has_cuda
from megatron.bridge.training.config import ConfigContainer, InProcessRestartConfig
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

# The run's own store and that of the restarts listen beside the launcher's port.
STORE, RESTARTS = 1, 2


class _Final(BaseException):
    """Carries an error that would come again past the restarts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class GlooConnections:
    """The connections of Gloo's groups, which can be ended while the main thread waits in one.

    Gloo has no call for it (``abort`` does nothing, and waiting for the time-out takes minutes), so the sockets
    are shut down. Each connection was accepted by one of its two ranks, on a port of its own.
    """

    def __init__(self) -> None:
        self._others: set[int] = set()

    def begin(self) -> None:
        """What listens already is somebody else's."""
        self._others = set(_listening())

    def end(self) -> None:
        """Break what was connected since."""
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


def restarting(config: ConfigContainer, attempt: Callable[[], Run]) -> Run:
    """``attempt``, again and again until it returns.

    Args:
        config: With ``inprocess_restart`` set.
        attempt: Sets a run up in a process group that is there, and trains it.

    Raises:
        UserError: nvidia-resiliency-ext is missing, or whatever ``attempt`` refuses: mistakes are not repeated.
    """
    assert config.inprocess_restart is not None, "inprocess_restart is not set"
    inprocess = _imported()
    store, gloo = _own_store(config), GlooConnections()

    def one(call: inprocess.CallWrapper = None) -> Run:  # pyright: ignore - nvidia-resiliency-ext fills it in
        if call.iteration:
            console().print(f"restart {call.iteration} within the processes", markup=False)
        gloo.begin()
        attempted = torch_dist.PrefixStore(f"attempt{call.iteration}", store)
        dist.initialize(config.dist.distributed_backend, config.dist.distributed_timeout_minutes, attempted)
        try:
            return attempt()
        except (UserError, FloatingPointError) as error:
            raise _Final(error) from error

    try:
        return _wrapper(inprocess, config.inprocess_restart, gloo)(one)()
    except _Final as final:
        raise final.error from None


def _imported() -> Any:
    try:
        from nvidia_resiliency_ext import inprocess
    except ImportError as error:
        raise UserError(
            f"inprocess_restart is set, but nvidia-resiliency-ext cannot be imported ({error}): install the extra "
            "`resiliency`, or unset inprocess_restart"
        ) from error
    return inprocess


def _own_store(config: ConfigContainer) -> Any:
    """Where ranks of all attempts find each other: a launcher's store is good for one attempt."""
    if dist.is_initialized() or "MASTER_PORT" not in os.environ:
        raise UserError(
            "inprocess_restart joins the process group itself: start the ranks with torchrun or another launcher, "
            "and do not initialise torch.distributed before"
        )
    return torch_dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + STORE,
        dist.world_size(),
        is_master=dist.rank() == 0,
        timeout=timedelta(minutes=config.dist.distributed_timeout_minutes),
    )


def _wrapper(inprocess: Any, settings: InProcessRestartConfig, gloo: GlooConnections) -> Any:
    world = dist.world_size()
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
            gloo.end()
            return super().__call__(state)

    with _without_gpu_checks():
        return inprocess.Wrapper(
            abort=Abort(),
            store_kwargs={"port": int(os.environ["MASTER_PORT"]) + RESTARTS},
            initialize=inprocess.initialize.RetryController(settings.max_iterations, world, world),
            finalize=Release(),
            **timeouts,
        )


@contextmanager
def _without_gpu_checks() -> Any:
    """With LOCAL_RANK set, the health of a GPU would be checked, also where there is none."""
    before = None if has_cuda() else os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def release() -> None:
    """Let go of what a failed attempt has built: process groups, models and what Megatron-Core keeps globally.

    Gradient hooks keep a wrapped model alive out of the garbage collector's sight, so they are cut by hand; each
    restart would cost a model's memory otherwise.
    """
    found: list[Any] = gc.get_objects()
    for wrapper in [thing for thing in found if type(thing) is DistributedDataParallel and vars(thing)]:
        for parameter in wrapper.parameters():
            vars(parameter).clear()
            parameter.grad = None
        vars(wrapper).clear()
    cast(Any, rerun_state_machine).destroy_rerun_state_machine()
    cast(Any, parallel_state).destroy_model_parallel()
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    gc.collect()
