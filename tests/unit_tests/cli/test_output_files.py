# SPDX-License-Identifier: Apache-2.0
"""A command replaces a file that it has written itself, and no other one."""

import json

import pytest

from megatron.bridge.cli.main import main

NOTES = "my notes of a year\n"
SCRIPT = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4\n"
TUNE = ["tune", "--recipe", "llama32_1b_pretrain_config", "--gpus", "1", "--gpu", "h100"]
COMMANDS = {
    "eval": (["eval", "model", "--tasks", "arc"], "--output"),
    "verify": (["verify", "hf", "megatron"], "--certificate"),
    "tune": (TUNE, "--output"),
    "tune page": (TUNE, "--report"),
    "launch": (["launch", "kubernetes", "--recipe", "llama32_1b_pretrain_config"], "--output"),
    "train": (["train", "--recipe", "llama32_1b_pretrain_config"], "--timeline"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_an_unrelated_file_stays(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, option = COMMANDS[case]
    for contents in (NOTES, json.dumps({"mine": 1})):
        (tmp_path / "notes").write_text(contents)
        assert main([*command, option, "notes"]) == 1
        error = capsys.readouterr().err
        assert f"{option} notes exists" in error
        assert "choose another file" in error
        assert (tmp_path / "notes").read_text() == contents


def test_a_file_of_the_same_command_is_replaced(tmp_path, capsys):
    script, output = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(SCRIPT)
    words = ["from-megatron-lm", str(script), "--output", str(output)]
    assert main(words) == 0, capsys.readouterr().err
    first = output.read_text()
    assert main(words) == 0
    assert output.read_text() == first
    output.write_text(NOTES)
    assert main(words) == 1
    assert output.read_text() == NOTES
