# SPDX-License-Identifier: Apache-2.0
"""Toy runs that are interrupted and go on, and everything of them that must be equal."""

import hashlib
import io
import tempfile
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.bridge.backends.fsdp.sharded_rows import local_rows
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import CheckpointConfig, DistributedDataParallelConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.initialize.rank_state import random_states
from megatron.bridge.training.optim.optimizer import torch_optimizers, update_count
from megatron.bridge.training.pretrain import pretrain
from tests.toy_run import initialize_by_name, toy_config

STEPS = 6
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


class Series(Callback):
    """The loss of each step, and the tokens that this rank drew for it; both survive a restart."""

    def __init__(self):
        self.losses, self.tokens = {}, {}
        self._drawn = []

    def state_dict(self):
        return {"losses": dict(self.losses), "tokens": dict(self.tokens)}

    def load_state_dict(self, state):
        self.losses, self.tokens = dict(state["losses"]), dict(state["tokens"])

    def on_train_start(self, context):
        self._drawn = []  # of a step that failed in this process
        context.train_batches[0] = self._watched(context.train_batches[0])

    def _watched(self, batches):
        for batch in batches:
            self._drawn += [row.tolist() for row in batch["tokens"]]
            yield batch

    def on_train_step_end(self, context):
        step = context.progress.step
        self.losses[step] = context.loss_dict["lm loss"].item()
        self.tokens[step], self._drawn = self._drawn, []


def run_to(root, stop, arguments, pretrained=None, load=None):
    """Train until step ``stop`` of ``STEPS``, from where ``root`` stands: losses by step, and a digest of all."""
    options = dict(arguments)
    ddp = DistributedDataParallelConfig(**options.pop("ddp", {}))
    saving = options.pop("checkpoint", {})
    series = options.pop("series", None) or Series()
    extra = options.pop("extra", [])
    config = toy_config(
        model=options.pop("model", {}),
        train={
            "train_iters": STEPS,
            "exit_interval": stop,
            "global_batch_size": 4,
            **options.pop("train", {}),
        },
        checkpoint=CheckpointConfig(
            save=root and str(root), pretrained_checkpoint=pretrained, load=load, **saving
        ),
        ddp=ddp,
        **options,
    )
    config.model.register_pre_wrap_hook(initialize_by_name)
    try:
        run = pretrain(config, forward_step, [series, *extra])
        return {
            "losses": series.losses,
            "tokens": series.tokens,
            "digest": digest(run),
            "progress": run.progress.state_dict(),
            "schedule": run.scheduler.state_dict(),
        }
    finally:
        parallel_state.destroy_model_parallel()


def tensors_of(path):
    """All tensors of a checkpoint in full, by an independent reader: torch's own conversion."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    # several ranks read at once: each needs a file of its own
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "whole.pt"
        dcp_to_torch_save(path, target)
        state = torch.load(target, weights_only=False)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def digest(run):
    """Hashes of weights, optimizer, loss scale and random states of this rank: equal only if all bits are."""
    parts = {
        "weights": [parameter.data for chunk in run.model for parameter in chunk.parameters()],
        "optimizer": [
            [sorted(inner.state[parameter].items()), parameter.data]
            for inner in torch_optimizers(run.optimizer)
            for group in inner.param_groups
            for parameter in group["params"]
            if local_rows(
                parameter
            ).numel()  # without rows nothing is updated, and updates need not be counted
        ],
        "hyper": [[group["lr"], group["weight_decay"]] for group in run.optimizer.param_groups],
        "scale": [float(run.optimizer.get_loss_scale()), update_count(run.optimizer)],
        "random": list(random_states().items()),
    }
    return {name: _hash(value) for name, value in parts.items()}


def _hash(value):
    # torch.save shares storages and keeps strides: clone to hash the values alone
    stream = io.BytesIO()
    torch.save(_cloned(value), stream)
    return hashlib.sha256(stream.getvalue()).hexdigest()


def _cloned(value):
    if isinstance(value, torch.Tensor):
        return local_rows(value).detach().clone()
    if isinstance(value, (list, tuple)):
        return [_cloned(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _cloned(entry) for key, entry in value.items()}
    return value
