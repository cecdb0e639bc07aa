# SPDX-License-Identifier: Apache-2.0
"""A dry run of any command of a page: its own parser reads it, and what it would train is built and validated."""

import argparse
import contextlib
import functools
import io
import math
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

from tests.unit_tests.project.tree import ROOT
from tests.workers import WorkerPool

RUN_RECIPE = "scripts/training/run_recipe.py"
MODULES = ("megatron.bridge", "megatron.bridge.cli.main")  # the command line
LAUNCH = "scripts/training/launch_with_nemo_run.py"
SBATCH = "scripts/training/launch_with_sbatch.sh"
# they change nothing of this project
SHELL = {".", "cd", "export", "cat", "ls", "mkdir", "git", "tail", "tensorboard"}


class Parsed(BaseException):
    """Raised by a program's parser once it has read all arguments."""


def dry_run(words: list[str]) -> str:
    """Check a command without what it would do; return what was checked.

    Raises:
        UserError, SystemExit, AssertionError: it would be refused.
    """
    program, *arguments = words
    if program in SHELL:
        return "shell"
    assert program in PROGRAMS, f"no test knows what {program} does"
    PROGRAMS[program](arguments)
    return program


def _ours(arguments, processes=None):
    """``megatron-bridge`` itself; what trains is built, changed and validated."""
    from megatron.bridge.cli import main

    name = arguments[0]
    parser, _ = main.make_parsers(name, main._load(name))
    args, extra = parser.parse_known_args(arguments)
    assert not extra or main.take_overrides(args, extra), f"unrecognized arguments: {extra}"
    if name == "train" and args.list is None:
        only_shows = args.dry_run or args.summary or args.rehearse is not None
        only_shows = only_shows or args.rehearse_rank is not None
        alone = None if only_shows else 1  # a command that trains without a launcher is one process
        validate(args, args.world_size or processes or alone)
    elif name == "launch" and args.script == "run_recipe.py":
        validate(args, args.nodes * args.devices)
    elif name == "data" and args.subcommand != "preprocess":
        validate(args, args.world_size)


def validate(args, processes=None):
    """Build the config that arguments of ``train`` ask for, for so many processes."""
    from megatron.bridge.cli.support.train_job import forward_step, prepare
    from megatron.bridge.utils.config.overrides import check_sticks

    job = prepare(args)
    forward_step(args.step_func, job.config)
    if job.mode == "cache-teacher":  # the layout is the teacher's, which is not at hand
        assert None not in (job.config.distill.teacher, job.config.distill.cache)
        return
    job.config.validate(processes or job.world_size or 1)
    check_sticks(job.config, job.changes)


def _torchrun(arguments):
    args = _parsed_by_torchrun(arguments)
    nodes = int(str(args.nnodes).rpartition(":")[2])
    module = ["-m"] if args.module else []
    _script(
        [*module, args.training_script, *args.training_script_args],
        nodes * int(args.nproc_per_node),
    )


def _parsed_by_torchrun(arguments):
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False
    return parser.parse_args([re.sub(r"(?<==)N$", "0", word) for word in arguments])


def _script(words, processes=None):
    """A Python file or, behind ``-m``, a module: run until its parser has read everything."""
    if words[0] == RUN_RECIPE:
        return _ours(["train", *words[1:]], processes)
    if words[0] == LAUNCH:
        return _ours(["launch", *words[1:]])
    module = words[0] == "-m"
    name, *arguments = words[1:] if module else words
    if (module and name in MODULES) or name == "megatron-bridge":
        return _ours(arguments, processes)
    if module and name == "pytest":
        paths = [word for word in arguments if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths), f"one of {paths} does not exist"
        return None
    assert module or (ROOT / name).exists(), f"{name} does not exist"
    return _until_parsed(name, arguments, module)


def _until_parsed(name, arguments, module):
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self, args=None, namespace=None):
        raise Parsed(parse(self, args, namespace))

    # either way with a main module of its own, which it may change
    run = functools.partial(runpy.run_module, alter_sys=True) if module else runpy.run_path
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", only_parse),
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(sys, "path", [str(ROOT), str((ROOT / name).parent), *sys.path]),
    ):
        try:
            run(name if module else str(ROOT / name), run_name="__main__")
        except Parsed:
            return
    raise AssertionError(
        f"{name} parses no arguments, so it cannot be tried without being run: mark the block"
    )


def _make(arguments):
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, setting, _ = word.partition("=")
        pattern = rf"\$\({name}\)" if setting else rf"^{word}:"
        assert re.search(pattern, makefile, flags=re.MULTILINE), f"the Makefile has no {word}"


