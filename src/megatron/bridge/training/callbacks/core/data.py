# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""The data of a run: a preview before the first step, and the position of a run in streamed data."""

import json
from pathlib import Path
from typing import Any, cast

from megatron.core import parallel_state

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.records.samples import EncodingReport
from megatron.bridge.data.streams import StreamingBatchIterator
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.initialize.rank_state import random_states, set_random_states
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import print_rank_0


class DataPosition(Callback):
    """Saves the position of each data reader, if ``Progress`` does not have it, for any number of ranks."""

    def __init__(self) -> None:
        self._batches: StreamingBatchIterator | None = None
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Positions of this rank's readers; the first rank holds all, for a resume with other parallel sizes."""
        if self._batches is None:
            return {}
        state = self._batches.state_dict()
        everyone = _gathered(state["readers"])
        readers = {
            reader_index: reader for part in everyone for reader_index, reader in part.items()
        }
        return state | ({"readers": readers} if distributed.rank() == 0 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state  # applied in on_train_start, when the data is built

    def on_train_start(self, context: Run) -> None:
        if isinstance(context.data.train, StreamingBatchIterator):
            self._batches = context.data.train
            if self._saved is not None:
                self._batches.load_state_dict(self._saved)

    def on_train_end(self, context: Run) -> None:
        """Print how many records were used and dropped."""
        if self._batches is None:
            return
        report = EncodingReport()
        for part in _gathered(self._batches.report):
            report.add(part)
        for line in report.lines():
            print_rank_0(f"{self._batches.name}: {line}")


def _gathered[T](value: T) -> list[T]:
    return distributed.all_gather_object(value, cast(Any, parallel_state).get_data_parallel_group())


SUMMARY, PAGE = "data_preview.json", "data_preview.html"


class DataPreview(Callback):
    """Prints a summary of the data, and writes it to ``data_preview.json`` and ``.html`` in ``logger.log_dir``."""

    def on_train_start(self, context: Run) -> None:
        before = random_states()  # reading samples may draw random numbers
        on_first_rank(lambda: _preview(context))
        set_random_states(before)


def _preview(run: Run) -> None:
    from megatron.bridge.data.preview.render import summary, to_html  # imports rich

    config = run.config
    sizes = (
        config.train.micro_batch_size,
        config.train.global_batch_size,
        config.data_parallel_size(),
    )
    data_preview = preview(config.dataset, run.data, run.tokenizer, sizes)
    for split in data_preview.splits:
        print_rank_0(f"{split.name}: {'; '.join(summary(split))}")
    for corpus in data_preview.corpora:
        print_rank_0(f"{corpus.name}: {'; '.join(corpus.lines())}")
    if config.logger.log_dir is not None:
        folder = Path(config.logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SUMMARY, json.dumps(data_preview.to_dict(), indent=1) + "\n")
        write_text(folder / PAGE, to_html(data_preview))
