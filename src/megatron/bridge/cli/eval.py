# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge eval``: tasks of lm-evaluation-harness with any checkpoint, under any layout."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import add_model_options
from megatron.bridge.cli.support.output_files import JsonFile
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.text_format import columns
from megatron.bridge.utils.optional_imports import import_optional

DESCRIPTION = (
    "Evaluate a model with lm-evaluation-harness (the extra eval), which runs in this process. "
    "Local task files and local data need no network."
)
EXAMPLES = """example:
  megatron-bridge eval checkpoints/smollm2 --tasks my_task --include-path tasks --output results.json
"""


class ResultsFile(JsonFile):
    """The results that lm-evaluation-harness returns."""

    keys = ("results", "configs")


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_model_options(parser)
    parser.add_hidden_names({"--out": "--output"})
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="tasks, groups or YAML files, separated by commas",
    )
    parser.add_argument(
        "--include-path", type=Path, metavar="DIR", help="folder with further tasks"
    )
    parser.add_argument(
        "--limit", type=count, metavar="N", help="maximum number of examples of each task"
    )
    parser.add_argument("--few-shot", type=int, metavar="N", help="examples in each prompt")
    parser.add_argument("--chat", action="store_true", help="put prompts into the chat template")
    parser.add_argument(
        "--output", type=ResultsFile, metavar="FILE", help="write results and samples as JSON"
    )


def run(args: argparse.Namespace) -> int:
    import_optional("lm_eval", "megatron-bridge eval", "eval", is_setting=False)
    model_options.check_paths(args)
    from megatron.bridge.inference.evaluation import harness
    from megatron.bridge.utils import distributed

    with model_options.load(args) as llm:
        options = (args.include_path, args.limit, args.few_shot, args.chat)
        results = harness.evaluate(llm, args.tasks.split(","), *options)
    if distributed.rank() == 0:
        sys.stdout.write(_table(results) + "\n")
        if args.output is not None:
            args.output.write_text(json.dumps(results, default=str, ensure_ascii=False) + "\n")
    return 0


def _table(results: dict[str, Any]) -> str:
    """A table of all metrics, with their standard errors where the harness has them."""
    rows = [("metric", "value", "stderr", "shots", "task")]
    for task, metrics in results["results"].items():
        shots = str(results.get("n-shot", {}).get(task, ""))
        for key, value in metrics.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{kind}")
                name = metric if kind == "none" else f"{metric} ({kind})"
                rows.append(
                    (name, _number(value), _number(error), shots, metrics.get("alias", task))
                )
    return "\n".join(columns(rows))


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""