def _behind(script):
    """A launcher that starts one of our scripts: the script's own arguments are checked."""

    def check(arguments):
        assert script in arguments, f"nothing is known of what is started: {arguments}"
        place = arguments.index(script)
        _script([RUN_RECIPE, *arguments[place + 1 :]], _started_processes(arguments[:place]))

    return check


def _started_processes(options):
    """The number of processes that options of sbatch or ft_launcher start."""
    sizes = re.findall(
        r"--(?:nodes|nnodes|ntasks-per-node|nproc-per-node)=(\d+)", " ".join(options)
    )
    return math.prod(map(int, sizes))


def _sbatch(arguments):
    """Options of Slurm by a list of our own: its ``--help`` needs a cluster."""
    _behind(SBATCH)(arguments)
    for word in arguments[: arguments.index(SBATCH)]:
        assert re.match(
            r"--(nodes|ntasks-per-node|cpus-per-task|gpus-per-node|partition|account|time)=\S+$",
            word,
        ), word


def _uv(arguments):
    """uv's options by its own help; files and extras by ours."""
    words = [word for word in arguments if not word.startswith("-")]
    known = _help_of_uv(*(words[:2] if words[0] == "pip" else words[:1]))
    for word in arguments:
        assert not word.startswith("--") or word.partition("=")[0] in known, f"uv has no {word}"
        assert not word.endswith((".lock", ".txt")) or (ROOT / word).exists(), f"there is no {word}"
    _extras(arguments)


@functools.cache
def _help_of_uv(*command):
    uv = [ROOT / "scripts/uv.sh", *command, "--help"]
    return subprocess.run(uv, capture_output=True, text=True, check=True).stdout


def _extras(arguments):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in arguments:
        for extra in re.findall(r"\[([\w,-]+)\]", word):
            assert set(extra.split(",")) <= extras.keys(), f"there is no extra {extra}"


def _file(path):
    def check(arguments):
        assert Path(ROOT / path).exists()
        _script([path, *arguments])

    return check


PROGRAMS = {
    "megatron-bridge": _ours,
    "torchrun": _torchrun,
    "python": _script,
    "make": _make,
    "scripts/testbench/testbench_collect_data.sh": lambda arguments: _script(
        ["-m", "scripts.testbench", *arguments]
    ),
    "uv": _uv,
    "pip": _extras,
    "sbatch": _sbatch,
    "ft_launcher": _behind("train"),
    "ray": lambda arguments: dry_run(arguments[arguments.index("--") + 1 :]),
}


def run(words: list[str], folder: Path, pool: WorkerPool) -> None:
    """Execute a command in a folder, with models and steps of toy size; torchrun's processes are those of a pool.

    Raises:
        AssertionError: it ended with an error.
    """
    from megatron.bridge.cli.main import main

    program, *arguments = words
    if program == "megatron-bridge":
        code = main(_small(arguments))
        assert code == 0, f"exit code {code}: {words}"
        return
    assert program == "torchrun", f"{program} is not executed: leave the mark out"
    args = _parsed_by_torchrun(arguments)
    assert int(args.nproc_per_node) == pool.size
    words = _small([args.training_script, *args.training_script_args])
    for code, said in pool.run(as_script, folder, words, args.module):
        assert code == 0, said


def as_script(folder: Path, words: list[str], is_module: bool = False) -> tuple[int, str]:
    """Execute a Python file or module in a folder as one rank: its exit code, and its standard error."""
    code = 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch.object(sys, "argv", [str(word) for word in words]),
    ):
        try:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return code, said.getvalue()


TOY = {
    "model.num_layers": 2,
    "model.hidden_size": 576,
    "model.ffn_hidden_size": 64,
    "model.vocab_size": 64,
    "model.kv_channels": 64,
    "train.train_iters": 2,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 1,
    "validation.eval_iters": 1,
    "mixed_precision": "fp32",
}


def _small(arguments):
    """What SmolLM2's 135M parameters are made for a test, where the command trains and does not say it itself."""
    trains = "train" in arguments[:2] or RUN_RECIPE in arguments
    if not trains or {"--list", "--dry-run", "--rehearse", "--rehearse-rank"} & set(arguments):
        return arguments
    toy = TOY | (
        {"tokenizer.tokenizer_model": "MODEL"}
        if "--data" in arguments
        else {"tokenizer.vocab_size": 64}
    )
    if "--seq-length" not in arguments:
        toy |= {"model.seq_length": 128, "dataset.seq_length": 128}
    given = {word.partition("=")[0] for word in arguments}
    place = arguments.index(RUN_RECIPE if RUN_RECIPE in arguments else "train") + 1
    settings = [f"{key}={value}" for key, value in toy.items() if key not in given]
    return [*arguments[:place], *settings, *arguments[place:]]
