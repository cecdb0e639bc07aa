# SPDX-License-Identifier: Apache-2.0
"""The published configs and the sources that they were checked against."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from scripts.docs import config_sources
from scripts.docs.config_sources import SourceLine

SOURCE = re.compile(r"[\w.-]+/[\w.-]+:[\w./+-]+|transformers (?P<version>[\d.]+) (?P<file>\w+\.py)")
LINES = config_sources.read_lines()
MODELS = config_sources.stored_models()


def test_table_is_current():
    assert config_sources.PART.is_current(config_sources.table()), (
        "run `make models` and commit docs/models.md"
    )


def test_each_config_has_a_source_or_is_marked_as_from_memory():
    rows = config_sources.table().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(MODELS)
    from_memory = {
        model
        for model, row in zip(MODELS, rows, strict=True)
        if config_sources.FROM_MEMORY in row.split(" | ")[1]
    }
    assert from_memory == set(MODELS) - config_sources.checked_models()


def test_no_source_is_listed_twice():
    pairs = [(line.model, line.source) for line in LINES]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.model} {line.source}")
def test_confirmed_keys_exist(line: SourceLine):
    assert SOURCE.fullmatch(line.source), f"{line.source} is no owner/repository:path"
    assert line.model in MODELS, f"{line.model} has no stored config"
    values = config_sources.stored_values(MODELS[line.model])
    assert line.keys
    assert config_sources.confirmed_keys(line, values) <= set(values)


def test_disputed_keys_are_stored_and_confirmed_by_no_source():
    for model, key in config_sources.DISPUTED:
        values = config_sources.stored_values(MODELS[model])
        assert key in values
        for line in LINES:
            if line.model == model:
                assert key not in config_sources.confirmed_keys(line, values)


def test_defaults_of_transformers_confirm_what_they_are_named_for():
    mismatches = [
        (line.model, key, stored, default)
        for line in LINES
        for key, stored, default in _values_and_defaults(line)
        if stored != default
    ]
    assert mismatches == []


def _values_and_defaults(line: SourceLine) -> Iterator[tuple[str, Any, Any]]:
    """Each confirmed key with its stored value and the default of the installed transformers."""
    source = SOURCE.fullmatch(line.source)
    assert source
    if source["version"] != transformers.__version__:
        return
    model_type = source["file"].removeprefix("configuration_").removesuffix(".py")
    defaults = config_sources.flatten(CONFIG_MAPPING[model_type]().to_dict())
    values = config_sources.stored_values(MODELS[line.model])
    for key in config_sources.confirmed_keys(line, values):
        yield key, values[key], defaults[key]
