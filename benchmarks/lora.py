# SPDX-License-Identifier: Apache-2.0
"""Steps with adapters on this machine: against training all weights, and against ``peft`` with the HF Trainer.

``python benchmarks/lora.py`` trains LoRA beside all linear layers of the same random Llama on the same samples,
candidate after candidate in turn, and prints a Markdown table as ``training.py`` does, and then how long an
adapter takes to be written and read.
"""

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import table
from training import (
    HEADERS,
    SIZES,
    Candidate,
    framework_loop,
    hf_config,
    hf_trainer,
    measure,
    megatron_run,
    rows,
)

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import DatasetRequest, MockGPTDatasetConfig
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.peft.lora import LoRA

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_peft(model: Any, args: argparse.Namespace, bf16: bool) -> Candidate:
    """``peft`` in the HF Trainer."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=TARGETS)
    request = DatasetRequest((512, 0, 0), NullTokenizer(model.config.vocab_size))
    dataset = MockGPTDatasetConfig(seq_length=args.seq_length).build(request).train
    return hf_trainer(get_peft_model(model, config), dataset, args, bf16)


def candidates(
    directory: Path, args: argparse.Namespace, bf16: bool
) -> tuple[dict[str, Candidate], Any]:
    """All of them from the same weights, and the run with adapters."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(hf_config(args.size, args.seq_length))
    model.save_pretrained(directory)
    whole = megatron_run(directory, args, bf16)
    adapted = megatron_run(directory, args, bf16, LoRA(dim=args.rank, alpha=2 * args.rank))
    return {
        "peft + HF Trainer, LoRA": with_peft(model, args, bf16),
        "Megatron Bridge, all weights": framework_loop(whole),
        "Megatron Bridge, LoRA": framework_loop(adapted),
    }, adapted


def seconds(action: Any, times: int = 3) -> float:
    """The shortest of several calls."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return min(found)


def writing_and_reading(directory: Path, run: Any, scratch: Path) -> list[list[str]]:
    """Seconds and bytes of the adapter in the format of ``peft``."""
    bridge = AutoBridge.from_hf_pretrained(str(directory))
    numbers = iter(range(100))
    save = seconds(
        lambda: bridge.save_hf_adapter(run.model, scratch / str(next(numbers)), show_progress=False)
    )
    load = seconds(lambda: bridge.load_hf_adapter(run.model, scratch / "0"))
    size = sum(file.stat().st_size for file in (scratch / "0").iterdir())
    return [[f"{save * 1e3:.0f}", f"{load * 1e3:.0f}", f"{size / 1e6:.2f}"]]


def main() -> None:
    """Measure each precision and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="32m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=6, help="counted steps of a candidate in a round"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        found, run = candidates(base, args, args.precision == "bf16")
        times = measure({name: partial(candidate) for name, candidate in found.items()}, args)
        print(
            f"\n{args.size}, {args.precision}, {args.micro_batch_size} x {args.seq_length} tokens per step\n"
        )
        print(
            table(
                HEADERS,
                rows(times, args.micro_batch_size * args.seq_length, "peft + HF Trainer, LoRA"),
            )
        )
        print()
        print(
            table(["ms to write", "ms to read", "MB"], writing_and_reading(base, run, Path(folder)))
        )


if __name__ == "__main__":
    main()
