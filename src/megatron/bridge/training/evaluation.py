# SPDX-License-Identifier: Apache-2.0
"""Losses on held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import tee
from typing import Literal

import torch
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.data.loaders import Batches as Data
from megatron.bridge.training.loop import forward_backward
from megatron.bridge.training.losses import LossTotals, Report, means
from megatron.bridge.training.param_gather import gathered_params
from megatron.bridge.training.state import Batches, Run


def evaluate(run: Run, split: Literal["valid", "test"] = "valid") -> Report:
    """Mean losses over ``validation.eval_iters`` global batches, the same ones at every call.

    Each token counts once, whatever the layout. Dropout is off and no random number is drawn, so a run goes on as
    if it had not been evaluated.

    Args:
        run: The run; it must have data for ``split``.
        split: Which held-out data.

    Returns:
        Losses by name, equal on all ranks.
    """
    data = getattr(run.data, split)
    assert data is not None, f"the run has no {split} data"
    event = "eval" if split == "valid" else "test"
    run.emit(f"{event}_start")
    with torch.no_grad(), gathered_params(run.model), evaluation_mode(run.model):
        run.total_loss_dict = _mean_losses(run, per_chunk(data.replicate(), len(run.model)), event)
    run.emit(f"{event}_end")
    return run.total_loss_dict


def per_chunk(batches: Data, chunks: int) -> list[Batches]:
    """One iterator per model chunk over the same microbatches, each of which is read once."""
    return list(tee(batches, chunks)) if chunks > 1 else [batches]


def _mean_losses(run: Run, batches: list[Batches], event: str) -> Report:
    add_up = LossTotals()
    totals: Report = {}
    for _ in range(run.config.validation.eval_iters):
        run.emit(f"{event}_step_start")
        for name, pair in add_up(forward_backward(run, batches, forward_only=True)).items():
            totals[name] = totals[name] + pair if name in totals else pair
        run.emit(f"{event}_step_end")
    return means(totals)


@contextmanager
def evaluation_mode(chunks: list[MegatronModule]) -> Iterator[None]:
    """Without dropout inside."""
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()
