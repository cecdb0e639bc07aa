# SPDX-License-Identifier: Apache-2.0
"""Steps that fail on all ranks if they fail on one, so that no rank waits for another that has stopped."""

import errno
import socket
import traceback
from collections.abc import Callable

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.torchrun_env import read_number


def on_first_rank[T](action: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 and return its result on all ranks; an error is raised on all ranks of ``group``."""
    value, error = _attempt_action(action) if distributed.rank() == 0 else (None, None)
    value, carried = distributed.broadcast_object((value, portable(error)), group=group)
    if carried is not None:
        raise carried from error
    return value  # type: ignore[return-value]


def on_every_rank[T](action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return this rank's result; if one fails, an error is raised on all."""
    value, error = _attempt_action(action)
    failures = [
        failure for failure in distributed.all_gather_object(portable(error)) if failure is not None
    ]
    if failures:
        raise failures[0] from error  # the same message on all ranks
    return value  # type: ignore[return-value]


def naming_node[T](action: Callable[[], T]) -> T:
    """Run ``action`` on this rank; errors of the operating system get the name of the node."""
    value, error = _attempt_action(action)
    if error is not None:
        forget_frames(error)
        raise portable(error) or error
    return value  # type: ignore[return-value]


def _attempt_action[T](action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        return None, error


def portable(error: BaseException | None) -> BaseException | None:
    """The cause of an error in a form that can be pickled: torch's own errors carry the tracebacks of every rank."""
    if error is None:
        return None
    cause = root_cause(error)
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, OSError):
        return OSError(cause.errno, _on_node(cause.strerror), cause.filename)
    kind = AssertionError if isinstance(cause, AssertionError) else RuntimeError
    return kind(f"{type(cause).__name__}: {cause}")


def _on_node(reason: str | None) -> str | None:
    """The message with the name of this node if the job has others: only one of their disks may be full."""
    ranks = distributed.world_size()
    name = f" on node {socket.gethostname()}"
    several = read_number("LOCAL_WORLD_SIZE", ranks) < ranks
    return f"{reason}{name}" if several and reason and not reason.endswith(name) else reason


def root_cause(error: BaseException) -> BaseException:
    """The cause below torch's ``CheckpointException`` and chained exceptions, preferably an OSError.

    Torch's zip writer reports a full disk as a RuntimeError; the OSError is only its context.
    """
    chain = _error_chain(error)
    for kind in (UserError, OSError):
        for link in chain:
            if isinstance(link, kind):
                return link
    plain = [link for link in chain if not isinstance(link, CheckpointException)]
    return plain[0] if plain else error


def forget_frames(error: BaseException) -> None:
    """Drop the variables of the frames that a failed write passed through.

    They hold a view of torch's buffer, and CPython 3.12.1 crashes where the garbage collector ends such a view.
    """
    for link in _error_chain(error):
        traceback.clear_frames(link.__traceback__)


def _error_chain(error: BaseException) -> list[BaseException]:
    """The error and all errors in its chain of causes and contexts."""
    chain: list[BaseException] = []
    queue = [error]
    while queue:
        current = queue.pop(0)
        if current in chain:
            continue
        chain.append(current)
        if isinstance(current, CheckpointException):
            queue += [wrapped[0] for wrapped in current.failures.values()]
        queue += [inner for inner in (current.__cause__, current.__context__) if inner is not None]
    return chain


def out_of_space(error: OSError) -> bool:
    """Whether the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
