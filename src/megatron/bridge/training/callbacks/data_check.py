# SPDX-License-Identifier: Apache-2.0
"""A look at the data before the first step."""

import json
from pathlib import Path

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.preview import Preview, preview
from megatron.bridge.data.preview_output import summary, to_html
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.random_states import random_states, set_random_states
from megatron.bridge.training.state import Run
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import console

SUMMARY, PAGE = "data_preview.json", "data_preview.html"


class DataCheck(Callback):
    """Tells what the run is going to learn from, and writes it to ``data_preview.json`` and ``.html``.

    The files go to ``logger.log_dir``, if there is one.
    """

    def on_train_start(self, context: Run) -> None:
        """Look and write, on the first rank; samples may draw random numbers, which are not the run's."""
        before = random_states()
        on_first_rank(lambda: _look(context))
        set_random_states(before)


def _look(run: Run) -> None:
    config = run.config
    sizes = (config.train.micro_batch_size, config.train.global_batch_size, config.data_parallel_size())
    found = preview(config.dataset, run.data, run.tokenizer, sizes)
    for split in found.splits:
        for line in summary(split):
            console().print(f"{split.name}: {line}", markup=False)
    for corpus in found.corpora:
        for line in corpus.lines():
            console().print(f"{corpus.name}: {line}", markup=False)
    if config.logger.log_dir is not None:
        _write(Path(config.logger.log_dir), found)


def _write(folder: Path, found: Preview) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SUMMARY, json.dumps(found.to_dict(), indent=1) + "\n")
    write_text(folder / PAGE, to_html(found))
