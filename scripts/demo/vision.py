# SPDX-License-Identifier: Apache-2.0
"""Third part of the demo: teach a tiny vision-language model, from random weights, to name what it sees."""

import json
import sys

from megatron.bridge.utils.errors import UserError
from scripts.demo import tiny_run
from scripts.demo.paths import ROOT, Paths, script
from scripts.demo.runner import PROCESSES, Runner, as_typed, megatron_bridge, torchrun

STAGES = 5
SEQ_LENGTH = 80
GLOBAL_BATCH_SIZE = 32
STEPS = 600
ENOUGH = 0.8
"""Share of the held-out pictures that must be named correctly."""


def run(runner: Runner, paths: Paths) -> None:
    """Run the stages of this part."""
    pictures, untrained = paths.out / "pictures", paths.out / "untrained"
    with runner.stage("Draw pictures of colored shapes with questions, and make a tiny Qwen2.5-VL"):
        runner.run(sys.executable, script("prepare_shapes.py"), pictures, untrained)
    with runner.stage("Look at the data: images, tokens, and what is in the loss"):
        runner.run(
            *megatron_bridge("data", "preview"), "qwen25_vl_3b_finetune_config", "--hf-model", untrained,
            "--data", pictures, "--html", paths.out / "preview.html", "--samples", "2",
            "--world-size", str(PROCESSES), *overrides(paths), live=True,
        )  # fmt: skip
    with runner.stage(
        f"Train it: {STEPS} steps, tensor parallel over {PROCESSES} processes that share the images"
    ):
        runner.run(
            *torchrun(), ROOT / "scripts" / "training" / "run_recipe.py",
            "--recipe", "qwen25_vl_3b_finetune_config", "--hf-model", untrained, "--data", pictures,
            *overrides(paths), live=True,
        )  # fmt: skip
    with runner.stage("Export the trained checkpoint to Hugging Face format"):
        runner.run(
            *megatron_bridge("export"), "--hf-model", untrained, "--megatron-path", paths.out / "shapes",
            "--hf-path", paths.shapes_model,
        )  # fmt: skip
    with runner.stage(
        "Ask both models about pictures that were never trained on, with transformers"
    ):
        runner.run(
            sys.executable, "-m", "scripts.demo.evaluate_shapes", "--before", untrained, "--after", paths.shapes_model,
            "--held-out", pictures / "validation.jsonl", "--report", paths.out / "shapes.json",
            "--page", paths.out / "shapes.html",
        )  # fmt: skip


def overrides(paths: Paths) -> list[str]:
    """Settings of the run."""
    return tiny_run.overrides(paths.out / "shapes", STEPS, GLOBAL_BATCH_SIZE, SEQ_LENGTH, PROCESSES)


def summary(paths: Paths) -> str:
    """What the model learned to see."""
    report = json.loads((paths.out / "shapes.json").read_text())
    count = len(report["expected"])
    return f"""
  Vision      a tiny Qwen2.5-VL from random weights; {STEPS * GLOBAL_BATCH_SIZE} pictures of shapes in training.
  Held out    correct answers about {count} pictures never trained on: {report["before"]["correct"]} before, \
{report["after"]["correct"]} after.
  Look at it  {as_typed([str(paths.out / "shapes.html")])} (pictures and answers), \
{as_typed([str(paths.out / "preview.html")])} (the data)"""


def verify(paths: Paths) -> None:
    """Check that the model learned to see.

    Raises:
        UserError: it names too few of the held-out pictures.
    """
    report = json.loads((paths.out / "shapes.json").read_text())
    correct, count = report["after"]["correct"], len(report["expected"])
    if correct < ENOUGH * count:
        raise UserError(
            f"the trained model names {correct} of {count} held-out pictures, less than {ENOUGH:.0%}"
        )
