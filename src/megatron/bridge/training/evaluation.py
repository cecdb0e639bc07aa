# SPDX-License-Identifier: Apache-2.0
"""Evaluation on held-out data."""

from itertools import tee
from typing import Literal

import torch

from megatron.bridge.data.loaders import DataIterator
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.training.loop import forward_backward
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.state import BatchIterator, Run
from megatron.bridge.training.step.losses import LossReport, LossTotals, mean_losses


def evaluate(run: Run, split: Literal["valid", "test"] = "valid") -> LossReport:
    """Mean losses by name over ``validation.eval_iters`` global batches of ``split``, the same ones at every call.

    Each set of ``validation.sets`` is evaluated on as many batches; its name precedes the names of its losses.
    Each token counts once under any parallelism. Dropout is off and no random numbers are drawn, so an evaluation
    does not affect training. The losses are equal on all ranks.
    """
    sets = _sets_of(run, split)
    assert sets, f"the run has no {split} data"
    event = "eval" if split == "valid" else "test"
    run.emit(f"{event}_start")
    if run.evaluation is not None and split == "valid":
        run.total_loss_dict = run.evaluation(run)
    else:
        with torch.no_grad(), gathered_params(run.model), evaluation_mode(run.model):
            run.total_loss_dict = {}
            for prefix, data in sets.items():
                batches = iterators_per_chunk(data.replicate(), len(run.model))
                for name, loss in _evaluate_batches(run, batches, event).items():
                    run.total_loss_dict[prefix + name] = loss
    run.emit(f"{event}_end")
    return run.total_loss_dict


def has_validation_data(run: Run) -> bool:
    return run.data.valid is not None or bool(run.data.valid_sets)


def _sets_of(run: Run, split: Literal["valid", "test"]) -> dict[str, DataIterator]:
    """Return the data of ``split`` by what precedes the names of its losses."""
    data: DataIterator | None = getattr(run.data, split)
    sets = {} if data is None else {"": data}
    if split == "valid":
        sets |= {f"{name}/": batches for name, batches in run.data.valid_sets.items()}
    return sets


def iterators_per_chunk(batches: DataIterator, chunks: int) -> list[BatchIterator]:
    """One iterator per model chunk over the same microbatches; each microbatch is read once."""
    return list(tee(batches, chunks)) if chunks > 1 else [batches]


def _evaluate_batches(run: Run, batches: list[BatchIterator], event: str) -> LossReport:
    loss_totals = LossTotals()
    totals: LossReport = {}
    for _ in range(run.config.validation.eval_iters):
        run.emit(f"{event}_step_start")
        for name, total in loss_totals(forward_backward(run, batches, forward_only=True)).items():
            totals[name] = totals[name] + total if name in totals else total
        run.emit(f"{event}_step_end")
    return mean_losses(totals)
