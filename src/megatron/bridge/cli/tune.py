# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge tune``: predict the fastest parallel layout that fits, without a GPU."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support import tune_probe, tune_rl
from megatron.bridge.cli.support.options import TRAIN_MODES, add_recipe_options
from megatron.bridge.cli.support.output_files import HtmlPage, YamlFile, header
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.text_format import columns, write_file
from megatron.bridge.cli.support.train_job import TrainJob, prepare
from megatron.bridge.recipes import catalog
from megatron.bridge.utils.config.serialize import dump_yaml
from megatron.bridge.utils.errors import UserError, did_you_mean
from megatron.bridge.utils.html_table import html_table
from megatron.bridge.utils.startup import without_gc

if TYPE_CHECKING:
    from megatron.bridge.autotune.ledger import LedgerEntry
    from megatron.bridge.autotune.search.explain import LayoutChange, Reason
    from megatron.bridge.autotune.search.price import Price
    from megatron.bridge.autotune.search.search import Found, Search


DESCRIPTION = (
    "Search the parallel layouts of a run for the fastest ones that fit, without a GPU. The global "
    "batch, the sequence length, the precision and the data stay as they are."
)
EXAMPLES = """examples:
  megatron-bridge tune --recipe llama3_70b_pretrain_config --gpus 64 --gpu h100
  megatron-bridge tune --recipe deepseek_v3_pretrain_config --gpus 1024 --gpu h100 --output tuned.yaml
  megatron-bridge tune --recipe llama3_8b_pretrain_config --explain tensor=4 pipeline=2
  megatron-bridge tune --recipe llama3_8b_pretrain_config --fix-oom train.micro_batch_size=8
  megatron-bridge tune --hf-model Qwen/Qwen3-8B --gpus 8 --gpu h100 --mode rl
"""


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_hidden_names({"--world-size": "--gpus", "--html": "--report"})
    add_recipe_options(parser, modes=(*TRAIN_MODES, "rl"), model_alone=True)
    _add_hardware_options(parser)
    parser.add_argument(
        "--fixed",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="dimensions that keep a value, such as tensor=8",
    )
    parser.add_argument(
        "--free",
        nargs="+",
        metavar="NAME",
        default=[],
        help=(
            "search dimensions that change the numbers of a run, too: gradients (in bf16) and "
            "batch (two and four times the global batch; layouts are ranked by the time of a "
            "token)"
        ),
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="tokens of the busiest expert rank over the average (default: 1, balanced)",
    )
    parser.add_argument(
        "--top", type=count, default=10, metavar="N", help="layouts to list (default: 10)"
    )
    parser.add_argument(
        "--explain",
        nargs="*",
        metavar="NAME=VALUE",
        help=(
            "explain why other layouts are slower: all that differ in one dimension, or the one "
            "with these values"
        ),
    )
    parser.add_argument(
        "--fix-oom",
        nargs="?",
        const=True,
        metavar="FILE",
        help=(
            "change a layout that does not fit as little as possible; FILE is the output of a run "
            "that ran out of memory, or a memory snapshot"
        ),
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="JSON with the GPUs, links and memory of a cluster",
    )
    parser.add_argument(
        "--probe",
        type=count,
        metavar="N",
        help="run the N best layouts on this machine, half of them longer each time",
    )
    parser.add_argument(
        "--output",
        type=YamlFile,
        metavar="FILE",
        help="write the config with the best layout as YAML",
    )
    parser.add_argument(
        "--report",
        type=HtmlPage,
        metavar="FILE",
        help="write an HTML page with timeline and tables",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    tune_rl.add_rl_options(parser)


def _add_hardware_options(parser: argparse.ArgumentParser) -> None:
    """Add the GPUs, and what is known about their speed and memory."""
    parser.add_argument(
        "--gpus", type=count, metavar="N", help="number of GPUs (default: the recipe's)"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="type of the GPUs, such as h100 (default: the recipe's)"
    )
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="KEY=SIZE",
        help="memory of a GPU to use, such as memory=72GB; seconds=120 for --measure",
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="time this machine, with collectives under torchrun, into a profile",
    )
    parser.add_argument(
        "--ledger",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="compare the runs below folders with their predictions",
    )
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="scale predictions by what the runs of --ledger took",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="predict with the times of a profile"
    )


