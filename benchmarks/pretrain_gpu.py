# SPDX-License-Identifier: Apache-2.0
"""Pretraining on one GPU without Transformer Engine: the card's ceilings, what others reach, what each part gives.

``python benchmarks/pretrain_gpu.py --shape llama32-1b`` measures, in bf16 at 4,096 tokens a sequence,

* the ceilings: matrix products of the model's sizes, and copying memory;
* a plain PyTorch loop over the Hugging Face model, the same compiled, and the HF Trainer (SDPA, fused AdamW,
  ``torch_compile``), all with fp32 weights under autocast;
* this framework, from random weights, with bf16 weights and fp32 ones in the optimizer.

Every candidate has a process of its own, round after round in turn. ``--changes`` then adds each of this
framework's faster parts to a run without any, and takes each out of the full set; ``--profile DIR`` writes for
each candidate where the time of the device goes. Model FLOP/s count what the model asks for (``models.flops``),
nothing that is computed again; utilisation is of the data sheet's peak. ``--tiny`` runs all of it on any machine.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import DEVICE, anonymous_memory, table, wait

from megatron.bridge.recipes.sizes import size_of

TINY: dict[str, Any] = {
    **size_of("meta-llama/Llama-3.2-1B").numbers,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama32-1b": size_of("meta-llama/Llama-3.2-1B").numbers,
    "qwen3-0.6b": size_of("Qwen/Qwen3-0.6B").numbers,
    "tiny": TINY,
}
COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"  # without a GPU only to see that it runs
OURS, TRAINER, PLAIN, COMPILED = (
    "Megatron Bridge",
    "HF Trainer, compiled",
    "HF plain loop",
    "HF compiled loop",
)
CANDIDATES = (TRAINER, PLAIN, COMPILED, OURS)
HEADERS = ["", "ms/step", "tokens/s", "model TFLOP/s", "utilisation", "peak memory, GB", "speed"]


# ------------------------------------------------------------------------------------------------- faster parts


def without_sdpa() -> None:
    """Megatron-Core's attention, with scores in memory."""
    from megatron.core.models.backends import LocalSpecProvider

    from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider

    TorchSpecProvider.core_attention = LocalSpecProvider.core_attention  # pyright: ignore[reportAttributeAccessIssue]


def without_compiled_norms() -> None:
    """PyTorch's own kernel."""
    import torch.nn.functional as F

    from megatron.bridge.backends.kernels import compiled

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
    ) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight + 1 if zero_centered else weight, eps)

    compiled.rms_norm = rms_norm


def without_compiled_rotary() -> None:
    """Megatron-Core's, operation by operation."""
    from megatron.core.models.common.embeddings import rope_utils

    from megatron.bridge.backends.kernels import compiled

    compiled.rotary = rope_utils._apply_rotary_pos_emb_bshd


def without_compiled_loss() -> None:
    """Megatron-Core's, with fp32 logits."""
    from megatron.bridge.backends.kernels import compiled

    compiled.cross_entropy = compiled.core_cross_entropy


def without_swiglu(run: Any) -> None:
    """One operation after the other."""
    for chunk in run.model:
        for module in chunk.modules():
            if hasattr(module, "config"):
                module.config.bias_activation_fusion = False


def without_fused_adam(run: Any) -> None:
    """The foreach kernels that PyTorch uses by default."""
    from megatron.bridge.training.optim.optimizer import torch_optimizers

    for optimizer in torch_optimizers(run.optimizer):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = False, True
        for state in optimizer.state.values():
            state["step"] = state["step"].cpu()


