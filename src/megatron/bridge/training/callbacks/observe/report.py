# SPDX-License-Identifier: Apache-2.0
"""The report of a fine-tuning run: ``report.md`` and ``loss.png`` in its log folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.models.hf_pretrained.hub import on_this_machine
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.callbacks.core import data
from megatron.bridge.training.callbacks.observe import sample_generation
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import json_lines, loss_curves
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import print_rank_0

REPORT_FILE, CURVES_FILE = "report.md", "loss.png"
LOSS = loss_curves.LOSS


class FinetuningReport(Callback):
    """Writes a report at the end of a run, if ``logger.log_dir`` is set."""

    def on_train_end(self, context: Run) -> None:
        folder = context.config.logger.log_dir
        if folder is not None:
            on_first_rank(lambda: write_report(Path(folder), context.config, context.progress.step))


def write_report(folder: Path, config: ConfigContainer, step: int) -> None:
    """Write the report and the loss curves from the files that the run wrote to ``folder``."""
    metrics = json_lines.read(folder / loss_curves.METRICS)
    train = config.train
    lines = [
        f"# Fine-tuning of {config.checkpoint.pretrained_checkpoint}\n",
        f"{step:,} of {train.train_iters:,} steps, {train.global_batch_size:,} rows per step.",
        *_losses(metrics),
        *_curves(folder / CURVES_FILE, metrics),
        *_data(folder),
        *_answers(json_lines.read(folder / sample_generation.SAMPLES_FILE)),
        *_next_steps(config),
    ]
    write_text(folder / REPORT_FILE, "\n".join(lines) + "\n")
    print_rank_0(f"report of this run: {folder / REPORT_FILE}")


def _losses(metrics: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Loss\n\n| data | first | last | lowest |\n|---|---|---|---|"
    for kind in ("train", "validation", "test"):
        values = [line[LOSS] for line in metrics if line["kind"] == kind and LOSS in line]
        if values:
            yield f"| {kind} | {values[0]:.4f} | {values[-1]:.4f} | {min(values):.4f} |"


def _data(folder: Path) -> Iterator[str]:
    path = folder / data.SUMMARY
    if not path.exists():
        return
    yield "\n## Data\n"
    yield "| split | samples | tokens | trained on | truncated | dropped | fill of rows |"
    yield "|---|---|---|---|---|---|---|"
    for split in json.loads(path.read_text())["splits"]:
        report = split["report"]
        fill = "-" if split["fill"] is None else f"{split['fill']:.1%}"
        dropped = sum(report["dropped"].values())
        counts = [report["samples"], report["tokens"], report["trained"], report["cut"], dropped]
        cells = [split["name"], *(f"{count:,}" for count in counts), fill]
        yield f"| {' | '.join(cells)} |"
    yield f"\nSamples with the tokens that are trained on: `{data.PAGE}`."


def _answers(lines: list[dict[str, Any]]) -> Iterator[str]:
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault(line["prompt"], []).append(line)
    if by_prompt:
        yield "\n## Answers"
    for prompt, answers in by_prompt.items():
        yield f"\n{_quoted(prompt)}"
        shown = answers[:1] if len(answers) == 1 else [answers[0], answers[-1]]
        yield from (
            f"\nAfter step {answer['step']}:\n\n{_quoted(answer['answer'])}" for answer in shown
        )


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _next_steps(config: ConfigContainer) -> Iterator[str]:
    save = config.checkpoint.save
    source = config.checkpoint.pretrained_checkpoint
    if save is None:
        return
    config_file = Path(config.logger.log_dir or save) / "run_config.yaml"
    yield "\n## To train further\n\n```bash"
    epochs = config.train.num_epochs
    length = (
        f"num_epochs={2 * epochs:g}" if epochs else f"train_iters={2 * config.train.train_iters}"
    )
    # the decay that this run derived from its length is in its file
    longer = (
        f"train.{length} scheduler.lr_decay_iters=null scheduler.override_opt_param_scheduler=true"
    )
    yield f"megatron-bridge train --config {config_file} {longer}"
    yield "```\n\n## To export\n\n```bash"
    if config.peft is not None:
        yield f"megatron-bridge adapter merge --adapter {save} --hf-path {save}-hf"
    else:
        model = source if source and on_this_machine(source) else config.tokenizer.tokenizer_model
        yield f"megatron-bridge export --hf-model {model} --megatron-path {save} --hf-path {save}-hf"
    yield "```"


def _curves(path: Path, metrics: list[dict[str, Any]]) -> Iterator[str]:
    if any(LOSS in line for line in metrics):
        loss_curves.draw(path, {"loss per trained token": loss_curves.curves(metrics, LOSS, "")})
        yield f"\n![loss]({path.name})"
