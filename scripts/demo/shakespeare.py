# SPDX-License-Identifier: Apache-2.0
"""First part of the demo: fine-tune all weights on Shakespeare, from Hugging Face format and back to it."""

import json
import shutil
import sys
from pathlib import Path

from megatron.bridge.utils.errors import UserError
from scripts.demo.paths import ROOT, Paths, script
from scripts.demo.runner import PROCESSES, Runner, as_typed, megatron_bridge, say, torchrun

STAGES = 6
SEQ_LENGTH = 512
GLOBAL_BATCH_SIZE = 4
TRIAL_STEPS = 2  # the first one also fills caches and buffers
TRAINING_SECONDS = 240
FEWEST_STEPS, MOST_STEPS = 4, 20

# What the stages after the trial take, in steps (validation and evaluation compute without gradients) and in starts of
# the framework, whose duration is that of the conversion.
EVALUATION = 4
LORA = 10
STARTS, LORA_STARTS = 4, 4


def run(runner: Runner, paths: Paths, steps: int | None, with_lora: bool) -> None:
    """Run the stages of this part; ``with_lora``: the other part follows, whose time is announced, too."""
    tokenize(runner, paths)
    convert(runner, paths)
    start_seconds = runner.seconds
    with runner.stage(f"Time a step on this machine: {TRIAL_STEPS} steps whose result is dropped"):
        step_seconds = measure_step(runner, paths)
    steps = steps or choose_steps(step_seconds)
    starts = STARTS + LORA_STARTS * with_lora
    later_steps = steps + EVALUATION + LORA * with_lora
    minutes = (later_steps * step_seconds + starts * start_seconds) / 60
    say(f"      a step takes {step_seconds:.1f} s: {steps} steps are trained")
    say(f"      all that follows takes about {max(1, round(minutes))} minutes")
    train(runner, paths, steps)
    export(runner, paths)
    evaluate(runner, paths)


def tokenize(runner: Runner, paths: Paths) -> None:
    """Turn the text into Megatron-Core's indexed format."""
    with runner.stage("Tokenize the text; one play is held out"):
        text = paths.out / "text"
        runner.run(
            sys.executable, script("prepare_text.py"), paths.sources / "shksprdata" / "texts", text
        )
        runner.run(
            *megatron_bridge("data", "preprocess", "--input"), text / "train.jsonl",
            "--tokenizer-model", paths.source_model, "--output-prefix", text / "train", "--append-eod",
            "--workers", "1",  # for 5 MB of text, starting a second process takes longer than it saves
        )  # fmt: skip


def convert(runner: Runner, paths: Paths) -> None:
    """Convert the model from Hugging Face to Megatron."""
    with runner.stage("Convert it to a Megatron checkpoint"):
        runner.run(
            *torchrun(), "--module", "megatron.bridge.cli.main", "convert", "--tp", str(PROCESSES),
            "--hf-model", paths.source_model, "--megatron-path", paths.out / "megatron",
        )  # fmt: skip


def measure_step(runner: Runner, paths: Paths) -> float:
    """Train a few steps without saving, and return the seconds of the fastest one."""
    trial = paths.out / "trial"
    overrides = training_overrides(paths, TRIAL_STEPS) | {
        "validation.eval_iters": 0,
        "logger.tensorboard_dir": "null",
        "logger.log_dir": trial,
        "checkpoint.save": "null",
    }
    runner.run(*training_command(paths, overrides))
    entries = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    return min(entry["step time"] for entry in entries if entry["kind"] == "train")


def choose_steps(step_seconds: float) -> int:
    """Return how many steps fit into the time for training."""
    return min(MOST_STEPS, max(FEWEST_STEPS, int(TRAINING_SECONDS / step_seconds)))


def train(runner: Runner, paths: Paths, steps: int) -> None:
    """Fine-tune with tensor parallelism over two processes."""
    with runner.stage(
        f"Fine-tune on Shakespeare: {steps} steps, tensor parallel over {PROCESSES} processes"
    ):
        runner.run(*training_command(paths, training_overrides(paths, steps)), live=True)