def without_one_norm_of_gradients(run: Any) -> None:
    """Megatron-Core's, which waits for every tensor."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm


BEFORE: dict[str, Callable[[], None]] = {
    "SDPA": without_sdpa,
    "compiled norms": without_compiled_norms,
    "compiled rotary embeddings": without_compiled_rotary,
    "compiled cross entropy": without_compiled_loss,
}
AFTER: dict[str, Callable[[Any], None]] = {
    "compiled SwiGLU": without_swiglu,
    "fused AdamW": without_fused_adam,
    "one norm of gradients": without_one_norm_of_gradients,
}
SETTINGS = ("no distributed optimizer",)
CHANGES = (*BEFORE, *AFTER, *SETTINGS)


# ------------------------------------------------------------------------------------------------ candidates


def hf_config(args: argparse.Namespace) -> Any:
    """The shape, for sequences of this length."""
    from transformers import AutoConfig

    numbers = SHAPES[args.shape] | {
        "use_cache": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(**numbers)


def hugging_face(args: argparse.Namespace) -> Any:
    """A candidate over the Hugging Face model."""
    from training import hf_trainer, plain_loop
    from transformers import AutoModelForCausalLM

    from megatron.bridge.data.config import DatasetRequest, MockGPTDatasetConfig
    from megatron.bridge.data.tokenizer import NullTokenizer

    config = hf_config(args)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    request = DatasetRequest((512, 0, 0), NullTokenizer(config.vocab_size))
    dataset = MockGPTDatasetConfig(seq_length=args.seq_length).build(request).train
    if args.worker == TRAINER:
        return hf_trainer(model, dataset, args, bf16=True, compiler=COMPILER)
    return plain_loop(
        model, dataset, args, bf16=True, compiler=COMPILER if args.worker == COMPILED else None
    )


def megatron(args: argparse.Namespace) -> Any:
    """This framework, without the parts in ``args.without``."""
    from training import framework_loop

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.setup import setup

    for name in args.without:
        BEFORE.get(name, lambda: None)()
    run = setup(bridge_config(args), forward_step)
    for name in args.without:
        AFTER.get(name, lambda run: None)(run)
    run.emit("train_start")
    return framework_loop(run)


def bridge_config(args: argparse.Namespace) -> Any:
    """What a user would write for this shape."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.data.config import MockGPTDatasetConfig
    from megatron.bridge.data.tokenizer import TokenizerConfig
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        LoggerConfig,
        OptimizerConfig,
        SchedulerConfig,
        TrainingConfig,
    )

    provider = AutoBridge.from_hf_config(hf_config(args)).to_megatron_provider(load_weights=False)
    provider.seq_length = args.seq_length
    provider.backend = "torch"
    config = ConfigContainer(
        train=TrainingConfig(args.micro_batch_size, args.micro_batch_size, train_iters=10**6),
        model=provider,
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        dataset=MockGPTDatasetConfig(seq_length=args.seq_length),
        logger=LoggerConfig(log_interval=10**6),
        tokenizer=TokenizerConfig("NullTokenizer", vocab_size=provider.vocab_size),
        checkpoint=CheckpointConfig(),
        mixed_precision="bf16_mixed",
    )
    config.ddp.use_distributed_optimizer = SETTINGS[0] in args.without
    return config


