# SPDX-License-Identifier: Apache-2.0
"""The order in which the tuner ranks layouts, against measured steps, on processes over gloo.

``python -m benchmarks tune_ranking --processes 2 4`` measures a profile under as many processes, predicts the step of
each layout of a toy dense model and a toy mixture of experts with it, runs all layouts in turn for some rounds, and
prints Spearman's rank correlation and how far the predicted best is from the measured best. Processes share the cores
of the machine and have one thread each.
"""

import argparse
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megatron.bridge.autotune.profile import Profile, measure, merged
from megatron.bridge.autotune.search.candidate import Candidate, as_yaml
from megatron.bridge.autotune.search.search import Search
from megatron.bridge.recipes.builders import pretrain
from megatron.bridge.recipes.sizes import ProviderSize
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.utils import distributed

SIZES: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 1024},
    "experts": {
        "num_layers": 8,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 256,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
    },
}
SHARED: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "vocab_size": 1024,
    "seq_length": 128,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}
BATCH, STEPS, LAYOUTS = 16, 3, 12


def config(kind: str) -> Any:
    size = ProviderSize("none", {**SHARED, **SIZES[kind]})
    options: Any = {
        "seq_length": 128,
        "lr": 1e-4,
        "global_batch_size": BATCH,
        "train_iters": STEPS,
        "precision": "fp32",
    }
    made = pretrain(size, options)
    made.validation.eval_iters, made.logger.log_interval = 0, 1
    made.ddp.overlap_grad_reduce = made.ddp.overlap_param_gather = False
    made.train.manual_gc = False
    return made


def layouts(search: Search) -> list[Candidate]:
    """About as many layouts as are asked for, spread over all that the rules allow."""
    allowed = [each for each in search.space.candidates() if not search.problems(each)]
    step = max(1, len(allowed) // LAYOUTS)
    return allowed[::step][: LAYOUTS + 2]


def predictions(kind: str, profile: Profile, size: int) -> list[tuple[Candidate, float]]:
    resolved = config(kind).resolve(size).config
    search = Search(resolved, size, profile.device, profile=profile)
    found = [(each, search.price(each)) for each in layouts(search)]
    return [(each, price.seconds) for each, price in found if price is not None]


def step_seconds(kind: str, candidate: Candidate) -> float:
    """Median of the measured steps after the first."""
    from megatron.core import parallel_state

    from megatron.bridge.training.pretrain import pretrain as train
    from megatron.bridge.utils.config.overrides import Layer, apply_layers
    from megatron.bridge.utils.loss_curves import read_metrics

    made = config(kind)
    values = [f"{key}={as_yaml(value)}" for key, value in candidate.settings().items()]
    apply_layers(made, [Layer("benchmark", overrides=values)])
    with tempfile.TemporaryDirectory() as folder:
        made.logger.log_dir = distributed.broadcast_object(folder)
        train(made, forward_step)
        dist.barrier()
        rows = distributed.broadcast_object(read_metrics(Path(folder)) if distributed.rank() == 0 else None)
    parallel_state.destroy_model_parallel()
    gc.collect()
    return statistics.median(row["step time"] for row in rows if row["kind"] == "train" and row["step"] > 1)


def shapes(kind: str, size: int) -> set[tuple[int, int, int]]:
    search = Search(config(kind).resolve(size).config, size, "H100 80GB")
    return set().union(*(search.pricer.shapes(each) for each in search.space.candidates()))


def work(rounds: int) -> None:
    """On each rank: measure a profile, predict, and run."""
    torch.set_num_threads(1)
    distributed.initialize()
    size = distributed.world_size()
    products = set().union(*(shapes(kind, size) for kind in SIZES))
    mine = measure(products, length=128, heads=8, width=32, dtype=torch.float32, budget=60.0)
    profile = merged(distributed.all_gather_object(mine))
    for kind in SIZES:
        predicted = predictions(kind, profile, size)
        times: list[list[float]] = [[] for _ in predicted]
        for _, (index, (candidate, _)) in itertools.product(range(rounds), enumerate(predicted)):
            times[index].append(step_seconds(kind, candidate))
        if distributed.rank() == 0:
            report(kind, size, predicted, [statistics.median(each) for each in times])


def report(kind: str, size: int, predicted: list[tuple[Candidate, float]], measured: list[float]) -> None:
    for (candidate, seconds), took in sorted(zip(predicted, measured, strict=True), key=lambda pair: pair[1]):
        print(f"  measured {took:7.4f} s  predicted {seconds:7.4f} s  {candidate.label()}")
    guesses = [seconds for _, seconds in predicted]
    chosen = measured[guesses.index(min(guesses))]
    print(
        f"{kind}, {size} processes, {len(measured)} layouts: Spearman {spearman(guesses, measured):.3f}; the predicted "
        f"best takes {chosen / min(measured) - 1:+.1%} of the measured best",
        flush=True,
    )


def spearman(first: list[float], second: list[float]) -> float:
    ranks = [torch.tensor(each).argsort().argsort().double() for each in (first, second)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured order of layouts on this machine.")
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args.rounds)
        return
    for count in args.processes:
        start = time.monotonic()
        ranks = ["--nproc-per-node", str(count), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "benchmarks.tune_ranking"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--rounds", str(args.rounds)], check=True, env=environment)
        print(f"({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
