# SPDX-License-Identifier: Apache-2.0
"""The whole circle of one family at toy size: make a model, convert it, train it, export it, load the result.

python examples/models/toy_roundtrip.py examples/models/llama/llama.json
torchrun --nproc-per-node=2 examples/models/toy_roundtrip.py examples/models/qwen/qwen3_moe.json --ep 2

The file is a config.json with small numbers and the features of the architecture. With a published model the same
calls do the same: each stage below is one of them.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from megatron.bridge import AutoBridge
from megatron.bridge.cli.support import model_options
from megatron.bridge.cli.support.options import add_parallel_sizes
from megatron.bridge.models.conversion.check import compare_logits
from megatron.bridge.recipes.llama import llama32_1b_finetune_config
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.utils import distributed

SEQUENCE = 64
STEPS = 2
TOLERANCE = (
    1e-4  # of the logits' deviation: both sides compute in float32, in another order of summation
)


def make(numbers: dict[str, Any], folder: Path) -> None:
    """A model of transformers' own class, its weights random, as anybody would save it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**numbers), dtype=torch.float32)
    model.save_pretrained(folder)


def provider(bridge: AutoBridge, sizes: dict[str, Any]) -> Any:
    """What builds the Megatron model, with the parallel sizes set."""
    found = bridge.to_megatron_provider(load_weights=False)
    model_options.set_parallel_sizes(found, sizes)
    found.sequence_parallel = (
        sizes["tensor_model_parallel_size"] > 1
    )  # training experts asks for it, others bear it
    return found


def training(model: Any, out: Path) -> ConfigContainer:
    """Two steps on mock data; only the optimizer and its schedule come from the recipe."""
    config = llama32_1b_finetune_config(
        pretrained_checkpoint=str(out / "megatron"),
        seq_length=SEQUENCE,
        train_iters=STEPS,
        global_batch_size=4,
        lr=1e-3,
        eval_iters=0,
        precision="fp32",
        dir=str(out / "run"),
    )
    config.model = model
    config.model.seq_length = SEQUENCE
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size)
    config.logger.log_interval = 1
    return config


def check(run: Any, out: Path) -> float:
    """Largest difference of logits between the trained Megatron model and transformers' model of the export.

    Returns:
        The difference over the deviation of the logits.
    """
    size = run.config.model.vocab_size
    ids = (torch.arange(4 * 16) * 7 % size).view(4, 16)
    ours = compare_logits.run_megatron(run.model, ids).logits[..., :size]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(out / name)(ids).logits
            for name in ("hf", "exported")
        )
    assert not torch.allclose(before, after, atol=1e-5), "nothing was learned"
    return float((ours - after).abs().max() / after.std())


def tell(stage: str, result: str) -> None:
    """A line of the summary, once for all processes."""
    if distributed.rank() == 0:
        print(f"{stage:10} {result}", flush=True)


def circle(numbers: dict[str, Any], sizes: dict[str, Any], out: Path) -> None:
    """All stages, on every process; the folder ``out`` is emptied first."""
    if distributed.rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
        make(numbers, out / "hf")
    distributed.barrier()
    tell("made", f"a {numbers['architectures'][0]} of transformers: {out / 'hf'}")

    bridge = AutoBridge.from_hf_pretrained(out / "hf")
    bridge.save_megatron_checkpoint(provider(bridge, sizes), out / "megatron", show_progress=False)
    tell("converted", f"to a Megatron checkpoint: {out / 'megatron'}")

    run = finetune(training(provider(bridge, sizes), out), forward_step)
    names = {
        name.removesuffix("_model_parallel_size"): size for name, size in sizes.items() if size
    }
    tell("trained", f"{STEPS} steps on {distributed.world_size()} processes: {names}")

    bridge.export_ckpt(out / "run", out / "exported", show_progress=False, mp_overrides=sizes)
    tell("exported", f"to Hugging Face format: {out / 'exported'}")

    difference = check(run, out)
    tell(
        "checked", f"transformers' logits are Megatron's: {difference:.1e} of their deviation apart"
    )
    assert difference < TOLERANCE, difference


def main() -> None:
    """Read the options, and go round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="config.json of the toy")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/toy_roundtrip"), help="folder of the results"
    )
    add_parallel_sizes(parser)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    distributed.initialize()
    circle(
        json.loads(args.config.read_text()),
        model_options.parallel_sizes(args),
        args.out / args.config.stem,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
