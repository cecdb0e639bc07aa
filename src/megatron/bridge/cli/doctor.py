# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge doctor``: what this machine has, which kernels a run will use on it, and how fast it is."""

import argparse
import copy
import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support import text_format, train_job
from megatron.bridge.cli.support.options import add_recipe_options
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.models.model_provider import ModelProvider

OPTIONAL_PACKAGES = {
    "transformer_engine": "FP8 layers, and the layer spec that runs use by default",
    "apex": "matrix products that accumulate gradients",
    "fla": "gated delta nets in Triton",
    "mamba_ssm": "Mamba layers in Triton",
    "causal_conv1d": "convolutions of Mamba layers",
    "triton": "compiled norms, rotary embeddings, SwiGLU and cross entropy",
}
"""Modules of optional packages, and what they bring."""

DESCRIPTION = (
    "Print hardware, versions, and the layers and kernels that a run would use here, with the "
    "reason of each choice; then measure matrix products, copies and, under torchrun, "
    "all-reduces. Takes less than a minute."
)
EXAMPLES = """examples:
  megatron-bridge doctor
  megatron-bridge doctor --recipe qwen3_30b_a3b_pretrain_config
  torchrun --nproc-per-node 8 --no-python megatron-bridge doctor    (also measures all-reduces)
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_recipe_options(parser)
    parser.add_argument("--no-measure", action="store_true", help="skip the measurements")


def run(args: argparse.Namespace) -> int:
    from megatron.bridge.utils import distributed

    model = _model(args)
    joins = "RANK" in os.environ and not distributed.is_initialized()
    if joins:
        distributed.initialize()
    lines = [*_machine(), "", *_packages(), "", *_kernels()]
    if model is not None:
        lines += ["", *_choices(model)]
    if distributed.rank() == 0:
        text_format.say("\n".join(lines))
    if not args.no_measure:
        _measure(distributed.rank() == 0)
    if joins:
        _leave()
    return 0


def _leave() -> None:
    """End the process group with its threads, which would abort the process at its end."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # cycles keep the group, and with it the threads


def _model(args: argparse.Namespace) -> "ModelProvider | None":
    if args.recipe is None and args.config is None and args.hf_model is None:
        if args.overrides:
            raise UserError(
                f"{args.overrides[0]} changes a run: give the run with --recipe or --config"
            )
        return None
    job = train_job.prepare(args)
    return job.resolve(job.world_size or 1).config.model


def _machine() -> Iterator[str]:
    import torch

    from megatron.bridge.utils.environment import environment, summary

    yield from summary(environment())[1:3]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        capability = f"compute capability {card.major}.{card.minor}"
        yield f"GPU {index}: {card.name}, {text_format.size(card.total_memory)}, {capability}"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"CPU: {text_format.many(os.cpu_count() or 1, 'core')}, {text_format.size(pages)}"


def _packages() -> Iterator[str]:
    for name, brings in OPTIONAL_PACKAGES.items():
        yield f"{name}: {'installed' if find_spec(name) else 'not installed'} ({brings})"


def _kernels() -> Iterator[str]:
    """Describe the kernels that a run of any model uses on this machine."""
    import torch
    from megatron.core.tensor_parallel import layers

    from megatron.bridge.backends.hardware import bf16, compiler
    from megatron.bridge.backends.specs import layer_specs
    from megatron.bridge.training.config.resolve.findings import CAPABILITIES, Hardware

    hardware = Hardware.detect()
    spec = layer_specs.resolve_backend("auto")
    why_torch = "Transformer Engine is not installed" if hardware.cuda else "there is no GPU"
    why = "there is a GPU and Transformer Engine" if spec == "transformer_engine" else why_torch
    yield f"layer spec of backend=auto: {spec} ({why})"
    if hardware.cuda:
        reason = compiler.why_not_compiled()
        yield "norms, rotary embeddings, cross entropy: " + (
            "compiled" if reason is None else f"eager ({reason})"
        )
        flash = torch.backends.cuda.is_flash_attention_available() and hardware.capability >= (8, 0)
        yield f"attention: {'flash kernels' if flash else 'scaled_dot_product_attention'} in bf16 and fp16"
    else:
        yield "norms, rotary embeddings, cross entropy: PyTorch's operations in few passes over memory (no GPU)"
        yield "attention: scaled_dot_product_attention (no GPU)"
        products = bf16.choose_products()
        how = "computed in fp32 and rounded once" if products.widened else "native"
        yield f"products in bf16 on the CPU: {how} ({products.reason})"
    fused = layers._grad_accum_fusion_available
    yield f"gradient accumulation in the matrix product: {'available' if fused else 'not available (needs Apex)'}"
    for scaling in CAPABILITIES:
        lack = hardware.lacks_for(scaling)
        yield f"{scaling} scaling: {'available' if lack is None else f'needs {lack}'}"


