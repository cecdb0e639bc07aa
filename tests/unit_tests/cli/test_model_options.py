# SPDX-License-Identifier: Apache-2.0
"""Paths of commands that generate text are checked before anything slow is imported."""

from argparse import Namespace

import pytest

from megatron.bridge.cli.support.model_options import check_paths
from megatron.bridge.utils.errors import UserError


def options(folder, **given):
    (folder / "config.json").write_text("{}")
    return Namespace(**{"model": str(folder), "adapter": None, "template": None, **given})


def test_an_adapter_may_be_a_folder_of_peft(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    check_paths(options(tmp_path, adapter=str(tmp_path)))


@pytest.mark.parametrize("name", ["adapter", "template"])
def test_a_path_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(UserError, match="nowhere"):
        check_paths(options(tmp_path, **{name: tmp_path / "nowhere"}))