def training_overrides(paths: Paths, steps: int) -> dict[str, object]:
    """What the run of ``steps`` steps changes in its recipe."""
    return {
        "model.tensor_model_parallel_size": PROCESSES,
        "model.make_query_groups_divisible_by": PROCESSES,  # 9 heads in 3 groups do not split over two
        "train.train_iters": steps,
        "train.global_batch_size": GLOBAL_BATCH_SIZE,
        "train.micro_batch_size": GLOBAL_BATCH_SIZE,
        "optimizer.lr": 3e-4,
        "optimizer.min_lr": 3e-5,
        "dataset.split": "90,5,5",
        "validation.eval_interval": max(1, steps // 4),
        "validation.eval_iters": 1,
        "logger.log_interval": 1,
        "ddp.use_distributed_optimizer": "false",  # one data-parallel rank has nothing to shard or overlap
        "ddp.overlap_grad_reduce": "false",
        "ddp.overlap_param_gather": "false",
        "logger.tensorboard_dir": paths.out / "run" / "tensorboard",
        "checkpoint.pretrained_checkpoint": paths.out / "megatron",
        "checkpoint.save": paths.out / "run",
        "checkpoint.save_optim": "false",
        "tokenizer.tokenizer_model": paths.source_model,
    }


def training_command(paths: Paths, overrides: dict[str, object]) -> list[str | Path]:
    """The command that trains with the recipe and these changes."""
    return [
        *torchrun(), ROOT / "scripts" / "training" / "run_recipe.py",
        "--recipe", "smollm2_135m_pretrain_config", "--mode", "sft",
        "--data", paths.out / "text" / "train", "--seq-length", str(SEQ_LENGTH),
        *(f"{key}={value}" for key, value in overrides.items()),
    ]  # fmt: skip


def export(runner: Runner, paths: Paths) -> None:
    """Convert the trained model from Megatron to Hugging Face."""
    with runner.stage("Export the fine-tuned model to Hugging Face format"):
        runner.run(
            *megatron_bridge("export"), "--hf-model", paths.source_model, "--megatron-path", paths.out / "run",
            "--hf-path", paths.shakespeare_model,
        )  # fmt: skip


def evaluate(runner: Runner, paths: Paths) -> None:
    """Compare the exported model with the trained one, and both models on the held-out play."""
    run_dir, exported = paths.out / "run", paths.shakespeare_model
    with runner.stage(
        "Load it with transformers; compare logits with Megatron, and loss on the held-out play"
    ):
        runner.run(
            sys.executable, script("evaluate_text.py"), "--before", paths.source_model, "--after", exported,
            "--megatron", run_dir, "--held-out", paths.out / "text" / "held_out.txt",
            "--metrics", run_dir / "metrics.jsonl",
            "--report", paths.out / "report.json", "--plot", exported / "loss.png",
        )  # fmt: skip
        shutil.copyfile(run_dir / "run_config.yaml", exported / "run_config.yaml")


def summary(paths: Paths) -> str:
    """What happened, for somebody who sees the project for the first time."""
    report = json.loads((paths.out / "report.json").read_text())
    before, after = report["loss_before"], report["loss_after"]
    return f"""
  Converted   SmolLM2-135M-Instruct, Hugging Face -> Megatron-Core -> Hugging Face.
              Its weights were dequantized from a 4-bit file, so expect slightly worse text than from the
              published model.
  Trained     on {report["samples"] * SEQ_LENGTH:,} tokens of Shakespeare, tensor parallel, {PROCESSES} processes.
  Held out    The Tempest, never trained on: loss {before:.3f} before, {after:.3f} after.
  Checked     transformers and Megatron give the same logits for the exported model:
              largest difference {report["logit_difference"]:.1e}, largest logit {report["logit_scale"]:.0f}.
  The model   {as_typed([str(paths.shakespeare_model)])}
  In it       loss.png (loss during training), run_config.yaml (every setting of the run)

  The prompt  {report["prompt"]!r}
  Before      {report["text_before"]!r}
  After       {report["text_after"]!r}"""


def verify(paths: Paths) -> None:
    """Check that the demo proved what it set out to prove.

    Raises:
        UserError: the held-out loss did not fall, or the exported model differs from the trained one.
    """
    report = json.loads((paths.out / "report.json").read_text())
    if (
        not report["logit_difference"] <= report["logit_tolerance"]
    ):  # written this way round, NaN fails too
        raise UserError(
            f"the exported model differs from the trained one: its logits differ by "
            f"{report['logit_difference']:.2e}, more than the {report['logit_tolerance']:.2e} of rounding"
        )
    if not report["loss_after"] < report["loss_before"]:
        raise UserError(
            f"the loss on held-out text did not fall: {report['loss_before']:.3f} before, "
            f"{report['loss_after']:.3f} after; try more --steps"
        )
