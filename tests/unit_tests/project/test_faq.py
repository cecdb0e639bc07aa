# SPDX-License-Identifier: Apache-2.0
"""Every name of docs/faq.md exists: settings here, and those of the libraries that they are compared with."""

import dataclasses
import re
import typing

import pytest

from tests.unit_tests.project.tree import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text()
NOT_A_SETTING = {"not needed", "not there", "refused"}


def rows(heading):
    """The first two cells of each row of the tables below a heading, of whatever level."""
    level, rest = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*)", PAGE, flags=re.MULTILINE | re.DOTALL
    ).groups()
    section = re.split(rf"^#{{2,{len(level)}}} ", rest, flags=re.MULTILINE)[0]
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line[:3] == "| `"
    ]
    assert all(len(row) == 3 for row in cells)
    return [(left.strip("`"), right) for left, right, _ in cells]


TABLES = {
    "From Megatron-LM": 130,
    "`TrainingArguments`": 40,
    "`SFTConfig` of TRL": 8,
    "`LoraConfig` of peft": 12,
}


def groups():
    """Name of a group -> the classes that may stand there."""
    from megatron.bridge.data.builders.hf_dataset import HFDatasetConfig
    from megatron.bridge.models import GPTModelProvider
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config

    found = {}
    for name, hint in typing.get_type_hints(config.ConfigContainer).items():
        found[name] = [
            kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)
        ]
    found["dataset"] = [config.GPTDatasetConfig, config.FinetuningDatasetConfig, HFDatasetConfig]
    return {**found, "model": [GPTModelProvider], "peft": [LoRA]}


def exists(key, known):
    group, _, name = key.partition(".")
    if not name:
        return group in known
    return any(
        name in {field.name for field in dataclasses.fields(kind)} for kind in known.get(group, ())
    )


@pytest.mark.parametrize(("heading", "least"), TABLES.items())
def test_what_things_are_called_here(heading, least):
    found = rows(heading)
    assert len(found) >= least
    assert len({left for left, _ in found}) == len(found), "no name twice"
    known = groups()
    settings = [
        right.strip("`") for _, right in found if right not in NOT_A_SETTING and "--" not in right
    ]
    assert [key for key in settings if not exists(key, known)] == []


def test_settings_in_the_text_exist():
    found = re.findall(r"`(\w+\.\w+)(?:=\S+)?`", PAGE)
    keys = [key for key in found if key.partition(".")[0] in groups()]
    assert [key for key in keys if not exists(key, groups())] == []


def test_megatron_lms_switches_are_spelled_like_options():
    assert [
        name
        for name, _ in rows("From Megatron-LM")
        if not re.fullmatch(r"--[a-z][a-z0-9_-]+", name)
    ] == []


def test_names_of_the_trainer_are_its_own():
    from transformers import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert [name for name, _ in rows("`TrainingArguments`") if name not in theirs] == []


def test_names_of_peft_are_its_own():
    from peft import LoraConfig

    theirs = {field.name for field in dataclasses.fields(LoraConfig)}
    assert [name for name, _ in rows("`LoraConfig` of peft") if name not in theirs] == []


def test_answers_to_foreign_names_are_those_of_the_command_line():
    from megatron.bridge.utils.config.keys import OTHER_NAMES

    table = dict(rows("`TrainingArguments`") + rows("`SFTConfig` of TRL"))
    shared = [
        (name, key) for name, key in OTHER_NAMES.items() if table.get(name, "").startswith("`")
    ]
    assert len(shared) > 10
    assert [name for name, key in shared if table[name].strip("`") != key] == []
