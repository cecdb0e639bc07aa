# SPDX-License-Identifier: Apache-2.0
"""The order in which the tuner ranks layouts, against measured steps, on processes over gloo.

``python -m benchmarks tune_ranking --processes 2 4`` measures a profile under as many processes, predicts the step of
each layout of a toy dense model and a toy mixture of experts with it, runs all layouts in turn for some rounds, and
prints Spearman's rank correlation and how far the predicted best is from the measured best. Processes share the cores
of the machine and have one thread each.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megatron.bridge.autotune.measure.machine import measure
from megatron.bridge.autotune.profile import Profile
from megatron.bridge.autotune.search.candidate import Candidate, as_yaml
from megatron.bridge.autotune.search.search import Search
from megatron.bridge.recipes.builders import pretrain
from megatron.bridge.recipes.sizes import ProviderSize
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain as train
from megatron.bridge.utils import distributed
from megatron.bridge.utils.config.overrides import Layer, apply_layers
from megatron.bridge.utils.loss_curves import read_metrics

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
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
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
    """Layouts that are spread over all that the rules allow."""
    allowed = [each for each in search.space.candidates() if not search.problems(each)]
    return [allowed[index * len(allowed) // LAYOUTS] for index in range(min(LAYOUTS, len(allowed)))]


def predictions(kind: str, profile: Profile, size: int) -> list[tuple[Candidate, dict[str, float]]]:
    """Layouts, and the predicted parts of their steps."""
    search = Search(config(kind).resolve(size).config, size, profile.device, profile=profile)
    found = [(each, search.price(each)) for each in layouts(search)]
    return [(each, price.prediction.split) for each, price in found if price is not None]


def in_ranks[T](count: int, work: Callable[..., T], *args: Any) -> T:
    """What ``work`` returns on rank 0 of ``count`` new processes.

    New ones, because hooks of a model that is not needed any more keep its process groups, whose threads take time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.tune_ranking"])
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_on_rank, args=(r, count, store.port, results, work, args))
        for r in range(count)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit(f"{work.__name__}{args}: a rank failed")
    return results.get()


def _on_rank(
    rank: int, count: int, port: int, results: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    torch.set_num_threads(1)
    distributed.initialize(
        store=dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5))
    )
    found = work(*args)
    if rank == 0:
        results.put(found)
    dist.barrier()
    os._exit(0)  # without the teardown of the interpreter, which takes a second


def step_seconds(kind: str, candidate: Candidate) -> float:
    """Median of the measured steps after the first."""
    made = config(kind)
    values = [f"{key}={as_yaml(value)}" for key, value in candidate.settings().items()]
    apply_layers(made, [Layer("benchmark", overrides=values)])
    with tempfile.TemporaryDirectory() as folder:
        made.logger.log_dir = distributed.broadcast_object(folder)
        train(made, forward_step)
        dist.barrier()
        rows: Any = distributed.broadcast_object(
            read_metrics(Path(folder)) if distributed.rank() == 0 else None
        )
    return statistics.median(
        row["step time"] for row in rows if row["kind"] == "train" and row["step"] > 1
    )


def measured_profile(kind: str) -> Profile:
    resolved = config(kind).resolve(distributed.world_size()).config
    search = Search(resolved, distributed.world_size(), "H100 80GB")
    products = set().union(*(search.pricer.shapes(each) for each in search.space.candidates()))
    return measure(resolved, products, budget=40.0)


def rank_layouts(kind: str, size: int, rounds: int) -> None:
    profile = in_ranks(size, measured_profile, kind)
    predicted = predictions(kind, profile, size)
    times = [
        [in_ranks(size, step_seconds, kind, each) for each, _ in predicted] for _ in range(rounds)
    ]
    report(
        kind, size, predicted, [statistics.median(column) for column in zip(*times, strict=True)]
    )


def report(
    kind: str, size: int, predicted: list[tuple[Candidate, dict[str, float]]], measured: list[float]
) -> None:
    for (candidate, split), took in sorted(
        zip(predicted, measured, strict=True), key=lambda pair: pair[1]
    ):
        parts = ", ".join(
            f"{part} {seconds:.3f}" for part, seconds in split.items() if seconds >= 0.001
        )
        print(
            f"  {took:7.4f} s  predicted {sum(split.values()):7.4f} s  {candidate.label():24} {parts}"
        )
    guesses = [sum(split.values()) for _, split in predicted]
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
    parser = argparse.ArgumentParser(
        description="Predicted against measured order of layouts on this machine."
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for count in args.processes:
        for kind in args.models:
            start = time.monotonic()
            rank_layouts(kind, count, args.rounds)
            print(f"({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
