# SPDX-License-Identifier: Apache-2.0
"""The command starts without torch, ends with the right exit code, and names mistakes in one line."""

import argparse
import errno
import importlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
)

from megatron.bridge.cli import main, train
from megatron.bridge.cli.support import exit_code as errors
from megatron.bridge.cli.support.parser import Parser
from megatron.bridge.utils import console, torchrun_env
from megatron.bridge.utils.errors import UserError


def run(capsys, *arguments):
    """Exit code, standard output and standard error of the command."""
    capsys.readouterr()
    try:
        code = main.main(list(arguments))
    except SystemExit as end:  # argparse
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_the_subcommands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"    {name} " in out for name in main.COMMANDS)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_module_of_a_command_declares_its_options(name):
    module = main._load(name)
    assert f"``megatron-bridge {name}``" in module.__doc__.splitlines()[0]
    parser = Parser()
    module.add_arguments(parser)
    assert parser.description
    assert main.option_names(parser) - {"-h", "--help"}
    assert callable(module.run)


DIFFERENT = {
    "--executor",  # of launch: a field of NeMo-Run's; of data preprocess: where shards are made
    "--tensors",  # of checkpoint inspect: a part of their names
    "--adapter",  # of convert and verify: only whether one is left out
    "--mode",  # of tune: also rl
    "--output",  # of port: a folder
}
"""Options that differ between commands, and why."""


