# SPDX-License-Identifier: Apache-2.0
"""Fourth part of the demo: teach a tiny model that hears, from random weights, to understand spoken digits."""

import json
import os
import shutil
import sys

from megatron.bridge.utils.errors import UserError
from scripts.demo import tiny_run
from scripts.demo.paths import ROOT, Paths, script
from scripts.demo.runner import PROCESSES, Runner, as_typed, megatron_bridge, torchrun

STAGES = 6
SEQ_LENGTH = 112
GLOBAL_BATCH_SIZE = 32
STEPS = 400
ENOUGH = 0.8
"""Share of the held-out recordings that must be understood."""
RECIPE = "qwen2_audio_7b_finetune_config"


def run(runner: Runner, paths: Paths) -> None:
    """Run the stages of this part."""
    recordings, untrained = paths.out / "recordings", paths.out / "untrained"
    with runner.stage("Fetch eSpeak NG (10 MB), which speaks, and soundfile and soxr (3 MB)"):
        fetch(runner, paths)
    with runner.stage("Speak digits in 120 voices, with questions, and make a tiny Qwen2-Audio"):
        runner.run(
            sys.executable, "-m", "scripts.demo.prepare_digits", paths.speech / "espeakng_loader",
            recordings, untrained,
        )  # fmt: skip
    with runner.stage("Look at the data, and listen to it on a page"):
        runner.run(
            *megatron_bridge("data", "preview"), RECIPE, "--hf-model", untrained, "--data", recordings,
            "--html", paths.out / "preview.html", "--samples", "2", "--world-size", str(PROCESSES),
            *overrides(paths), live=True,
        )  # fmt: skip
    with runner.stage(
        f"Train it: {STEPS} steps, tensor parallel over {PROCESSES} processes that share the audio"
    ):
        runner.run(
            *torchrun(), ROOT / "scripts" / "training" / "run_recipe.py", "--recipe", RECIPE,
            "--hf-model", untrained, "--data", recordings, *overrides(paths), live=True,
        )  # fmt: skip
    with runner.stage("Export the trained checkpoint to Hugging Face format"):
        runner.run(
            *megatron_bridge("export"), "--hf-model", untrained, "--megatron-path", paths.out / "digits",
            "--hf-path", paths.digits_model,
        )  # fmt: skip
    with runner.stage("Ask both models about voices that were never trained on, with transformers"):
        runner.run(
            sys.executable, "-m", "scripts.demo.evaluate_digits", "--before", untrained,
            "--after", paths.digits_model, "--held-out", recordings / "validation.jsonl",
            "--report", paths.out / "digits.json", "--page", paths.out / "digits.html",
        )  # fmt: skip


def fetch(runner: Runner, paths: Paths) -> None:
    """Unpack the package that speaks, and install what reads audio, for this and the next stages."""
    runner.run(ROOT / "scripts" / "extra.sh", "audio")
    beside = str(ROOT / ".cache" / "audio")
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{beside}{os.pathsep}{known}" if known else beside
    if paths.speech.is_dir():
        return
    staging = paths.cache / "speech.incomplete"
    shutil.rmtree(staging, ignore_errors=True)
    runner.run(
        ROOT / "scripts" / "uv.sh", "pip", "install", "--python", sys.executable, "--target", staging, "--no-deps",
        "--require-hashes", "--requirement", script("speech.txt"),
    )  # fmt: skip
    staging.rename(paths.speech)


def overrides(paths: Paths) -> list[str]:
    """Settings of the run."""
    return tiny_run.overrides(paths.out / "digits", STEPS, GLOBAL_BATCH_SIZE, SEQ_LENGTH, PROCESSES)


def summary(paths: Paths) -> str:
    """What the model learned to hear."""
    report = json.loads((paths.out / "digits.json").read_text())
    count = len(report["expected"])
    return f"""
  Audio       a tiny Qwen2-Audio from random weights; {STEPS * GLOBAL_BATCH_SIZE} recordings of digits in training.
  Held out    correct answers about {count} recordings of voices never trained on: {report["before"]["correct"]} \
before, {report["after"]["correct"]} after.
  Listen      {as_typed([str(paths.out / "digits.html")])} (recordings and answers), \
{as_typed([str(paths.out / "preview.html")])} (the data)"""


def verify(paths: Paths) -> None:
    """Check that the model learned to hear.

    Raises:
        UserError: it understands too few of the held-out recordings.
    """
    report = json.loads((paths.out / "digits.json").read_text())
    correct, count = report["after"]["correct"], len(report["expected"])
    if correct < ENOUGH * count:
        raise UserError(
            f"the trained model understands {correct} of {count} held-out recordings, less than {ENOUGH:.0%}"
        )
