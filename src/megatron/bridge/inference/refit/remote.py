# SPDX-License-Identifier: Apache-2.0
"""Steps to a receiver in another process of this machine, over a ``multiprocessing.connection.Connection``."""

from typing import Any

from megatron.bridge.inference.refit.replacement import BucketReader
from megatron.bridge.inference.refit.steps import Finish, WeightStep
from megatron.bridge.utils.errors import UserError


class RemoteReceiver:
    """``take`` of ``send_weights`` for the process at the other end, which calls ``receive_weights``."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __call__(self, step: WeightStep) -> None:
        """Hand a step over and wait until it is done."""
        try:
            self._connection.send(step)
            problem = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError("the process that receives weights has ended: start it again from an export") from error
        if problem is not None:
            raise UserError(problem)


def receive_weights(connection: Any, reader: BucketReader) -> None:
    """Take all steps of one refit from the process at the other end, which is told of an error, too."""
    step = None
    while not isinstance(step, Finish):
        step = connection.recv()
        try:
            reader.take(step)
        except UserError as error:
            connection.send(str(error))
            raise
        connection.send(None)
