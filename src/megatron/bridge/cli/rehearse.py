# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge train --rehearse``: the run at toy size, before anything is queued.

The same family, features and parallel dimensions in up to 8 processes over gloo, without a GPU: training steps, a
checkpoint, its resume by fresh processes, and the export to Hugging Face. What is shrunk is said.
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

from megatron.bridge.cli import toy
from megatron.bridge.cli.job import ADAPTERS, Job, forward_step
from megatron.bridge.utils.errors import UserError

PLAN, CONFIG = "plan.json", "toy.yaml"


def rehearse(job: Job, steps: int, step_func: str, asked: int | None) -> int:
    """Run the rehearsal, show what it proved, and remove what it wrote.

    Args:
        job: The real run; its config is resolved here.
        steps: Steps before the checkpoint, and after it.
        step_func: As ``--step_func`` names it.
        asked: Processes of the real run, where given.

    Raises:
        UserError: the real config cannot run, or a stage of the rehearsal failed.
    """
    from megatron.bridge.utils.console import console

    forward_step(step_func)
    if getattr(job.config, "distill", None) is not None:
        raise UserError(f"--rehearse does not rehearse --mode {job.mode}: rehearse the same recipe without it")
    world_size = asked or job.world_size or 1
    small = _shrunk(job, world_size, steps)
    folder = Path(tempfile.mkdtemp(prefix="megatron-bridge-rehearsal-"))
    exports = _write_plan(folder, job, small, steps, step_func)
    terminal = console()
    terminal.print(f"rehearsal of {job.source}: {_processes(world_size, small.original)}", markup=False)
    shrunk = _processes(small.layout.ranks, small.layout)
    terminal.print(f"as {shrunk}, at toy width over gloo", markup=False)
    for change in small.changes:
        terminal.print(f"shrunk: {change}", markup=False)
    for result in _results(folder):
        if "failed" in result:
            raise UserError(f"the rehearsal failed: {result['failed']} (everything is kept in {folder})")
        line = f"proven: {result['what']}: {result['result']} ({result['seconds']:.0f} s)"
        terminal.print(line, markup=False)
    shutil.rmtree(folder)
    more = "" if exports else "export, as this model has no Hugging Face form here, "
    terminal.print(f"not proven: {more}memory, speed, and what only the full size shows", markup=False)
    return 0


def _shrunk(job: Job, world_size: int, steps: int) -> toy.Toy:
    from megatron.bridge.utils.config.overrides import check_sticks

    job.config.validate(world_size)
    check_sticks(job.config, job.changes)
    small = toy.shrink(job.config, world_size, steps)
    if job.mode != "pretrain":
        _of_one_token(small)
    try:
        _validated(small)
    except UserError as error:
        raise UserError(f"this run cannot be shrunk for a rehearsal: {error}") from error
    return small


def _of_one_token(small: toy.Toy) -> None:
    """The toy to tune is made by transformers, whose models have no layers for further tokens."""
    model = small.config.model
    if not model.mtp_num_layers:
        return
    small.changes.append(f"model.mtp_num_layers={model.mtp_num_layers}: the toy to tune predicts one token")
    model.mtp_num_layers = None
    if model.pipeline_model_parallel_layout is not None:
        model.pipeline_model_parallel_layout = str(model.pipeline_model_parallel_layout).replace("m", "")


def _validated(small: toy.Toy) -> None:
    """Check a copy: the toy is resolved by those that run it."""
    import copy

    config = copy.deepcopy(small.config)
    if config.model.vocab_size is None:
        config.model.vocab_size = toy.VOCABULARY  # the tokenizer's; nobody has read it yet
    config.checkpoint.pretrained_checkpoint = config.checkpoint.pretrained_checkpoint or "toy"
    config.validate(small.layout.ranks)


def _processes(count: int, layout: Any) -> str:
    return "one process" if count == 1 else f"{count} processes = {layout}"


def _write_plan(folder: Path, job: Job, small: toy.Toy, steps: int, step_func: str) -> bool:
    """Tell the conductor what to do; whether that ends with an export."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    hf_config = _without_far_tokens(AutoBridge.hf_config_of(small.config.model))
    mode = job.mode if small.config.peft is None else ADAPTERS[0]
    if mode != "pretrain":
        if hf_config is None:
            raise UserError("a rehearsal of tuning makes a toy of the model to tune, which needs --recipe")
        small.config.checkpoint.pretrained_checkpoint = str(folder / "base")
    (folder / CONFIG).write_text(small.config.to_yaml())
    plan = {"mode": mode, "ranks": small.layout.ranks, "steps": steps, "step_func": step_func, "hf": hf_config}
    (folder / PLAN).write_text(json.dumps(plan, default=str))
    return hf_config is not None


def _without_far_tokens(hf_config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Special tokens behind the end of the toy's vocabulary are unset: transformers refuses them."""
    if hf_config is None:
        return None

    def is_far(key: str, value: Any) -> bool:
        numbers = value if isinstance(value, list) else [value]
        return key.endswith("_token_id") and any(number is not None and number >= limit for number in numbers)

    limit = hf_config["vocab_size"]
    return {key: None if is_far(key, value) else value for key, value in hf_config.items()}


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    """What the conductor reports, line by line; it is a process of its own, to which no GPU is visible."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "megatron.bridge.cli.rehearsal", str(folder)]
    with (
        (folder / "conductor.log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as conductor,
    ):
        assert conductor.stdout is not None
        try:
            for line in conductor.stdout:
                yield json.loads(line)
        finally:
            conductor.terminate()
    if conductor.returncode not in (0, -15):
        tail = (folder / "conductor.log").read_text().splitlines()[-1:]
        raise UserError(f"the rehearsal ended with exit code {conductor.returncode}: {' '.join(tail)} ({folder})")
