# SPDX-License-Identifier: Apache-2.0
"""Some completions for people: ``completions.jsonl`` and ``completions.html``, and text in TensorBoard."""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from megatron.bridge.training.reinforcement.rollouts import Generation
from megatron.bridge.training.state import Run
from megatron.bridge.utils import json_lines
from megatron.bridge.utils.atomic import write_text

COMPLETIONS_FILE = "completions.jsonl"
COMPLETIONS_PAGE = "completions.html"
SHOWN_STEPS = 50  # newest steps on the page
PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>Completions</title>
<style>
body {{ font-family: sans-serif; color: #222; background: #fff; }}
table {{ border-collapse: collapse; }}
td, th {{ border: 1px solid #ccc; padding: 4px 8px; text-align: left; vertical-align: top; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }}
</style>
</head><body><h1>Completions</h1>
<table><tr><th>step</th><th>prompt</th><th>completion</th><th>rewards</th><th>advantage</th></tr>
{rows}
</table></body></html>
"""


class CompletionSamples:
    """Writes completions of each generation; only the first rank uses it.

    Args:
        folder: ``logger.log_dir``.
        tensorboard: ``logger.tensorboard_dir``; None writes no events.
    """

    def __init__(self, folder: str | None, tensorboard: str | None) -> None:
        self._folder = folder
        self._tensorboard = tensorboard
        self._writer: Any = None

    @classmethod
    def of(cls, run: Run) -> Self:
        logger = run.config.logger
        return cls(logger.log_dir, logger.tensorboard_dir)

    def write(self, step: int, generation: Generation) -> None:
        """Append the completions with which a step begins; those of later steps, which a killed run left, go."""
        lines = [{"step": step, **shown} for shown in generation.shown]
        if not lines:
            return
        if self._folder is not None:
            folder = Path(self._folder)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / COMPLETIONS_FILE
            write_text(path, json_lines.text_until(path, step - 1) + json_lines.to_text(lines))
            newest = json_lines.read(path)
            first = step - SHOWN_STEPS
            write_text(
                folder / COMPLETIONS_PAGE,
                render_page([line for line in newest if line["step"] > first]),
            )
        if self._tensorboard is not None:
            self._write_events(step, lines)

    def _write_events(self, step: int, lines: list[dict[str, Any]]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter  # 1 s to import

            self._writer = SummaryWriter(self._tensorboard, filename_suffix=".completions")
        for index, line in enumerate(lines):
            text = (
                f"    {_text_of(line['prompt'])}\n    {line['completion']}\n\n{_rewards_of(line)}"
            )
            self._writer.add_text(f"completion {index + 1}", text.replace("\n", "\n    "), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def render_page(lines: list[dict[str, Any]]) -> str:
    """The completions as a page that needs no other file, the newest first."""
    rows = "\n".join(_row(line) for line in reversed(lines))
    return PAGE.format(rows=rows)


def _row(line: Mapping[str, Any]) -> str:
    cells = [
        str(line["step"]),
        f"<pre>{html.escape(_text_of(line['prompt']))}</pre>",
        f"<pre>{html.escape(line['completion'])}</pre>",
        html.escape(_rewards_of(line)),
        "" if line["advantage"] is None else f"{line['advantage']:.3f}",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _rewards_of(line: Mapping[str, Any]) -> str:
    rewards: dict[str, float | None] = line["rewards"]
    return ", ".join(
        f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in rewards.items()
    )


def _text_of(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(
        f"{message['role']}: {message.get('content') or json.dumps(message)}" for message in prompt
    )
