# SPDX-License-Identifier: Apache-2.0
"""Searches of the tuner against all layouts, and its repairs of runs that do not fit.

``python -m benchmarks tune_search grids`` prices every layout of five grids, with every kind of recomputation, and
compares the fastest that fits with the one that a search finds. ``python -m benchmarks tune_search ooms`` changes
recipes until they do not fit, lets ``--fix-oom``'s search repair them, and counts the memory of the repaired layout
exactly. ``python -m benchmarks tune_search outputs`` runs what the tuner writes for ten recipes, and ``speed``
measures CPU milliseconds for a layout whose layers were counted before.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.autotune.search.candidate import Candidate
from megatron.bridge.autotune.search.explain import nearest_fit
from megatron.bridge.autotune.search.price import Price
from megatron.bridge.autotune.search.search import Search
from megatron.bridge.autotune.time import simulate
from megatron.bridge.recipes.catalog import find
from megatron.bridge.utils.config.overrides import Layer, apply_layers

GRIDS = {
    "llama3_8b_pretrain_config": (64, "h100"),
    "llama3_70b_pretrain_config": (128, "h100"),
    "qwen3_30b_a3b_pretrain_config": (64, "h100"),
    "mixtral_8x7b_pretrain_config": (64, "A100 80GB"),
    "gpt_oss_20b_pretrain_config": (32, "b200"),
}
GRID = 2000  # layouts at most

OUTPUTS = {
    "llama32_3b_pretrain_config": 8,
    "llama3_70b_pretrain_config": 64,
    "qwen3_14b_pretrain_config": 16,
    "qwen3_30b_a3b_pretrain_config": 16,
    "gemma3_4b_pretrain_config": 8,
    "gpt_oss_20b_pretrain_config": 8,
    "deepseek_v2_lite_pretrain_config": 8,
    "olmoe_7b_pretrain_config": 8,
    "mixtral_8x7b_pretrain_config": 64,
    "nemotronh_8b_pretrain_config": 16,
}

LOSS = [
    "train.micro_batch_size=16",
    "model.tensor_model_parallel_size=1",
    "model.sequence_parallel=false",
]
ALONE = [
    *("ddp.use_distributed_optimizer=false", "ddp.overlap_param_gather=false"),
    *("model.tensor_model_parallel_size=1", "model.sequence_parallel=false"),
]
SEQUENCE = ["dataset.seq_length=65536", "model.seq_length=65536", "model.context_parallel_size=1"]
FIRST = ["model.pipeline_model_parallel_size=2", "train.micro_batch_size=8"]
EXPERTS = ["model.expert_model_parallel_size=1", "train.micro_batch_size=8"]
OOMS: dict[str, dict[str, list[str]]] = {
    "llama32_1b_pretrain_config": {"loss": LOSS, "sequence": SEQUENCE},
    "llama32_3b_pretrain_config": {"loss": LOSS, "sequence": SEQUENCE},
    "llama3_8b_pretrain_config": {
        "loss": LOSS,
        "optimizer": ALONE,
        "sequence": SEQUENCE,
        "first": FIRST,
    },
    "llama3_70b_pretrain_config": {"optimizer": ALONE, "sequence": SEQUENCE, "first": FIRST},
    "qwen3_8b_pretrain_config": {
        "loss": LOSS,
        "optimizer": ALONE,
        "sequence": SEQUENCE,
        "first": FIRST,
    },
    "qwen3_14b_pretrain_config": {
        "loss": LOSS,
        "optimizer": ALONE,
        "sequence": SEQUENCE,
        "first": FIRST,
    },
    "qwen3_32b_pretrain_config": {"optimizer": ALONE, "sequence": SEQUENCE, "first": FIRST},
    "qwen3_30b_a3b_pretrain_config": {"experts": EXPERTS, "loss": LOSS, "sequence": SEQUENCE},
    "mixtral_8x7b_pretrain_config": {"experts": EXPERTS, "loss": LOSS, "optimizer": ALONE},
    "gpt_oss_20b_pretrain_config": {"experts": EXPERTS, "loss": LOSS, "sequence": SEQUENCE},
}


def searched(name: str, gpus: int, card: str, overrides: list[str] | None = None) -> Search:
    from megatron.bridge.autotune.gpus import gpu_name

    config = find(name)()
    apply_layers(config, [Layer("benchmark", overrides=overrides or [])])
    return Search(config.resolve(gpus).config, gpus, gpu_name(card), switches=False)


def everything(search: Search, candidates: list[Candidate]) -> Iterator[Price]:
    """All layouts that fit, simulated, with each kind of recomputation."""
    for candidate in candidates:
        for recompute in search.recomputes:
            price = search.price(replace(candidate, recompute=recompute))
            if price is not None and price.fullest <= search.budget:
                yield price


def grids() -> int:
    failures = 0
    for name, (gpus, card) in GRIDS.items():
        search = searched(name, gpus, card)
        allowed = [each for each in search.space.candidates() if not search.problems(each)]
        start = time.monotonic()
        best = min(
            everything(search, allowed[:: max(1, -(-len(allowed) // GRID))]),
            key=lambda price: price.seconds_per_token,
        )
        whole, start = time.monotonic() - start, time.monotonic()
        found = search.run(1).best[0]
        change = found.seconds / best.seconds - 1
        failures += change > 0.01
        print(
            f"{name}, {gpus} x {card}, {len(allowed)} layouts x {len(search.recomputes)}: {best.seconds:.3f} s "
            f"({best.candidate.label()}) in {whole:.0f} s; the search {found.seconds:.3f} s ({change:+.2%}) in "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    return failures


def ooms() -> int:
    failures = 0
    for name, cases in OOMS.items():
        for kind, overrides in cases.items():
            failures += not _repaired(name, kind, overrides)
    total = sum(map(len, OOMS.values()))
    print(
        f"{total - failures} of {total} fit after the repair, by the exact count, and no allowed one is 5 % faster"
    )
    return failures


def _repaired(name: str, kind: str, overrides: list[str]) -> bool:
    recipe = find(name)
    search = searched(name, recipe.gpus, recipe.gpu_kind, overrides)
    start = search.current
    before = None if search.problems(start) else search.price(start)
    goal = nearest_fit(search)
    if goal is None or before is None or before.fullest <= search.budget:
        print(
            f"{name} {kind}: {'not repaired' if goal is None else 'no case, it fits or is not allowed'}",
            flush=True,
        )
        return False
    exact = max(
        rank.total
        for rank in memory_per_rank(search.pricer.configured(goal.candidate), search.world_size)
    )
    exact = search.pricer.reserve(goal.candidate).around(exact)
    goal = search.price(replace(goal.candidate, layout=None)) or goal
    changes = len(goal.candidate.changes(start))
    near = [each for each in search.space.candidates() if len(each.changes(start)) <= changes]
    near = [each for each in near if not search.problems(each)]
    same = [
        each for each in everything(search, near) if len(each.candidate.changes(start)) == changes
    ]
    fastest = min(price.seconds for price in [goal, *same])
    good = exact <= search.budget and goal.seconds <= 1.05 * fastest
    print(
        f"{name} {kind}: {before.fullest / 1e9:.1f} GB -> {exact / 1e9:.1f} of {search.budget / 1e9:.1f} GB, "
        f"{goal.seconds / before.seconds - 1:+.1%} time, {goal.seconds / fastest - 1:+.1%} of the fastest with as many "
        f"changes: {goal.candidate.label()}{'' if good else '  FAILED'}",
        flush=True,
    )
    return good


def outputs() -> int:
    """The best layout of ten recipes, as a file that goes through a dry run and a rehearsal of ``run_recipe.py``."""
    failures = 0
    for name, gpus in OUTPUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            tuned = str(Path(folder) / "tuned.yaml")
            sizes = ["--gpus", str(gpus), "--gpu", "h100", "--top", "1"]
            run = [
                sys.executable,
                "scripts/training/run_recipe.py",
                "--config",
                tuned,
                "--world-size",
                str(gpus),
            ]
            tune = [
                sys.executable,
                "-m",
                "megatron.bridge.cli.main",
                "tune",
                "--recipe",
                name,
                *sizes,
            ]
            commands = {"tune": [*tune, "--output", tuned], "dry run": [*run, "--dry-run"]}
            commands["rehearsal"] = [*run, "--rehearse"]
            for what, command in commands.items():
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    failures += 1
                    print(
                        f"{name}, {gpus} GPUs, {what} FAILED: {(done.stdout + done.stderr)[-600:]}",
                        flush=True,
                    )
                    break
            else:
                proven = [line for line in done.stdout.splitlines() if line.startswith("as ")]
                print(
                    f"{name}, {gpus} GPUs: tuned, dry run, rehearsed {''.join(proven)}", flush=True
                )
    print(f"{len(OUTPUTS) - failures} of {len(OUTPUTS)} outputs passed")
    return failures


def speed() -> int:
    """Milliseconds to check a layout, to price it as a search does, and to simulate it as a finalist."""
    for name, (gpus, card) in {**GRIDS, "deepseek_v3_pretrain_config": (1024, "h100")}.items():
        search = searched(name, gpus, card)
        layouts = [*search.space.candidates()]
        allowed = [each for each in layouts if not search.problems(each)]
        some = random.Random(0).sample(allowed, min(100, len(allowed)))
        steps = {
            "checked": search.problems,
            "priced": search.pricer.price,
            "simulated": search.price,
        }
        found = {
            what: min(_milliseconds(step, some) for _ in range(3)) for what, step in steps.items()
        }
        print(f"{name}: {len(allowed)} of {len(layouts)} layouts allowed; ms for each:", end=" ")
        print(", ".join(f"{what} {each:.2f}" for what, each in found.items()), flush=True)
    return 0


def _milliseconds(step: Callable[[Candidate], Any], layouts: list[Candidate]) -> float:
    simulate._end_of_last_pass.cache_clear()
    start = time.process_time()
    for layout in layouts:
        step(layout)
    return (time.process_time() - start) / len(layouts) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="The tuner's searches against all layouts.")
    parser.add_argument("part", choices=["grids", "ooms", "outputs", "speed"])
    part: dict[str, Callable[[], int]] = {
        "grids": grids,
        "ooms": ooms,
        "outputs": outputs,
        "speed": speed,
    }
    sys.exit(part[parser.parse_args().part]())


if __name__ == "__main__":
    main()
