# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge tune --probe N``: short runs of the best layouts on this machine, by successive halving."""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.utils import loss_curves
from megatron.bridge.utils.config.overrides import Layer, apply_layers
from megatron.bridge.utils.config.serialize import copy_config, dump_yaml
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.autotune.search.price import Price
    from megatron.bridge.autotune.search.search import Search

_FIRST = 4  # steps of the first round, of which two are not counted; each round doubles them
_WARM = 2


def run(job: TrainJob, search: "Search", prices: "list[Price]") -> "list[Price]":
    """Return ``prices`` with measured seconds, fastest first; layouts that lost a round follow the winners."""
    steps = _FIRST
    left = list(prices)
    out = []
    while left:
        measured = sorted(
            (_measured(job, search, price, steps) for price in left),
            key=lambda price: price.seconds,
        )
        keep = len(measured) // 2
        out = [*measured[keep:], *out]
        left = measured[:keep]
        steps = 2 * steps
    return out


def _measured(job: TrainJob, search: "Search", price: "Price", steps: int) -> "Price":
    """Return ``price`` with the median step time of a real run."""
    config = with_layout(job, search, price)
    with tempfile.TemporaryDirectory() as folder:
        config.checkpoint.save, config.logger.log_dir, config.logger.log_interval = None, folder, 1
        config.train.train_iters, config.validation.eval_iters = steps, 0
        path = Path(folder) / "config.yaml"
        path.write_text(dump_yaml(config))
        ranks = [
            "--nproc-per-node",
            str(search.world_size),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
        ]
        train = ["-m", "megatron.bridge.cli.main", "train", "--config", str(path)]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, *train]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [
                line
                for line in (done.stdout + done.stderr).splitlines()
                if line.startswith("error")
            ]
            reason = (lines or [done.stderr.strip()[-300:]])[0]
            raise UserError(f"--probe: {price.candidate.label()} did not run: {reason}")
        rows = loss_curves.read_metrics(Path(folder))
    seconds = statistics.median(
        row["step time"] for row in rows if row["kind"] == "train" and row["step"] > _WARM
    )
    return replace(price, prediction=price.prediction.scaled(seconds / price.seconds))


def with_layout(job: TrainJob, search: "Search", price: "Price") -> Any:
    """Return the config of the job with the layout of ``price``."""
    config = copy_config(job.config)
    apply_layers(config, [Layer("tune", overrides=overrides(search, price))])
    return config


def overrides(search: "Search", price: "Price") -> list[str]:
    """Return ``key=value`` for each setting of a layout that differs from the config."""
    from megatron.bridge.autotune.search.candidate import as_overrides

    settings = price.candidate.settings()
    configured = search.pricer.configured(price.candidate)
    settings["train.global_batch_size"] = configured.train.global_batch_size
    if configured.ddp.use_distributed_optimizer:
        settings["ddp.use_distributed_optimizer"] = True
    return as_overrides(search.config, settings)
