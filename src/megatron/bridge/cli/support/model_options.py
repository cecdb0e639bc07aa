# SPDX-License-Identifier: Apache-2.0
"""The options of every subcommand that builds a model: which model, and its parallel sizes."""

import argparse
from math import lcm, prod
from typing import Any

from megatron.bridge.cli.support import text_format

DTYPES = ("float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser, *names: str, without: str = "") -> None:
    """Add the Hugging Face model, also under ``names``, and the arguments below.

    ``without`` tells what happens without the option; an empty text requires it.
    """
    parser.add_argument(
        "--hf-model",
        *names,
        dest="hf_model",
        required=not without,
        metavar="ID",
        help=f"model directory or hub id{f' ({without})' if without else ''}",
    )
    add_parallel_arguments(parser)


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    add_trust_remote_code(parser)
    sizes = parser.add_argument_group("parallel sizes, under torchrun")
    sizes.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    sizes.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    sizes.add_argument("--vp", type=int, help="virtual pipeline stages per rank")
    sizes.add_argument("--ep", type=int, default=1, help="expert-parallel size")
    sizes.add_argument("--etp", type=int, help="tensor-parallel size of the experts")


def add_trust_remote_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the model's repository contains"
    )


def add_trust_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-checkpoint", action="store_true", help="unpickle all classes in the checkpoint, which can run code"
    )


def parallel_sizes(args: argparse.Namespace) -> dict[str, Any]:
    _check_sizes(args)
    return {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "virtual_pipeline_model_parallel_size": args.vp,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": args.etp,
    }


def _check_sizes(args: argparse.Namespace) -> None:
    from megatron.bridge.utils import distributed
    from megatron.bridge.utils.errors import UserError

    given = {name: size for name in ("tp", "pp", "vp", "ep", "etp") if (size := getattr(args, name)) is not None}
    for name, size in given.items():
        if size < 1:
            raise UserError(f"--{name} {size}: a parallel size must be at least 1")
    if "vp" in given and args.pp == 1:
        raise UserError(f"--vp {args.vp} divides pipeline stages: give --pp 2 or more, or leave --vp out")
    groups = {
        " x ".join(f"--{name} {given[name]}" for name in names): prod(given[name] for name in names)
        for names in (("tp", "pp"), ("ep", "etp" if "etp" in given else "tp", "pp"))
    }
    world = distributed.world_size()
    for named, ranks in groups.items():
        if world % ranks:
            raise UserError(
                f"{named} does not divide the {text_format.many(world, 'running process', 'es')}: start it with "
                f"torchrun --nproc-per-node {lcm(*groups.values())}"
            )


def set_parallel_sizes(provider: Any, sizes: dict[str, Any]) -> None:
    """Set the parallel sizes of ``provider``, and the settings that they need."""
    from megatron.bridge.models.gpt_provider import pad_query_groups
    from megatron.bridge.utils.console import console

    for name, value in sizes.items():
        setattr(provider, name, value)
    if sizes["virtual_pipeline_model_parallel_size"]:
        # batched p2p is wrong if the previous and the next rank are the same process
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
    if groups := pad_query_groups(provider):
        ranks = provider.tensor_model_parallel_size
        console().print(f"{groups} query groups are padded for --tp {ranks}; the padding is zero and not exported")


def build_model(bridge: Any, sizes: dict[str, Any]) -> list[Any]:
    provider = bridge.to_megatron_provider()
    set_parallel_sizes(provider, sizes)
    return provider.provide_distributed_model(wrap_with_ddp=False)
