# SPDX-License-Identifier: Apache-2.0
"""The first half hour with a GPU: what works, how fast, and which targets are met.

Start it from a checkout of the repository, on a machine with a GPU:

    .venv/bin/python -m scripts.gpu.acceptance --out DIR

or, where no environment has been carried to the machine, with any Python that has torch 2.11 for CUDA, triton,
transformers and megatron-core (pytest for stage a, peft for stages d and e; there is no need for a network):

    PYTHONPATH=src python -m scripts.gpu.acceptance --out DIR

Each stage is a process with a limit of its own; one that fails, hangs or runs out of memory does not stop the
others. ``DIR/results.json`` is written after each stage, and ``DIR/STAGE.log`` holds what the stage printed. The
same command again runs what has not succeeded yet; ``--again`` runs all. The exit code is 0 if every stage that
ran succeeded and every target was met. ``--tiny`` shows on any machine that the stages run; its figures mean
nothing.

Stages, in order of value (seconds of --quick and of a whole run at most):
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "results.json"
_GRACE = 10.0  # seconds between asking a stage to end and killing it

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """What a figure of a stage should be."""

    figure: str
    """Its key."""
    text: str
    met: Callable[[float], bool]


@dataclass(frozen=True)
class Stage:
    """One process: ``scripts.gpu.stages`` with the name of the stage."""

    letter: str
    name: str
    does: str
    quick: int
    """Seconds that it may take with ``--quick``."""
    whole: int
    targets: tuple[Target, ...] = ()


def at_least(figure: str, bound: float, unit: str = "") -> Target:
    return Target(figure, f"{figure} >= {bound:g}{unit}", lambda value: value >= bound)


def at_most(figure: str, bound: float, unit: str = "") -> Target:
    return Target(figure, f"{figure} <= {bound:g}{unit}", lambda value: value <= bound)


STAGES = (
    Stage("a", "tests", "the tests that need a GPU", 200, 420, (at_most("failed", 0), at_least("passed", 1))),
    Stage(
        "b", "families", "logits of every family in fp32 and bf16 against transformers on the card", 120, 300,
        (at_most("families that differ", 0),),
    ),
    Stage(
        "c", "pretrain", "Llama 3.2 1B in bf16 against the HF Trainer and a compiled loop", 240, 420,
        (
            at_least("model FLOP/s utilization", 0.5),
            at_least("speed over the HF Trainer", 1.2),
            at_most("error of predicted memory", 0.05),
        ),
    ),
    Stage(
        "d", "lora", "LoRA of Llama 3.1 8B against peft with the HF Trainer", 180, 240,
        (at_least("tokens/s", 12_500),),
    ),
    Stage(
        "e", "packed", "packed fine-tuning of all weights of Llama 3.2 1B", 90, 120,
        (at_most("not finite", 0),),
    ),
    Stage(
        "f", "experts", "Qwen3 30B-A3B, cut to 4 layers, with grouped experts", 90, 150,
        (at_most("copies of experts", 0),),
    ),
    Stage(
        "g", "resume", "save, kill, resume; how long an async save blocks", 120, 180,
        (at_least("bitwise equal", 1), at_most("async save blocks, s/GB", 0.1)),
    ),
    Stage("h", "transformer_engine", "Transformer Engine in bf16 and FP8, if it is installed", 120, 180),
    Stage("i", "conversion", "loading and exporting a Hugging Face model, and copies from host to device", 60, 90),
    Stage(
        "k", "graphs", "Llama 3.2 1B without CUDA graphs, with those of layers, with one of a step", 120, 180,
        (at_most("largest difference of losses", 1e-3),),
    ),
    Stage(
        "l", "generation", "greedy tokens against transformers in fp32, then Llama 3.2 1B in bf16", 90, 150,
        (at_most("texts that differ", 0), at_least("batch 32: decoding over transformers", 2)),
    ),
    Stage(
        "m", "predictions", "three steps against the tuner's predictions, from data sheets and from measured kernels",
        180, 300,
    ),
    Stage("j", "profile", "one step: the ten longest kernels and the time without any", 60, 90),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- one stage


def run_stage(stage: Stage, size: str, out: Path, seconds: float) -> dict[str, Any]:
    """What became of a stage: its state, seconds and figures, and the error if it failed."""
    command = [
        sys.executable,
        "-m",
        "scripts.gpu.stages",
        stage.name,
        "--size",
        size,
        "--out",
        str(out),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *_python_path()])
    }
    environment.setdefault("HF_HUB_OFFLINE", "1")
    start, log = time.monotonic(), out / f"{stage.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    figures = last_figures(log)
    found = {"seconds": round(time.monotonic() - start, 1), "size": size, "figures": figures}
    if code == 0:
        return {"state": "skipped" if "skipped" in figures else "ok", **found}
    why = (
        f"took more than {seconds:.0f} s" if code is None else f"exit code {code}: {last_line(log)}"
    )
    return {"state": "failed", "error": why, **found}


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a stage and the processes that it started, which have its group."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    process.wait()


FIGURES = "figures: "
"""How a stage begins a line of JSON; each line replaces the one before."""


def last_figures(log: Path) -> dict[str, Any]:
    """What a stage found until it ended, in whatever way."""
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(FIGURES)
    ]
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # cut off by a kill
            return json.loads(line.removeprefix(FIGURES))
    return {}


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


# --------------------------------------------------------------------------------------------------- all stages


def machine() -> dict[str, Any]:
    """What the figures were measured on, as far as it can be told without torch."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit",
        "--format=csv",
    ]
    try:
        gpu = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = ""
    return {
        "gpu": gpu or "none found",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Run the stages that are wanted and not done, and write the results after each."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / RESULTS
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"stages": {}}
    results["machine"] = machine()
    deadline = time.monotonic() + 60 * args.minutes
    for stage in wanted(args.only):
        before = results["stages"].get(stage.name, {})
        if (
            before.get("state") in ("ok", "skipped")
            and before["size"] == args.size
            and not args.again
        ):
            continue
        left = deadline - time.monotonic()
        limit = min(left, stage.quick if args.size == "quick" else stage.whole)
        if left < 10:
            found = {
                "state": "not run",
                "error": f"--minutes {args.minutes:g} were over",
                "figures": {},
            }
            found |= {"seconds": 0.0, "size": args.size}
        else:
            print(f"({stage.letter}) {stage.name}: {stage.does} ... ", end="", flush=True)
            found = run_stage(stage, args.size, args.out, limit)
            print(f"{found['state']}, {found['seconds']:.0f} s", flush=True)
        results["stages"][stage.name] = found | {"date": time.strftime("%Y-%m-%d %H:%M:%S")}
        write(path, results)
    return results


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the file at once, so that it is whole whenever the machine is taken away."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    aside.replace(path)


