# SPDX-License-Identifier: Apache-2.0
"""A preview of the data before the first step."""

import json
from pathlib import Path

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.preview.render import summary, to_html
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.initialize.rng import random_states, set_random_states
from megatron.bridge.training.state import Run
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import print_rank_0

SUMMARY, PAGE = "data_preview.json", "data_preview.html"


class DataPreview(Callback):
    """Prints a summary of the data, and writes it to ``data_preview.json`` and ``.html`` in ``logger.log_dir``."""

    def on_train_start(self, context: Run) -> None:
        before = random_states()  # reading samples may draw random numbers
        on_first_rank(lambda: _preview(context))
        set_random_states(before)


def _preview(run: Run) -> None:
    config = run.config
    sizes = (config.train.micro_batch_size, config.train.global_batch_size, config.data_parallel_size())
    found = preview(config.dataset, run.data, run.tokenizer, sizes)
    for split in found.splits:
        print_rank_0(f"{split.name}: {'; '.join(summary(split))}")
    for corpus in found.corpora:
        print_rank_0(f"{corpus.name}: {'; '.join(corpus.lines())}")
    if config.logger.log_dir is not None:
        folder = Path(config.logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SUMMARY, json.dumps(found.to_dict(), indent=1) + "\n")
        write_text(folder / PAGE, to_html(found))
