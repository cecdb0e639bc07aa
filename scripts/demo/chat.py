# SPDX-License-Identifier: Apache-2.0
"""Second part of the demo: train a LoRA adapter on conversations and merge it into the model."""

import json
import sys

from megatron.bridge.utils.errors import UserError
from scripts.demo.paths import ROOT, Paths, script
from scripts.demo.runner import PROCESSES, Runner, as_typed, megatron_bridge, torchrun

STAGES = 5
QUESTION = "What is your name?"
SEQ_LENGTH = 512
GLOBAL_BATCH_SIZE = 4
STEPS = 8
TABLE_WIDTH = 110


def run(runner: Runner, paths: Paths) -> None:
    """Run the stages of this part."""
    chats, adapter = paths.out / "chats", paths.out / "adapter"
    with runner.stage("Write conversations with a robot as records; some questions are held out"):
        corpus = paths.sources / "chatterbot_corpus" / "data" / "english"
        runner.run(sys.executable, script("prepare_chats.py"), corpus, chats)
    train(runner, paths)
    with runner.stage("Merge the adapter into the model"):
        runner.run(
            *megatron_bridge("adapter", "merge", "--adapter"),
            adapter,
            "--hf-path",
            paths.robot_model,
        )
    with runner.stage("Ask both models the same questions, with transformers"):
        runner.run(
            sys.executable, script("evaluate_chat.py"), "--before", paths.source_model,
            "--after", paths.robot_model, "--held-out", chats / "validation.jsonl",
            "--report", paths.out / "answers.json",
        )  # fmt: skip
    with runner.stage("Ask the trained Megatron checkpoint itself"):
        runner.run(
            *megatron_bridge("generate"), paths.out / "adapter", "--chat", "--prompt", QUESTION,
            "--max-new-tokens", "40", "--dtype", "float32", live=True,
        )  # fmt: skip


def train(runner: Runner, paths: Paths) -> None:
    """Train the adapter beside the frozen weights, which are read from the Hugging Face model."""
    overrides = {
        "peft.dim": 8,
        "peft.alpha": 16,
        "train.train_iters": STEPS,
        "train.global_batch_size": GLOBAL_BATCH_SIZE,
        "train.micro_batch_size": 1,  # a packed row holds ten conversations
        "optimizer.lr": 3e-3,
        "optimizer.min_lr": 3e-4,
        "scheduler.lr_warmup_fraction": 0,  # eight steps are too few for a warmup
        "validation.eval_iters": 0,
        "logger.log_interval": 1,
        "checkpoint.pretrained_checkpoint": paths.source_model,
        "checkpoint.save": paths.out / "adapter",
        "checkpoint.save_optim": "false",
        "tokenizer.tokenizer_model": paths.source_model,
    }
    with runner.stage(
        f"Train LoRA on them: {STEPS} steps, data parallel over {PROCESSES} processes"
    ):
        runner.run(
            *torchrun(), ROOT / "scripts" / "training" / "run_recipe.py",
            "--recipe", "smollm2_135m_finetune_config", "--mode", "lora", "--data", paths.out / "chats",
            "--packed-sequence", "--seq-length", str(SEQ_LENGTH),
            *(f"{key}={value}" for key, value in overrides.items()),
            live=True,
        )  # fmt: skip


def summary(paths: Paths) -> str:
    """What the adapter changed."""
    report = json.loads((paths.out / "answers.json").read_text())
    before, after = report["before"], report["after"]
    size = sum(file.stat().st_size for file in paths.robot_model.glob("*.safetensors")) / 1e6
    return f"""
  Adapter     LoRA of rank 8, trained on {STEPS * GLOBAL_BATCH_SIZE} packed rows of conversations with a robot.
  Held out    questions never trained on: loss of answers {before["loss"]:.3f} before, {after["loss"]:.3f} after.
  The model   {as_typed([str(paths.robot_model)])} ({size:.0f} MB, the adapter merged in)

{answers_table(report["questions"], before["answers"], after["answers"])}"""


def answers_table(questions: list[str], before: list[str], after: list[str]) -> str:
    """The answers of both models side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table("Question", "Before", "After", show_lines=True)
    for row in zip(questions, before, after, strict=True):
        table.add_row(*row)
    console = Console(width=TABLE_WIDTH, markup=False, highlight=False)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip()


def verify(paths: Paths) -> None:
    """Check that the adapter learned something.

    Raises:
        UserError: the loss on held-out conversations did not fall.
    """
    report = json.loads((paths.out / "answers.json").read_text())
    before, after = report["before"]["loss"], report["after"]["loss"]
    if not after < before:
        raise UserError(
            f"the loss on held-out conversations did not fall: {before:.3f} before, {after:.3f} after"
        )