def wanted(only: str | None) -> list[Stage]:
    """The stages whose letters or names are in ``only``, separated by commas; all without it."""
    if only is None:
        return list(STAGES)
    words = [word.strip() for word in only.split(",")]
    unknown = [
        word for word in words if not any(word in (stage.letter, stage.name) for stage in STAGES)
    ]
    if unknown:
        known = ", ".join(f"{stage.letter} ({stage.name})" for stage in STAGES)
        raise SystemExit(f"--only {only}: there is no stage {unknown[0]}; stages are {known}")
    return [stage for stage in STAGES if {stage.letter, stage.name} & set(words)]


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Stage, state, target or figure, and its value."""
    for stage in STAGES:
        found = results["stages"].get(stage.name)
        if found is None:
            continue
        title = f"({stage.letter}) {stage.name}"
        yield title, found["state"], found.get("error") or found["figures"].get("skipped", ""), ""
        judged = {target.figure: target for target in stage.targets}
        for name, value in found["figures"].items():
            if isinstance(value, (int, float)):
                target = judged.get(name)
                yield (
                    "",
                    "",
                    name if target is None else target.text,
                    f"{value:,.4g}{_verdict(target, value, found)}",
                )


def _verdict(target: Target | None, value: float, found: Mapping[str, Any]) -> str:
    if target is None or found["size"] == "tiny":
        return ""
    return "  met" if target.met(value) else "  MISSED"


def missed(results: Mapping[str, Any]) -> list[str]:
    """Stages that failed and targets that are not met; toy figures are not judged."""
    found: list[str] = []
    for stage in STAGES:
        result = results["stages"].get(stage.name)
        if result is None or result["state"] == "skipped":
            continue
        if result["state"] != "ok":
            found.append(stage.name)
        elif result["size"] != "tiny":
            figures = result["figures"]
            unmet = [
                one
                for one in stage.targets
                if one.figure not in figures or not one.met(figures[one.figure])
            ]
            found += [f"{stage.name}: {one.text}" for one in unmet]
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the stages and print the table."""
    listed = "\n".join(
        f"  {one.letter}  {one.name:20} {one.quick:4} {one.whole:4}  {one.does}" for one in STAGES
    )
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.acceptance",
        description=f"{__doc__}\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where results and logs go"
    )
    parser.add_argument(
        "--only", metavar="LIST", help="letters or names of stages, separated by commas"
    )
    parser.add_argument(
        "--minutes", type=float, default=25, help="for all stages together (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="also run what has succeeded before")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="fewer steps and rounds"
    )
    sizes.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="toy sizes, on any machine"
    )
    parser.set_defaults(size="whole")
    args = parser.parse_args(argv)
    results = run_all(args)
    print(f"\n{results['machine']['gpu']}\n")
    for title, state, name, value in rows(results):
        print(f"{title:22} {state:8} {name:44} {value}".rstrip())
    problems = missed(results)
    print("\nall targets met" if not problems else "\nnot met: " + "; ".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # ends the stage that runs
    sys.exit(main())
