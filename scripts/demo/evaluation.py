# SPDX-License-Identifier: Apache-2.0
"""Compare the answers of a model before and after training: what the demos with images and audio share."""

import argparse
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

Records = list[dict[str, Any]]


def answer_cell(text: str, right: str) -> str:
    """An answer in the color of right or wrong."""
    return f'<td class="{"right" if text == right else "wrong"}">{html.escape(text) or "(nothing)"}</td>'


def evaluate(
    description: str,
    answer: Callable[[Path, Records, Path], list[str]],
    write_page: Callable[[dict[str, Any], Records, Path], str],
) -> None:
    """Ask both models that the command line names, and write the report and the page.

    Args:
        description: What the program does, for ``--help``.
        answer: (folder of a model, records, folder of their media) -> an answer to each record.
        write_page: (report, records, folder of their media) -> a web page.
    """
    parser = argparse.ArgumentParser(description=description)
    for name in ("before", "after", "held-out", "report", "page"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    records = [json.loads(line) for line in args.held_out.read_text().splitlines()]
    expected = [record["messages"][1]["content"] for record in records]
    report: dict[str, Any] = {"expected": expected}
    for name, directory in (("before", args.before), ("after", args.after)):
        found = answer(directory, records, args.held_out.parent)
        correct = sum(said == right for said, right in zip(found, expected, strict=True))
        report[name] = {"answers": found, "correct": correct}
    args.report.write_text(json.dumps(report, indent=2) + "\n")
    args.page.write_text(write_page(report, records, args.held_out.parent))
    print(json.dumps(report, indent=2))  # noqa: T201 - the log of this stage
