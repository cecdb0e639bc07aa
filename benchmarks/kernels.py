# SPDX-License-Identifier: Apache-2.0
"""Attention and experts of the ``torch`` backend against the formulas as they are written: time and memory.

``python benchmarks/kernels.py`` runs forward and backward on this machine's GPU in bf16, or without one in fp32,
and prints two Markdown tables: seconds, and peak memory above the inputs. Attention is causal with 4 heads of 64
channels, alone and in every form (2 groups, a window, sinks, rows of packed sequences, the part of one of two
context parallel ranks), against the formula over the whole score matrix. Experts get 2 of them for each token,
sorted by expert, against one module per expert, as Megatron-Core has without Transformer Engine, and against a
loop that picks each expert's tokens by a mask. Outputs and gradients are compared in the same run at the smallest
size; the naive formula is left out where its score matrices would not fit.
"""

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from measure import DEVICE, table, wait

import megatron.bridge  # noqa: F401  # before megatron.core, on a machine without a GPU

HEADS, WIDTH, GROUPS, WINDOW = 4, 64, 2, 1024
HIDDEN, FFN, TOPK = 256, 512, 2
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 2**-6 if DEVICE == "cuda" else 1e-4  # of the largest number of a tensor

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A form of attention: settings of its config, key heads, packed sequences, context parallel ranks."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    groups: int = HEADS
    sequences: int = 1
    ranks: int = 1


FORMS = (
    Form("causal"),
    Form("2 groups", groups=GROUPS),
    Form(f"window of {WINDOW}", {"window_size": (WINDOW - 1, 0)}),
    Form("sinks", {"softmax_type": "learnable"}),
    Form("8 packed sequences", sequences=8),
    Form("one of 2 context parallel ranks", ranks=2),
)


# -------------------------------------------------------------------------------------------------- attention


def attention(form: Form, length: int) -> tuple[Tensors, Function, Function]:
    """Leaves, and two functions of them: the backend's and the formula's."""
    rows = positions_of_rank(form, length)
    shapes = [(len(rows), 1, HEADS, WIDTH), *[(length, 1, form.groups, WIDTH)] * 2]
    random = torch.Generator(DEVICE).manual_seed(1)
    leaves = tuple(
        torch.randn(shape, generator=random, device=DEVICE).to(DTYPE).requires_grad_()
        for shape in shapes
    )
    module = build_attention(form)
    sinks = module.softmax_offset
    if sinks is not None:
        leaves = (*leaves, sinks)
    return (
        leaves,
        backend_attention(form, length, module),
        naive_attention(form, length, rows, module.scale),
    )


def build_attention(form: Form) -> Any:
    """The module of a layer."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.bridge.backends.attention.torch_attention import TorchAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=form.groups,
        attention_dropout=0.0,
        params_dtype=DTYPE,
        use_cpu_initialization=DEVICE == "cpu",
        **form.settings,
    )
    return TorchAttention(config, 1, AttnMaskType.causal, "self")


def backend_attention(form: Form, length: int, module: Any) -> Function:
    """What a layer calls."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron.bridge.backends.attention.block_mask import (
        AttentionWindow,
        PackedSegment,
        zigzag_spans,
    )

    if form.ranks > 1:
        runs = zigzag_spans([PackedSegment(0, length, length)], 0, form.ranks)
        return lambda q, k, v: module._attend(
            (q, k, v), None, runs, AttentionWindow(None, 0), None
        ).flatten(2)
    if form.sequences == 1:
        return lambda q, k, v, *_: module(q, k, v, None)
    part = length // form.sequences
    bounds = torch.arange(0, length + 1, part, dtype=torch.int32, device=DEVICE)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=part,
        max_seqlen_kv=part,
    )
    return lambda *qkv: module(
        *(tensor.squeeze(1) for tensor in qkv), None, packed_seq_params=packed
    )


def positions_of_rank(form: Form, length: int) -> torch.Tensor:
    """Of the queries: all, or the first chunk and the last."""
    chunk = length // (2 * form.ranks)
    whole = torch.arange(length, device=DEVICE)
    return whole if form.ranks == 1 else torch.cat((whole[:chunk], whole[-chunk:]))