def run(args: argparse.Namespace) -> int:
    if args.fix_oom and args.explain is not None:
        raise UserError("--fix-oom and --explain cannot be used together: leave one out")
    if "=" in str(args.fix_oom):
        args.overrides = [*args.overrides, args.fix_oom]
        args.fix_oom = True
    for words in (
        args.fixed,
        args.explain or [],
        args.free,
    ):  # these options take all words up to the next option
        args.overrides += [word for word in words if "." in word.partition("=")[0]]
        words[:] = [word for word in words if word not in args.overrides]
    is_rl = args.mode == "rl"
    args.mode = None if args.mode == "rl" else args.mode
    if args.calibrated and not args.ledger:
        raise UserError(
            "--calibrated needs measured runs: add --ledger DIR, or leave --calibrated out"
        )
    if args.ledger and not args.calibrated:
        return _ledger(args)
    _check_words(args)
    from megatron.bridge.models import model_provider

    with without_gc(), model_provider.silenced(model_provider):  # warnings about missing kernels
        job = prepare(args)
        if is_rl:
            sys.stdout.write(tune_rl.text(job, _search(job, args), args))
            return 0
        if args.measure is not None:
            return _measure(job, args)
        search = _search(job, args)
        sys.stdout.write(_text(job, search, args))
    return 0


def _check_words(args: argparse.Namespace) -> None:
    """Check the options' words before anything slow is imported."""
    from megatron.bridge.autotune.gpus import gpu_name
    from megatron.bridge.autotune.search.candidate import FREE

    if args.gpu is not None:
        gpu_name(args.gpu)
    if args.recipe is not None:
        catalog.find(args.recipe)
    for name in args.free:
        if name not in FREE:
            raise UserError(f"--free {name}: unknown dimension; known: {', '.join(FREE)}")
    if not 1 <= args.imbalance <= 100:
        raise UserError(
            f"--imbalance {args.imbalance:g} must be from 1 to 100: 1.3 is 30 % more than the average"
        )
    _budgets(args.budget)
    _values(args.fixed, "--fixed")


def _ledger(args: argparse.Namespace) -> int:
    from megatron.bridge.autotune.ledger import as_json, summary

    entries, problems = _entries(args)
    if args.json:
        sys.stdout.write(as_json(entries))
        return 0
    rows = [("run", "device", "processes", "layout", "measured", "predicted", "error")]
    for entry in entries:
        times = (f"{entry.measured:.3f} s", f"{entry.predicted:.3f} s", f"{entry.error:+.1%}")
        rows.append((entry.run, entry.device, str(entry.processes), entry.layout, *times))
    notes = [f"not compared: {problem}" for problem in problems]
    sys.stdout.write(
        "\n".join([*columns(rows), *notes, *([summary(entries)] if entries else [])]) + "\n"
    )
    return 0 if entries else 1


def _entries(args: argparse.Namespace) -> tuple[list["LedgerEntry"], list[str]]:
    """Return the runs of ``--ledger`` that can be compared, and why the others cannot."""
    from megatron.bridge.autotune.ledger import LedgerEntry, read_entries
    from megatron.bridge.autotune.profile import read

    entries = list(read_entries(args.ledger, None if args.profile is None else read(args.profile)))
    return [entry for entry in entries if isinstance(entry, LedgerEntry)], [
        entry for entry in entries if isinstance(entry, str)
    ]


def _measure(job: TrainJob, args: argparse.Namespace) -> int:
    from torch import distributed as dist

    from megatron.bridge.autotune.measure.machine import measure
    from megatron.bridge.autotune.profile import write
    from megatron.bridge.utils import distributed

    distributed.initialize()
    search = _search(job, args)
    shapes = set().union(
        *(search.pricer.shapes(candidate) for candidate in search.space.candidates())
    )
    profile = measure(search.config, shapes, _budgets(args.budget)["seconds"] or 120.0)
    if distributed.rank() == 0:
        write(profile, args.measure)
        sys.stdout.write(
            f"{args.measure}: {len(profile.shapes)} of {len(shapes)} products of {profile.device}\n"
        )
    if distributed.is_initialized():
        dist.destroy_process_group()
    return 0


