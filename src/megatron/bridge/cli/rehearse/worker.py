# SPDX-License-Identifier: Apache-2.0
"""The worker process of a rehearsal: ``python -m megatron.bridge.cli.rehearse.worker FOLDER``.

It imports everything once and forks the ranks, so that eight of them start quickly on two cores. It does not join
a process group itself. Each result is a line of JSON on standard output.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.main import main as command
from megatron.bridge.cli.rehearse.command import CONFIG_FILE, PLAN_FILE
from megatron.bridge.cli.support.text_format import say
from megatron.bridge.cli.support.train_job import forward_step
from megatron.bridge.recipes.sizes import hf_config
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.loss_curves import LOSS, read_metrics
from megatron.bridge.utils.processes import free_port


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    rehearsal = Rehearsal(folder)
    stages: list[Callable[[], tuple[str, str]]] = [rehearsal.train, rehearsal.resume]
    if rehearsal.plan["hf"] is not None:
        stages.append(rehearsal.export)
    for stage in stages:
        started = time.perf_counter()
        try:
            name, result = stage()
        except UserError as error:
            say(json.dumps({"failed": str(error)}))
            return 0
        say(json.dumps({"what": name, "result": result, "seconds": time.perf_counter() - started}))
    return 0


class Rehearsal:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = json.loads((folder / PLAN_FILE).read_text())
        self.first = folder / "run"
        self.second = folder / "resumed"

    def train(self) -> tuple[str, str]:
        """Train ``2 * steps`` steps, with a checkpoint in the middle."""
        if self.plan["mode"] != "pretrain":
            self._fork("making a toy base model", 1, self._make_base)
        self._fork("training", self.plan["ranks"], lambda: self._run(self.first))
        losses = _losses(self.first)
        shown = ", ".join(f"{loss:.3f}" for loss in losses.values())
        return "layout, data and forward step", f"{len(losses)} steps on every rank, losses {shown}"

    def resume(self) -> tuple[str, str]:
        """Resume from the middle in new processes, and compare the losses bitwise."""
        steps = self.plan["steps"]
        source = paths.iteration_dir(self.first, steps)
        self.second.mkdir()
        shutil.copytree(source, paths.iteration_dir(self.second, steps))
        paths.write_tracker(self.second, steps)
        self._fork("resuming", self.plan["ranks"], lambda: self._run(self.second))
        expected = {step: loss for step, loss in _losses(self.first).items() if step > steps}
        if _losses(self.second) != expected:
            raise UserError(
                f"the resumed run has losses {_losses(self.second)}, but the first has {expected}"
            )
        return (
            "checkpoint and resume",
            f"new processes resumed from step {steps} with bitwise equal losses",
        )

    def export(self) -> tuple[str, str]:
        """Export the Hugging Face model, and compare it with the checkpoint."""
        adapted = self.plan["mode"] not in ("pretrain", "sft")
        self._fork("exporting", 1, self._merge if adapted else self._export)
        if adapted:
            return "export to Hugging Face", f"adapters merged into the base, {self._for_peft()}"
        logits = "same logits in transformers" if self._is_native else "transformers cannot run it"
        return "export to Hugging Face", f"every tensor bitwise equal, {logits}"

    def _run(self, save: Path) -> None:
        config = ConfigContainer.from_yaml((self.folder / CONFIG_FILE).read_text(), trust=True)
        config.checkpoint.save, config.checkpoint.load = str(save), None
        config.checkpoint.save_interval = self.plan["steps"]
        config.checkpoint.most_recent_k = -1
        run = pretrain if self.plan["mode"] == "pretrain" else finetune
        run(config, forward_step(self.plan["step_func"], config))

    def _make_base(self) -> None:
        torch.manual_seed(0)
        if self._is_native:
            model = getattr(transformers, self.plan["hf"]["architectures"][0])(self._hf_config())
            model.to(torch.bfloat16).save_pretrained(self.folder / "base")
            return
        bridge = AutoBridge.from_hf_config(self._hf_config())
        model_chunks = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False, bf16=True)
        bridge.save_hf_pretrained(model_chunks, self.folder / "base", show_progress=False)

    def _export(self) -> None:
        exported = self.folder / "exported"
        AutoBridge.from_hf_config(self._hf_config()).export_ckpt(
            self.first, exported, show_progress=False
        )
        tensors_only = [] if self._is_native else ["--skip-logits"]
        if command(["verify", str(exported), str(self.first), "--no-progress", *tensors_only]):
            raise UserError("the exported model differs from the checkpoint")

    def _merge(self) -> None:
        for action in ("merge", "export"):
            code = command(
                [
                    "adapter",
                    action,
                    "--adapter",
                    str(self.first),
                    "--hf-path",
                    str(self.folder / action),
                ]
            )
            if code and action == "merge":
                raise UserError("adapter merge failed")

    def _for_peft(self) -> str:
        """Whether the adapters were exported for peft, whose format does not support all of them."""
        if (self.folder / "export").exists():
            return "and exported for peft"
        return f"and not exported for peft: {_last_line(self._log('exporting', 0)).removeprefix('error: ')}"

    @property
    def _is_native(self) -> bool:
        """Whether transformers has the model's class; others need remote code from the hub, which is not run."""
        return hasattr(transformers, self.plan["hf"]["architectures"][0])

    def _hf_config(self) -> Any:
        return hf_config(self.plan["hf"])

    def _fork(self, stage: str, count: int, function: Callable[[], None]) -> None:
        """Run ``function`` on ``count`` forked ranks; the last line of a log says why its rank failed."""
        port = free_port()
        ranks: dict[int, int] = {}
        for rank in range(count):
            process = os.fork()
            if process == 0:
                _run_rank(rank, count, port, self._log(stage, rank), function)
            ranks[process] = rank
        while ranks:
            process, status = os.wait()
            rank = ranks.pop(process)
            if status:
                for other_pid in ranks:
                    os.kill(other_pid, signal.SIGKILL)
                    os.waitpid(other_pid, 0)
                raise UserError(f"{stage}, rank {rank}: {_last_line(self._log(stage, rank))}")

    def _log(self, stage: str, rank: int) -> Path:
        return self.folder / f"{stage.replace(' ', '-')}.{rank}.log"


def _run_rank(rank: int, count: int, port: int, log: Path, function: Callable[[], None]) -> None:
    code = 1
    try:
        from megatron.bridge.utils.processes import die_with_parent

        die_with_parent(signal.SIGKILL)
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
        os.environ.update(
            {name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1"
        )
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        function()
        code = 0
    except UserError as error:
        sys.stderr.write(f"{error}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _last_line(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else f"{log} is empty"


def _losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row[LOSS] for row in read_metrics(folder) if row["kind"] == "train"}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
