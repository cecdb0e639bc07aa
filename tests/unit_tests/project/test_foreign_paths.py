# SPDX-License-Identifier: Apache-2.0
"""Other programs import modules under paths that are no files of this package."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.bridge
from megatron.bridge.compat.foreign_paths import MODULES

ROOT = Path(megatron.bridge.__file__).parent


@pytest.mark.parametrize("foreign", [path for path, home in MODULES.items() if home is not None])
def test_path_is_the_module_that_it_stands_for(foreign):
    home = importlib.import_module(f"megatron.bridge.{MODULES[foreign]}")
    assert importlib.import_module(f"megatron.bridge.{foreign}") is home
    assert home.__spec__.name == home.__name__ == f"megatron.bridge.{MODULES[foreign]}"


@pytest.mark.parametrize("foreign", MODULES)
def test_no_file_stands_at_a_foreign_path(foreign):
    path = ROOT.joinpath(*foreign.split("."))
    assert not path.exists()
    assert not path.with_suffix(".py").exists()


def test_misspelled_path_is_an_import_error():
    with pytest.raises(ModuleNotFoundError, match=r"training\.utils\.train_util'"):
        importlib.import_module("megatron.bridge.training.utils.train_util")


def test_names_are_imported_first_under_the_foreign_path():
    script = (
        "from megatron.bridge.training.tokenizers.config import TokenizerConfig\n"
        "from megatron.bridge.utils.common_utils import get_rank_safe\n"
        "print(TokenizerConfig.__module__, get_rank_safe())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout == "megatron.bridge.data.tokenizer 0\n"
