# SPDX-License-Identifier: Apache-2.0
"""``python -m scripts.testbench``: time the operators of a model, and compare their memory and work with the theory."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support.exit_code import exit_code
from megatron.bridge.cli.support.options import add_recipe_options
from megatron.bridge.cli.support.parser import Parser, count
from megatron.bridge.cli.support.text_format import columns
from megatron.bridge.cli.support.train_job import TrainJob, prepare
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from scripts.testbench import Case
    from scripts.testbench.output import Results

DESCRIPTION = (
    "Run single operators of a model, forward and backward, and write time, memory and work beside the theory. "
    "Under torchrun the operators run in the layout of the config."
)
EXAMPLES = """examples:
  python -m scripts.testbench --hf-model checkpoints/smollm2 --ops SelfAttention MLPDense
  torchrun --nproc-per-node=2 -m scripts.testbench --recipe llama32_1b_pretrain_config \\
      --cases cases.json model.tensor_model_parallel_size=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_options(parser, model_alone=True)
    parser.add_argument(
        "--ops", nargs="+", default=[], metavar="NAME", help="operators (default: all of the model)"
    )
    parser.add_argument(
        "--ops-module",
        metavar="MODULE",
        help="import a module that registers operators of your own",
    )
    parser.add_argument("--cases", type=Path, metavar="FILE", help="JSON with the sizes of batches")
    parser.add_argument(
        "--case-indexes", nargs="+", type=int, metavar="I", help="cases of the file to run"
    )
    parser.add_argument(
        "--profile-mode",
        type=int,
        choices=range(4),
        default=0,
        help="0: numbers, 1: ranges for nsys, 2: PyTorch's profiler, 3: snapshots of a GPU's memory (default: 0)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=5,
        metavar="N",
        help="timed calls of an operator (default: 5)",
    )
    _add_switch(parser, "--theoretical-flops", False, "count operations, too")
    _add_switch(
        parser, "--theoretical-activations", True, "measure the activations that autograd keeps"
    )
    parser.add_argument(
        "--override-model-config",
        type=Path,
        metavar="FILE",
        help="JSON with keys of --hf-model's config.json",
    )
    parser.add_argument(
        "--override-tf-config", type=Path, metavar="FILE", help="JSON with keys of model.*"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), metavar="DIR", help="default: outputs"
    )
    parser.add_argument("--name", metavar="NAME", help="folder below --output (default: the time)")


def _add_switch(parser: argparse.ArgumentParser, name: str, default: bool, what: str) -> None:
    help = f"{what} (default: {str(default).lower()})"
    parser.add_argument(name, type=_switch, default=default, metavar="true|false", help=help)


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is not true or false")
    return text.lower() == "true"


def run(args: argparse.Namespace) -> int:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron.bridge.utils import distributed
    from megatron.bridge.utils.torchrun_env import read_number
    from scripts.testbench import Bench, Launcher

    model, cases = _cases(args)
    args.hf_model = args.hf_model or (
        model if args.recipe is None and args.config is None else None
    )
    with _changed_model(args):
        job = prepare(args)
        config = job.resolve(read_number("WORLD_SIZE", 1)).config
        _import_ops(args.ops_module)
        bench = Bench(config)
    folder = (
        args.output
        / distributed.broadcast_object(args.name or time.strftime("%Y%m%d-%H%M%S"))
        / _name(job)
    )
    flags = (args.profile_mode, args.repeats, args.theoretical_activations, args.theoretical_flops)
    cases = cases or [bench.case]
    results = Launcher(bench, folder, *flags).run(args.ops, cases)
    if distributed.rank() == 0:
        sys.stdout.write("\n".join(_lines(results)) + f"\n{folder}\n")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return 0


def _cases(args: argparse.Namespace) -> tuple[str | None, "list[Case]"]:
    from scripts.testbench.cases import read_cases

    model, cases = read_cases(args.cases) if args.cases else (None, [])
    for index in args.case_indexes or ():
        if not 0 <= index < len(cases):
            raise UserError(
                f"--case-indexes {index}: {args.cases or 'no --cases'} has {len(cases)} cases"
            )
    return model, [cases[index] for index in args.case_indexes] if args.case_indexes else cases


@contextmanager
def _changed_model(args: argparse.Namespace) -> Iterator[None]:
    """``args`` with the changes of both files: a copy of the model's config, and overrides."""
    from megatron.bridge.autotune.search.candidate import as_yaml

    if args.override_tf_config is not None:
        values = _values(args.override_tf_config, "--override-tf-config")
        args.overrides = [
            *(f"model.{key}={as_yaml(value)}" for key, value in values.items()),
            *args.overrides,
        ]
    if args.override_model_config is None:
        yield
        return
    source = Path(args.hf_model or "") / "config.json"
    if args.hf_model is None or not source.is_file():
        raise UserError(
            f"--override-model-config {args.override_model_config}: give --hf-model, a folder with config.json"
        )
    changes = _values(args.override_model_config, "--override-model-config")
    with tempfile.TemporaryDirectory() as folder:
        import json

        copy = Path(folder) / Path(args.hf_model).resolve().name
        copy.mkdir()
        (copy / "config.json").write_text(json.dumps(strict_json.read(source) | changes))
        args.hf_model = str(copy)
        yield


def _values(path: Path, option: str) -> dict[str, Any]:
    found = strict_json.read(path)
    if not isinstance(found, dict):
        raise UserError(f"{option} {path} is not an object of keys and values")
    return found


def _import_ops(module: str | None) -> None:
    if module is None:
        return
    import importlib

    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--ops-module {module} cannot be imported: {error}") from error


def _name(job: TrainJob) -> str:
    """A folder's name for the model."""
    return Path(job.source).stem


def _lines(results: "Results") -> Iterator[str]:
    for file, ops in results.files.items():
        rows = [(file, "", "real", "estimated")]
        for op, cases in ops.items():
            for case, leaf in cases.items():
                for direction, each in leaf.items() if "real" not in leaf else (("", leaf),):
                    rows.append((f"  {op}", f"{case} {direction}", each["real"], each["estimated"]))
        yield from columns(rows)


def main() -> int:
    parser = Parser(prog="python -m scripts.testbench", description=DESCRIPTION, epilog=EXAMPLES)
    add_arguments(parser)
    args = parser.parse_args()
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