def _choices(model: "ModelProvider") -> Iterator[str]:
    """Describe the layers of a run's model on this machine, and the settings that the machine changes."""
    from megatron.bridge.backends.specs import layer_specs

    trial = copy.copy(model)
    backend = layer_specs.resolve_backend(trial.backend)
    yield f"layer spec of this run: {backend} (model.backend={model.backend})"
    yield from _parts(trial)
    for change in layer_specs.apply_backend_settings(trial, backend):
        yield f"model.{change.field}={change.asked!r} becomes {change.used!r}: {change.reason}"


def _parts(model: Any) -> Iterator[str]:
    from megatron.core.ssm.gated_delta_net import common

    from megatron.bridge.backends.recurrent import mamba
    from megatron.bridge.training.config.resolve.findings import Hardware

    hardware = Hardware.detect()
    if model.num_moe_experts:
        grouped = hardware.capability >= (9, 0)
        reason = "" if grouped else " (one grouped kernel needs compute capability 9.0 and bf16)"
        yield f"experts of the torch spec: {'one grouped kernel' if grouped else 'one product per expert'}{reason}"
    if getattr(model, "attn_logit_softcapping", None) is not None:
        yield "attention with soft-capping: tiles without a fused kernel, computed again in the backward pass"
    if getattr(model, "hybrid_layer_pattern", None) or getattr(
        model, "hybrid_override_pattern", None
    ):
        yield f"Mamba layers: {mamba.mixer_class().__name__}"
    if getattr(model, "linear_attention_freq", None):
        fast = common.HAVE_FLA and hardware.cuda
        yield f"gated delta nets: {'fla' if fast else 'PyTorch, chunk by chunk (fla or a GPU is missing)'}"


def _measure(speaks: bool) -> None:
    """Measure on all ranks at once, as in a run, and print the results of the first rank."""
    from megatron.bridge.backends.cpu.device import has_cuda
    from megatron.bridge.backends.hardware import speed
    from megatron.bridge.backends.hardware.device_flops import device_tflops

    def say(line: str) -> None:
        if speaks:
            text_format.say(line)

    say("\nmeasured:")
    flops = speed.matmul_flops() / 1e12
    peak = device_tflops()
    share = "" if peak is None else f", {flops / peak:.0%} of the data sheet's {peak:,.0f}"
    shown = f"{flops:,.2f}" if flops >= 0.1 else f"{flops:.2g}"  # a small CPU has a thousandth
    say(f"matrix products in bf16: {shown} TFLOP/s{share}")
    say(
        f"copies in the device's memory: {speed.copy_bandwidth() / 1e9:,.1f} GB/s, read and written"
    )
    route = "pinned memory to the device" if has_cuda() else "host memory to host memory"
    say(f"copies from {route}: {speed.host_bandwidth() / 1e9:,.1f} GB/s")
    reduced = speed.all_reduce_bandwidth()
    if reduced is None:
        say("all-reduce: not measured on one rank (start it with torchrun)")
    else:
        say(f"all-reduce: {reduced / 1e9:,.2f} GB/s in and out of each rank")