def _search(job: TrainJob, args: argparse.Namespace) -> "Search":
    from megatron.bridge.autotune.gpus import gpu, gpu_name, read_cluster
    from megatron.bridge.autotune.profile import read
    from megatron.bridge.autotune.search.search import Search

    profile = None if args.profile is None else read(args.profile)
    if args.cluster and args.gpu:
        raise UserError(f"--cluster {args.cluster} names the GPUs: leave out --gpu {args.gpu}")
    cluster, count = read_cluster(args.cluster) if args.cluster else (None, None)
    gpus = args.gpus or count or job.world_size
    name = (
        cluster
        or args.gpu
        or (profile.device if profile else job.gpu_kind)
        or ("h100" if args.measure else "")
    )
    if not gpus or not name:
        raise UserError(f"{job.source} names no GPUs: give --gpus N and --gpu NAME")
    config = _resolved(job, gpus)
    kind = profile.device if profile else gpu_name(name)
    if profile and args.gpu and gpu_name(args.gpu).split()[0] not in kind:
        raise UserError(
            f"--profile {args.profile} is a profile of {kind}, not of --gpu {args.gpu}: leave one out"
        )
    budget = _budget(args.budget, kind, profile.memory if profile else gpu(kind).memory)
    search = Search(config, gpus, kind, budget, _values(args.fixed, "--fixed"), profile, args.free)
    search.pricer.imbalance = args.imbalance
    search.pricer.factor = _correction(args) if args.calibrated else 1.0
    return search


def _resolved(job: TrainJob, gpus: int) -> Any:
    """Resolve the config on ``gpus`` GPUs or, if rules refuse that, on the number that its recipe specifies."""
    try:
        return job.resolve(gpus).config
    except UserError:
        if job.world_size in (None, gpus):
            raise
        return job.resolve(job.world_size).config


def _budget(words: list[str], kind: str, memory: int) -> int | None:
    """Return the bytes of a GPU that the layout may use."""
    given = _budgets(words)["memory"]
    if given is not None and not 0 < given * 1e9 <= memory:
        raise UserError(
            f"--budget memory={given:g}GB: {kind} has {memory / 1e9:.0f} GB, give at most this"
        )
    return None if given is None else int(given * 1e9)


def _budgets(words: list[str]) -> dict[str, float | None]:
    budgets: dict[str, float | None] = {"memory": None, "seconds": None}
    for word in words:
        key, _, size = word.partition("=")
        digits = size.upper().removesuffix("GB")
        if key not in budgets or not digits.replace(".", "", 1).isdecimal():
            raise UserError(
                f"--budget {word}: write memory=SIZE in GB, such as memory=72GB, or seconds=120"
            )
        budgets[key] = float(digits)
    return budgets


def _values(words: Iterable[str], option: str) -> dict[str, Any]:
    """Parse ``tensor=8`` into a dict of candidate fields."""
    from megatron.bridge.autotune.search.candidate import NAMES

    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in NAMES:
            raise UserError(
                f"{option} {word}: unknown dimension {name}{did_you_mean(name, NAMES)}; known: {', '.join(NAMES)}"
            )
        if not value.isdecimal() or not int(value):
            raise UserError(
                f"{option} {word}: {name} must be a number of at least 1, such as {name}=2"
            )
        if values.get(name, int(value)) != int(value):
            raise UserError(
                f"{option} {word}: {name} is already fixed at {values[name]}: give one value"
            )
        values[name] = int(value)
    return values


def _text(job: TrainJob, search: "Search", args: argparse.Namespace) -> str:
    from megatron.bridge.autotune.search.search import FINALISTS

    if args.fix_oom:
        return _fix(job, search, args)
    results = search.run(max(args.top, FINALISTS))
    valid = (valid_price for price in results.best if (valid_price := _valid(job, search, price)))
    best = [*islice(valid, args.top)]
    if results.best and not best:
        tune_probe.with_layout(job, search, results.best[0]).resolve(
            search.world_size
        )  # raises the error
    results = replace(results, best=best)
    if args.probe:
        results = replace(results, best=tune_probe.run(job, search, results.best[: args.probe]))
    if not results.best:
        raise UserError(_nothing_fits(search, results))
    _write_yaml(job, search, results.best[0], args.output)
    if args.report is not None:
        write_file("--report", args.report, _page(job, search, results))
    if args.explain is not None:
        return _explained(search, results, args)
    if args.json:
        return json.dumps(_as_json(job, search, results), indent=2) + "\n"
    probed = bool(args.probe)
    return (
        "\n".join(
            [*_ranking(search, results, probed), "", *_advice(job, search, results.best[0], probed)]
        )
        + "\n"
    )