def ceilings(args: argparse.Namespace) -> dict[str, float]:
    """TFLOP/s of the model's largest products, GB/s of copying, and operations of a token by ``models.flops``."""
    from megatron.bridge.models.flops import flops_per_token

    config = hf_config(args)
    tokens = args.micro_batch_size * args.seq_length
    found = {"operations": flops_per_token(bridge_config(args).model.meta_model(), args.seq_length)}
    sizes = {
        "MLP": (config.hidden_size, 2 * config.intermediate_size),
        "logits": (config.hidden_size, config.vocab_size),
    }
    for name, (inner, outer) in sizes.items():
        a, b = (
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
            for shape in ((tokens, inner), (inner, outer))
        )
        found[f"{name}, TFLOP/s"] = 2 * tokens * inner * outer / best(lambda a=a, b=b: a @ b) / 1e12
    source = torch.empty(1 << (30 if DEVICE == "cuda" else 24), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    found["copy, GB/s"] = 2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9
    return found


def best(function: Callable[[], object], times: int = 20) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    seconds = []
    for _ in range(times + 1):
        wait()
        start = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


# ------------------------------------------------------------------------------------------------- processes


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One candidate in this process: seconds of its steps, and the memory that they take."""
    if args.worker == "ceilings":
        return ceilings(args)
    steps = (megatron if args.worker == OURS else hugging_face)(args)
    steps(args.warm_up)  # compiles
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stamps = [stamp for stamp, _ in steps(args.steps + 1)]
    memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else anonymous_memory()
    if args.profile:
        write_profile(args, steps)
    return {
        "seconds": [later - earlier for earlier, later in itertools.pairwise(stamps)],
        "memory": memory,
    }


def write_profile(args: argparse.Namespace, steps: Any) -> None:
    """The operations that take most of the device's time, of two steps."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        steps(2)
    found = profile.key_averages().table(
        sort_by=f"self_{DEVICE}_time_total", row_limit=40, max_name_column_width=80
    )
    name = "-".join([args.worker, *(f"without {part}" for part in args.without)])
    folder = Path(args.profile)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{args.shape}-{name}.txt".replace(" ", "_").replace(",", "")).write_text(found)


def in_process(
    args: argparse.Namespace, worker: str, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What a fresh process finds; it fails with what that process said."""
    passed = {
        "shape": args.shape,
        "seq-length": args.seq_length,
        "micro-batch-size": args.micro_batch_size,
    }
    passed |= {"steps": args.steps, "warm-up": args.warm_up, "worker": worker}
    command = [sys.executable, __file__]
    for name, value in passed.items():
        command += [f"--{name}", str(value)]
    command += ["--profile", args.profile] if args.profile else []
    command += ["--without", *without] if without else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{worker} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


Found = dict[str, dict[str, Any]]


def compare(
    args: argparse.Namespace,
    candidates: dict[str, tuple[str, tuple[str, ...]]],
    after_each: Callable[[Found], None] = lambda found: None,
) -> Found:
    """All candidates, in turn, round after round: their steps together, and the most memory."""
    found: Found = {name: {"seconds": [], "memory": 0} for name in candidates}
    for number in range(args.rounds):
        for name, (worker, without) in candidates.items():
            result = in_process(args, worker, without)
            found[name]["seconds"] += result["seconds"]
            found[name]["memory"] = max(found[name]["memory"], result["memory"])
            step = statistics.median(result["seconds"])
            print(
                f"round {number + 1}, {name}: {step * 1e3:.1f} ms/step", file=sys.stderr, flush=True
            )
            after_each(found)
    return found


def rows(
    found: dict[str, dict[str, Any]], args: argparse.Namespace, operations: float, first: str
) -> Iterator[list[str]]:
    """Medians over all rounds; speed is relative to ``first``."""
    from megatron.bridge.backends.hardware.device_flops import device_tflops

    peak = device_tflops()
    reference = statistics.median(found[first]["seconds"])
    for name, result in found.items():
        seconds = statistics.median(result["seconds"])
        speed = args.micro_batch_size * args.seq_length / seconds
        rate = speed * operations / 1e12
        used = "" if peak is None else f"{rate / peak:.1%}"
        memory = f"{result['memory'] / 1e9:.1f}"
        yield [
            name,
            f"{seconds * 1e3:.1f}",
            f"{speed:,.0f}",
            f"{rate:.1f}",
            used,
            memory,
            f"{reference / seconds:.2f}",
        ]


def changes() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Without any of the faster parts, with one of them, without one of them, with all."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {"none of these": (OURS, CHANGES)}
    for name in CHANGES:
        found[f"+ {name}"] = OURS, tuple(other for other in CHANGES if other != name)
    for name in CHANGES:
        found[f"all without {name}"] = OURS, (name,)
    return found | {"all": (OURS, ())}


def main() -> None:
    """Measure and print the tables."""
    args = arguments()
    if args.worker:
        print(json.dumps(work(args)))
        return
    if args.shape != "tiny" and DEVICE == "cpu":
        print(f"{args.shape} needs a GPU: skipped (--tiny runs anywhere)")
        return
    limits = in_process(args, "ceilings")
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    batch = f"{args.micro_batch_size} x {args.seq_length} tokens per step"
    print(f"\n{args.shape}, bf16, {batch}, {name}, torch {torch.__version__}\n")
    print(
        table(
            ["ceiling", ""],
            [[key, f"{value:,.1f}"] for key, value in limits.items() if key != "operations"],
        )
    )
    parts = [({name: (name, ()) for name in CANDIDATES}, TRAINER)]
    if args.changes:
        parts.append((changes(), "none of these"))
    for candidates, first in parts:
        found = compare(args, candidates)
        print(
            "\n" + table(HEADERS, list(rows(found, args, limits["operations"], first))), flush=True
        )


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Of the command line, or ``words`` in its place; ``--tiny`` stands for several."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama32-1b")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=10, help="counted steps of a candidate in a round"
    )
    parser.add_argument("--warm-up", type=int, default=6, help="steps before, which compile")
    parser.add_argument(
        "--changes",
        action="store_true",
        help="add and remove each of this framework's faster parts",
    )
    parser.add_argument(
        "--profile", metavar="DIR", help="write a table of operations for each candidate"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the whole of it, small, to see that it runs"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs="*", choices=CHANGES, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.tiny:
        args.shape, args.seq_length, args.micro_batch_size = "tiny", 64, 2
        args.rounds, args.steps, args.warm_up = 1, 2, 1
    return args


if __name__ == "__main__":
    main()