def declared_options(parser):
    """Yield each option that the help shows, and how it is declared."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from declared_options(subparser)
        elif action.option_strings and action.help != argparse.SUPPRESS:
            yield action.option_strings[-1], (type(action), action.nargs, action.choices)


def test_an_option_is_the_same_in_all_commands():
    declared = {}
    for command in main.COMMANDS:
        module = main._load(command)
        _, parsers = main.make_parsers(command, module)
        for option, how in declared_options(parsers[command]):
            declared.setdefault(option, []).append(how)
    different = {option for option, hows in declared.items() if any(how != hows[0] for how in hows)}
    assert different <= DIFFERENT
    assert not [option for option in declared if "_" in option]


def test_nothing_to_do_shows_help_and_fails(capsys):
    code, out, _ = run(capsys)
    assert (code, out.startswith("usage: megatron-bridge")) == (2, True)


def test_version(capsys):
    from megatron.bridge import __version__

    assert run(capsys, "--version")[:2] == (0, f"megatron-bridge {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command trian; did you mean train or trace?"),
        (["train", "--recipee", "x"], "unrecognized arguments: --recipee; did you mean --recipe"),
        (
            ["checkpoint", "verify", "--fas", "x"],
            "unrecognized arguments: --fas; did you mean --fast",
        ),
        (["plot", "run", "--smoth", "3"], "--smoth 3; did you mean --smooth"),
        (
            ["convert", "--hf-model", "x", "--megatron-path", ""],
            "argument --megatron-path: the path is empty",
        ),
        (["train", "--mode", "ppo"], "invalid choice: 'ppo'"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


def test_start_and_help_of_all_subcommands_need_no_torch():
    code = (
        "import sys; from megatron.bridge.cli.main import COMMANDS, main\nfor name in COMMANDS:\n"
    )
    code += (
        "  try: main([name, '--help'])\n  except SystemExit as end: assert end.code == 0, name\n"
    )
    code += "main(['train', '--list', 'smollm2'])\nprint('torch' in sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.splitlines()[-1] == "False"


def test_subcommand_that_cannot_be_imported_does_not_break_the_others(capsys, monkeypatch):
    load = importlib.import_module

    def failing(name, *rest):
        if name == "megatron.bridge.cli.plot":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return load(name, *rest)

    monkeypatch.setattr(importlib, "import_module", failing)
    code, _, err = run(capsys, "plot")
    assert code == 1
    assert err.startswith("error: megatron-bridge plot ")
    assert "install the missing module matplotlib" in err
    assert run(capsys, "train", "--help")[0] == 0


def test_user_error_is_a_line_and_1(capsys):
    def fail():
        raise UserError("first\nsecond")

    assert errors.exit_code(fail) == 1
    assert capsys.readouterr().err == "error: first\nerror: second\n"


def test_torchrun_is_told(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def fail():
        raise UserError("wrong key")

    assert errors.exit_code(fail) == 1
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json")
    )
    assert "traceback : error: wrong key" in ChildFailedError("train", {0: failure}).format_msg()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")  # torchrun itself has none
    with caplog.at_level("WARNING"):  # no remark about the form of the file
        ErrorHandler().dump_error_file(failure.error_file, error_code=1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # that it has none


def test_mistake_is_told_under_a_rank_that_is_none(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "first")

    def fail():
        raise UserError("RANK=first")

    assert errors.exit_code(fail) == 1
    assert capsys.readouterr().err == "error: RANK=first\n"


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            GLOO + "Read error [10.0.0.2]:49289: Connection reset by peer",
            "Connection reset by peer",
        ),
        (GLOO + "Connection closed by peer [127.0.0.1]:2929", "Connection closed by peer"),
        (
            "NCCL error: remote process exited\nncclRemoteError: A call failed possibly due to ...",
            "ncclRemoteError",
        ),
    ],
)
def test_a_lost_rank_is_one_sentence(capsys, monkeypatch, message, reason):
    def fail():
        raise RuntimeError(message)

    monkeypatch.setattr(errors, "_rank", lambda: (0, False))
    with pytest.raises(RuntimeError):  # no group, so something else
        errors.exit_code(fail)
    monkeypatch.setattr(errors, "_rank", lambda: (1, True))
    assert errors.exit_code(fail) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error (rank 1): ")
    assert reason in line
    assert "repeat the command" in line


def test_too_few_open_files_are_one_sentence(capsys):
    def fail():
        raise RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:186] Too many open files")

    assert errors.exit_code(fail) == 1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"only {limit} files" in (message := capsys.readouterr().err)
    assert "ulimit -n" in message


def test_soft_limit_of_open_files_is_raised():
    script = (
        "import resource; from megatron.bridge.cli.support.exit_code import exit_code\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 500))\n"
        "exit_code(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == "(500, 500)\n"


def test_too_little_address_space_is_one_sentence():
    command = "ulimit -v 400000; exec $0 -m megatron.bridge.cli.main doctor"
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this process may use only 0.4 GB of address space")
    assert "ulimit -v unlimited" in line


def test_full_disk_behind_standard_output_is_one_sentence():
    command = "$0 -m megatron.bridge.cli.main train --list > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        errors.exit_code(lambda: 1 // 0)


def test_interrupt_is_130():
    def interrupt():
        raise KeyboardInterrupt

    assert errors.exit_code(interrupt) == 130


def test_rank_is_named_when_one_fails(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(errors, "HEAD_START_SECONDS", 0.0)

    def fail():
        raise UserError("lost")

    assert errors.exit_code(fail) == 1
    assert capsys.readouterr().err == "error (rank 3): lost\n"


def test_other_distribution_is_refused(capsys, monkeypatch, tmp_path):
    info = tmp_path / "megatron_bridge-0.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-bridge\nVersion: 0.3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = run(capsys, "train", "--list")
    assert code == 1
    assert err.startswith(
        "error: megatron-bridge 0.3.0 by NVIDIA and hf-megatron-bridge both install"
    )


def test_overrides_may_stand_behind_options(monkeypatch):
    monkeypatch.setattr(train, "run", lambda args: len(args.overrides))
    assert main.main(["train", "a.b=1", "--recipe", "x", "c.d=2", "--dry-run", "e.f=3"]) == 3


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (
            ["train", "--seq_length", "64", "--dry_run", "--peft_scheme=lora", "--world-size", "2"],
            {"seq_length": 64, "dry_run": True, "peft_scheme": "lora", "world_size": 2},
        ),
        (
            ["convert", "--hf_model=a_b", "--output-dir", "c_d", "--torch_dtype", "bfloat16"],
            {"hf_model": "a_b", "megatron_path": Path("c_d"), "dtype": "bfloat16"},
        ),
        (
            ["verify", "model", "checkpoint", "--skip_logits"],
            {"hf_model": "model", "megatron_path": Path("checkpoint"), "skip_logits": True},
        ),
        (
            ["verify", "--hf-model", "model", "--megatron_path", "checkpoint"],
            {"hf_model": "model", "megatron_path": Path("checkpoint")},
        ),
        (
            ["generate", "--hf-model", "a", "--prompts=in", "--out", "o", "--template", "t"],
            {"model": "a", "output": Path("o"), "template": Path("t")},
        ),
        (["eval", "--megatron-path=run", "--tasks", "x"], {"model": "run"}),
        (["inspect", "--hf_model", "a"], {"path": Path("a")}),
        (["tune", "--world-size", "8", "--html", "p"], {"gpus": 8, "report": Path("p")}),
        (
            ["verify", "--skip-logits", "a", "--megatron-path", "b"],
            {"hf_model": "a", "megatron_path": Path("b")},
        ),
        (["plot", "a", "--", "--x_y"], {"runs": [Path("a"), Path("--x_y")]}),
        (["checkpoint", "inspect", "a", "--tensors"], {"tensors": ""}),
    ],
)
def test_other_names_of_options(monkeypatch, words, options):
    """Both spellings, and the names that earlier versions or other commands have."""
    seen = {}
    module = importlib.import_module(f"megatron.bridge.cli.{words[0]}")
    monkeypatch.setattr(module, "run", lambda args: seen.update(vars(args)) or 0)
    assert main.main(words) == 0
    assert options == {name: seen[name] for name in options}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": ""}, "RANK=0 is set without WORLD_SIZE"),
        ({"RANK": "first"}, "RANK='first' in the environment is not numeric"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks are counted from 0 to 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: a port lies between 1 and 65535"),
    ],
)
def test_environment_of_no_launcher_is_refused(changes, words):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    torchrun_env.check_environment(environment)
    with pytest.raises(UserError, match=re.escape(words)):
        torchrun_env.check_environment(environment | changes)


def test_rank_that_is_none_is_refused_by_every_command(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "x")
    code, _, err = run(capsys, "train", "--list")
    assert (code, err.split(" in")[0]) == (1, "error: LOCAL_RANK='x'")


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        ("--list", "| sleep 0", 141),
        ("--list smollm2", "| sleep 0", 141),
        ("--list", ">&-", 0),
        ("--list", "2>&-", 0),
    ],
)
def test_output_that_nobody_reads(words, redirection, code):
    command = f"{sys.executable} -m megatron.bridge.cli.main train {words}"
    line = f"(sleep 0.3; exec {command}) {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_full_disk_under_the_output_is_told(capfd, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=0))
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output of this process is still needed

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    assert errors.exit_code(fail) == 1
    assert (
        capfd.readouterr().err
        == "error: standard output cannot be written: No space left on device\n"
    )


def test_text_is_shown_where_there_is_no_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    console.console.__wrapped__().print("hello")
    assert capsys.readouterr().err == "hello\n"
