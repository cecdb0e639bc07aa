# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --rehearse``: run a toy-sized version of a job before submitting it.

The rehearsal keeps the family, the features and the parallel dimensions, in up to 8 processes over Gloo without a
GPU: training steps, a checkpoint, a resume in new processes, and the export to Hugging Face. It prints what it
shrinks.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.bridge.cli.rehearse import toy_config
from megatron.bridge.cli.support.train_job import ADAPTERS, TrainJob, forward_step
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.features.multi_token_prediction import drop_mtp_layers
from megatron.bridge.utils.config.serialize import copy_config
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError

PLAN_FILE, CONFIG_FILE = "plan.json", "toy.yaml"


def rehearse(job: TrainJob, steps: int, step_func: str | None, asked: int | None) -> int:
    """Run the rehearsal, ``steps`` steps before the checkpoint and after it, print its results, remove its files.

    ``asked`` is the number of processes of the real job, if it was given.
    """
    forward_step(step_func, job.config)
    if job.config.distill is not None:
        raise UserError(
            f"--rehearse does not support --mode {job.mode}: rehearse the same recipe without it"
        )
    if job.config.grpo is not None:
        raise UserError(
            "--rehearse does not support --mode grpo: rehearse a recipe of fine-tuning with the same parallel sizes"
        )
    world_size = asked or job.world_size or 1
    small = _toy_of(job, world_size, steps)
    folder = Path(tempfile.mkdtemp(prefix="megatron-bridge-rehearsal-"))
    exports = _write_plan(folder, job, small, steps, step_func)
    print_rank_0(f"rehearsal of {job.source}: {_process_count(world_size, small.original)}")
    shrunk = _process_count(small.dimensions.ranks, small.dimensions)
    print_rank_0(f"as {shrunk}, at toy width over gloo")
    for change in small.changes:
        print_rank_0(f"shrunk: {change}")
    for result in _results(folder):
        if "failed" in result:
            raise UserError(
                f"the rehearsal failed: {result['failed']} (its files are kept in {folder})"
            )
        print_rank_0(f"proven: {result['what']}: {result['result']} ({result['seconds']:.0f} s)")
    shutil.rmtree(folder)
    more = "" if exports else "export (this model has no Hugging Face format here), "
    print_rank_0(f"not proven: {more}memory, speed, and effects of the full size")
    return 0


def _toy_of(job: TrainJob, world_size: int, steps: int) -> toy_config.Toy:
    small = toy_config.shrink(job.resolve(world_size).config, world_size, steps)
    if job.mode != "pretrain":
        _remove_mtp(small)
    try:
        _check_toy(small)
    except UserError as error:
        raise UserError(f"this run cannot be shrunk for a rehearsal: {error}") from error
    return small


def _remove_mtp(small: toy_config.Toy) -> None:
    """Remove multi-token prediction: transformers makes the toy base model, and its models do not have it."""
    model = small.config.model
    if not model.mtp_num_layers:
        return
    small.changes.append(
        f"model.mtp_num_layers={model.mtp_num_layers}: the toy base model predicts one token"
    )
    drop_mtp_layers(model)


def _check_toy(small: toy_config.Toy) -> None:
    """Check the toy's config, with placeholders for the checkpoint and the vocabulary size."""
    config = copy_config(small.config)
    config.checkpoint.pretrained_checkpoint = config.checkpoint.pretrained_checkpoint or "toy"
    config.model.vocab_size = config.model.vocab_size or toy_config.VOCAB_SIZE
    config.validate(small.dimensions.ranks)


def _process_count(count: int, dimensions: Any) -> str:
    return "one process" if count == 1 else f"{count} processes = {dimensions}"


def _write_plan(
    folder: Path, job: TrainJob, small: toy_config.Toy, steps: int, step_func: str | None
) -> bool:
    """Write the plan for the worker process; return whether it ends with an export."""
    hf_config = _without_out_of_range_tokens(AutoBridge.hf_config_of(small.config.model))
    mode = job.mode if small.config.peft is None else ADAPTERS[0]
    if mode != "pretrain":
        if hf_config is None:
            raise UserError("a rehearsal of fine-tuning makes a toy base model: give --recipe")
        small.config.checkpoint.pretrained_checkpoint = str(folder / "base")
    (folder / CONFIG_FILE).write_text(small.config.to_yaml())
    plan = {
        "mode": mode,
        "ranks": small.dimensions.ranks,
        "steps": steps,
        "step_func": step_func,
        "hf": hf_config,
    }
    (folder / PLAN_FILE).write_text(json.dumps(plan, default=str))
    return hf_config is not None


def _without_out_of_range_tokens(hf_config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Move or unset special tokens beyond the toy's vocabulary, which transformers refuses."""
    if hf_config is None:
        return None

    text = hf_config.get("text_config") or hf_config
    changed = dict(hf_config)
    # not every architecture can do without the first two
    for key, inside in (("bos_token_id", 0), ("eos_token_id", 0), ("pad_token_id", None)):
        value = changed.get(key)
        numbers = value if isinstance(value, list) else [value]
        if any(token_id is not None and token_id >= text["vocab_size"] for token_id in numbers):
            changed[key] = inside
    return (
        changed
        if text is hf_config
        else changed | {"text_config": _without_out_of_range_tokens(text)}
    )


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    """Run the worker process, without visible GPUs, and yield each result that it prints."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "megatron.bridge.cli.rehearse.worker", str(folder)]
    with (
        (folder / "worker.log").open("w") as log,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                yield json.loads(line)
        finally:
            worker.terminate()
    if worker.returncode not in (0, -15):
        tail = (folder / "worker.log").read_text().splitlines()[-1:]
        raise UserError(
            f"the rehearsal ended with exit code {worker.returncode}: {' '.join(tail)} ({folder})"
        )
