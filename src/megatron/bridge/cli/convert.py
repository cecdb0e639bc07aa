# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge convert``: Hugging Face to Megatron."""

import argparse
from math import lcm, prod
from pathlib import Path
from typing import Any

from megatron.bridge.cli import words

EXAMPLE = """examples:
  megatron-bridge convert --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2
  torchrun --nproc-per-node 2 --module megatron.bridge.cli.main convert --tp 2 \\
      --hf-model HuggingFaceTB/SmolLM2-135M --megatron-path checkpoints/smollm2
"""
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``convert``."""
    parser = subparsers.add_parser(
        "convert",
        help="Hugging Face -> Megatron",
        description="Convert a Hugging Face model to a Megatron checkpoint, bit for bit. A few parameters are in "
        "memory at a time, so the model may be larger than the machine's memory.",
        epilog=EXAMPLE,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what an import needs."""
    add_model_arguments(parser)
    parser.add_argument(
        "--megatron-path", "--output-dir", type=Path, required=True, help="checkpoint directory to make"
    )
    parser.add_argument(
        "--dtype", "--torch-dtype", choices=DTYPES, help="dtype of the model (default: the checkpoint's)"
    )
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")


def add_model_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the Hugging Face model, under ``names`` too, and the parallel sizes while it is converted."""
    parser.add_argument(
        "--hf-model", *names, dest="hf_model", required=True, metavar="ID", help="model directory or hub id"
    )
    add_shared_arguments(parser)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command that builds a model takes."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow a model with Python code of its own"
    )
    sizes = parser.add_argument_group("parallel sizes, under torchrun")
    sizes.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    sizes.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    sizes.add_argument("--vp", type=int, help="virtual pipeline stages on each rank")
    sizes.add_argument("--ep", type=int, default=1, help="expert-parallel size")
    sizes.add_argument("--etp", type=int, help="tensor-parallel size of the experts")


def layout(args: argparse.Namespace) -> dict[str, Any]:
    """The provider's parallel sizes.

    Raises:
        UserError: the sizes do not fit the number of processes.
    """
    _check_sizes(args)
    return {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "virtual_pipeline_model_parallel_size": args.vp,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": args.etp,
    }


def _check_sizes(args: argparse.Namespace) -> None:
    from megatron.bridge.utils import dist
    from megatron.bridge.utils.errors import UserError

    given = {name: size for name in ("tp", "pp", "vp", "ep", "etp") if (size := getattr(args, name)) is not None}
    for name, size in given.items():
        if size < 1:
            raise UserError(f"--{name} {size}: a parallel size is at least 1")
    if "vp" in given and args.pp == 1:
        raise UserError(f"--vp {args.vp} cuts pipeline stages again: give --pp 2 or more, or leave it out")
    groups = {
        " x ".join(f"--{name} {given[name]}" for name in names): prod(given[name] for name in names)
        for names in (("tp", "pp"), ("ep", "etp" if "etp" in given else "tp", "pp"))
    }
    world = dist.world_size()
    for named, ranks in groups.items():
        if world % ranks:
            raise UserError(
                f"{named} does not divide the {words.many(world, 'running process', 'es')}: start it with "
                f"torchrun --nproc-per-node {lcm(*groups.values())}"
            )


def set_layout(provider: Any, sizes: dict[str, Any]) -> None:
    """Give ``provider`` parallel sizes, with what they need to work."""
    from megatron.bridge.utils.console import console

    for name, value in sizes.items():
        setattr(provider, name, value)
    if sizes["virtual_pipeline_model_parallel_size"]:
        # batched sends mix up the two neighbours when they are the same process
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
    heads, groups = provider.num_attention_heads, provider.num_query_groups or provider.num_attention_heads
    ranks = provider.tensor_model_parallel_size
    # fewer groups than ranks are replicated, if everything divides
    if groups % ranks and (ranks % groups or heads % ranks):
        provider.make_query_groups_divisible_by = ranks
        console().print(f"{groups} query groups are padded for --tp {ranks}; the padding is zero and not exported")


def build_model(bridge: Any, sizes: dict[str, Any]) -> list[Any]:
    """This rank's chunks under the parallel sizes of ``layout``, filled with the Hugging Face weights."""
    provider = bridge.to_megatron_provider()
    set_layout(provider, sizes)
    return provider.provide_distributed_model(wrap_with_ddp=False)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.utils.console import console
    from megatron.bridge.utils.errors import UserError

    sizes = layout(args)
    if (args.megatron_path / "config.json").is_file():
        raise UserError(f"--megatron-path {args.megatron_path} is a Hugging Face model: give a folder of its own")
    bridge = AutoBridge.from_hf_pretrained(
        args.hf_model, trust_remote_code=args.trust_remote_code, dtype=args.dtype
    )
    provider = bridge.to_megatron_provider(load_weights=False)
    set_layout(provider, sizes)
    bridge.save_megatron_checkpoint(provider, args.megatron_path, not args.no_progress)
    console().print(f"Megatron checkpoint: {args.megatron_path}")
    return 0
