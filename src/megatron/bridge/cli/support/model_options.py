# SPDX-License-Identifier: Apache-2.0
"""The options of subcommands that build a model (which model, and its parallel sizes) or generate text."""

import argparse
import re
from dataclasses import fields
from math import lcm, prod
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.parser import count
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser, *names: str, without: str = "") -> None:
    """Add the Hugging Face model, required or ``without`` with what that means, and the arguments below."""
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


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="PATH", help="Hugging Face directory or hub id, Megatron checkpoint, or run with adapters"
    )
    parser.add_argument("--adapter", metavar="DIR", help="run, checkpoint or peft directory to put on the model")
    parser.add_argument("--tokenizer", metavar="ID", help="another tokenizer than the model's")
    parser.add_argument("--template", metavar="FILE", type=Path, help="another chat template than the tokenizer's")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and caches (default: as stored)")
    sizes = parser.add_argument_group("parallel sizes; the processes are started unless torchrun has done so")
    for name, text in (("tp", "tensor-parallel"), ("pp", "pipeline-parallel"), ("ep", "expert-parallel")):
        sizes.add_argument(f"--{name}", type=count, default=1, help=f"{text} size")
    sizes.add_argument("--etp", type=count, help="tensor-parallel size of the experts")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--max-context", type=count, metavar="N", help="tokens of a prompt and its completion")
    memory.add_argument("--max-requests", type=count, default=32, metavar="N", help="texts at the same time")
    memory.add_argument(
        "--kv-memory", type=memory_size, default="4GB", metavar="SIZE", help="for keys, values and states (4GB)"
    )
    memory.add_argument(
        "--window-rings",
        action="store_true",
        help="layers with a sliding window keep what it can hold: more texts fit, no beginning is reused",
    )
    add_trust_remote_code(parser)
    add_trust_checkpoint(parser)


def add_named_adapters(parser: argparse.ArgumentParser, chosen_by: str) -> None:
    parser.add_argument(
        "--adapters",
        action=_NamedPaths,
        metavar="NAME=DIR",
        help=f"an adapter, and its name, which is then {chosen_by}; may be repeated",
    )


class _NamedPaths(argparse.Action):
    """Collects ``name=path``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, _, path = values.partition("=")
        found = dict(getattr(namespace, self.dest) or {})
        if not name or not path or name in found:
            parser.error(f"{option_string} {values}: give NAME=DIR, each name once")
        setattr(namespace, self.dest, {**found, name: path})


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How to continue a prompt; greedy by default."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to generate at most")
    group.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest that sum up to P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep tokens at least P of the best")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="divides logits of repeats")
    group.add_argument("--seed", type=int, help="the same seed gives the same text in any batch and layout")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end here; may be repeated")


def memory_size(text: str) -> int:
    """The ``type`` of an option that takes bytes, such as ``4GB`` or ``512M``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 4GB or 512MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.bridge.inference.requests import Sampling

    names = [field.name for field in fields(Sampling)]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    Sampling.from_dict(values, "--")
    return values


_SAME = ("adapter", "tokenizer", "dtype", "tp", "pp", "ep", "etp", "max_context", "max_requests", "kv_memory")


def load(args: argparse.Namespace, **options: Any) -> Any:
    from megatron.bridge.inference.llm import LLM

    return LLM(args.model, **llm_options(args), **options)


def llm_options(args: argparse.Namespace) -> dict[str, Any]:
    """What ``LLM`` takes beside the path, of the arguments of ``add_model_options``."""
    names = (*_SAME, "window_rings", "trust_remote_code", "trust_checkpoint")
    template = args.template and read_text(args.template, f"--template {args.template}")
    named = {"adapters": getattr(args, "adapters", None), "template": template}
    return {**named, **{name: getattr(args, name) for name in names}}


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """The model and its layout under the names of the Megatron Bridge API's scripts."""
    parser.add_argument("--hf_model_path", "--hf-model-path", metavar="ID", help="Hugging Face model")
    parser.add_argument("--megatron_model_path", "--megatron-model-path", metavar="DIR", help="its checkpoint")
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=20)
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=count, default=1)
    parser.add_argument("--etp", type=count)
    parser.add_argument("--dtype", choices=DTYPES)
    add_trust_remote_code(parser)
    add_trust_checkpoint(parser)


def load_of_script(args: argparse.Namespace, **options: Any) -> Any:
    from megatron.bridge.inference.llm import LLM

    path, same = script_model(args)
    return LLM(path, **same, **options)


def script_model(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The path and the options of an ``LLM`` from ``add_script_options``."""
    path = args.megatron_model_path or args.hf_model_path
    if path is None:
        raise UserError("no model: give --hf_model_path or --megatron_model_path")
    names = ("tp", "pp", "ep", "etp", "dtype", "trust_remote_code", "trust_checkpoint")
    same = {name: getattr(args, name) for name in names}
    return path, {"tokenizer": args.hf_model_path if args.megatron_model_path else None, **same}
