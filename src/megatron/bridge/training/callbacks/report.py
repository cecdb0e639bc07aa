# SPDX-License-Identifier: Apache-2.0
"""What came of a run, on one page: ``report.md`` and ``loss.png`` in its folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.training.callbacks import data_check, samples
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import Run
from megatron.bridge.utils import curves
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import console

PAGE, CURVES = "report.md", "loss.png"
LOSS, METRICS = curves.LOSS, curves.METRICS


class TuningReport(Callback):
    """Writes the report at the end of a run, if ``logger.log_dir`` is set."""

    def on_train_end(self, context: Run) -> None:
        """Write it, on the first rank."""
        folder = context.config.logger.log_dir
        if folder is not None:
            on_first_rank(lambda: write_report(Path(folder), context.config, context.progress.step))


def write_report(folder: Path, config: ConfigContainer, step: int) -> None:
    """Read what the run left in ``folder``, and write the page and the curves."""
    metrics = _lines(folder / METRICS)
    drawn = _draw(folder / CURVES, metrics)
    text = "\n".join(_page(folder, config, step, metrics, drawn))
    write_text(folder / PAGE, text + "\n")
    console().print(f"{folder / PAGE} tells what came of this run", markup=False)


def _page(
    folder: Path, config: ConfigContainer, step: int, metrics: list[dict[str, Any]], drawn: bool
) -> Iterator[str]:
    train = config.train
    yield f"# Fine-tuning of {config.checkpoint.pretrained_checkpoint}"
    yield ""
    yield f"{step:,} of {train.train_iters:,} steps, {train.global_batch_size:,} rows a step."
    yield from _losses(metrics)
    if drawn:
        yield f"\n![loss]({CURVES})"
    yield from _data(folder)
    yield from _answers(_lines(folder / samples.FILE))
    yield from _how_to_go_on(config)


def _losses(metrics: list[dict[str, Any]]) -> Iterator[str]:
    yield "\n## Loss\n\n| data | first | last | lowest |\n|---|---|---|---|"
    for kind in ("train", "validation", "test"):
        values = [line[LOSS] for line in metrics if line["kind"] == kind and LOSS in line]
        if values:
            yield f"| {kind} | {values[0]:.4f} | {values[-1]:.4f} | {min(values):.4f} |"


def _data(folder: Path) -> Iterator[str]:
    path = folder / data_check.SUMMARY
    if not path.exists():
        return
    yield "\n## Data\n"
    yield "| split | samples | tokens | learnt | cut | dropped | rows full |"
    yield "|---|---|---|---|---|---|---|"
    for split in json.loads(path.read_text())["splits"]:
        report = split["report"]
        fill = "-" if split["fill"] is None else f"{split['fill']:.1%}"
        dropped = sum(report["dropped"].values())
        counts = [report["samples"], report["tokens"], report["trained"], report["cut"], dropped]
        cells = [split["name"], *(f"{count:,}" for count in counts), fill]
        yield f"| {' | '.join(cells)} |"
    yield f"\nSamples with what is learnt of them: `{data_check.PAGE}`."


def _answers(lines: list[dict[str, Any]]) -> Iterator[str]:
    """For each prompt the first and the last answer."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault(line["prompt"], []).append(line)
    if by_prompt:
        yield "\n## Answers"
    for prompt, answers in by_prompt.items():
        yield f"\n{_quoted(prompt)}"
        shown = answers[:1] if len(answers) == 1 else [answers[0], answers[-1]]
        yield from (f"\nAfter step {answer['step']}:\n\n{_quoted(answer['answer'])}" for answer in shown)


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _how_to_go_on(config: ConfigContainer) -> Iterator[str]:
    save, source = config.checkpoint.save, config.checkpoint.pretrained_checkpoint
    if save is None:
        return
    config_file = Path(config.logger.log_dir or save) / "run_config.yaml"
    yield "\n## To go on\n\n```bash"
    longer = f"train.train_iters={2 * config.train.train_iters} scheduler.override_opt_param_scheduler=true"
    yield f"megatron-bridge train --config {config_file} {longer}"
    yield "```\n\n## To export\n\n```bash"
    if config.peft is not None:
        yield f"megatron-bridge adapter merge --adapter {save} --hf-path {save}-hf"
    else:
        is_hf = (Path(source or "") / "config.json").is_file()
        model = source if is_hf else config.tokenizer.tokenizer_model
        yield f"megatron-bridge export --hf-model {model} --megatron-path {save} --hf-path {save}-hf"
    yield "```"


def _draw(path: Path, metrics: list[dict[str, Any]]) -> bool:
    """The curves as a picture; False if there is nothing to draw."""
    if not any(LOSS in line for line in metrics):
        return False
    curves.draw(path, {"loss per learnt token": curves.curves(metrics, LOSS, "")})
    return True


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