def _correction(args: argparse.Namespace) -> float:
    """Return the ratio of measured to predicted time of the runs of ``--ledger``."""
    from megatron.bridge.autotune.ledger import correction

    entries, problems = _entries(args)
    if not entries:
        raise UserError(f"--calibrated: no run of --ledger can be compared ({problems[0]})")
    return correction(entries)


def _nothing_fits(search: "Search", results: "Found") -> str:
    budget = f"{search.budget / 1e9:.1f} GB on each of {search.world_size} GPUs"
    if results.smallest is not None:
        size, candidate = results.smallest
        need = f"{size / 1e9:.1f} GB ({candidate.label()})"
        return f"no layout fits into {budget}: the smallest needs {need}; give more GPUs or a larger --budget"
    if results.tried:
        return f"no layout fits into {budget}: weights and optimizer state alone need more; give more GPUs"
    rule, times = results.refused.most_common(1)[0]
    return f"rules refuse all layouts on {search.world_size} GPUs; the most frequent rule, {times} times: {rule}"


def _ranking(search: "Search", results: "Found", probed: bool) -> Iterator[str]:
    refused = sum(results.refused.values())
    yield (
        f"{results.tried:,} layouts are allowed, {results.too_large:,} of them do not fit into "
        f"{search.budget / 1e9:.1f} GB; rules refused others {refused:,} times. {_origin(search, probed)}:"
    )
    rows = [("", "step", "interval", "tokens/s", "MFU", "GB", "bubble", "layout")]
    for rank, price in enumerate(results.best, 1):
        step = price.prediction
        rows.append(
            (
                str(rank),
                f"{step.seconds:.3f} s",
                f"{step.low:.3f}-{step.high:.3f}",
                f"{step.tokens_per_second:,.0f}",
                f"{step.mfu:.1%}",
                f"{price.fullest / 1e9:.1f}",
                f"{step.bubble:.1%}",
                price.candidate.label(),
            )
        )
    yield from columns(rows)
    if not probed:
        yield from _doubt(search, results.best)


def _doubt(search: "Search", best: "Sequence[Price]") -> Iterator[str]:
    """Say which layouts the prediction cannot tell apart, and what measures them."""
    first = best[0]
    slowest = first.prediction.high / first.seconds * first.seconds_per_token
    equal = [
        price
        for price in best
        if price.prediction.low / price.seconds * price.seconds_per_token <= slowest
    ]
    if len(equal) > 1:
        yield (
            f"layouts 1 to {len(equal)} are equal within the doubt of the prediction, as their intervals overlap: on "
            f"{search.world_size} {search.pricer.card}, this command with --probe {len(equal)} measures them"
        )


def _origin(search: "Search", probed: bool) -> str:
    if probed:
        return "Measured in short runs on this machine"
    factor = search.pricer.factor
    return "Predicted, not measured" + (
        f", times {factor:.3f} of the ledger" if factor != 1.0 else ""
    )


def _advice(job: TrainJob, search: "Search", best: "Price", probed: bool) -> Iterator[str]:
    from megatron.bridge.autotune.priced import unpriced

    current = None if probed or search.problems(search.current) else search.price(search.current)
    if current is not None:
        state = "fits" if current.fullest <= search.budget else "does not fit"
        unit = "time of a token" if best.candidate.batch else "time"
        change = f"{best.seconds_per_token / current.seconds_per_token - 1:+.1%} {unit}"
        yield (
            f"the layout of {job.source} ({search.current.label()}) {state}: {current.seconds:.3f} s, "
            f"{current.fullest / 1e9:.1f} GB; the best one takes {change}"
        )
    yield f"the fullest GPU of the best one, {best.fullest / 1e9:.1f} GB:"
    yield from search.pricer.reserve(best.candidate).lines(best.fullest, search.pricer.card)
    if ignored := ", ".join(unpriced(search.config)):
        yield f"note: time and memory are predicted without {ignored}"
    yield f"run the best one with --world-size {search.world_size} in a dry run, and these settings:"
    yield " ".join(tune_probe.overrides(search, best)) or "(none: it is the layout of the config)"


