# SPDX-License-Identifier: Apache-2.0
"""Training speed on this machine: this framework against the HF Trainer, a plain PyTorch loop, and a bare loop.

``python benchmarks/training.py`` trains the same random Llama on the same samples, candidate after candidate,
round after round, and prints a Markdown table: milliseconds and CPU seconds of a step (medians over all rounds
without the first step of each), tokens a second, and the speed relative to the HF Trainer. The HF candidates have
a process each, as a user's script would; only one process works at a time. With ``bf16`` all keep fp32 weights in
the optimizer: the HF candidates compute under autocast, Megatron-Core on bf16 copies.
"""

import argparse
import copy
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import DEVICE, table, wait

from megatron.bridge import AutoBridge
from megatron.bridge.backends.hardware.bf16 import VARIABLE as BF16_VARIABLE
from megatron.bridge.data.config import DatasetRequest, MockGPTDatasetConfig
from megatron.bridge.data.tokenizer import NullTokenizer, TokenizerConfig
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.loop import advance, train_step
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import Run

Stamps = list[tuple[float, float]]  # wall and CPU seconds since some start, at the end of each step
Candidate = Callable[[int], Stamps]

SIZES: dict[str, dict[str, Any]] = {
    "32m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "vocab_size": 8192,
    },
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 16384,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    },
}
HEADERS = ["", "ms/step", "CPU s/step", "tokens/s", "speed", "speed per CPU second"]
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0


def hf_config(size: str, seq_length: int) -> Any:
    """A Llama with grouped queries and heads of 64 channels."""
    from transformers import LlamaConfig

    hidden = SIZES[size]["hidden_size"]
    return LlamaConfig(
        **SIZES[size],
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=max(seq_length, 2048),
        use_cache=False,
        dtype="float32",
    )


def now() -> tuple[float, float]:
    """Wall and CPU seconds, when the device has done what it was asked."""
    wait()
    return time.perf_counter(), time.process_time()


# ------------------------------------------------------------------------------------------------- Hugging Face


def hf_batches(dataset: Any, micro_batch_size: int) -> Iterator[torch.Tensor]:
    """Tokens of consecutive samples, for ever."""
    start = 0
    while True:
        yield torch.stack(
            [dataset[(start + i) % len(dataset)]["tokens"] for i in range(micro_batch_size)]
        )
        start += micro_batch_size


def plain_loop(
    model: Any, dataset: Any, args: argparse.Namespace, bf16: bool, compiler: str | None = None
) -> Candidate:
    """The loop that one writes by hand over the Hugging Face model; ``compiler`` is a backend of torch.compile."""
    model.to(DEVICE).train()
    forward = torch.compile(model, backend=compiler) if compiler else model
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    batches = hf_batches(dataset, args.micro_batch_size)

    def run(steps: int) -> Stamps:
        stamps = []
        for _ in range(steps):
            tokens = next(batches).to(DEVICE, non_blocking=True)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
                loss = forward(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            stamps.append(now())
        return stamps

    return run


def hf_trainer(
    model: Any, dataset: Any, args: argparse.Namespace, bf16: bool, compiler: str | None = None
) -> Candidate:
    """The Hugging Face Trainer with its fused AdamW and no logging."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    stamps: Stamps = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(now())

    samples = [
        {"input_ids": dataset[i]["tokens"], "labels": dataset[i]["tokens"]}
        for i in range(len(dataset))
    ]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.micro_batch_size,
        max_steps=1,
        bf16=bf16,
        use_cpu=DEVICE == "cpu",
        torch_compile=compiler is not None,
        torch_compile_backend=compiler,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Clock()])

    def run(steps: int) -> Stamps:
        stamps.clear()
        trainer.args.max_steps = steps
        trainer.train()
        return list(stamps)

    return run


# ----------------------------------------------------------------------------------------------------- Megatron


def megatron_run(directory: Path, args: argparse.Namespace, bf16: bool, peft: Any = None) -> Run:
    """A run of this framework with the weights of ``directory``."""
    provider = AutoBridge.from_hf_pretrained(str(directory)).to_megatron_provider(
        load_weights=peft is None
    )
    provider.seq_length = args.seq_length
    config = ConfigContainer(
        train=TrainingConfig(args.micro_batch_size, args.micro_batch_size, train_iters=10**6),
        model=provider,
        optimizer=OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP,
        ),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        dataset=MockGPTDatasetConfig(seq_length=args.seq_length),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig("NullTokenizer", vocab_size=provider.vocab_size),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(directory) if peft else None),
        peft=peft,
        mixed_precision="bf16_mixed" if bf16 else "fp32",
    )
    run = setup(config, forward_step)
    run.emit("train_start")
    return run


def framework_loop(run: Run) -> Candidate:
    """The body of ``training.loop.train`` with the default callbacks and its own data."""

    def steps_of(steps: int) -> Stamps:
        stamps = []
        for _ in range(steps):
            run.emit("train_step_start")
            run.last_step = train_step(run)
            advance(run, run.last_step)
            run.emit("train_step_end")
            stamps.append(now())
        return stamps

    return steps_of


def bare_loop(run: Run, args: argparse.Namespace) -> Candidate:
    """Only what Megatron-Core itself must be called for, on a batch made before, with the run's model."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch = next(copy.copy(run.train_batches[0]).replicate())  # pyright: ignore[reportAttributeAccessIssue]

    def loss(
        mask: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total = (output.float() * mask).sum()
        return total, mask.sum().int(), {"loss": total.detach()}

    def step(_: Any, model: Any) -> Any:
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(loss, batch["loss_mask"])

    def steps_of(steps: int) -> Stamps:
        stamps = []
        for _ in range(steps):
            for chunk in run.model:
                chunk.zero_grad_buffer()
            run.optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(())],
                model=run.model,
                num_microbatches=1,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
            run.optimizer.step()
            run.scheduler.step(increment=args.micro_batch_size)
            reports[0]["loss"].item()
            stamps.append(now())
        return stamps

    return steps_of


# ------------------------------------------------------------------------------------------------------- measuring


def seconds_per_step(stamps: Stamps) -> list[tuple[float, float]]:
    """Wall and CPU seconds of every step but the first, which pays for starting."""
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(stamps)]


