# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""Where a run stands in data that is read forwards. The place in numbered samples is a number, in ``Progress``."""

from typing import Any, cast

from megatron.core import parallel_state

from megatron.bridge.data.examples import Report
from megatron.bridge.data.streams import StreamedBatches
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.console import console


class DataPosition(Callback):
    """Saves where each reader stands, and brings it back there, under any number of ranks."""

    def __init__(self) -> None:
        self._batches: StreamedBatches | None = None
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's readers; on the first rank of all, because another layout takes its state."""
        if self._batches is None:
            return {}
        state = self._batches.state_dict()
        everyone = _gathered(state["readers"])
        readers = {number: reader for part in everyone for number, reader in part.items()}
        return state | ({"readers": readers} if dist.rank() == 0 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept until there is data."""
        self._saved = state

    def on_train_start(self, context: Run) -> None:
        """Go on where the run was saved."""
        if isinstance(context.data.train, StreamedBatches):
            self._batches = context.data.train
            if self._saved is not None:
                self._batches.load_state_dict(self._saved)

    def on_train_end(self, context: Run) -> None:
        """Tell what became of the records."""
        if self._batches is None:
            return
        report = Report()
        for part in _gathered(self._batches.report):
            report.add(part)
        for line in report.lines():
            console().print(f"{self._batches.name}: {line}", markup=False)


def _gathered[T](value: T) -> list[T]:
    """The values of all data-parallel ranks."""
    return dist.all_gather_object(value, cast(Any, parallel_state).get_data_parallel_group())
