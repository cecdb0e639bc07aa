# SPDX-License-Identifier: Apache-2.0
"""LoRA on one GPU: a model of 8 billion weights against ``peft`` with the HF Trainer, in bf16.

``python benchmarks/lora_gpu.py --shape llama31-8b --data packed`` trains adapters of rank 16 beside all linear
layers of the same random weights on the same samples, candidate after candidate in turn, and prints tokens a
second and TFLOP/s (operations that are done: nothing for the gradients of frozen weights). ``mock`` is made-up
samples of 4,096 tokens; ``packed`` is conversations of log-normal lengths in rows of 2,048, packed by best fit and
counted as full, the same rows for both candidates. Without a GPU it says so and ends; ``--shape tiny`` runs
anywhere.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lora import TARGETS
from measure import table
from training import Candidate, Stamps, framework_loop, measure, now

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import (
    DatasetConfig,
    FinetuningDatasetConfig,
    MockGPTDatasetConfig,
    PackedSequenceSpecs,
)
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer, TokenizerConfig
from megatron.bridge.models.flops import flops_per_token
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.sizes import size_of
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.setup import setup

TINY = {
    **size_of("meta-llama/Llama-3.1-8B").numbers,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SHAPES = {
    "llama31-8b": size_of("meta-llama/Llama-3.1-8B").numbers,
    "qwen3-8b": size_of("Qwen/Qwen3-8B").numbers,
    "tiny": TINY,
}
LENGTHS = {"mock": 4096, "packed": 2048}
ROWS = 512
RANK, RATE = 16, 1e-4
TRAINER, OURS = "peft + HF Trainer", "Megatron Bridge"
MEAN, SPREAD = (
    5.5,
    0.9,
)  # of the logarithm of a conversation's tokens: a median of 245, a mean of 367


def write_conversations(folder: Path, vocabulary: int, longest: int) -> None:
    """Enough to fill ``ROWS`` rows, as numbers for a ``NullTokenizer``; a third of each is the prompt."""
    random = np.random.default_rng(0)
    left = ROWS * longest
    with (folder / "training.jsonl").open("w") as file:
        while left > 0:
            length = int(np.clip(random.lognormal(MEAN, SPREAD), 8, longest - 1))
            words = [str(token) for token in random.integers(0, vocabulary - 1, length)]
            cut = max(1, length // 3)
            record = {"prompt": " ".join(words[:cut]) + " ", "completion": " ".join(words[cut:])}
            file.write(json.dumps(record) + "\n")
            left -= length


def dataset(kind: str, length: int, folder: Path, vocabulary: int) -> DatasetConfig:
    """What both candidates draw from."""
    if kind == "mock":
        return MockGPTDatasetConfig(seq_length=length)
    write_conversations(folder, vocabulary, length)
    specs = PackedSequenceSpecs(packed_sequence_size=length)
    return FinetuningDatasetConfig(
        dataset_root=str(folder), seq_length=length, packed_sequence_specs=specs
    )


def batches(
    config: DatasetConfig, vocabulary: int, micro_batch_size: int
) -> Iterator[dict[str, Any]]:
    """Microbatches for ever; packed rows say where their samples begin."""
    while True:
        found = build_iterators(
            config, NullTokenizer(vocabulary), (ROWS, 0, 0), micro_batch_size, micro_batch_size
        )
        assert found.train is not None, "samples to train on"
        yield from found.train


def for_hugging_face(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tokens as transformers takes them: positions that start again mark the samples of a row."""
    tokens = batch["tokens"]
    targets = torch.where(batch["loss_mask"] > 0, batch["labels"], -100)
    labels = torch.cat(
        (torch.full_like(targets[:, :1], -100), targets[:, :-1]), dim=1
    )  # it shifts them itself
    return {"input_ids": tokens, "labels": labels, "position_ids": batch["position_ids"]}


def with_trainer(
    base: Path, found: Iterator[dict[str, Any]], args: argparse.Namespace
) -> Candidate:
    """``peft`` in the HF Trainer, fed batches that are made already."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS))
    stamps: Stamps = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(now())

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return (for_hugging_face(batch) for batch in found)

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=args.micro_batch_size, max_steps=1, bf16=True,
        use_cpu=not torch.cuda.is_available(), learning_rate=RATE, lr_scheduler_type="constant",
        optim="adamw_torch_fused", disable_tqdm=True, report_to=[], save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = Fed(model=model, args=arguments, callbacks=[Clock()])

    def run(steps: int) -> Stamps:
        stamps.clear()
        trainer.args.max_steps = steps
        trainer.train()
        return list(stamps)

    return run


def with_megatron(
    base: Path, data: DatasetConfig, args: argparse.Namespace
) -> tuple[Candidate, float]:
    """This framework, and the operations that it does for each token."""
    provider = AutoBridge.from_hf_pretrained(str(base)).to_megatron_provider(load_weights=False)
    provider.seq_length = data.seq_length
    config = ConfigContainer(
        train=TrainingConfig(args.micro_batch_size, args.micro_batch_size, train_iters=10**6),
        model=provider,
        optimizer=OptimizerConfig(lr=RATE, weight_decay=0.0, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        dataset=data,
        logger=LoggerConfig(log_interval=10**6),
        tokenizer=TokenizerConfig("NullTokenizer", vocab_size=provider.vocab_size),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(base)),
        peft=LoRA(dim=RANK, alpha=2 * RANK),
        mixed_precision="bf16_mixed",
    )
    run = setup(config, forward_step)
    run.emit("train_start")
    bare = [chunk.module for chunk in run.model]
    return framework_loop(run), flops_per_token(
        [getattr(chunk, "module", chunk) for chunk in bare], data.seq_length
    )


def make_base(shape: str, folder: Path) -> int:
    """Random weights on disk; the vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[shape])
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return config.vocab_size


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Of the command line, or ``words`` in its place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama31-8b")
    parser.add_argument("--data", choices=LENGTHS, default="mock")
    parser.add_argument(
        "--seq-length", type=int, help="default: 4096 for mock, 2048 for packed data"
    )
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=10, help="counted steps of a candidate in a round"
    )
    args = parser.parse_args(words)
    args.seq_length = args.seq_length or LENGTHS[args.data]
    return args


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Seconds of the steps of each candidate, and the operations of a token."""
    length = args.seq_length
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        vocabulary = make_base(args.shape, base)
        data = dataset(args.data, length, Path(name), vocabulary)
        ours, operations = with_megatron(base, data, args)
        theirs = with_trainer(base, batches(data, vocabulary, args.micro_batch_size), args)
        return measure({TRAINER: theirs, OURS: ours}, args), operations


def main() -> None:
    """Measure and print a table."""
    args = arguments()
    if args.shape != "tiny" and not torch.cuda.is_available():
        print(f"{args.shape} needs a GPU: skipped (--shape tiny runs anywhere)")
        return
    times, operations = compare(args)
    length = args.seq_length
    print(
        f"\n{args.shape}, {args.data}, bf16, {args.micro_batch_size} x {length} tokens per step\n"
    )
    print(
        table(
            ["", "ms/step", "tokens/s", "TFLOP/s"],
            list(rows(times, args.micro_batch_size * length, operations)),
        )
    )


def rows(times: dict[str, Any], tokens: int, operations: float) -> Iterator[list[str]]:
    """Medians over all counted steps."""
    for name, steps in times.items():
        seconds = statistics.median(step[0] for step in steps)
        speed = tokens / seconds
        yield [name, f"{seconds * 1e3:.0f}", f"{speed:,.0f}", f"{speed * operations / 1e12:.1f}"]


if __name__ == "__main__":
    main()