def _explained(search: "Search", results: "Found", args: argparse.Namespace) -> str:
    from megatron.bridge.autotune.search.explain import alternatives, pareto, reason

    best = results.best[0]
    lines = [f"best: {best.candidate.label()}, {best.seconds:.3f} s, {best.fullest / 1e9:.1f} GB"]
    values = _values(args.explain, "--explain")
    if values:
        candidate = replace(best.candidate, layout=None, **values)
        lines.append(_line(reason(search, best, candidate)))
    else:
        lines += [_line(item) for item in alternatives(search, best)]
        lines += ["", "the layouts that no other layout beats in both time and memory:"]
        lines += [
            f"  {item.seconds:.3f} s, {item.fullest / 1e9:.1f} GB: {item.candidate.label()}"
            for item in pareto(results.best)
        ]
    lines += ["", "rules that refused layouts:"]
    lines += [f"{times:7,} x {rule}" for rule, times in results.refused.most_common(8)]
    return "\n".join(lines) + "\n"


def _line(reason: "Reason") -> str:
    return f"  {reason.candidate.label()}: {reason.text}"


def _fix(job: TrainJob, search: "Search", args: argparse.Namespace) -> str:
    from megatron.bridge.autotune.search.explain import nearest_fit, steps_to, unpredicted

    if args.fix_oom is not True:
        search.budget -= unpredicted(search, Path(args.fix_oom))
    goal = nearest_fit(search)
    if goal is None:
        raise UserError(_nothing_fits(search, search.run(1)))
    lines = [f"{goal.candidate.label()}: {goal.seconds:.3f} s, {goal.fullest / 1e9:.1f} GB"]
    lines += [_change(step) for step in steps_to(search, goal)] or ["the layout of the config fits"]
    lines += [" ".join(tune_probe.overrides(search, goal))]
    _write_yaml(job, search, goal, args.output)
    return "\n".join(line for line in lines if line) + "\n"


def _change(step: "LayoutChange") -> str:
    value = (
        "+".join(step.value[3] or (str(step.value[0]),))
        if isinstance(step.value, tuple)
        else step.value
    )
    if step.saved is None or step.lost is None:
        return f"  {step.name}={value}"
    return (
        f"  {step.name}={value}: saves {step.saved / 1e9:.1f} GB, costs {step.lost:+.3f} s per step"
    )


def _as_json(job: TrainJob, search: "Search", results: "Found") -> dict[str, Any]:
    return {
        "source": job.source,
        "gpus": search.world_size,
        "allowed": results.tried,
        "too_large": results.too_large,
        "refused": dict(results.refused),
        "layouts": [
            {
                "layout": price.candidate.label(),
                "overrides": tune_probe.overrides(search, price),
                "step_seconds": price.seconds,
                "interval": [price.prediction.low, price.prediction.high],
                "tokens_per_second": price.prediction.tokens_per_second,
                "mfu": price.prediction.mfu,
                "bytes": list(price.memory),
                "split": price.prediction.split,
            }
            for price in results.best
        ],
    }


def _valid(job: TrainJob, search: "Search", price: "Price") -> "Price | None":
    """Return a layout that all rules of a run allow, if need be without switches; the search checks only some rules."""
    try:
        tune_probe.with_layout(job, search, price).resolve(search.world_size)
    except UserError:
        plain = replace(price.candidate, switches=(), layout=None)
        without = search.price(plain) if price.candidate.switches else None
        return without and _valid(job, search, without)
    return price


def _write_yaml(job: TrainJob, search: "Search", price: "Price", path: Path | None) -> None:
    if path is not None:
        text = dump_yaml(tune_probe.with_layout(job, search, price))
        write_file("--output", path, header("tune") + text)


def _page(job: TrainJob, search: "Search", results: "Found") -> str:
    from megatron.bridge.autotune.report import page, scatter
    from megatron.bridge.autotune.search.explain import pareto

    best = results.best[0]
    front = pareto(results.best)
    further = [price for price in results.best if price not in front]
    points = [
        (price.fullest / 1e9, price.seconds, price.candidate.label())
        for price in (*front, *further)
    ]
    rows = [
        (
            price.candidate.label(),
            f"{price.seconds:.3f}",
            f"{price.fullest / 1e9:.1f}",
            f"{price.prediction.mfu:.1%}",
        )
        for price in results.best
    ]
    memory = [(f"stage {stage}", f"{size / 1e9:.1f}") for stage, size in enumerate(best.memory)]
    sections = [
        ("Best layouts", html_table(("layout", "seconds", "GB", "MFU"), rows)),
        ("Time against memory", scatter(points, len(front))),
        ("Memory of the best layout", html_table(("", "GB"), memory)),
        ("Settings", f"<pre>{' '.join(tune_probe.overrides(search, best))}</pre>"),
    ]
    return page(
        f"{job.source} on {search.world_size} x {search.pricer.card}", best.prediction, sections
    )