def naive_attention(form: Form, length: int, rows: torch.Tensor, scale: float) -> Function:
    """softmax(q k^T) v, with all scores in memory."""
    keys = torch.arange(length, device=DEVICE)
    seen = keys[None] <= rows[:, None]
    if "window_size" in form.settings:
        seen &= keys[None] > rows[:, None] - WINDOW
    part = length // form.sequences
    seen &= (keys // part)[None] == (rows // part)[:, None]

    def formula(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any = None
    ) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        k, v = (tensor.repeat_interleave(HEADS // form.groups, dim=1) for tensor in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., :length].to(v.dtype)
        return (weights @ v).permute(2, 0, 1, 3).flatten(2)

    return formula


# ---------------------------------------------------------------------------------------------------- experts


def experts(count: int, tokens: int) -> dict[str, tuple[Tensors, Function]]:
    """Three ways from tokens to the sum of their experts' outputs; tokens and weights of each are the same."""
    random = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=random, device=DEVICE).to(DTYPE).requires_grad_()
    scores = torch.randn(tokens, count, generator=random, device=DEVICE)
    shares, chosen = scores.softmax(-1).topk(TOPK)
    shares = shares.to(DTYPE)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=count).cpu()
    grouped, single = build_experts(count, grouped=True), build_experts(count, grouped=False)
    pairs = [
        (module.linear_fc1.weight, module.linear_fc2.weight) for module in single.local_experts
    ]  # of one module per expert
    with torch.no_grad():
        for index, weights in enumerate(pairs):
            for layer, weight in zip(
                (grouped.linear_fc1, grouped.linear_fc2), weights, strict=True
            ):
                getattr(layer, f"weight{index}").copy_(weight)

    def sorted_by_expert(module: Any) -> Function:
        def forward(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            taken = x[order // TOPK]
            out, _ = module(taken, counts, shares.flatten()[order])
            return torch.zeros_like(x).index_add(0, order // TOPK, out)

        return forward

    def masked(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert, (first, second) in enumerate(pairs):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], first).chunk(2, dim=-1)
            hidden = F.silu(gate) * up * shares[token, place].unsqueeze(-1)
            total = total.index_add(0, token, F.linear(hidden, second))
        return total

    layers = (grouped.linear_fc1, grouped.linear_fc2)
    together = [getattr(layer, f"weight{index}") for index in range(count) for layer in layers]
    apart = [weight for weights in pairs for weight in weights]
    return {
        "torch backend": ((x, *together), sorted_by_expert(grouped)),
        "a module per expert": ((x, *apart), sorted_by_expert(single)),
        "a mask per expert": ((x, *apart), masked),
    }


def build_experts(count: int, grouped: bool) -> Any:
    """The experts of a layer."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=count,
        moe_ffn_hidden_size=FFN,
        moe_grouped_gemm=grouped,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=DTYPE,
        use_cpu_initialization=DEVICE == "cpu",
    )
    provider = TorchSpecProvider() if grouped else LocalSpecProvider()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return provider.grouped_mlp_modules(grouped)(count, config, pg_collection=groups).to(DEVICE)


# -------------------------------------------------------------------------------------------------- measuring


def step(function: Function, leaves: Tensors, grad: torch.Tensor | None = None) -> Tensors:
    """Output and gradients."""
    out = function(*leaves).flatten(1)
    grad = torch.ones_like(out) if grad is None else grad
    return (out, *torch.autograd.grad(out, leaves, grad))


def cost(function: Function, leaves: Tensors, rounds: int) -> tuple[float, float]:
    """Median seconds of forward and backward, and the most memory above what was there, in MB."""
    step(function, leaves)
    seconds, peaks = [], []
    for _ in range(rounds):
        gc.collect()
        wait()
        start = time.perf_counter()
        step(function, leaves)
        wait()
        seconds.append(time.perf_counter() - start)
        peaks.append(memory(function, leaves))
    return statistics.median(seconds), max(peaks) / 1e6


def memory(function: Function, leaves: Tensors) -> float:
    """Bytes at the peak of a step, in a run of its own: counting would disturb the clock."""
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(function, leaves)
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(function, leaves)
    found: Any = profile.profiler
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def compare(ours: tuple[Tensors, Function], reference: tuple[Tensors, Function], what: str) -> None:
    """Refuse to measure what computes something else."""
    (leaves, function), (others, wanted_of) = ours, reference
    grad = torch.randn(function(*leaves).flatten(1).shape, device=DEVICE).to(DTYPE)
    for found, wanted in zip(
        step(function, leaves, grad), step(wanted_of, others, grad), strict=True
    ):
        off = (found - wanted).abs().max().item() / wanted.abs().max().item()
        assert off < TOLERANCE, f"{what}: off by {off:.1e} of the largest number"


def attention_rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """One for each form and length."""
    for form in FORMS:
        leaves, ours, naive = attention(form, args.lengths[0])
        compare((leaves, ours), (leaves, naive), form.name)
        for length in args.lengths:
            leaves, ours, naive = attention(form, length)
            mine = cost(ours, leaves, args.rounds)
            theirs = cost(naive, leaves, args.rounds) if length <= args.naive_up_to else None
            yield [form.name, f"{length:,}", *cells(mine, theirs)]


def cells(mine: tuple[float, float], *others: tuple[float, float] | None) -> list[str]:
    """Seconds and MB of each; ratios are to the first."""
    found = [f"{mine[0]:.3f}", f"{mine[1]:,.0f}"]
    for other in others:
        if other is None:
            found += ["-", "-", "-"]
        else:
            found += [f"{other[0]:.3f}", f"{other[1]:,.0f}", f"{other[0] / mine[0]:.1f}"]
    return found


def expert_rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """One for each number of experts."""
    for count in args.experts:
        ways = experts(count, args.tokens)
        first, *others = ways.values()
        for name, other in list(ways.items())[1:]:
            compare(first, other, f"{count} experts, {name}")
        costs = [cost(function, leaves, args.rounds) for leaves, function in (first, *others)]
        yield [str(count), *cells(*costs)]


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument(
        "--naive-up-to", type=int, default=8192, help="longest sequence of the naive formula"
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from megatron.core import parallel_state, tensor_parallel

    from megatron.bridge.utils import distributed

    distributed.initialize()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{args.threads} threads"
    print(f"\n{where}, {DTYPE}; forward and backward\n")
    headers = ["attention", "tokens", "s", "MB", "naive: s", "MB", "times"]
    print(table(headers, list(attention_rows(args))) + "\n", flush=True)
    headers = [
        "experts",
        "s",
        "MB",
        "a module each: s",
        "MB",
        "times",
        "a mask each: s",
        "MB",
        "times",
    ]
    print(table(headers, list(expert_rows(args))))


if __name__ == "__main__":
    main()