def measure(
    candidates: dict[str, Candidate], args: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """Steps of all candidates, in turn, after a round that is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for number in range(args.rounds + 1):
        for name, candidate in candidates.items():
            found = seconds_per_step(candidate(args.steps + 1))
            if number:
                times[name] += found
    return times


def rows(
    times: dict[str, list[tuple[float, float]]], tokens: int, reference: str
) -> list[list[str]]:
    """Medians, and speed relative to ``reference`` in wall and in CPU time."""
    wall = {name: statistics.median(step[0] for step in steps) for name, steps in times.items()}
    cpu = {name: statistics.median(step[1] for step in steps) for name, steps in times.items()}
    return [
        [
            name,
            f"{wall[name] * 1e3:.0f}",
            f"{cpu[name]:.2f}",
            f"{tokens / wall[name]:,.0f}",
            f"{wall[reference] / wall[name]:.2f}",
            f"{cpu[reference] / cpu[name]:.2f}",
        ]
        for name in times
    ]


def shapes(description: str | None) -> argparse.ArgumentParser:
    """Options that say what is trained."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="32m")
    parser.add_argument(
        "--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"]
    )
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def main() -> None:
    """Measure each precision and print its table."""
    parser = shapes(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=6, help="counted steps of a candidate in a round"
    )
    args = parser.parse_args()
    for precision in args.precision:
        print(
            f"\n{args.size}, {precision}, {args.micro_batch_size} x {args.seq_length} tokens per step\n"
        )
        print(table(HEADERS, one_precision(args, precision)))


def candidates_of(kind: str, args: argparse.Namespace, bf16: bool) -> dict[str, Candidate]:
    """What one process measures, all kinds from the same weights and samples."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(hf_config(args.size, args.seq_length))
    if kind == "megatron":
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            run = megatron_run(Path(directory), args, bf16)
        return {
            "bare Megatron-Core loop": bare_loop(run, args),
            "Megatron Bridge": framework_loop(run),
        }
    request = DatasetRequest((512, 0, 0), NullTokenizer(model.config.vocab_size))
    dataset = MockGPTDatasetConfig(seq_length=args.seq_length).build(request).train
    make = hf_trainer if kind == "HF Trainer" else plain_loop
    return {kind: make(model, dataset, args, bf16)}


def serve(kind: str, args: argparse.Namespace, bf16: bool, pipe: Any) -> None:
    """A process: steps of a candidate whenever its name comes in."""
    torch.set_num_threads(args.threads)
    found = candidates_of(kind, args, bf16)
    pipe.send(list(found))
    while (name := pipe.recv()) is not None:
        pipe.send(found[name](args.steps + 1))


def one_precision(args: argparse.Namespace, precision: str) -> list[list[str]]:
    """The rows of one table; one process works at a time, the others wait."""
    context = multiprocessing.get_context("spawn")
    candidates: dict[str, Candidate] = {}
    pipes = []
    for kind in ("HF Trainer", "HF plain loop", "megatron"):
        pipe, theirs = context.Pipe()
        # without bf16 instructions, importing the framework would make the products of the others faster, too
        with patched_environment({} if kind == "megatron" else {BF16_VARIABLE: "native"}):
            context.Process(
                target=serve, args=(kind, args, precision == "bf16", theirs), daemon=True
            ).start()
        for name in pipe.recv():
            candidates[name] = partial(ask, pipe, name)
        pipes.append(pipe)
    found = rows(measure(candidates, args), args.micro_batch_size * args.seq_length, "HF Trainer")
    for pipe in pipes:
        pipe.send(None)
    return found


@contextmanager
def patched_environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which processes that start inside the context inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def ask(pipe: Any, name: str, _steps: int) -> Stamps:
    """Let the process at the other end take its steps."""
    pipe.send(name)
    return pipe.recv()


if __name__ == "__main__":
    main()
