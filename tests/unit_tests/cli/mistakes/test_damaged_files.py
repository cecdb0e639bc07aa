# SPDX-License-Identifier: Apache-2.0
"""Every file that a command reads, damaged in every way: one sentence with the file's name, or the right result.

No command runs what a file contains, waits for a pipe, or ends in a traceback.
"""

import os
import shutil
import signal
from itertools import product
from pathlib import Path

import pytest

from megatron.bridge.cli.main import main
from tests.workers import leave

SAVED = Path("tests/fixtures/v0.1").resolve()
LIMIT = 60
RECIPE = [
    "smollm2_135m_finetune_config",
    "tokenizer.tokenizer_model={base}",
    "dataset.seq_length=64",
]

COMMANDS = {
    "base": ["convert", "--hf-model", "{base}", "--megatron-path", "{out}", "--no-progress"],
    "run": ["checkpoint", "diff", "{run}", str(SAVED / "pretrain"), "--values"],
    "adapter": [
        "adapter",
        "merge",
        "--adapter",
        "{adapter}",
        "--hf-model",
        "{base}",
        "--hf-path",
        "{out}",
    ],
    "chats": ["data", "preview", *RECIPE, "--data", "{chats}", "dataset.do_test=false"],
    "tokenizer": ["data", "preview", *RECIPE, "--data", "{chats}", "dataset.do_test=false"],
    "config": [
        "train",
        "--recipe",
        "smollm2_135m_finetune_config",
        "--config",
        "{config}/run.yaml",
        "--dry-run",
    ],
}
"""Folder -> the command that reads its files."""

FILES = {
    "base": ["config.json", "model.safetensors", "model.safetensors.index.json"],
    "run": [
        "iter_0000003/.metadata",
        "iter_0000003/metadata.json",
        "iter_0000003/__0_0.distcp",
        "latest_checkpointed_iteration.txt",
    ],
    "adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "chats": ["training.jsonl", "validation.jsonl"],
    "tokenizer": ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"],
    "config": ["run.yaml"],
}

DAMAGE = {
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file: file.write_bytes(bytes(range(256)) * 40),
    "zeros": lambda file: file.write_bytes(bytes(5000)),
    "null": lambda file: file.write_text("null"),
    "a list": lambda file: file.write_text("[]"),
    "a number": lambda file: file.write_text("17"),
    "a text": lambda file: file.write_text('"text"'),
    "brackets": lambda file: file.write_text("[" * 200_000),
    "braces": lambda file: file.write_text('{"a":' * 200_000),
    "a key twice": lambda file: file.write_text('{"model_type": "llama", "model_type": "llama"}'),
    "digits": lambda file: file.write_text('{"a": ' + "1" * 100_000 + "}"),
    "aliases": lambda file: file.write_text(
        "a0: &a0 [x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    ),
    "a template that never ends": lambda file: file.write_text(
        "{% for a in range(999999) %}{% for b in range(999999) %}{{ b }}{% endfor %}{% endfor %}"
    ),
    "a template that reaches out": lambda file: file.write_text(
        "{{ messages.__class__.__base__.__subclasses__() }}{{ cycler.__init__.__globals__.os.mkdir('ran') }}"
    ),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link outside": lambda file: (file.unlink(), file.symlink_to("/etc/passwd")),
    "a link to itself": lambda file: (file.unlink(), file.symlink_to(file.name)),
}

NAMED = {
    "chat_template.jinja": ("chat template", "no sample", "jinja", "dataset.seq_length"),
    "run.yaml": ("run.yaml", "error: train"),  # half of it ends in a group that has no members
}
"""What the sentence names where it is not the file."""

CASES = [
    (folder, file, damage)
    for folder, files in FILES.items()
    for file, damage in product(files, DAMAGE)
    if "template" not in damage or "template" in file
]


@pytest.fixture(autouse=True)
def limit():
    """End a command that waits, or computes, for longer than anybody would."""

    def interrupt(*_):
        raise TimeoutError(f"no answer after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folders(tmp_path):
    for name in ("base", "adapter", "chats"):
        shutil.copytree(SAVED / name, tmp_path / name)
    shutil.copytree(SAVED / "pretrain", tmp_path / "run")
    with (tmp_path / "base/chat_template.jinja").open("a") as template:
        template.write("{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/run.yaml").write_text("train:\n  train_iters: 5\n")
    return tmp_path


def sample(rows):
    """One of six in every run, all of them among the slow tests."""
    return [
        row if number % 6 == 0 else pytest.param(*row, marks=pytest.mark.slow)
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize(("folder", "name", "damage"), sample(CASES))
def test_a_damaged_file_is_named(folders, monkeypatch, capfd, folder, name, damage):
    file = folders / ("base" if folder == "tokenizer" else folder) / name
    if name == "model.safetensors.index.json":
        file.write_text('{"weight_map": {"model.norm.weight": "model.safetensors"}}')
    DAMAGE[damage](file)
    monkeypatch.chdir(folders)
    code, errors = said([word.format(**paths(folders)) for word in COMMANDS[folder]], capfd)
    assert not (folders / "ran").exists()
    assert "Traceback" not in errors
    assert code == 1, "the damage was accepted"
    line = next(line for line in errors.splitlines() if "error: " in line)
    assert any(
        word in line for word in NAMED.get(name, (file.name, file.parent.name + " is damaged"))
    )
    assert len(line) < 700


def paths(folders):
    return {
        name: str(folders / name) for name in ("base", "run", "adapter", "chats", "config", "out")
    }


def said(arguments, capfd):
    """The exit code and standard error of a command."""
    capfd.readouterr()
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        leave()
    return code, capfd.readouterr().err
