# SPDX-License-Identifier: Apache-2.0
"""Read the options of subcommands that build a model or generate text."""

import argparse
from dataclasses import fields
from math import lcm, prod
from typing import Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import text_format
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils import torchrun_env
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError


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
    given = {
        name: size
        for name in ("tp", "pp", "vp", "ep", "etp")
        if (size := getattr(args, name)) is not None
    }
    for name, size in given.items():
        if size < 1:
            raise UserError(f"--{name} {size}: a parallel size must be at least 1")
    if "vp" in given and args.pp == 1:
        raise UserError(
            f"--vp {args.vp} divides pipeline stages: give --pp 2 or more, or leave --vp out"
        )
    groups = {
        " x ".join(f"--{name} {given[name]}" for name in names): prod(given[name] for name in names)
        for names in (("tp", "pp"), ("ep", "etp" if "etp" in given else "tp", "pp"))
    }
    world = torchrun_env.read_number("WORLD_SIZE", 1)
    for named, ranks in groups.items():
        if world % ranks:
            raise UserError(
                f"{named} does not divide the {text_format.many(world, 'running process', 'es')}: start it with "
                f"torchrun --nproc-per-node {lcm(*groups.values())}"
            )


def set_parallel_sizes(provider: Any, sizes: dict[str, Any]) -> None:
    """Set the parallel sizes of ``provider``, and the settings that they need."""
    from megatron.bridge.models.gpt_provider import pad_query_groups

    for name, value in sizes.items():
        setattr(provider, name, value)
    if sizes["virtual_pipeline_model_parallel_size"]:
        # batched p2p is wrong if the previous and the next rank are the same process
        provider.overlap_p2p_comm = True
        provider.batch_p2p_comm = False
    if groups := pad_query_groups(provider):
        ranks = provider.tensor_model_parallel_size
        console().print(
            f"{groups} query groups are padded for --tp {ranks}; the padding is zero and not exported"
        )


def build_model(bridge: Any, sizes: dict[str, Any]) -> list[Any]:
    provider = bridge.to_megatron_provider()
    set_parallel_sizes(provider, sizes)
    return provider.provide_distributed_model(wrap_with_ddp=False)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.bridge.inference.requests import Sampling

    names = [field.name for field in fields(Sampling)]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    Sampling.from_dict(values, "--")
    return values


_SAME = (
    "adapter",
    "tokenizer",
    "dtype",
    "tp",
    "pp",
    "ep",
    "etp",
    "max_context",
    "max_requests",
    "kv_memory",
)


def check_paths(args: argparse.Namespace) -> None:
    """Refuse a model, an adapter or a template that is not there, before anything slow is imported."""
    if hub.is_megatron(args.model):
        paths.resolve(args.model)
    else:
        hub.local_folder(args.model)
        hub.refuse_adapter_beside_weights(
            args.model, ignored=hub.leaves_out_adapter(args.model, args.adapter)
        )
    if args.adapter not in (None, "none") and not hub.is_peft_adapter(args.adapter):
        paths.resolve(args.adapter)
    _template(args)


def _template(args: argparse.Namespace) -> str | None:
    return args.template and read_text(args.template, f"--chat-template {args.template}")


def load(args: argparse.Namespace, **options: Any) -> Any:
    from megatron.bridge.inference.llm import LLM

    return LLM(args.model, **llm_options(args), **options)


def _speculative(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.speculative is None:
        if args.speculative_tokens is not None:
            raise UserError(
                f"--speculative-tokens {args.speculative_tokens} has no effect without --speculative: give "
                "--speculative ngram"
            )
        return None
    settings: dict[str, Any] = {"method": args.speculative}
    if args.speculative_tokens is not None:
        settings["num_speculative_tokens"] = args.speculative_tokens
    return settings


def llm_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of ``LLM`` from the options of ``add_model_options``."""
    names = (
        *_SAME,
        "prefix_reuse",
        "window_rings",
        "graphs",
        "trust_remote_code",
        "trust_checkpoint",
    )
    named = {
        "adapters": getattr(args, "adapters", None),
        "template": _template(args),
        "tool_parser": getattr(args, "tool_parser", None),
        "speculative": _speculative(args),
    }
    return {**named, **{name: getattr(args, name) for name in names}}
